"""Estimates other systems on the same model and machines, each as it really runs: encoders first, then the backbone.

    data parallelism    every rank trains on its share; gradients are summed while the backward runs, or after it
    ZeRO-3 / FSDP       the same with parameters (frozen ones too), gradients and optimizer state in equal parts on all
                        ranks; every layer gathers its parameters before its forward and again before its backward, one
                        layer ahead, and scatters the sums of its gradients; encoders are whole on every rank if they
                        fit, else in parts as well
    GPipe               stages of equal time (torchgpipe's balance), all forwards, then all backwards
    1F1B + SPP          stages by SPP's bound (see `objectives.PlanningBound`), 1F1B

Each at its own best sizes that fit in memory.

Where layers compute in bfloat16 from wider weights, each casts them as its system does. Data parallelism trains under
torch.autocast, which casts every weight in every forward, recomputed ones included, and keeps the copies of the one
part of the batch that is under way for its backward (where layers are recomputed: of one layer). FSDP casts the part of
a layer that a rank holds whenever it gathers that layer, and keeps no other copy. The two pipelines are run as ours is:
copies are made once in an iteration and kept throughout, but recomputed layers are cast in every forward.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from diffusionpipe.holding.memory import use_of
from diffusionpipe.planner.assembly.partition import balanced_cuts
from diffusionpipe.planner.pricing.arrangement import Arrangement, arrangements
from diffusionpipe.planner.pricing.collectives import all_gather
from diffusionpipe.planner.pricing.encoders import components_of, encode_chunks_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import settings_in_storages
from diffusionpipe.planner.rivals.copy_times import data_parallel_times, gathered_bytes, gathering_time, zero3_times
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import sizes_of
from diffusionpipe.planner.search.objectives import PlanningBound
from diffusionpipe.units import Bytes, Seconds

MAX_MICROBATCHES = 128
DDP = "DDP"
DDP_AFTER = "DDP (no overlap)"
ZERO3 = "ZeRO-3 / FSDP"

DIFFERENCES = {
    DDP: "It sums gradients in buckets of 25 MiB and keeps narrow copies of weights for one part of the batch only.",
    DDP_AFTER: "It keeps narrow copies of weights for one part of the batch only.",
    ZERO3: "It cuts every layer into equal parts and gathers each layer by itself; sharded copies here hold whole "
    "parameters, and gather blocks of layers.",
}
"""A sentence for each system on its differences from DiffusionPipe. The pipelines are layouts that DiffusionPipe runs
too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The times and the memory that another system reaches at some sizes."""

    name: str
    sizes: str
    """Stages, micro-batches or accumulation in words."""
    step: Seconds
    """Seconds of the encoders and the iteration, without the update."""
    frozen: Seconds
    """Seconds of the step in which encoders run."""
    busy: Seconds
    """The mean seconds for which a rank computes, encoders included."""
    held: tuple[Bytes, ...]
    """The peak memory of each rank of a pipeline; one number if all ranks hold the same."""
    overflow: Bytes
    """Bytes that the fullest device lacks; negative: bytes that are left."""
    updated: float = 0.0
    """The number of trained parameters that each rank updates, if all update as many."""
    is_copy: bool = False
    """Whether every rank holds the whole model."""
    candidate: Candidate | None = None
    """The candidate of a pipeline system; None for the others."""


def best_baselines(setting: Setting) -> tuple[Baseline, ...]:
    """The figures of five other systems, each at its best sizes, or at the sizes that miss the memory by least.

    Systems that cannot share the batch are left out. Heavy encoders are on the devices or in host memory, whichever is
    better for the system. With several backbones copies train them one after the other, and pipelines are left out.
    """
    systems: tuple[Callable[[Judge], Baseline | None], ...] = (
        partial(data_parallel, is_overlapped=True),
        partial(data_parallel, is_overlapped=False),
        zero3,
        lambda judge: pipeline(judge, "GPipe", "gpipe", gpipe_starts, places(judge)),
        lambda judge: pipeline(judge, "1F1B + SPP", "1f1b", spp_starts, places(judge)),
    )
    found = (best_of(system, setting) for system in systems[: 3 if len(setting.graph.backbones) > 1 else None])
    return tuple(one for one in found if one is not None)


def best_of(system: Callable[[Judge], Baseline | None], setting: Setting) -> Baseline | None:
    """The better figures of a system: with encoders on the devices or, if these are heavy, in host memory.

    None if the system has no layout.
    """
    best = system(Judge(setting=setting))
    for moved in settings_in_storages(setting):
        other = system(Judge(setting=moved))
        if other and (best is None or is_better(other, best)):
            best = replace(other, sizes=other.sizes + moved.workload.encoders.words)
    return best


def places(judge: Judge, *, least: int = 2) -> Iterator[tuple[Arrangement, int]]:
    """Every (arrangement, number of micro-batches) with `least` or more stages that divides the batch."""
    batch = judge.setting.workload.batch
    for arrangement in arrangements(judge.setting.cluster):
        if least <= arrangement.units <= judge.tables.num_layers and batch % arrangement.data_parallel == 0:
            rows = batch // arrangement.data_parallel
            for count in range(1, min(rows, MAX_MICROBATCHES) + 1):
                if rows % count == 0:
                    yield arrangement, count


Partitioner = Callable[[Judge, Arrangement, int], tuple[int, ...] | None]


def gpipe_starts(judge: Judge, arrangement: Arrangement, microbatches: int) -> tuple[int, ...] | None:
    """The first layer of each stage of the partition whose slowest stage has the shortest forward and backward.

    Transfers and sums of gradients do not count.
    """
    sums = judge.tables.table.sums(judge.tables.unit_samples(arrangement, microbatches), microbatches)
    return balanced_cuts(sums.steps(), arrangement.units)


def spp_starts(judge: Judge, arrangement: Arrangement, microbatches: int) -> tuple[int, ...] | None:
    """The first layer of each stage of the partition with the smallest bound of SPP; None where there is none."""
    found = judge.questions.partitions(
        arrangement, microbatches, PlanningBound(microbatches), width=2, ignores_memory=True
    )
    return found[0].starts if found else None


def pipeline(
    judge: Judge, name: str, schedule: str, partitioner: Partitioner, where: Iterable[tuple[Arrangement, int]]
) -> Baseline | None:
    """The best figures of a pipeline system over the (arrangement, micro-batches) of `where`; None if there are none.

    `partitioner` gives the first layer of each stage. Sizes that can be fast come first, so that most of the others are
    left out by their bounds.
    """
    best: Baseline | None = None
    bounds = ((sum(judge.tables.least_times(*place)) + judge.tables.frozen_seconds, place) for place in where)
    for bound, (arrangement, microbatches) in sorted(bounds, key=lambda pair: pair[0]):
        if best and best.overflow <= 0 and bound >= best.step:
            continue
        starts = partitioner(judge, arrangement, microbatches)
        if starts is None:
            continue
        candidate = Candidate(
            arrangement=arrangement,
            schedule=schedule,
            microbatches=microbatches,
            starts=starts,
            replicas=(1,) * len(starts),
        )
        one = pipeline_at(judge, name, candidate)
        if best is None or is_better(one, best):
            best = one
    return best


def pipeline_at(judge: Judge, name: str, candidate: Candidate) -> Baseline:
    """The estimated figures of a pipeline system at one candidate's sizes; encoders run before the first forward."""
    estimate = judge.estimates.estimate(candidate, is_filled=False)
    return Baseline(
        name=name,
        sizes=sizes_of(candidate),
        step=estimate.iteration,
        frozen=estimate.frozen,
        busy=estimate.busy + estimate.frozen,
        held=estimate.held,
        overflow=estimate.overflow,
        candidate=candidate,
    )


