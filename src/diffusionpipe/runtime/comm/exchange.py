"""Small values between the ranks of a job, as JSON text: reading one runs no code of its sender.

torch.distributed's own exchange of objects unpickles what a peer sends, and a pickle may run any code. Here a
`JsonForm` says how a kind of value becomes a JSON value and how it is read back. A message that is not such a value is
refused on all ranks, and its sender is named; so is a value that its sender cannot write. Numbers arrive as they were
sent: the text of a float64 stands for exactly that one. Many numbers travel faster as a tensor (`gather_numbers`). None
is an empty message: where all send one, as where nothing has failed, only the lengths travel.
"""

import json
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeAlias, TypeVar, Union

import torch
import torch.distributed as dist
from torch import Tensor

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.codec import decode, encode
from diffusionpipe.units import Bytes

T = TypeVar("T")
Json: TypeAlias = Union[bool, int, float, str, "list[Json]", "dict[str, Json]", None]

MOST_GATHERED: Bytes = 2**28
"""The longest message of a rank to all: every rank holds one of each."""
MOST_BROADCAST: Bytes = 2**32
"""The longest message of the first rank to all."""
_NUM_SHOWN = 3
_LONGEST_PROBLEM = 500
"""The most characters of a problem's text that a message holds."""


@dataclass(frozen=True, slots=True)
class JsonForm(Generic[T]):
    """A pair of functions: one writes a value of type T as a JSON value, the other reads it back."""

    write: Callable[[T], object]
    """A function that makes the JSON value of a value."""
    read: Callable[[object], T]
    """A function that makes the value of its JSON value; raises a ValueError, TypeError or KeyError for any other."""


def form_of(kind: type[T]) -> JsonForm[T]:
    """The JSON form of one type: a frozen dataclass, tuple, enumeration or another type that `ir.codec.decode` reads.

    Its `read` raises a ValueError that lists the first problems of data that are not such a value.
    """

    def read(data: object) -> T:
        problems: list[str] = []
        value = decode(kind, data, "value", problems)
        if problems:
            raise ValueError("; ".join(problems[:_NUM_SHOWN]))
        return value  # type: ignore[return-value]  # decode returns a value of that kind if it finds no problem

    return JsonForm(lambda value: encode(value, kind), read)


def rows_of(kind: type[T]) -> JsonForm[tuple[T, ...]]:
    """The JSON form of a tuple of instances of the dataclass `kind`, written as one list for each field.

    Types are checked by list, in a tenth of the time of a check by instance. The dataclass may have fields that are
    texts, numbers, truth values, one of these or None, or tuples of whole numbers or of texts.
    """
    hints = typing.get_type_hints(kind)

    def write(rows: tuple[T, ...]) -> object:
        return {name: [getattr(row, name) for row in rows] for name in hints}

    def read(data: object) -> tuple[T, ...]:
        if not isinstance(data, dict) or data.keys() != hints.keys():
            raise ValueError(f"the columns {', '.join(hints)} are needed")
        columns = [_column(name, hint, data[name]) for name, hint in hints.items()]
        return tuple(kind(**dict(zip(hints, row, strict=True))) for row in zip(*columns, strict=True))

    return JsonForm(write, read)


def _column(name: str, hint: object, data: object) -> list[object]:
    """The values of the field `name` of all instances, from the JSON list `data`; inner lists become tuples.

    Raises:
        ValueError: `data` is not a list of values of the field's type `hint`.
    """
    is_list = typing.get_origin(hint) is tuple
    kinds = {list} if is_list else set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    if not isinstance(data, list) or not kinds.issuperset(map(type, data)):
        raise ValueError(f"column {name} holds values of another type")
    if not is_list:
        return data
    inner = typing.get_args(hint)[0]
    if not {inner}.issuperset(type(value) for values in data for value in values):
        raise ValueError(f"column {name} holds values of another type")
    return [tuple(values) for values in data]


