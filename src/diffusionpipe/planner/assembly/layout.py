"""The sizes of which a plan is made, and the interfaces of functions that price and fill its schedules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

from diffusionpipe.costs import Costs, ModelGraph
from diffusionpipe.holding import DEVICE
from diffusionpipe.ir import Mesh, Range, Schedule, Sharded, Timeline
from diffusionpipe.ir.versions import Versions
from diffusionpipe.passes import PlacedFill, connect
from diffusionpipe.planner.assembly.structure import Division, Encoding, generated
from diffusionpipe.schedules.building.list_scheduling import StageTimes
from diffusionpipe.schedules.building.shapes import FORWARD, Pipe, linear
from diffusionpipe.schedules.several.backbones import alone, of_backbone, one_by_one
from diffusionpipe.schedules.several.opposed import JOINT, facing, ordered, pipe_of

Blocks = Sequence[Sequence[str]]


class Pricing(Protocol):
    """A function that gives the costs of a schedule's actions."""

    def __call__(self, schedule: Schedule, blocks: Blocks, mesh: Mesh) -> Costs:
        """The costs of a schedule whose stage s holds the layers `blocks[stage.weights]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfilled:
    """A training iteration or a window before its frozen work is placed, with its times and costs."""

    schedule: Schedule
    """Compute, gradient reductions and steps; no messages, no frozen pipeline."""
    timeline: Timeline
    """The timeline of that schedule at these costs; of a window, the iteration that ends with a flush."""
    costs: Costs
    blocks: Blocks
    """The names of the layers of each block; the last one is the frozen block, in the model's order."""
    mesh: Mesh


