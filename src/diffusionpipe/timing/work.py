"""The work of an event of a schedule, as far as its price depends on it."""

from dataclasses import dataclass

from diffusionpipe.ir import Op


@dataclass(frozen=True, slots=True)
class Nothing:
    """The work of an event at which others meet: none, so it takes no time."""


@dataclass(frozen=True, slots=True)
class Compute:
    """The work of one compute op (F, B, I or W) of a stage on a micro-batch."""

    stage: int
    op: Op


@dataclass(frozen=True, slots=True)
class Encode:
    """The work of one fill: layers of the frozen part on some samples; `slot` is its index in `Schedule.fills`."""

    slot: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of tensors of some samples from the worker `source` to the worker `destination`."""

    source: int
    destination: int
    tensors: tuple[str, ...]
    num_samples: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """The sum of a block's gradients over the stages that hold it."""

    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """The gathering of the parameters of a stage's sharded block from all their owners."""

    stage: int


@dataclass(frozen=True, slots=True)
class Room:
    """A gap before an action of a worker, or after its last one, into which work may be put."""

    worker: int
    position: int
    """The index of the action in the worker's order; the order's length: after all actions."""


Work = Nothing | Compute | Encode | Transfer | Reduce | Gather | Room
NOTHING = Nothing()
