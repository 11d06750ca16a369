"""Candidates for a plan, and the estimate of a candidate by a quick simulation."""

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
    """Number of micro-batches; with several backbones the least common multiple of their numbers."""
    starts: tuple[int, ...]
    """The first layer of each block, before buckets, counted among the trained layers."""
    replicas: tuple[int, ...]
    """The number of units that share the stages of each worker of the schedule; 1 if a worker has several stages."""
    buckets: int = 1
    """The number of buckets of each stage."""
    hosts: tuple[int, ...] | None = None
    """The units that hold the frozen layers, if not all have memory for them; None for all. The filler asks the
    memory itself and may find more."""
    orders: Schedule | None = None
    """Orders made for this candidate; `schedule` is then their name. None: the family's orders."""
    sharded: Sharded = Sharded.NONE
    """The things that the data-parallel copies hold in parts."""

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of micro-batches of each backbone, in the model's order."""
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
        """Whether the candidate has no pipeline: every device holds the whole model, or a part of its parameters."""
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
        """Whether each replica gets whole samples of each micro-batch of a batch of `batch` samples."""
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
        """The names of the layers with which the blocks 1, 2, ... of a backbone start."""
        cuts, layers = {graph.backbone_layers[start] for start in self.starts}, graph.layers_of(backbone)
        return tuple(name for name in layers[1:] if name in cuts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The times and the memory of a candidate by a quick simulation."""

    pipeline: Seconds
    """The iteration without frozen work: forwards, backwards and reductions."""
    busy: Seconds
    """The mean time for which a unit computes in it."""
    frozen: Seconds
    """The frozen work for a rank's equal share of the batch."""
    iteration: Seconds
    """The iteration with the frozen work. It is exact if that runs before the pipeline; if it fills waits, it is a
    lower bound that good fillings nearly reach."""
    held: tuple[Bytes, ...]
    """The peak memory of each unit, by unit."""
    overflow: Bytes
    """Bytes that the fullest device lacks; negative: bytes that are left."""