class Filler(Protocol):
    """A function that places frozen work of the next batch in the bubbles of this one.

    In a window it places the work of a later batch.
    """

    def __call__(self, unfilled: Unfilled) -> Mapping[int, Sequence[PlacedFill]]:
        """Worker -> its fills in their order, as `passes.insert_fills` takes them; together they cover the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneLayout:
    """The micro-batches and the cuts of one of several backbones."""

    name: str
    microbatches: int
    splits: tuple[str, ...] = ()
    """Names of the layers with which the backbone's blocks 1, 2, ... start; () cuts by counted work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes of which a plan is made: batch, stages, micro-batches, copies, schedule and their details."""

    batch: int
    """Samples of one step, over all data-parallel groups."""
    stages: int
    """Workers of one pipeline, before they are replicated; a schedule may cut the model finer than that."""
    microbatches: int
    schedule: str = "1f1b"
    backbones: tuple[BackboneLayout, ...] = ()
    """Sizes of each of several backbones, in place of `microbatches` and `splits`; () for one backbone."""
    replicas: tuple[int, ...] = ()
    """The number of replicas of each stage; () for one of each."""
    data_parallel: int = 1
    """Copies of the whole pipeline."""
    adjacent: int = 1
    """The number of copies of the pipeline whose ranks are side by side, worker by worker (see `Mesh`): they share a
    node's links."""
    sharded: Sharded = Sharded.NONE
    """The things that the copies hold in parts, once among them. With `Sharded.ALL` a block, a bucket of a stage, is
    gathered for its compute (`passes.shard_parameters`); with `Sharded.OPTIMIZER` it comes from the owners of its
    parameters once in a step (`passes.bring_parameters`)."""
    encode_chunk: int = 16
    """Samples that go through the frozen layers at a time."""
    encode_chunks: tuple[tuple[str, int], ...] = ()
    """Samples that go through single components at a time, by name; the others use `encode_chunk`."""
    splits: tuple[str, ...] = ()
    """Names of the layers with which blocks 1, 2, ... start; () cuts by counted work."""
    checkpointed: tuple[str, ...] = ()
    """Patterns (as of file names) of layers to recompute in the backward."""
    buckets: int = 1
    """Parts of every block, each reduced as soon as its own gradients are complete. 0, for sharded parameters alone:
    as many as `sharded_buckets` says."""
    orders: Schedule | None = None
    """Orders of compute actions made for these very sizes, in place of the orders of `schedule`; None: the family's."""
    times: tuple[StageTimes, ...] = ()
    """Times of each stage of each of several backbones, by which the orders of both at once are listed; () for equal
    ones."""
    encoders: str = DEVICE.name
    """The storage in which the frozen part's weights rest, by its name (`holding.STORAGES`)."""
    probes: tuple[tuple[str, Fraction], ...] = ()
    """Backbones that read their own estimate, each with the share of samples for which it does; a plan takes
    the model's (`ModelGraph.probes`)."""
    versions: Versions = Versions.FLUSHED
    """How the weights of batches in flight are treated; all but flushed ones train without a flush."""
    delay: int = 1
    """Age in steps of the weights of `Versions.DELAYED`."""
    sample_batch: int = 0
    """Samples drawn at a time during training (both halves of guidance counted); 0 for one per stage."""
    sample_microbatch: int = 0
    """Samples of a micro-batch of those that are drawn; 0: as many micro-batches as stages."""

    @property
    def workers(self) -> int:
        """The number of workers of one pipeline, replicas included."""
        return sum(self.replicas) if self.replicas else self.stages

    @property
    def mesh(self) -> Mesh:
        """The mesh of the job with this layout."""
        return Mesh(
            data_parallel=self.data_parallel,
            pipeline=self.workers,
            adjacent=self.adjacent,
            shard=self.data_parallel if self.sharded is Sharded.ALL else 1,
            owners=self.data_parallel if self.sharded is Sharded.OPTIMIZER else 1,
        )

    @property
    def division(self) -> Division:
        """The replicas, buckets and copies into which the layout divides the stages of its schedule."""
        return Division(
            replicas=self.replicas or (1,) * self.stages,
            buckets=self.buckets,
            data_parallel=self.data_parallel,
            sharded=self.sharded,
            probes=self.probes,
        )

    def encoding(self, graph: ModelGraph, outputs: Sequence[tuple[str, ...]]) -> Encoding:
        """The frozen work of a batch before its first forward: the layers, and how many samples run at a time.

        `outputs` are the frozen tensors that each trained block reads. The frozen block is cut where the number of
        samples changes that go through its layers at a time.
        """
        component, of_component = {layer.name: layer.component for layer in graph.layers}, dict(self.encode_chunks)
        chunks = [of_component.get(component[name], self.encode_chunk) for name in graph.frozen_layers]
        # The frozen block is cut into runs of layers with equally many samples at a time.
        starts = [i for i, chunk in enumerate(chunks) if i == 0 or chunk != chunks[i - 1]]
        return Encoding(
            outputs=tuple(outputs),
            runs=tuple((Range(start, stop), chunks[start]) for start, stop in pairwise([*starts, len(chunks)])),
            max_chunk=self.encode_chunk,
        )

    def backbone(self, number: int) -> "Layout":
        """The layout of one of several backbones alone, by its number; the layout itself if it has one backbone."""
        if not self.backbones:
            return self
        own = self.backbones[number]
        orders = alone(self.orders, own.name) if self.orders else None
        schedule = "1f1b" if self.schedule in JOINT else self.schedule  # one backbone alone has nothing to run beside
        return replace(
            self,
            microbatches=own.microbatches,
            splits=own.splits,
            backbones=(),
            orders=orders,
            schedule=schedule,
            times=(),
        )

    def generated(self) -> Schedule:
        """The compute-only schedule of the layout: its own orders, or the family's schedule of these sizes.

        Raises:
            ConfigError: there is no such family, or it cannot do these sizes.
        """
        if self.orders is not None:
            return self._sized(self.orders)
        if not self.backbones:
            return generated(self.schedule, self.stages, self.microbatches, self._size(self.microbatches))
        counts = tuple((own.name, own.microbatches, self._size(own.microbatches)) for own in self.backbones)
        return _of_backbones(self.schedule, self.stages, counts, self.times)

    def _size(self, microbatches: int) -> int:
        """The samples of a micro-batch if each copy's part of the batch is cut into `microbatches`; at least 1."""
        return max(self.batch // (self.data_parallel * microbatches), 1)

    def _sized(self, schedule: Schedule) -> Schedule:
        counts = {own.name: own.microbatches for own in self.backbones}
        for number, pipeline in enumerate(schedule.placement.pipelines):
            size = self._size(counts.get(pipeline.model, self.microbatches))
            sizes = (size,) * len(pipeline.microbatches)
            schedule = connect(schedule, pipeline.edges, microbatches=sizes, pipeline=number)
        return schedule

    def pipes(self) -> tuple[Pipe, ...]:
        """A pipe for each backbone: forwards of the whole batch through the stages of its first pipeline.

        Raises:
            ConfigError: there is no such family, or it cannot do these sizes.
        """
        found: dict[str, Pipe] = {}
        placement = self.generated().placement
        for number, pipeline in enumerate(placement.pipelines):
            first = found.get(pipeline.model)
            found[pipeline.model] = Pipe(
                workers=first.workers if first else placement.workers(number),
                microbatches=(*(first.microbatches if first else ()), *pipeline.microbatches),
                ops=FORWARD,
                model=pipeline.model,
                first_block=first.first_block if first else placement.stages[pipeline.stages[0]].weights,
            )
        return tuple(sorted(found.values(), key=lambda pipe: pipe.first_block))

    def places(self) -> tuple[int, ...]:
        """The worker of each stage of the first pipeline, in forward order; one for each block, before buckets.

        Raises:
            ConfigError: there is no such family, or it cannot do these sizes.
        """
        return self.pipes()[0].workers

    def num_blocks(self) -> int:
        """The number of blocks into which the trained model is cut, before buckets.

        Raises:
            ConfigError: there is no such family, or it cannot do these sizes.
        """
        return sum(len(pipe.workers) for pipe in self.pipes())


@lru_cache(maxsize=32)
def _of_backbones(
    schedule: str, stages: int, counts: tuple[tuple[str, int, int], ...], times: tuple[StageTimes, ...]
) -> Schedule:
    """The compute-only schedule that trains several backbones in a step.

    Args:
        schedule: the name of a joint schedule, or of a family that each backbone runs by itself, one after the other.
        stages: the workers of the pipeline.
        counts: (name, number of micro-batches, samples of a micro-batch) of each backbone.
        times: see `Layout.times`.
    """
    if schedule in JOINT:
        down = linear(stages)
        pipes = [
            pipe_of(model, down, (size,) * count, first_block=number * stages)
            for number, (model, count, size) in enumerate(counts)
        ]
        if schedule == "opposed":
            # Every second backbone runs up the workers.
            pipes = [facing(pipe, pipe)[number % 2] for number, pipe in enumerate(pipes)]
        return ordered(schedule, pipes, times or [StageTimes()] * (stages * len(pipes)))
    found: list[Schedule] = []
    first_block = 0
    for model, count, size in counts:
        own = generated(schedule, stages, count, size)
        found.append(of_backbone(own, model, first_block))
        first_block += 1 + max(stage.weights for stage in own.placement.stages)
    return one_by_one(schedule, found)
