"""Rehearsals: a schedule on virtual ranks of this machine, beside what the simulator says of it.

    planned costs --scale--> waits --------+--> processes  --> measured timelines
    planned tensors --bytes scale--> real messages
    measured link -------------------------+--> simulator --> predicted timeline

Waits and messages of both are the same; so a difference is the runtime's, or the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from diffusionpipe.costs import Costs, Link, StageCosts, TensorSpec
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import COMPUTE_OPS, Mesh, Op, Schedule, Span, Timeline
from diffusionpipe.ir.flows import flows
from diffusionpipe.simulator import simulate
from diffusionpipe.timing import Streams
from diffusionpipe.units import Bytes, Seconds

if TYPE_CHECKING:
    from diffusionpipe.costs import ModelGraph
    from diffusionpipe.runtime.job.local_ranks import LocalRanks
    from diffusionpipe.runtime.rehearsals.rehearsal import RankIteration, VirtualRun

SHORTEST: Seconds = 0.01
"""The shortest forward or backward of a rehearsal whose scale is chosen for the user: far above a late wake-up."""
LONGEST: Seconds = 20.0
"""The longest time of all iterations of a rehearsal together, the one before the first measured one included."""
FINEST: Seconds = 0.001
"""The shortest mean forward or backward of a rehearsal; it goes before the longest time."""
COPYING = 0.05
"""The part of one core that copying messages may take where their scale is chosen for the user."""
TOUCHES = 4
"""The number of copies counted for each byte of a message: zeroing, into and out of the kernel, and one in reserve."""
SIZES: tuple[Bytes, ...] = (64, 2**14, 2**18, 2**20)
REPEATS = 15
KINDS = {Op.F: "forward", Op.B: "backward", Op.I: "backward", Op.W: "backward", Op.ENCODE: "encode"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """The predicted timeline of one schedule, and the measured ones of its rehearsed iterations."""

    predicted: Timeline
    measured: tuple[Timeline, ...]
    """The measured timeline of each iteration; workers are ranks, time 0 is the start of the first rank."""
    cpu: tuple[Seconds, ...]
    """Processor time of all ranks in each iteration: copying, Python, and the ends of waits."""
    mesh: Mesh
    """Mesh of the ranks that rehearsed."""

    @property
    def seconds(self) -> tuple[Seconds, ...]:
        """The length of each measured iteration, in seconds."""
        return tuple(timeline.makespan for timeline in self.measured)

    @property
    def error(self) -> float:
        """The median of the measured times divided by the predicted time, less 1."""
        return median(self.seconds) / self.predicted.makespan - 1.0

    @property
    def typical(self) -> Timeline:
        """The measured timeline whose length is nearest to the median."""
        middle = median(self.seconds)
        return min(self.measured, key=lambda timeline: abs(timeline.makespan - middle))


def measured_link(ranks: LocalRanks) -> Link:
    """Measure messages between the ranks' processes; returns a link with their latency and bandwidth."""
    from diffusionpipe.profiler.links import fit_line
    from diffusionpipe.runtime.rehearsals.rehearsal import time_messages

    found = ranks.run(time_messages, SIZES, REPEATS)
    points = [(float(size), median(dict(pair)[size] for pair in found if pair)) for size in SIZES]
    return Link(*fit_line(points))


def fitting_scale(schedule: Schedule, costs: Costs, iterations: int) -> float:
    """The factor of times that makes the shortest forward or backward of a trained stage `SHORTEST` seconds long.

    It is less where all iterations would take longer than `LONGEST` then, but the mean time stays at least `FINEST`. A
    plan that shards its parameters has a stage for every few layers, and some of them take next to no time.
    """
    times = [time for stage in costs.stages for time in (stage.forward, stage.backward) if time > 0]
    if not times:
        return 1.0
    # Messages are free here: they take the time of this machine, which no factor changes.
    iteration = simulate(schedule, replace(costs, link=Link(), links={})).makespan
    finest, longest = FINEST * len(times) / sum(times), LONGEST / ((iterations + 1) * iteration)
    # Longer than wanted is better than waits that are too short to be exact.
    return min(SHORTEST / min(times), max(finest, longest))