def optional(form: JsonForm[T]) -> JsonForm[T | None]:
    """The JSON form of a value that may also be None: None as JSON's null, any other value by `form`."""
    return JsonForm(
        lambda value: None if value is None else form.write(value),
        lambda data: None if data is None else form.read(data),
    )


def _plain(value: object) -> object:
    """The value itself, after a check that it and all values in it are texts, numbers, bools, None, lists or dicts.

    Raises:
        TypeError: one of them is not.
    """
    match value:
        case None | bool() | int() | float() | str():
            if type(value) not in (type(None), bool, int, float, str):
                raise TypeError(f"{type(value).__name__} is not a plain value")
        case list():
            for item in value:
                _plain(item)
        case dict():
            for key, item in value.items():
                if type(key) is not str:
                    raise TypeError("a key is not a text")
                _plain(item)
        case _:
            name = type(value).__name__
            raise TypeError(f"a {name} cannot travel as JSON; give the exchange form=form_of({name})")
    return value


PLAIN: JsonForm[Json] = JsonForm(_plain, lambda data: data)  # type: ignore[arg-type,return-value]  # the parser returns Json
"""Values that are JSON already: texts, numbers, lists, dictionaries."""


def gather(value: T, form: JsonForm[T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Send this rank's value to all; returns all values of the group, in the order of ranks, on every rank.

    All ranks of the group call it; `group` None is the whole job. Without torch.distributed it returns [value].

    Raises:
        ConfigError: on every rank alike, if a rank has sent more than `MOST_GATHERED` bytes, or something that `form`
            does not read; it names the rank.
        TypeError: on every rank alike, if `form` cannot write a rank's value; it names the rank.
    """
    if _size(group) == 1:
        return [value]
    texts = _gather_bytes(_message(value, form), group)
    return [_read(text, form, rank) for rank, text in enumerate(texts)]


def broadcast(value: T | None, form: JsonForm[T]) -> T:
    """Rank 0's value, on every rank; the other ranks' arguments do not count. All ranks of the job call it.

    Raises:
        ConfigError: on every rank, if the value has more than `MOST_BROADCAST` bytes; on the others alone, if `form`
            does not read it.
        TypeError: on every rank, if `form` cannot write it.
    """
    if _size(None) == 1:
        return value  # type: ignore[return-value]  # the first rank has one
    is_first = dist.get_rank() == 0
    own = _message(value, optional(form)) if is_first else _Message(b"")
    length = torch.tensor([own.length], dtype=torch.int64)
    dist.broadcast(length, src=0)
    _check_lengths([int(length)], MOST_BROADCAST)
    message = _as_tensor(own.text) if is_first else torch.empty(abs(int(length)), dtype=torch.uint8)
    if len(message):
        dist.broadcast(message, src=0)
    _check_problems([(int(length), message)])
    return value if is_first else _read(message.numpy().tobytes(), form, 0)  # type: ignore[return-value]  # as above


def collect(value: T, form: JsonForm[T], group: dist.ProcessGroup | None = None) -> list[Callable[[], T]]:
    """On the first rank of the group, a function for each rank that returns the value which it sent; [] on the others.

    All ranks of the group call it. A function raises a `ConfigError` if its rank has sent something that `form` does
    not read.

    Raises:
        ConfigError: on every rank alike, if one has sent more than `MOST_GATHERED` bytes; it names the rank.
        TypeError: on every rank alike, if `form` cannot write a rank's value; it names the rank.
    """
    if _size(group) == 1:
        return [lambda: value]
    own = _message(value, form)
    counts, mine = _padded(own, group)
    if min(counts) < 0:
        # Here every rank gets the problem and raises it.
        _gather_padded(mine, counts, group)
    is_first = dist.get_rank(group) == 0
    messages = [torch.empty_like(mine) for _ in counts] if is_first else None
    if len(mine):
        # `group_dst` is the place in the group, not the rank in the job.
        dist.gather(mine, messages, group=group, group_dst=0)
    found = zip(messages or (), counts, strict=False)
    return [
        partial(_read, message[:count].numpy().tobytes(), form, rank) for rank, (message, count) in enumerate(found)
    ]


def gather_numbers(values: Tensor) -> list[Tensor]:
    """The tensors of all ranks of the job, in the order of ranks, on every rank; all ranks call it.

    They have the same shape and dtype on all ranks, and are on the CPU.
    """
    everyone = [torch.empty_like(values) for _ in range(_size(None))]
    dist.all_gather(everyone, values.contiguous())
    return everyone


def _size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


class _Message(NamedTuple):
    """A value as bytes, or the problem for which it cannot travel."""

    text: bytes
    """The value's JSON text, empty for None, or the problem in words."""
    is_problem: bool = False

    @property
    def length(self) -> int:
        """The number of bytes of `text`, negative for a problem."""
        return -len(self.text) if self.is_problem else len(self.text)


def _message(value: T, form: JsonForm[T]) -> _Message:
    """The message with a value or, if `form` cannot write it, with the problem, because other ranks wait for one."""
    try:
        data = form.write(value)
        return _Message(b"" if data is None else json.dumps(data, separators=(",", ":")).encode("ascii"))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return _Message(
            f"{type(error).__name__}: {error}"[:_LONGEST_PROBLEM].encode("utf-8", "backslashreplace"), is_problem=True
        )


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _gather_bytes(own: _Message, group: dist.ProcessGroup | None) -> list[bytes]:
    counts, mine = _padded(own, group)
    return [message.numpy().tobytes() for message in _gather_padded(mine, counts, group)]


def _gather_padded(mine: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    """The bytes of the messages of all ranks, by rank, without padding. Raises a TypeError where one is a problem.

    `mine`: this rank's bytes with zeros at the end. `counts`: the lengths of all messages, negative for problems.
    """
    messages = [torch.empty_like(mine) for _ in counts]
    if len(mine):
        dist.all_gather(messages, mine, group=group)
    _check_problems(list(zip(counts, messages, strict=True)))
    return [message[:count] for message, count in zip(messages, counts, strict=True)]


def _padded(own: _Message, group: dist.ProcessGroup | None) -> tuple[list[int], Tensor]:
    """(lengths of all ranks' messages, bytes of this rank's message with zeros up to the greatest length)."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(_size(group))]
    dist.all_gather(lengths, torch.tensor([own.length], dtype=torch.int64), group=group)
    counts = [int(length) for length in lengths]
    _check_lengths(counts, MOST_GATHERED)
    mine = torch.zeros(max(map(abs, counts)), dtype=torch.uint8)
    mine[: len(own.text)] = _as_tensor(own.text)
    return counts, mine


def _check_problems(messages: Sequence[tuple[int, Tensor]]) -> None:
    """Raise a TypeError for the first rank whose message is a problem.

    `messages`: (length, bytes) of each rank, the length negative for a problem; bytes beyond it do not count.
    """
    for rank, (length, message) in enumerate(messages):
        if length < 0:
            raise TypeError(f"rank {rank}: {message[:-length].numpy().tobytes().decode(errors='replace')}")


def _check_lengths(counts: Sequence[int], most: Bytes) -> None:
    for rank, count in enumerate(counts):
        # The limit of a problem is in characters: UTF-8 writes one in up to four bytes, "backslashreplace" in six.
        if not -_LONGEST_PROBLEM * 6 <= count <= most:
            raise _refusal(rank, f"a message of {count:,} bytes; a message has 0 to {most:,}")


def _read(text: bytes, form: JsonForm[T], rank: int) -> T:
    try:
        return form.read(json.loads(text) if text else None)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        problem = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
        raise _refusal(rank, f"a message that cannot be read ({problem[:_LONGEST_PROBLEM]})") from error


def _refusal(rank: int, problem: str) -> ConfigError:
    error = ConfigError(
        f"rank {rank} has sent {problem}. Start all ranks with the same version of DiffusionPipe, and let no other "
        "program connect to the job."
    )
    error.is_common = True
    return error
