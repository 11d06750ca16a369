"""Candidates for a plan, and the result of a quick simulation of one."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm

from diffusionpipe.costs import Backbone, ModelGraph
from diffusionpipe.ir import Schedule, Sharded
from diffusionpipe.planner.assembly.layout import BackboneLayout, Layout
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.encoders import encode_chunks_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """All sizes of a plan but its fills: arrangement, schedule, micro-batches, cuts and replicas."""

    arrangement: Arrangement
    schedule: str
    microbatches: int
    """Number of micro-batches; of several backbones with numbers of their own, the least common multiple of these."""
    starts: tuple[int, ...]
    """First layer of each block, before buckets; schedules with one stage on each worker have a block for each."""
    replicas: tuple[int, ...]
    """Units in place of each worker of the schedule; all 1 where a worker has several stages."""
    buckets: int = 1
    hosts: tuple[int, ...] | None = None
    """Units that hold the frozen layers, where memory lets not all of them do so; None for all. The filler asks the
    memory itself and may find more."""
    orders: Schedule | None = None
    """Orders made for this candidate; `schedule` is then their name. None: the family's orders."""
    sharded: Sharded = Sharded.NONE
    """The things that the data-parallel copies hold in parts."""

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of micro-batches of each backbone."""
        return tuple(own.microbatches for own in self.backbones) or (self.microbatches,)

    @cached_property
    def backbones(self) -> tuple[BackboneLayout, ...]:
        """The name and the micro-batches of each of several backbones, without cuts; () for one backbone."""
        found: Counter[str] = Counter()
        # Both directions of one backbone count together.
        for pipeline in self.orders.placement.pipelines if self.orders else ():
            found[pipeline.model] += len(pipeline.microbatches)
        own = tuple(BackboneLayout(name=name, microbatches=count) for name, count in found.items())
        return own if len(own) > 1 else ()

    @property
    def is_copy(self) -> bool:
        """Whether it has no pipeline: every device holds the whole model, or a part of its parameters."""
        return self.workers == 1

    @property
    def stages(self) -> tuple[int, ...]:
        """The number of stages of each backbone, before buckets."""
        if not self.backbones:
            return (len(self.starts),)
        assert self.orders, "several backbones have orders of their own"
        return tuple(len(pipeline.stages) for pipeline in self.orders.placement.pipelines)

    @property
    def workers(self) -> int:
        """The number of workers of the schedule. A worker is one unit, or several that share its stages."""
        return len(self.replicas)

    def divides(self, batch: int) -> bool:
        """Whether micro-batches and replicas cut the batch at whole samples."""
        return batch % (self.arrangement.data_parallel * self.microbatches * lcm(*self.replicas)) == 0

    def layout(self, setting: Setting) -> Layout:
        """The layout of which `build_plan` makes the candidate's plan."""
        return Layout(
            batch=setting.workload.batch,
            stages=self.workers,
            microbatches=self.microbatches,
            schedule=self.schedule,
            orders=self.orders,
            replicas=self.replicas,
            data_parallel=self.arrangement.data_parallel,
            adjacent=self.arrangement.adjacent,
            encode_chunk=setting.workload.encode_chunk,
            encode_chunks=tuple(encode_chunks_of(setting).items()),
            backbones=tuple(
                replace(own, splits=self._splits(setting.graph, backbone))
                for own, backbone in zip(self.backbones, setting.graph.backbones, strict=False)
            ),
            splits=() if self.backbones else self._splits(setting.graph, setting.graph.backbones[0]),
            checkpointed=setting.workload.checkpointed,
            buckets=self.buckets,
            sharded=self.sharded,
            encoders=setting.workload.encoders.name,
            probes=setting.graph.probes,
        )

    def _splits(self, graph: ModelGraph, backbone: Backbone) -> tuple[str, ...]:
        """The layers of a backbone at which its blocks 1, 2, ... start."""
        cuts, layers = {graph.backbone_layers[start] for start in self.starts}, graph.layers_of(backbone)
        return tuple(name for name in layers[1:] if name in cuts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The times and the memory of a candidate by a quick simulation."""

    pipeline: Seconds
    """The iteration without the frozen work: forwards, backwards, reductions; where that is done before the pipeline,
    without `frozen`."""
    busy: Seconds
    """Mean time that a unit computes in it."""
    frozen: Seconds
    """Frozen work of a rank's equal share."""
    iteration: Seconds
    """The iteration with the frozen work: exactly where that is done before the pipeline; where it fills waits, a time
    that no filling can beat, and a good one comes close to."""
    held: tuple[Bytes, ...]
    """Peak memory of each unit."""
    overflow: Bytes
    """Bytes that the fullest device lacks; negative: bytes that are left."""
