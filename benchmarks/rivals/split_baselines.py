"""What people use today where a model is too large for one card, with its encoders run on the fly.

    naive split         layers over cards by memory, one micro-batch at a time: one card works, all others wait
                        (`device_map` of accelerate and diffusers)
    diffusion-pipe      https://github.com/tdrussell/diffusion-pipe: DeepSpeed's pipeline, 1F1B, stages of equal numbers
                        of parameters, frozen ones too; text encoders are part of the first layer

                        stage 0   enc F enc F enc F B enc F B ...        every micro-batch waits for its encoders
                        stage 1         F     F B   F  B ...

That project keeps the VAE's latents on disk, and for most models the text encoders' outputs; here everything is encoded
on the fly, so both are in its first stage. One stage, its default, is data parallelism whose gradients are summed after
the backward.

Where layers compute in bfloat16 from wider weights, the naive split trains under torch.autocast, which casts them in
every forward (see `baselines`). DeepSpeed holds bfloat16 weights beside float32 ones and writes them once in a step;
our own runtime does so once in an iteration, but for recomputed layers, and diffusion-pipe counts alike.
"""

from diffusionpipe.planner.assembly.partition import balanced_cuts
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.stage_costs import frozen_parameters, frozen_time
from diffusionpipe.planner.rivals.baselines import Baseline, is_better, places
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.units import Seconds


def naive_split(judge: Judge) -> Baseline | None:
    """The best split of the model over two and more cards, side by side copies of it over the rest; None without one.

    The encoders are whole on one card, the one that lets it all fit, and encode all samples of their copy there.
    """
    best: Baseline | None = None
    for arrangement, microbatches in places(judge, least=2):
        for host in range(arrangement.units):
            one = _split_at(judge, arrangement, microbatches, host)
            if best is None or is_better(one, best):
                best = one
    return best


def diffusion_pipe(judge: Judge, *, least: int = 1) -> Baseline | None:
    """Its layout at its best number of stages, from `least` on, and micro-batches; None without one."""
    best: Baseline | None = None
    for arrangement, microbatches in places(judge, least=least):
        one = _diffusion_pipe_at(judge, arrangement, microbatches)
        if best is None or is_better(one, best):
            best = one
    return best


def _split_at(judge: Judge, arrangement: Arrangement, microbatches: int, host: int) -> Baseline:
    ground, table, count = judge.tables.ground(arrangement), judge.tables.table, microbatches
    samples = judge.tables.unit_samples(arrangement, microbatches)
    rooms = [memory - judge.footprint.frozen_bytes * (unit == host) for unit, memory in enumerate(ground.memories)]
    starts = _cuts_by_room(judge, samples, rooms)
    stops = (*starts[1:], judge.tables.num_layers)
    sums, compute, reduce = table.sums(samples, 1), 0.0, 0.0
    held = []
    for unit, (first, stop) in enumerate(zip(starts, stops, strict=True)):
        work = sums.forward[stop] - sums.forward[first] + sums.backward[stop] - sums.backward[first]
        compute += work / ground.speeds[unit]
        held.append(judge.footprint.stage_bytes(first, stop, samples, count, 1, is_host=unit == host))
        reduce = max(reduce, judge.tables.reduction(ground, first, stop, [unit]))
    messages = 0.0
    for unit, cut in enumerate(starts[1:], 1):
        there, back = table.crossing[cut]
        link = ground.link(unit - 1, 1, unit, 1)
        messages += link.transfer(round(samples * there)) + (link.transfer(round(samples * back)) if back else 0.0)
    rows = judge.setting.workload.batch // arrangement.data_parallel
    frozen = judge.tables.encoding(rows) / ground.speeds[host]
    return Baseline(
        name="naive split",
        sizes=_sizes(arrangement, count),
        step=frozen + count * (compute + messages) + reduce,
        frozen=frozen,
        busy=(frozen + count * compute) / arrangement.units,
        held=tuple(held),
        overflow=max(one - memory for one, memory in zip(held, ground.memories, strict=True)),
    )


def _cuts_by_room(judge: Judge, samples: float, rooms: list[int]) -> tuple[int, ...]:
    """Where each card's layers start, so that all are filled to the same part of what they have room for."""
    ground = [
        judge.footprint.stage_bytes(i, i + 1, samples, 1, 1, is_host=False) for i in range(judge.tables.num_layers)
    ]
    total, room = sum(ground), sum(max(0, one) for one in rooms)
    starts, reached, layer, wanted = [0], 0, 0, 0.0
    for unit, one in enumerate(rooms[:-1]):
        wanted += total * max(0, one) / room
        most = judge.tables.num_layers - (len(rooms) - 1 - unit)
        while layer < most and (layer <= starts[-1] or reached + ground[layer] / 2 <= wanted):
            reached += ground[layer]
            layer += 1
        starts.append(layer)
    return tuple(starts)


def _diffusion_pipe_at(judge: Judge, arrangement: Arrangement, microbatches: int) -> Baseline:
    setting, table, ground = judge.setting, judge.tables.table, judge.tables.ground(arrangement)
    samples = judge.tables.unit_samples(arrangement, microbatches)
    layers = setting.graph.frozen_layers
    counts = [table.trained[i + 1] - table.trained[i] + table.frozen[i + 1] - table.frozen[i]
              for i in range(judge.tables.num_layers)]  # fmt: skip
    counts[0] += frozen_parameters(setting.graph, layers)
    candidate = Candidate(
        arrangement=arrangement,
        schedule="1f1b",
        microbatches=microbatches,
        starts=balanced_cuts(counts, arrangement.units),
        replicas=(1,) * arrangement.units,
        hosts=(0,),
    )
    head: Seconds = frozen_time(setting.profile, layers, samples)
    estimate = judge.estimates.estimate(candidate, is_filled=True, head=head)  # frozen work is in the head
    return Baseline(
        name="diffusion-pipe",
        sizes=_sizes(arrangement, microbatches),
        step=estimate.pipeline,
        frozen=microbatches * head / ground.speeds[0],
        busy=estimate.busy,
        held=estimate.held,
        overflow=estimate.overflow,
        candidate=candidate,
    )


def _sizes(arrangement: Arrangement, microbatches: int) -> str:
    stages = f"{arrangement.units} stages" if arrangement.units > 1 else "1 stage"
    count = f"{microbatches} micro-batches" if microbatches > 1 else "1 micro-batch"
    return f"{stages} x {arrangement.data_parallel}, {count}"