def data_parallel(judge: Judge, *, is_overlapped: bool) -> Baseline | None:
    """The figures of data parallelism with the whole model on every rank, at the best number of parts of the batch.

    None if the ranks cannot share the batch equally. `is_overlapped`: gradients are summed while the backward runs.
    """
    name = DDP if is_overlapped else DDP_AFTER
    best: Baseline | None = None
    for rows, count in accumulations(judge):
        samples = rows / count
        passes, last = data_parallel_times(judge, samples, is_overlapped=is_overlapped)
        held = judge.footprint.stage_bytes(0, judge.tables.num_layers, samples, count, 1)
        # Gradients are summed with the last part of the batch alone.
        one = replace(replicated(judge, name, count, (count - 1) * passes + last, count * passes, held), is_copy=True)
        if best is None or is_better(one, best):
            best = one
    return best


def accumulations(judge: Judge) -> Iterator[tuple[int, int]]:
    """Pairs (a rank's samples of a batch, equal parts in which the rank computes them).

    No pairs if the ranks cannot share the batch equally.
    """
    batch, ranks = judge.setting.workload.batch, judge.setting.cluster.num_ranks
    if batch % ranks == 0:
        rows = batch // ranks
        yield from ((rows, count) for count in range(1, min(rows, MAX_MICROBATCHES) + 1) if rows % count == 0)


