"""The work of an event of a schedule, as far as its price depends on it."""

from dataclasses import dataclass

from diffusionpipe.ir import Op


@dataclass(frozen=True, slots=True)
class Nothing:
    """No work: an event at which others meet."""


@dataclass(frozen=True, slots=True)
class Compute:
    """One of a stage's compute ops on a micro-batch."""

    stage: int
    op: Op


@dataclass(frozen=True, slots=True)
class Encode:
    """The work of one fill: layers of the frozen part on some samples."""

    slot: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Samples of tensors from a worker to another one."""

    source: int
    destination: int
    tensors: tuple[str, ...]
    num_samples: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """The sum of a block's gradients over these stages, which hold it."""

    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """The parameters of a stage's sharded block come together."""

    stage: int


@dataclass(frozen=True, slots=True)
class Room:
    """A gap for work before an action of a worker, or after its last one."""

    worker: int
    position: int
    """Place of the action in the worker's order; the order's length: after all."""


Work = Nothing | Compute | Encode | Transfer | Reduce | Gather | Room
NOTHING = Nothing()
