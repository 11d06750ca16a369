"""The bytes that an optimizer keeps of parameters of given shapes, found by steps on the CPU.

Each distinct shape is tried alone. A large one would take too long: the rule of its states is read off two smaller
parameters of the same form and must hold for both. A state of the form (320, 1280, 3, 3) is tried as (72, 88, 3, 3) and
as (104, 120, 3, 3); its sides are then

    exp_avg   (72, 88, 3, 3), (104, 120, 3, 3)     its own sides            (320, 1280, 3, 3)
    absmax1   (223,), (439,)                       all numbers / 256        (14400,)
    GG[0]     (72, 72), (104, 104)                 the first side twice     (320, 320)
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from time import thread_time

import torch
from torch import nn

from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.optim.classes import has_modes, optimizer_class, quiet, stand_in_of
from diffusionpipe.trainer.optim.entries import entries_of
from diffusionpipe.trainer.optim.optimizer import RankOptimizer, build_optimizer
from diffusionpipe.units import Bytes, Seconds

Shape = tuple[int, ...]

LIMIT: Seconds = 10.0
"""The longest time that the trials of one call of `kept_bytes` take together."""
_ALONE = 2**22
"""The most elements of a parameter that is tried itself; with states of usual classes it takes far less than 1 GiB."""
_SMALL = 2**10
"""The most elements of a parameter that is tried itself with every class."""
_LONGEST = 2**13
"""The longest side over which states may be matrices: classes leave out longer ones, at lengths of their own."""
_MUCH: Bytes = 2**26
_TIMES = 32
"""States larger than this many times their parameter, and larger than `_MUCH` bytes, are a mistake of the recipe."""
_SIDES = ((8, 12, 20, 28, 36), (11, 17, 25, 31, 41)), ((72, 88, 112, 136, 152), (104, 120, 144, 168, 184))
"""The sides of the two smaller parameters, in place of longer sides, the shortest first: for a first look, and for the
rule. For the rule vectors have more than 4,096 numbers, because 8-bit classes keep other states of shorter ones."""
_VECTORS = (4160, 5184)
_PAIR = (128, 64)
"""The shape of a parameter that every class is tried with. Its states have the form of large parameters' states."""
_SHORT = 32
"""Sides of at most this length, such as the sides of convolution kernels, are not made smaller."""


@dataclass(frozen=True, slots=True)
class KeptStates:
    """The bytes of an optimizer's states by the shape of the parameter, and the bytes that all parameters share."""

    by_shape: Mapping[Shape, Bytes]
    """Shape of a parameter -> bytes of its states, without the shared bytes."""
    shared: Bytes
    """Bytes that all parameters of a rank share, such as the code tables of 8-bit classes."""


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The shape and the bytes of a tensor among the states of a parameter."""

    shape: Shape
    item: Bytes
    """Bytes of one element."""
    storage: Bytes
    """Bytes of the tensor's memory; 0 where a tensor before it has the same memory."""


def kept_bytes(
    name: str, arguments: Mapping[str, object], shapes: Sequence[Shape], dtype: torch.dtype = torch.float32
) -> KeptStates:
    """The bytes of states that an optimizer class keeps for a parameter of each of these shapes after three steps.

    `name`: the class; `arguments`: of its constructor; `dtype`: the type of the parameters.

    Raises:
        RecipeError: it cannot step by gradients alone on a CPU, it keeps objects, its states follow no rule or are many
            times as large as a parameter, its arguments are not plain values, or the trials take over 10 s.
    """
    try:
        key = json.dumps(arguments, sort_keys=True)
    except TypeError as error:
        raise RecipeError(f"optimizer {name}: its arguments must be plain values: {error}") from error
    started, found = thread_time(), {}
    # The cheap ones first, as long as there is time.
    for shape in sorted(set(shapes), key=lambda shape: (prod(shape), shape)):
        found[shape] = _bytes_of(name, key, shape, dtype, is_late=thread_time() - started > LIMIT / 2)
        if thread_time() - started > LIMIT and len(found) < len(set(shapes)):
            raise RecipeError(
                f"optimizer {name}: the trial steps that count its states take more than {LIMIT:.0f} s on this CPU; "
                "choose one that is cheaper"
            )
    shared = _shared(name, key, dtype) if any(prod(shape) > _SMALL for shape in found) else {}
    return KeptStates(found, sum(shared.values()))


def has_group_values(name: str) -> bool:
    """Whether an optimizer class keeps values for all parameters of a group together, such as a count of steps.

    Raises:
        RecipeError: the class cannot be tried.
    """
    parameter = stand_in_of(torch.zeros(()), (4, 4))
    with quiet(), torch.random.fork_rng(devices=[]):
        optimizer = build_optimizer(name, {"parameter": parameter}, 1e-3, {})
        assert optimizer is not None, "it has a parameter"
        before = repr(optimizer.group_values())
        _step(name, optimizer)
        return repr(optimizer.group_values()) != before