def replicated(judge: Judge, name: str, count: int, step: Seconds, busy: Seconds, held: Bytes) -> Baseline:
    """The figures of a system in which every rank runs the same work on its samples, in `count` parts.

    `step` and `busy` are seconds without the encoders, whose time is added here; `held` is the peak memory of a rank.
    """
    smallest = min(device.memory for device in judge.setting.cluster.devices)
    return Baseline(
        name=name,
        sizes=f"{judge.setting.cluster.num_ranks} copies" + (f", accumulated over {count}" if count > 1 else ""),
        step=judge.tables.frozen_seconds + step,
        frozen=judge.tables.frozen_seconds,
        busy=judge.tables.frozen_seconds + busy,
        held=(held,),
        overflow=held - smallest,
        updated=judge.tables.table.trained[-1],
    )


def zero3(judge: Judge) -> Baseline | None:
    """The figures of ZeRO-3, as FSDP runs it, at its best sizes; None if the ranks cannot share the batch equally."""
    best: Baseline | None = None
    for rows, count in accumulations(judge):
        samples = rows / count
        busy, step = zero3_times(judge, samples)
        held = zero3_bytes(judge, samples, count)
        one = replicated(judge, ZERO3, count, count * step, count * busy, held)
        one = replace(one, updated=one.updated / judge.setting.cluster.num_ranks)
        if one.overflow > 0 and judge.footprint.frozen_bytes and not judge.setting.workload.encoders.brings:
            one = _with_sharded_encoders(judge, one, rows)
        if best is None or is_better(one, best):
            best = one
    return best


def _with_sharded_encoders(judge: Judge, one: Baseline, rows: int) -> Baseline:
    """The figures of ZeRO-3 with the frozen layers in equal parts too, each gathered for every chunk that runs through.

    `rows`: the samples of a rank.
    """
    setting = judge.setting
    ranks, layers = range(setting.cluster.num_ranks), setting.graph.frozen_layers
    sizes = [setting.ledger.frozen_of([name]) for name in layers]
    gathers = [all_gather(setting.cluster, size, ranks) for size in sizes]
    slowest = min(device.speed for device in setting.cluster.devices)
    gather_of = dict(zip(layers, gathers, strict=True))
    chunks, seconds = encode_chunks_of(setting), 0.0
    for component, own in components_of(setting.graph).items():
        for start in range(0, rows, chunks[component]):
            samples = min(chunks[component], rows - start)
            computes = [setting.profile.forward(name, samples) / slowest for name in own]
            seconds += gathering_time([gather_of[name] for name in own], computes)
    # A part of the layers stays, and two whole layers at a time: the running one and the next.
    saved = judge.footprint.frozen_bytes - -(-judge.footprint.frozen_bytes // len(ranks)) - sum(sorted(sizes)[-2:])
    return replace(
        one,
        sizes=f"{one.sizes}, encoders in parts",
        step=one.step - one.frozen + seconds,
        frozen=seconds,
        held=(one.held[0] - saved,),
        overflow=one.overflow - saved,
    )


def zero3_bytes(judge: Judge, samples: float, count: int, parts: int = 0) -> Bytes:
    """The peak bytes of a rank with ZeRO-3: a part of all parameters, two gathered layers, the gradients of one.

    The rest is as in data parallelism. A rank runs `count` parts of its samples, of `samples` samples each. The
    parameters are divided into `parts` parts; 0: one for each rank.
    """
    table, num_layers = judge.tables.table, judge.tables.num_layers
    # FSDP keeps no narrow copies of whole weights.
    whole = judge.footprint.stage_bytes(0, num_layers, samples, count, 1) - table.copies[-1]
    held = use_of(table.held(0, num_layers), frozen=table.frozen_bytes[-1]).total
    # The layer that runs and the next one, which is gathered ahead.
    gathered = 2 * max(gathered_bytes(judge)) + max(table.held(i, i + 1).gradients for i in range(num_layers))
    return whole - held + -(-held // (parts or judge.setting.cluster.num_ranks)) + gathered


def is_better(one: Baseline, other: Baseline) -> bool:
    """Whether `one` lacks less memory than `other`, or as much and is faster; a baseline that fits lacks nothing."""
    return (max(0, one.overflow), one.step) < (max(0, other.overflow), other.step)