def fitting_bytes_scale(
    schedule: Schedule, costs: Costs, link: Link, iteration: Seconds, *, data_parallel: int = 1
) -> float:
    """The factor, at most 1, of all bytes between stages that lets copying take the part `COPYING` of a core's time.

    `iteration`: the scaled length of one. Tensors that stay on their rank count too: the real part of them takes time
    from the waits.
    """
    # Every copy of the pipeline shares the one machine's cores.
    total = data_parallel * sum(
        len(flow.samples) * sum(costs.tensor_bytes.get(name, 0) for name in flow.tensors) for flow in flows(schedule)
    )
    affordable = COPYING * iteration * link.bandwidth / TOUCHES
    return min(1.0, affordable / total) if total else 1.0


def scaled_costs(costs: Costs, scale: float) -> Costs:
    """The costs with all times of compute, fills, reductions and gathers multiplied by `scale`.

    Waits instead of compute take no longer after other waits.
    """

    def stage(cost: StageCosts) -> StageCosts:
        return replace(
            cost,
            forward=cost.forward * scale,
            backward=cost.backward * scale,
            input_grad=cost.input_grad * scale,
            weight_grad=cost.weight_grad * scale,
        )

    return replace(
        costs,
        stages=tuple(map(stage, costs.stages)),
        fills=tuple(time * scale for time in costs.fills),
        reduces=tuple(time * scale for time in costs.reduces),
        unshards=tuple(time * scale for time in costs.unshards),
        waking=(),
    )


def scaled_tensors(tensors: Sequence[TensorSpec], scale: float) -> dict[str, TensorSpec]:
    """Name -> the tensor made flat, with `scale` times its elements, at least one.

    A tensor with one number a sample is unchanged.
    """
    return {
        spec.name: spec if not spec.shape else replace(spec, shape=(max(1, round(_count(spec) * scale)),))
        for spec in tensors
    }


def _count(spec: TensorSpec) -> int:
    count = 1
    for size in spec.shape:
        count *= size
    return count


def held_bytes(schedule: Schedule, tensors: Mapping[str, TensorSpec]) -> list[Bytes]:
    """The bytes of tensors that each stage of a rehearsal holds for a micro-batch, from its forward to its backward.

    0 for frozen stages.
    """
    placement, held = schedule.placement, []
    edges = [edge for pipeline in placement.pipelines for edge in pipeline.edges if edge.tensors]
    for index, stage in enumerate(placement.stages):
        if placement.is_frozen(index):
            held.append(0)
            continue
        names = {name for edge in edges if edge.producer == index for name in edge.tensors}
        for edge in edges:
            is_near = placement.stages[edge.producer].worker == stage.worker
            if edge.consumer == index and not is_near and not placement.is_frozen(edge.producer):
                names |= set(edge.tensors)
        samples = len(stage.share.samples(max(placement.pipeline_of(index).microbatches)))
        held.append(samples * sum(tensors[name].num_bytes for name in names))
    return held


def virtual_run(
    schedule: Schedule, costs: Costs, graph: ModelGraph, mesh: Mesh, *, scale: float, bytes_scale: float, link: Link
) -> VirtualRun:
    """The schedule to rehearse, with waits of scaled costs, messages of scaled bytes, and the measured link."""
    from diffusionpipe.runtime.rehearsals.rehearsal import VirtualRun

    tensors = scaled_tensors(graph.tensors, bytes_scale)
    scaled = scaled_costs(costs, scale)
    return VirtualRun(
        schedule=schedule,
        costs=replace(
            scaled,
            stages=tuple(
                replace(stage, activation=held, kept_after_input_grad=0)
                for stage, held in zip(scaled.stages, held_bytes(schedule, tensors), strict=True)
            ),
            tensor_bytes={name: spec.num_bytes for name, spec in tensors.items()},
            link=link,
            links={},
        ),
        tensors=tensors,
        mesh=mesh,
        inputs=graph.inputs,
        backbones=graph.backbones,
    )


def predict_run(run: VirtualRun) -> Timeline:
    """The simulated timeline of a rehearsal, with a stream for every pair of ranks, as gloo has."""
    return simulate(run.schedule, run.costs, streams=Streams.PAIR)


