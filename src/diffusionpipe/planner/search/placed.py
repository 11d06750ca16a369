"""Makes candidates whose workers have several stages or two directions, and candidates with searched orders.

    v       0 7   1 6   2 5   3 4       stages of four workers: zero-bubble V, V-Half, V-Min, Hanayo, DualPipeV
    loop    0 4   1 5   2 6   3 7       interleaved, breadth-first, ZeroPP
    both    0 3'  1 2'  2 1'  3 0'      two directions, copies of the same blocks: Chimera, BitPipe, DualPipe

The model is cut for them by time or, on a V under a U-Net, so that skips stay on one rank (`folded.stage_starts`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from diffusionpipe.errors import ConfigError
from diffusionpipe.ordering import Goal, HalfStage, Instance, Placing
from diffusionpipe.planner.assembly.structure import generated
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.constants import MAX_ACTIONS, TICK
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.schedules.building.shapes import linear, loop, wave
from diffusionpipe.schedules.traits import is_chain
from diffusionpipe.units import Seconds

PLACES: Mapping[Placing, Callable[[int], tuple[int, ...]]] = {
    Placing.LINEAR: linear,
    Placing.V: lambda num_workers: wave(num_workers, 2),
    Placing.LOOP: lambda num_workers: loop(num_workers, 2),
}


def placed(judge: Judge, arrangement: Arrangement, microbatches: int) -> Iterator[Candidate]:
    """A candidate for each published family with several stages on a worker that can do these sizes.

    If a family is given (`Given.schedule`), it is the only one.
    """
    for name in sorted(REGISTRY):
        if is_chain(name) or not judge.setting.allows_family(name):
            continue
        try:
            workers = generated(name, arrangement.units, microbatches, 1).placement.workers()
        except ConfigError:
            continue
        if len(workers) > judge.tables.num_layers:
            continue
        yield Candidate(
            arrangement=arrangement,
            schedule=name,
            microbatches=microbatches,
            starts=judge.cuts(arrangement, microbatches, workers),
            replicas=(1,) * arrangement.units,
            sharded=judge.setting.sharded,
        )


def ordered(judge: Judge, known: Sequence[Candidate], *, seconds: Seconds) -> Iterator[Candidate]:
    """The candidate with the best order that a search finds for its times and memory, for each placement.

    All candidates of `known` have the same arrangement and micro-batches, the best ones first. The cuts come from the
    first one with the same placement. `seconds` limits the effort of each search, see `ordering.Instance`. All orders
    that are searched split backwards; nothing is returned if the setting does not allow that.
    """
    if not judge.setting.may_split:
        return
    first = known[0]
    arrangement, microbatches = first.arrangement, first.microbatches
    for placing, places in PLACES.items():
        starts = next((one.starts for one in known if _stands(one, places(arrangement.units))), None)
        if one := ordered_as(judge, arrangement, microbatches, placing, starts, seconds=seconds):
            yield one


def ordered_as(
    judge: Judge,
    arrangement: Arrangement,
    microbatches: int,
    placing: Placing,
    starts: tuple[int, ...] | None = None,
    *,
    seconds: Seconds,
) -> Candidate | None:
    """The candidate with the best order that a search finds for one placement of its stages.

    Its stages begin at the layers `starts`; None: they are cut by time. The result is None if the order would be too
    large or does not fit in memory.
    """
    workers = PLACES[placing](arrangement.units)
    if len(workers) > judge.tables.num_layers or 3 * len(workers) * microbatches > MAX_ACTIONS:  # F, I and W of each
        return None
    candidate = Candidate(
        arrangement=arrangement,
        schedule=f"search-{placing}",
        microbatches=microbatches,
        starts=starts or judge.cuts(arrangement, microbatches, workers),
        replicas=(1,) * arrangement.units,
        sharded=judge.setting.sharded,
    )
    orders = judge.orders(_instance(judge, candidate, placing, workers, seconds))
    return replace(candidate, orders=orders) if orders else None


def instance_of(setting: Setting, *, microbatches: int, placing: Placing, seconds: Seconds) -> Instance:
    """The instance of the order search for one pipeline over all devices of a setting, half-stages cut by time.

    Times are in ticks, memory is in bytes: the rest of a device beside parameters, gradients and optimizer.

    Raises:
        ConfigError: the batch or the model cannot be cut so.
    """
    judge, num_ranks = Judge(setting=setting), setting.cluster.num_ranks
    if setting.workload.batch % microbatches:
        raise ConfigError(
            f"a batch of {setting.workload.batch} cannot be cut into {microbatches} equal micro-batches; change one"
        )
    if 2 * num_ranks > judge.tables.num_layers:
        raise ConfigError(
            f"{num_ranks} ranks have {2 * num_ranks} half-stages, but the trained part has only "
            f"{judge.tables.num_layers} layers; use fewer devices"
        )
    arrangement = Arrangement(data_parallel=1, units=num_ranks)
    shape = Placing.V if placing is Placing.V else Placing.LOOP  # the same 2p half-stages serve all placements
    workers = PLACES[shape](num_ranks)
    candidate = Candidate(
        arrangement=arrangement,
        schedule=f"search-{shape}",
        microbatches=microbatches,
        starts=judge.cuts(arrangement, microbatches, workers),
        replicas=(1,) * num_ranks,
    )
    return replace(_instance(judge, candidate, shape, workers, seconds), placement=placing)


def _stands(candidate: Candidate, workers: tuple[int, ...]) -> bool:
    """Whether the candidate has one pipeline over these workers, each of them one unit."""
    if max(candidate.replicas) > 1 or len(candidate.starts) != len(workers):
        return False
    schedule = candidate.orders or generated(candidate.schedule, candidate.workers, candidate.microbatches, 1)
    return len(schedule.placement.pipelines) == 1 and schedule.placement.workers() == workers


def _instance(
    judge: Judge, candidate: Candidate, placing: Placing, workers: tuple[int, ...], seconds: Seconds
) -> Instance:
    """The instance of the order search for a candidate's stages; all messages get their mean time.

    `workers`: the worker of each stage.
    """
    arrangement, ground = candidate.arrangement, judge.tables.ground(candidate.arrangement)
    samples = judge.tables.unit_samples(arrangement, candidate.microbatches)
    sums = judge.tables.table.sums(samples, candidate.microbatches)
    spans = list(zip(candidate.starts, (*candidate.starts[1:], judge.tables.num_layers), strict=True))
    halves = []
    for (first, stop), unit in zip(spans, workers, strict=True):
        kept = judge.tables.table.kept(first, stop, samples)
        forward, input_grad, rest = (round(time / ground.speeds[unit] / TICK) for time in sums.times(first, stop))
        halves.append(
            HalfStage(
                forward=forward,
                input_grad=input_grad,
                weight_grad=rest,
                # The search of orders makes room for a micro-batch when its forward starts. Recomputed layers hold most
                # after it, so what they hold then counts from the start: no order that is found needs more.
                activation=max(kept, judge.tables.table.activation(first, stop, samples)),
                kept_after_input_grad=kept,
            )
        )
        # For a linear placement the order search joins two half-stages; the second one is empty.
        if placing is Placing.LINEAR:
            halves.append(HalfStage(forward=0, input_grad=0, weight_grad=0, activation=0, kept_after_input_grad=0))
    flows = judge.tables.table.flows(candidate.starts)
    times_sent = [
        ground.link(workers[a], 1, workers[b], 1).transfer(round(samples * flow[0][0]))
        for (a, b), flow in flows.items()
        if b == a + 1 and workers[a] != workers[b]
    ]
    free = []
    for unit, memory in enumerate(ground.memories):
        here = [span for span, worker in zip(spans, workers, strict=True) if worker == unit]
        own = [(*span, candidate.microbatches, samples) for span in here]
        # Memory without any micro-batch.
        free.append(max(0, memory - judge.footprint.use(own, [[0, 0] * len(own)]).total))
    return Instance(
        ranks=arrangement.units,
        microbatches=candidate.microbatches,
        placement=placing,
        stages=tuple(halves),
        comm=round(fmean(times_sent or [0.0]) / TICK),
        memory_limit=tuple(free),
        objective=Goal.MAKESPAN,
        seconds=seconds,
    )