def steps_together(name: str) -> bool:
    """Whether an optimizer class must step all parameters at one time, because it has modes or values of groups.

    Always False for a class of torch.optim, which has a name without a path.

    Raises:
        RecipeError: the class cannot be tried.
    """
    return "." in name and (has_modes(optimizer_class(name)) or has_group_values(name))


def sums_over_all(name: str, arguments: Mapping[str, object]) -> bool:
    """Whether an optimizer's update of a parameter, or a value of its group, depends on other parameters.

    It is found by steps with and without a second parameter.

    Raises:
        RecipeError: the class cannot be tried.
    """
    ends = []
    for others in ((), (3.0,)):  # alone, and beside a parameter with large gradients
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(6, 4, generator=generator) for _ in range(4)]
        held = {"own": nn.Parameter(values[0].clone())}
        held |= {f"other{size}": nn.Parameter(size * torch.ones(5, 3)) for size in others}
        # Some classes draw random numbers, which must not change the run's.
        with quiet(), torch.random.fork_rng(devices=[]):
            optimizer = build_optimizer(name, held, 1e-2, arguments)
            assert optimizer is not None, "it has a parameter"
            for gradient in values[1:]:
                for key, parameter in held.items():
                    parameter.grad = gradient.clone() if key == "own" else torch.full_like(parameter, 50.0)
                _step(name, optimizer)
        ends.append((held["own"].tolist(), repr(optimizer.group_values())))
    return ends[0] != ends[1]


def _step(name: str, optimizer: RankOptimizer) -> None:
    try:
        for part in optimizer.parts:  # whose warnings belong to the run
            part.step()
    except Exception as error:  # libraries raise what they like
        raise RecipeError(
            f"optimizer {name} cannot step by gradients alone on a CPU, where its states are counted: {error}"
        ) from error


def _bytes_of(name: str, key: str, shape: Shape, dtype: torch.dtype, *, is_late: bool) -> Bytes:
    shared = _shared(name, key, dtype) if prod(shape) > _SMALL else {}
    if prod(shape) <= _SMALL:
        return _sum(_tried(name, key, shape, dtype), shared)
    # A first look at tiny parameters shows whether a trial of the shape itself would be too dear.
    looked = _by_rule(name, key, shape, dtype, 0)
    if looked is not None and looked > max(_MUCH, _TIMES * prod(shape) * dtype.itemsize):
        raise RecipeError(
            f"optimizer {name} would keep {looked:,} bytes for one parameter of shape {shape}, which has "
            f"{prod(shape) * dtype.itemsize:,}; choose another one, or train adapters"
        )
    has_squares = _has_squares(name, key, shape, dtype)
    if has_squares and max(shape) > _LONGEST:
        raise RecipeError(
            f"optimizer {name} keeps matrices over the sides of a parameter; one of {max(shape):,} is too long to be "
            "tried; choose another optimizer, or train adapters"
        )
    # The shape itself is tried where that is cheap, because a rule could miss an exception.
    if prod(shape) <= 2**14 or (prod(shape) <= _ALONE and looked is not None and not has_squares and not is_late):
        return _sum(_tried(name, key, shape, dtype), shared)
    ruled = _by_rule(name, key, shape, dtype, 1)
    if ruled is None:
        raise RecipeError(
            f"optimizer {name}: the states of a parameter of shape {shape} follow no rule that smaller ones show, so "
            "its memory cannot be counted; choose another one"
        )
    return ruled


def _sum(tensors: Mapping[str, _Tensor], shared: Mapping[str, Bytes]) -> Bytes:
    return sum(one.storage for key, one in tensors.items() if key not in shared)


def _has_squares(name: str, key: str, shape: Shape, dtype: torch.dtype) -> bool:
    """Whether some states of a parameter of this shape are square matrices as long as a side.

    The time of their steps grows with the cube of the side. `key`: the optimizer's arguments, JSON.
    """
    first, _ = _smaller(tuple(side + index for index, side in enumerate(shape)), 0)  # no two sides are equal
    tensors = _tried(name, key, first, dtype).values()
    return any(len(one.shape) == 2 and one.shape[0] == one.shape[1] > 2 and one.shape != first for one in tensors)


