"""The workers that stages live on, and the tensors that flow between stages.

    Stage     a block of weights on a worker, handling a share of every micro-batch's samples
    Edge      which stage's output which stage reads, by tensor name
    Pipeline  stages in forward order with their own micro-batches and ops
    Placement all stages and pipelines of one schedule

Two stages with equal `weights` hold copies of the same parameters: as replicas (disjoint shares, same pipeline) or as
the two directions of Chimera (different pipelines). Frozen work is a pipeline too: its ops are {ENCODE}, it has one
micro-batch, the whole batch, and one stage per worker whose share are the samples which that worker encodes.

A **probe** is a pipeline that runs forwards over another one's blocks, on the same workers, without gradients. An edge
leads from its last stage to the other pipeline's first: the denoiser reads its own estimate (self-conditioning). It has
the same micro-batches with the same numbers, but runs only those from a certain one on.
"""

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from diffusionpipe.ir.action import Op


@dataclass(frozen=True, slots=True)
class Range:
    """The whole numbers from `start` to `stop`, without `stop`, of samples or layers; its len is their number.

    Raises:
        ValueError: `start` is negative or above `stop`.
    """

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"a range needs 0 <= start <= stop; got {self.start}, {self.stop}")

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def intersection(self, other: "Range") -> "Range":
        """The numbers that are in both ranges; a range of length 0 if there are none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))

    def overlaps(self, other: "Range") -> bool:
        """Whether any number is in both ranges."""
        return max(self.start, other.start) < min(self.stop, other.stop)

    def shifted(self, offset: int) -> "Range":
        """The range with `offset` added to both ends.

        Raises:
            ValueError: the start becomes negative.
        """
        return Range(self.start + offset, self.stop + offset)


@dataclass(frozen=True, slots=True)
class Share:
    """The part of every micro-batch that a stage handles, as a half-open range of fractions of it.

    Raises:
        ValueError: not 0 <= start < stop <= 1.
    """

    start: Fraction = Fraction(0)
    stop: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= 1:
            raise ValueError(f"a share needs 0 <= start < stop <= 1; got {self.start}, {self.stop}")

    def __str__(self) -> str:
        return f"{self.start}:{self.stop}"

    def overlaps(self, other: "Share") -> bool:
        """Whether the two shares have any part of a micro-batch in common."""
        if self is WHOLE or other is WHOLE:  # no share is empty
            return True
        return max(self.start, other.start) < min(self.stop, other.stop)

    def samples(self, size: int) -> Range:
        """The range of samples in this share, of a micro-batch of `size` samples.

        Raises:
            ValueError: the share's borders fall inside a sample.
        """
        if self is WHOLE:
            return Range(0, size)
        start, stop = self.start * size, self.stop * size
        if start.denominator != 1 or stop.denominator != 1:
            raise ValueError(f"a micro-batch of {size} samples cannot be cut at {self.start} and {self.stop} of it")
        return Range(int(start), int(stop))


WHOLE = Share()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A place of a schedule's work: a worker, the block of weights that it runs, and its share of the samples."""

    worker: int
    """Coordinate on the mesh's pipeline axis, never a global rank."""
    weights: int
    """Block id: `Plan.blocks` maps it to layers. Stages with equal ids share parameters."""
    share: Share = WHOLE
    """The part of every micro-batch's samples that this stage handles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The named tensors that stage `consumer` reads from stage `producer`, and those whose gradients return."""

    producer: int
    consumer: int
    tensors: tuple[str, ...] = ("hidden",)
    gradients: tuple[str, ...] = ("hidden",)
    """The tensors among them whose gradient flows back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Stages in forward order, the micro-batches that pass through them, and the ops that each stage does for each."""

    stages: tuple[int, ...]
    """The stages in forward order, as indices into `Placement.stages`."""
    microbatches: tuple[int, ...]
    """Samples of each micro-batch; a micro-batch's id is its index."""
    ops: frozenset[Op]
    """The ops that every stage does for every micro-batch: {F}, {F, B}, {F, I, W}; or {ENCODE}."""
    edges: tuple[Edge, ...] = ()
    """Edges into this pipeline's stages, also from a frozen pipeline's stages."""
    model: str = ""
    """The name of the backbone, or of the frozen part."""
    is_ahead: bool = False
    """Frozen pipelines only: they encode the next iteration's batch, so nothing in this iteration waits for them."""
    first_sample: int = 0
    """The first sample of the batch that the pipeline takes: pipelines that train the same weights share the batch."""
    probes_from: int | None = None
    """The first micro-batch that a probe runs; None: the pipeline is not a probe, and runs all."""

    @property
    def is_probe(self) -> bool:
        """Whether it is a probe: it runs another pipeline's blocks ahead, without gradients, for self-conditioning."""
        return self.probes_from is not None

    @property
    def numbers(self) -> range:
        """The numbers of the micro-batches that it runs: all, or for a probe the ones from `probes_from` on."""
        return range(self.probes_from or 0, len(self.microbatches))

    def probes(self, other: "Pipeline") -> bool:
        """Whether it is a probe of `other`, which has the same backbone and first sample, and is not a probe itself."""
        is_alike = (self.model, self.first_sample) == (other.model, other.first_sample)
        return is_alike and self.is_probe and not other.is_probe

    @property
    def num_samples(self) -> int:
        """The number of samples of all its micro-batches together."""
        return sum(self.microbatches)

    def rows(self, microbatch: int) -> Range:
        """The range of a micro-batch's samples, counted within the batch."""
        start = self.first_sample + sum(self.microbatches[:microbatch])
        return Range(start, start + self.microbatches[microbatch])


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """All stages of a schedule, and the pipelines that they form."""

    stages: tuple[Stage, ...]
    pipelines: tuple[Pipeline, ...]
    _pipeline_of: dict[int, Pipeline] = field(init=False, repr=False, compare=False)
    """The pipeline of each stage: the checker, the simulator and the compiler ask for it at every action."""

    def __post_init__(self) -> None:
        found: dict[int, Pipeline] = {}
        for pipeline in self.pipelines:
            for stage in pipeline.stages:
                # A stage in two pipelines is refused by `timing.legal`, which names it.
                found.setdefault(stage, pipeline)
        object.__setattr__(self, "_pipeline_of", found)  # the dataclass is frozen, and this follows from its fields

    @property
    def num_workers(self) -> int:
        """The number of workers: one more than the highest worker of a stage."""
        return 1 + max(stage.worker for stage in self.stages)

    @property
    def num_samples(self) -> int:
        """The number of samples of the batch that all pipelines share."""
        return max(pipeline.first_sample + pipeline.num_samples for pipeline in self.pipelines)

    def workers(self, pipeline: int = 0) -> tuple[int, ...]:
        """The worker of each stage of a pipeline, in forward order; `pipeline` is its index."""
        return tuple(self.stages[stage].worker for stage in self.pipelines[pipeline].stages)

    def pipeline_of(self, stage: int) -> Pipeline:
        """The pipeline to which the stage with this index belongs.

        Raises:
            KeyError: no pipeline has it.
        """
        return self._pipeline_of[stage]

    def first_conditioned(self, pipeline: Pipeline, share: Fraction) -> int:
        """The pipeline's first micro-batch with any of the batch's last samples; `share` is their part of the batch.

        The number of micro-batches if none has any.
        """
        alike = (other for other in self.pipelines if other.model == pipeline.model)
        batch = max(other.first_sample + other.num_samples for other in alike)
        first = batch - ceil(share * batch)
        numbers = range(len(pipeline.microbatches))
        return next((m for m in numbers if pipeline.rows(m).stop > first), len(numbers))

    def num_forwards(self, stage: int) -> int:
        """The number of forwards of the stage's block on its worker in an iteration, a probe's forwards included."""
        own = self.pipeline_of(stage)
        alike = (p for p in self.pipelines if p is own or p.probes(own) or own.probes(p))
        return sum(len(pipeline.numbers) for pipeline in alike)

    def samples(self, stage: int, microbatch: int) -> Range:
        """The range of the micro-batch's samples that the stage handles, counted within the micro-batch."""
        return self.stages[stage].share.samples(self.pipeline_of(stage).microbatches[microbatch])

    def rows(self, stage: int, microbatch: int) -> Range:
        """The range of the micro-batch's samples that the stage handles, counted within the batch."""
        pipeline = self.pipeline_of(stage)
        start = pipeline.rows(microbatch).start
        return self.samples(stage, microbatch).shifted(start)

    def is_frozen(self, stage: int) -> bool:
        """Whether the stage belongs to a frozen pipeline, which only encodes."""
        return Op.ENCODE in self.pipeline_of(stage).ops

    def replicas(self, stage: int) -> tuple[int, ...]:
        """The indices of all stages that have the same block of weights, this one included, in order."""
        weights = self.stages[stage].weights
        return tuple(i for i, other in enumerate(self.stages) if other.weights == weights)
