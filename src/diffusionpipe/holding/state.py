"""Numbers beside a trained parameter: its gradient, the state of its optimizer, averages, copies to go back to.

Each is a `State` with a rule for its bytes. A workload holds a tuple of them, and every count of memory goes through
`Held`, their sums by item.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from operator import add, sub
from typing import NamedTuple

from diffusionpipe.costs.graph import ParameterSpec, is_kept_narrow
from diffusionpipe.units import Bytes

BUCKET: Bytes = 2**28
"""The bytes of parameters, in the width of their update, that an update brings to the device at a time: a bucket."""


class Item(StrEnum):
    """The items of a rank's memory in which states of parameters are counted; `MemoryUse` has fields of these names."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    EMA = "ema"
    BACKUP = "backup"


@dataclass(frozen=True, slots=True)
class Sized:
    """The bytes of a state for one parameter, with the parameter's name."""

    parameter: str
    size: Bytes


@dataclass(frozen=True, kw_only=True)
class State:
    """A kind of numbers that a rank holds for each weight of a trained parameter, such as its gradient or a moment."""

    item: Item
    """The item of a rank's memory in which the state is counted."""
    width: int
    """Bytes for each number of the parameter."""
    name: str = ""
    """The name under which an optimizer keeps it, "exp_avg"; "" where that does not matter."""
    is_hosted: bool = False
    """Whether it is kept in host memory, and is on the device only while the parameter is updated."""

    narrow: int | None = None
    """Bytes for each number of a parameter that is kept in bfloat16; None: `width`."""
    sizes: tuple[Sized, ...] = ()
    """The bytes for each parameter, where they do not follow from its shape; `width` is then their mean per weight."""

    @cached_property
    def _by_name(self) -> dict[str, Bytes]:
        return {one.parameter: one.size for one in self.sizes}

    def size(self, parameter: ParameterSpec) -> Bytes:
        """The bytes of this state for one parameter."""
        if self.sizes and parameter.name in self._by_name:
            return self._by_name[parameter.name]
        narrow = self.narrow if is_kept_narrow(parameter) else None
        return prod(parameter.shape) * (self.width if narrow is None else narrow)


