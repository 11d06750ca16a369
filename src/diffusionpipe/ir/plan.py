"""A plan: everything that the ranks must agree on before the first step."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from diffusionpipe.ir.schedule import Schedule


class Sharded(StrEnum):
    """The part of the training state that data-parallel copies hold once among them, in parts."""

    NONE = "none"
    """Every copy holds everything."""
    OPTIMIZER = "optimizer"
    """The states of the optimizer and averages (ZeRO-1); each copy holds all parameters and gradients."""
    ALL = "all"
    """Parameters, gradients, states and averages (ZeRO-3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How the ranks are laid out: which global rank is which worker of which data-parallel group.

        data_parallel 2, pipeline 2, adjacent 1   ranks 0 1 | 2 3    group 0: workers 0, 1; then group 1
        data_parallel 2, pipeline 2, adjacent 2   ranks 0 1 | 2 3    worker 0 of groups 0, 1; then worker 1

    With nodes of two ranks a pipeline stays in its node in the first, and crosses nodes in the second.
    """

    data_parallel: int = 1
    """The number of data-parallel groups: copies of the whole pipeline."""
    pipeline: int = 1
    """The number of workers of each group."""
    shard: int = 1
    """The number of data-parallel groups that hold each block's parameters, gradients and optimizer state once among
    them, in parts: 1, every group holds them whole, or `data_parallel`."""
    adjacent: int = 1
    """The number of data-parallel groups whose ranks are interleaved, worker by worker; divides `data_parallel`."""

    owners: int = 1
    """The number of data-parallel groups that hold the optimizer's states once among them, while each holds all
    parameters and gradients: 1, every group holds its states too, or `data_parallel`."""

    def __post_init__(self) -> None:
        if self.adjacent < 1 or self.data_parallel % self.adjacent:
            raise ValueError(f"adjacent={self.adjacent} must divide data_parallel={self.data_parallel}")
        if self.shard not in (1, self.data_parallel):
            raise ValueError(f"shard={self.shard} must be 1 or data_parallel={self.data_parallel}")
        if self.owners not in (1, self.data_parallel):
            raise ValueError(f"owners={self.owners} must be 1 or data_parallel={self.data_parallel}")
        if self.owners > 1 and self.shard > 1:
            raise ValueError(f"shard={self.shard} holds the states in parts too; leave out owners={self.owners}")

    @property
    def sharded(self) -> Sharded:
        """The part of the training state of which each data-parallel group holds a part."""
        if self.shard > 1:
            return Sharded.ALL
        return Sharded.OPTIMIZER if self.owners > 1 else Sharded.NONE

    @property
    def parts(self) -> int:
        """The number of groups among which the updates of parameters are divided; 1: each group does all of them."""
        return max(self.shard, self.owners)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the whole job."""
        return self.data_parallel * self.pipeline

    def rank(self, group: int, worker: int) -> int:
        """The global rank of this worker in this data-parallel group."""
        outer, inner = divmod(group, self.adjacent)
        return (outer * self.pipeline + worker) * self.adjacent + inner

    def place(self, rank: int) -> tuple[int, int]:
        """The (data-parallel group, worker) of a global rank; the inverse of `rank`."""
        rest, inner = divmod(rank, self.adjacent)
        outer, worker = divmod(rest, self.pipeline)
        return outer * self.adjacent + inner, worker


class PlanPhase(StrEnum):
    """The kinds of iteration for which a plan has schedules, by the names that `Plan.phases` uses.

    Of several backbones each has a phase of its own for samples, see `sampling_phase`.
    """

    TRAIN = "train"
    PROLOGUE = "prologue"
    VALIDATE = "validate"
    SAMPLE = "sample"


def sampling_phase(backbone: str) -> str:
    """The name of the phase in which a backbone draws: "sample" for one without a name, else "sample/NAME"."""
    return f"{PlanPhase.SAMPLE}/{backbone}" if backbone else str(PlanPhase.SAMPLE)


def drawing_backbone(schedule: Schedule) -> str:
    """The name of the backbone that draws in this schedule: the model of its first pipeline, "" without one."""
    return next((pipeline.model for pipeline in schedule.placement.pipelines), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that the ranks agree on before the first step: the mesh, the blocks of layers, a schedule for each phase."""

    mesh: Mesh
    blocks: tuple[tuple[str, ...], ...]
    """Block id -> names of its layers, in order. Every stage's `weights` is a block id."""
    train: Schedule
    """One training iteration: encode, forward, backward, reduce."""
    prologue: Schedule | None = None
    """Encoding of the first batch, where `train` encodes ahead; of every batch, where it is a window without fills;
    else None."""
    validate: Schedule
    """The same batch forward only, up to the loss."""
    sample: tuple[Schedule, ...]
    """The schedule of each backbone for drawing samples: its denoiser alone, forward only."""
    checkpointed: tuple[str, ...] = ()
    """Layers whose activations are recomputed in the backward."""
    encoders: str = "device"
    """The storage in which the frozen part's weights rest, by its name (`holding.STORAGES`). From "host", host memory,
    they come to the device layer by layer, as they run."""
    made_with: tuple[str, ...] = ()
    """Options of the command that made it, "--cluster=rtx4090x2", and keys of its recipe, "training.batch=64"."""

    @property
    def phases(self) -> Mapping[str, Schedule]:
        """Name of a phase -> its schedule, for each `PlanPhase` that the plan has.

        Of several backbones each has its `sampling_phase` in place of "sample".
        """
        found: dict[str, Schedule | None] = {"train": self.train, "prologue": self.prologue, "validate": self.validate}
        found |= {sampling_phase(drawing_backbone(one)): one for one in self.sample}
        return {phase: schedule for phase, schedule in found.items() if schedule is not None}

    @property
    def is_filled(self) -> bool:
        """Whether `train` encodes a later batch in its bubbles."""
        return any(pipeline.is_ahead for pipeline in self.train.placement.pipelines)

    @property
    def encoding(self) -> Schedule:
        """The schedule that encodes the training's batches: `prologue` without flush and fills, else `train`."""
        return self.prologue if self.prologue is not None and self.train.lead else self.train

    @property
    def batch(self) -> int:
        """The number of samples of one step over all data-parallel groups."""
        return self.mesh.data_parallel * self.train.placement.num_samples
