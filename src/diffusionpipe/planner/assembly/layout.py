"""Given sizes, and what prices and fills a schedule that is made of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from diffusionpipe.costs import Costs
from diffusionpipe.ir import Mesh, Schedule, Timeline
from diffusionpipe.passes import (
    PlacedFill,
    connect,
)
from diffusionpipe.planner.assembly.structure import Division, generated, microbatches_of_blocks

Blocks = Sequence[Sequence[str]]


class Pricing(Protocol):
    """Says what the actions of a schedule cost."""

    def __call__(self, schedule: Schedule, blocks: Blocks, mesh: Mesh) -> Costs:
        """The costs of a schedule whose stage s holds the layers `blocks[weights of s]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfilled:
    """A training iteration before its frozen work is placed."""

    schedule: Schedule
    """Compute and gradient reductions; no messages, no frozen pipeline."""
    timeline: Timeline
    """Of that schedule at these costs."""
    costs: Costs
    blocks: Blocks
    """The last one is the frozen block, in order."""
    mesh: Mesh


class Filler(Protocol):
    """Places the frozen work of the next batch in the bubbles of this one."""

    def __call__(self, unfilled: Unfilled) -> Mapping[int, Sequence[PlacedFill]]:
        """Worker -> its fills in their order, as `passes.insert_fills` takes them; together they cover the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes that the user chose."""

    batch: int
    """Samples of one step, over all data-parallel groups."""
    stages: int
    """Workers of one pipeline, before they are replicated; a schedule may cut the model finer than that."""
    microbatches: int
    """Of several backbones with numbers of their own, the least common multiple of these."""
    schedule: str = "1f1b"
    replicas: tuple[int, ...] = ()
    """Workers in place of each; () for one."""
    data_parallel: int = 1
    """Copies of the whole pipeline."""
    adjacent: int = 1
    """So many of these copies stand side by side, worker by worker (see `Mesh`): they share a node's links."""
    sharded: bool = False
    """Whether the copies hold every block's parameters, gradients and optimizer state in parts, once among them; a
    block, a bucket of a stage, is gathered for its compute. See `passes.shard_parameters`."""
    encode_chunk: int = 16
    """Samples that go through the frozen layers at a time,"""
    encode_chunks: tuple[tuple[str, int], ...] = ()
    """and through those of some components, by name."""
    splits: tuple[str, ...] = ()
    """Names of the layers with which blocks 1, 2, ... start; () cuts by counted work."""
    checkpointed: tuple[str, ...] = ()
    """Patterns (as of file names) of layers to recompute in the backward."""
    buckets: int = 1
    """Parts of every block, each reduced as soon as its own gradients are complete. 0, for sharded parameters alone:
    as many as `sharded_buckets` says."""
    orders: Schedule | None = None
    """Orders of compute actions made for these very sizes, in place of those of `schedule`; None: the family's."""
    offload_frozen: bool = False
    """Whether the frozen part's parameters rest in host memory and come to the device layer by layer, as they run."""
    sample_batch: int = 0
    """Samples drawn at a time during training (both halves of guidance counted); 0 for one per stage."""

    @property
    def workers(self) -> int:
        """Workers of one pipeline."""
        return sum(self.replicas) if self.replicas else self.stages

    @property
    def mesh(self) -> Mesh:
        """The mesh of the job."""
        return Mesh(
            data_parallel=self.data_parallel,
            pipeline=self.workers,
            adjacent=self.adjacent,
            shard=self.data_parallel if self.sharded else 1,
        )

    @property
    def division(self) -> Division:
        """How its stages are divided further."""
        return Division(
            replicas=self.replicas or (1,) * self.stages,
            buckets=self.buckets,
            data_parallel=self.data_parallel,
            sharded=self.sharded,
        )

    def generated(self) -> Schedule:
        """The layout's own orders, or the family's schedule of these sizes.

        Raises:
            ConfigError: there is no such family, or it cannot do these sizes.
        """
        rows = self.batch // self.data_parallel
        if self.orders is not None:
            schedule = self.orders
            counts = microbatches_of_blocks(schedule)
            for number, pipeline in enumerate(schedule.placement.pipelines):
                size = rows // counts[schedule.placement.stages[pipeline.stages[0]].weights]
                sizes = (max(size, 1),) * len(pipeline.microbatches)
                schedule = connect(schedule, pipeline.edges, microbatches=sizes, pipeline=number)
            return schedule
        size = rows // self.microbatches
        return generated(self.schedule, self.stages, self.microbatches, max(size, 1))

    def places(self) -> tuple[int, ...]:
        """The worker of each stage of the first pipeline, in forward order: as many as blocks, before buckets.

        Raises:
            ConfigError: there is no such family, or it cannot do these sizes.
        """
        return self.generated().placement.workers()

    def num_blocks(self) -> int:
        """Parts into which the trained model is cut, before buckets.

        Raises:
            ConfigError: there is no such family, or it cannot do these sizes.
        """
        return len({stage.weights for stage in self.generated().placement.stages})