def rehearse_runs(
    ranks: LocalRanks,
    runs: Mapping[str, VirtualRun],
    order: Sequence[str],
    progress: Callable[[int], None] | None = None,
) -> dict[str, Rehearsed]:
    """Predict and rehearse each run, one iteration for each name of `order`; returns name -> both timelines.

    `progress` is called with the number of iterations that are done.

    Raises:
        ScheduleError: a schedule holds ops that the executor cannot run.
        PeerError: a rank died.
    """
    from diffusionpipe.runtime.rehearsals.rehearsal import rehearse

    found: list[dict[str, list[RankIteration]]] = ranks.run(rehearse, runs, order, progress=progress)
    return {name: rehearsed_of(run, [rank[name] for rank in found]) for name, run in runs.items()}


def rehearsed_of(run: VirtualRun, ranks: Sequence[Sequence[RankIteration]]) -> Rehearsed:
    """The prediction of a run and the timelines of its measured iterations; `ranks`: iterations of each rank."""
    iterations = list(zip(*ranks, strict=True))
    return Rehearsed(
        predicted=predict_run(run),
        measured=tuple(_timeline(parts) for parts in iterations),
        cpu=tuple(sum(part.cpu for part in parts) for parts in iterations),
        mesh=run.mesh,
    )


def _timeline(parts: Sequence[RankIteration]) -> Timeline:
    """The measured timeline of one iteration, from the `parts` of all ranks; time 0 is the start of the first rank."""
    first = min(part.start for part in parts)
    return Timeline(
        num_workers=len(parts),
        spans=tuple(
            replace(span, start=span.start + part.start - first, end=span.end + part.start - first)
            for part in parts
            for span in part.spans
        )
        + tuple(_end(rank, part, first) for rank, part in enumerate(parts)),
        source="measured",
    )


def _end(rank: int, part: RankIteration, first: Seconds) -> Span:
    """An empty span at the end of a rank's iteration, so that the timeline lasts until then.

    `first`: the start of the first rank.
    """
    last = part.spans[-1].action
    return Span(worker=rank, action=last, start=part.end - first, end=part.end - first)


def seconds_by_kind(timeline: Timeline, worker: int) -> dict[str, Seconds]:
    """Kind -> seconds that a worker spends in this kind of compute, and idle until the iteration's end."""
    found = dict.fromkeys(dict.fromkeys(KINDS.values()), 0.0)
    for span in timeline.spans:
        if span.worker == worker and (span.action.op in COMPUTE_OPS or span.action.op is Op.ENCODE):
            found[KINDS.get(span.action.op, "forward")] += span.end - span.start
    found["idle"] = timeline.makespan - sum(found.values())
    return found


def group_of(timeline: Timeline, mesh: Mesh, group: int = 0) -> Timeline:
    """The part of a measured timeline of one data-parallel group, with its workers in place of ranks."""
    worker_of = {mesh.rank(group, worker): worker for worker in range(mesh.pipeline)}
    return replace(
        timeline,
        num_workers=mesh.pipeline,
        spans=tuple(replace(s, worker=worker_of[s.worker]) for s in timeline.spans if s.worker in worker_of),
    )


def rehearsal_mesh(mesh: Mesh, ranks: int | None) -> Mesh:
    """The mesh of `ranks` ranks that rehearse a plan: whole data-parallel groups of it; None for all ranks.

    Raises:
        ConfigError: the ranks do not form whole groups, or are more than the plan has or this machine should run.
    """
    wanted = mesh.num_ranks if ranks is None else ranks
    size, groups = mesh.pipeline, mesh.data_parallel
    if wanted > mesh.num_ranks:
        raise ConfigError(f"the plan has {mesh.num_ranks} ranks, but --ranks asks for {wanted}; leave out --ranks")
    if wanted < size or wanted % size:
        choice = ", ".join(str(size * n) for n in range(1, min(groups, 4) + 1))
        raise ConfigError(f"{wanted} ranks do not form whole pipelines of {size} ranks; use --ranks {choice}")
    if wanted > MAX_RANKS:
        fitting = MAX_RANKS // size * size
        advice = f"use --ranks {fitting} or less, in steps of {size}" if fitting else "it cannot be rehearsed"
        raise ConfigError(f"{wanted} processes are too many for one machine, which can run {MAX_RANKS}; {advice}")
    copies = wanted // size
    return Mesh(
        data_parallel=copies,
        pipeline=size,
        shard=copies if mesh.shard > 1 else 1,
        owners=copies if mesh.owners > 1 else 1,
    )


MAX_RANKS = 64
"""Processes with torch that one machine can be asked to start."""