class Held(NamedTuple):
    """Bytes of trained parameters and of all that lies beside them, by item."""

    parameters: Bytes = 0
    gradients: Bytes = 0
    optimizer: Bytes = 0
    ema: Bytes = 0
    backup: Bytes = 0
    hosted: Bytes = 0
    """Bytes in host memory, which count in no item of the device."""

    def plus(self, other: "Held") -> "Held":
        """The sum of both, item by item."""
        return Held._make(map(add, self, other))

    def minus(self, other: "Held") -> "Held":
        """The difference, this less `other`, item by item."""
        return Held._make(map(sub, self, other))

    def at_least(self, other: "Held") -> "Held":
        """The larger number of both, item by item."""
        return Held._make(map(max, self, other))

    def part(self, parts: int) -> "Held":
        """Each item divided by `parts`, rounded down."""
        return Held(*(size // parts for size in self))

    def in_parts(self, parts: int) -> "Held":
        """Whole parameters and gradients, and all other items divided by `parts`, rounded down."""
        return self.part(parts)._replace(parameters=self.parameters, gradients=self.gradients)

    @property
    def saved(self) -> Bytes:
        """Bytes that a checkpoint holds: parameters, the state of the optimizer, averages, and all in host memory."""
        return self.parameters + self.optimizer + self.ema + self.hosted

    @property
    def on_device(self) -> Bytes:
        """The bytes on the device: the sum of all items but `hosted`."""
        return sum(self) - self.hosted


def in_bfloat16(states: Iterable[State], *, gradient: int, has_errors: bool) -> tuple[State, ...]:
    """The same states for training in which parameters kept in bfloat16 are stepped in float32 and rounded.

    `gradient`: bytes of a number of their gradients. `has_errors`: whether a rounding error of two bytes is kept for
    each of their numbers, as one more state.

    >>> narrow = ParameterSpec(name="x", shape=(10,), dtype="bfloat16", is_trainable=True)
    >>> held_of(in_bfloat16(plain_states(), gradient=4, has_errors=True), narrow)
    Held(parameters=20, gradients=40, optimizer=100, ema=0, backup=0, hosted=0)
    """
    widths = {Item.PARAMETERS: 2, Item.GRADIENTS: gradient}
    found = tuple(replace(one, narrow=widths.get(one.item, one.narrow)) for one in states)
    return (*found, State(item=Item.OPTIMIZER, width=0, narrow=2, name="rounding_error")) if has_errors else found


def widened_bytes(parameters: Iterable[ParameterSpec], *, gradient: int) -> Bytes:
    """The most bytes in float32 that an update holds at a time of parameters kept in bfloat16: a bucket of them.

    `gradient` is the width of their gradients in bytes; below 4 the gradients are widened too, which doubles the bytes.
    0 without such parameters.
    """
    sizes = [4 * prod(p.shape) for p in parameters if is_kept_narrow(p)]
    # A bucket holds at least one parameter, also one that is larger than a bucket.
    most = min(sum(sizes), max(BUCKET, max(sizes, default=0)))
    return most if gradient == 4 else 2 * most


def freed_at_once(states: Iterable[State], parameters: Iterable[ParameterSpec]) -> tuple[tuple[State, ...], Bytes]:
    """(the states without gradients, the most bytes that the step of one parameter needs).

    For training in which each gradient is there only while its parameter is stepped. The bytes are the largest sum of a
    gradient and the wide copies of a parameter kept in bfloat16.

    >>> wide = ParameterSpec(name="x", shape=(10,), dtype="float32", is_trainable=True)
    >>> [len(freed_at_once(plain_states(), [wide])[0]), freed_at_once(plain_states(), [wide])[1]]
    [2, 40]
    """
    gradients = tuple(state for state in states if state.item is Item.GRADIENTS)
    others = tuple(state for state in states if state.item is not Item.GRADIENTS)
    own = [(p, sum(state.size(p) for state in gradients)) for p in parameters if p.is_trainable]
    # All gradients of a parameter have one width here, so it is found by dividing.
    steps = [size + widened_bytes([p], gradient=size // max(1, prod(p.shape))) for p, size in own]
    return others, max(steps, default=0)


def held_of(states: Iterable[State], parameter: ParameterSpec) -> Held:
    """The bytes of one trained parameter and its states, item by item.

    >>> held_of(plain_states(ema=4), ParameterSpec(name="x", shape=(10,), dtype="float32", is_trainable=True))
    Held(parameters=40, gradients=40, optimizer=80, ema=40, backup=0, hosted=0)
    """
    found: dict[str, Bytes] = {}
    for state in states:
        item = "hosted" if state.is_hosted else state.item.value
        found[item] = found.get(item, 0) + state.size(parameter)
    return Held(**found)


def plain_states(
    *,
    parameter: int = 4,
    gradient: int = 4,
    master: int = 0,
    optimizer: int = 8,
    ema: int = 0,
    has_backup: bool = False,
) -> tuple[State, ...]:
    """The states of the usual training, all on the device; each width is in bytes a number, and 0 leaves a state out.

    Args:
        parameter: width of the parameter as layers read it.
        gradient: width of its gradient.
        master: width of a float32 copy beside a narrower parameter.
        optimizer: width of the state of the optimizer; 8 for Adam's two float32 moments.
        ema: width of its average.
        has_backup: whether parameters, gradients and the state of the optimizer are there once more, to undo an update.
    """
    widths = (
        (Item.PARAMETERS, parameter),
        (Item.GRADIENTS, gradient),
        (Item.OPTIMIZER, optimizer + master),
        (Item.EMA, ema),
        (Item.BACKUP, (parameter + gradient + optimizer + master) * has_backup),
    )
    return tuple(State(item=item, width=width) for item, width in widths if width)