def _by_rule(name: str, key: str, shape: Shape, dtype: torch.dtype, size: int) -> Bytes | None:
    """The bytes of the states of a parameter of this shape, by the rule that two smaller ones show; None: no rule.

    `key`: the optimizer's arguments, JSON. `size`: index into `_SIDES`, 0 for a first look, 1 for the rule.
    """
    small = _smaller(shape, size)
    first, second = (_tried(name, key, one, dtype) for one in small)
    if first.keys() != second.keys():
        return None
    shared = _shared(name, key, dtype)
    total = 0
    for entry, tensor in first.items():
        other = second[entry]
        if entry in shared or not tensor.storage:
            continue
        if len(tensor.shape) != len(other.shape) or tensor.item != other.item:
            return None
        count = 1
        for side, beside in zip(tensor.shape, other.shape, strict=True):
            # A side may be read in several ways, e.g. as a side and as a constant; those that hold for both are left.
            ways = set(_ways(side, small[0])) & set(_ways(beside, small[1]))
            lengths = {_length(way, shape) for way in ways}
            if len(lengths) != 1:  # the ways that are left must agree
                return None
            count *= lengths.pop()
        total += count * tensor.item
    return total


def _ways(side: int, shape: Shape) -> Iterator[tuple[str, int]]:
    """All ways in which a side of a state may follow from the parameter's shape, as (kind, index or length)."""
    numbers = prod(shape)
    own = [("side", index) for index, one in enumerate(shape) if one == side]
    yield from own
    yield from (("rest", index) for index, one in enumerate(shape) if numbers == side * one and len(shape) > 1)
    if numbers == side:
        yield "all", 0
    blocks = [("blocks", 2**power) for power in range(4, 13) if -(-numbers // 2**power) == side]
    if not own:  # a side of the parameter itself is not read as a number of blocks
        yield from blocks
    if side <= _SHORT:
        yield "constant", side


def _length(way: tuple[str, int], shape: Shape) -> int:
    match way:
        case "side", index:
            return shape[index]
        case "rest", index:
            return prod(shape) // shape[index]
        case "all", _:
            return prod(shape)
        case "blocks", size:
            return -(-prod(shape) // size)
        case _, constant:
            return constant


def _smaller(shape: Shape, size: int) -> tuple[Shape, Shape]:
    """The shapes of two smaller parameters of the same form: equal sides stay equal, and longer ones longer.

    `size`: index into `_SIDES`, 0 for a first look, 1 for the rule.
    """
    if len(shape) == 1 and size:
        return (_VECTORS[0],), (_VECTORS[1],)
    long = sorted({side for side in shape if side > _SHORT})
    found = []
    for sides in _SIDES[size]:
        # Longer sides stay longer, so that rules over one side show.
        lengths = {side: sides[min(index, len(sides) - 1)] for index, side in enumerate(long)}
        found.append(tuple(lengths.get(side, side) for side in shape))
    return found[0], found[1]


@cache
def _tried(name: str, arguments: str, shape: Shape, dtype: torch.dtype) -> dict[str, _Tensor]:
    """The tensors in the state of a parameter of this shape after three steps, by entry; it tries the optimizer.

    Memory that two tensors have counts for the first one. `arguments`: the optimizer's, JSON.
    """
    with _built(name, arguments, shape, dtype) as (optimizer, parameter):
        for _ in range(3):
            _step(name, optimizer)
        try:
            entries = entries_of(optimizer.state_of(parameter))
        except RecipeError as error:
            raise RecipeError(f"optimizer {name}: {error}") from error
    seen, found = set[int](), dict[str, _Tensor]()
    for key, tensor in entries.items():
        if ":" in key:
            continue  # numbers of Python
        place = tensor.untyped_storage()
        found[key] = _Tensor(
            tuple(tensor.shape), tensor.element_size(), 0 if place.data_ptr() in seen else place.nbytes()
        )
        seen.add(place.data_ptr())
    return found


@cache
def _shared(name: str, arguments: str, dtype: torch.dtype) -> dict[str, Bytes]:
    """Name of a state entry whose memory all parameters share -> its bytes."""
    tensors = _tried(name, arguments, _PAIR, dtype)
    with _built(name, arguments, _PAIR, dtype) as (optimizer, _):
        return {key: tensors[key].storage for key in optimizer.shared_keys() & tensors.keys()}


@contextmanager
def _built(name: str, arguments: str, shape: Shape, dtype: torch.dtype) -> Iterator[tuple[RankOptimizer, nn.Parameter]]:
    """A context with an optimizer of one parameter on the CPU, and the parameter, which has a gradient.

    Its prints and warnings are hidden, and its random numbers do not change the run's.
    """
    usable = {key: value for key, value in json.loads(arguments).items() if key != "capturable"}
    with quiet(), torch.random.fork_rng(devices=[]):
        parameter = stand_in_of(torch.zeros((), dtype=dtype), shape)
        optimizer = build_optimizer(name, {"own": parameter}, 1e-3, usable)
        assert optimizer is not None, "it has a parameter"
        yield optimizer, parameter
