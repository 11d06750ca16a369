"""Steps that succeed on every rank or fail on every rank."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch.distributed as dist

from diffusionpipe.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FileFormatError,
    ModelError,
    PeerError,
    RecipeError,
)
from diffusionpipe.runtime.comm.exchange import PLAIN, JsonForm, broadcast, form_of, gather, optional

T = TypeVar("T")

_ERRORS = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError, DataError, FileFormatError, ModelError, RecipeError)
}
"""Name -> class of errors, for those that keep their class on the way to another rank."""
_TEXT = optional(form_of(str))

_Outcome: TypeAlias = tuple[T | None, str | None, Exception | None]
_Made: TypeAlias = tuple[T | None, ConfigError | None]


def agree(
    action: Callable[[], T],
    group: dist.ProcessGroup | None = None,
    *,
    form: JsonForm[T] = PLAIN,  # type: ignore[assignment]  # refuses at once what is not plain
) -> list[T]:
    """Runs the action on every rank of the group and returns all results in the order of the ranks.

    Every rank of the group must call it; results and messages travel as JSON, so they should be small. Without
    torch.distributed there is one rank. If a peer dies, the collective's own error passes through unchanged (with NCCL
    nothing ends the wait but a watchdog).

    Raises:
        CheckpointError: the action failed somewhere; all ranks raise it, with the same message.
        ConfigError: a rank has sent a value that `form` does not read.
        TypeError: on every rank alike; `form` cannot write a rank's result.
    """
    outcome = _attempt(action)
    outcomes = gather(outcome, _outcomes_of(form), group)
    _raise_problems([problem for _, problem, _ in outcomes], outcome[2])
    return [value for value, _, _ in outcomes]  # type: ignore[misc]  # no problem: every rank has its result


def together(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """The result on this rank of an action that all ranks of the group run; it may be of any type and does not travel.

    Raises:
        CheckpointError: the action failed somewhere; all ranks raise it, with the same message.
    """
    result, problem, cause = _attempt(action)
    _raise_problems(gather(problem, _TEXT, group), cause)
    return result  # type: ignore[return-value]  # no problem: this rank has its result


def from_first(
    make: Callable[[], T],
    form: JsonForm[T] = PLAIN,  # type: ignore[assignment]  # refuses at once what is not plain
) -> T:
    """The value that rank 0 makes, on every rank; all ranks call it, and only rank 0 calls `make`.

    Raises:
        ConfigError: on every rank, the error that `make` has raised on rank 0.
    """
    made: _Made[T] | None = None
    if rank_in() == 0:
        try:
            made = make(), None
        except ConfigError as error:
            error.is_common = True
            made = None, error
    value, problem = broadcast(made, _made_of(form))
    if problem is not None:
        raise problem
    return value  # type: ignore[return-value]  # without a problem rank 0 has made one


def on_all(make: Callable[[], T]) -> T:
    """The result of `make` on this rank, after all ranks have called theirs without an error; all ranks call it.

    Raises:
        ConfigError: the error that `make` has raised on this rank.
        PeerError: it has raised one on another rank only.
    """
    mine: ConfigError | None = None
    try:
        result = make()
    except ConfigError as error:
        mine = error
    # All ranks take part, also those that failed: the others wait for their message.
    texts = gather(str(mine) if mine is not None else None, _TEXT)
    if mine is not None:
        mine.is_common = len(set(texts)) == 1
        raise mine
    failed = next(((rank, text) for rank, text in enumerate(texts) if text is not None), None)
    if failed is not None:
        raise PeerError(f"rank {failed[0]}: {failed[1]}")
    return result


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """The rank of this process in the group; 0 without torch.distributed."""
    return dist.get_rank(group) if _is_distributed() else 0


def size_of(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks in the group; 1 without torch.distributed."""
    return dist.get_world_size(group) if _is_distributed() else 1


def _is_distributed() -> bool:
    """Whether this process is one of several."""
    return dist.is_available() and dist.is_initialized()


def _attempt(action: Callable[[], T]) -> _Outcome[T]:
    """(result, None, None) of the action or, if it fails, (None, the problem in words, its exception)."""
    try:
        return action(), None, None
    except Exception as error:
        return None, str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}", error


def _raise_problems(of_ranks: list[str | None], cause: Exception | None) -> None:
    problems = [(rank, text) for rank, text in enumerate(of_ranks) if text is not None]
    if not problems:
        return
    if len(problems) == len(of_ranks) and len({text for _, text in problems}) == 1:
        raise CheckpointError(problems[0][1]) from cause
    raise CheckpointError("\n".join(f"rank {rank}: {text}" for rank, text in problems)) from cause


def _outcomes_of(form: JsonForm[T]) -> JsonForm[_Outcome[T]]:
    """The JSON form of `_attempt`'s results without the exception, for which the reader gets None.

    `form`: of the action's result.
    """

    def write(outcome: _Outcome[T]) -> object:
        value, problem, _ = outcome
        data = form.write(value) if problem is None else None  # type: ignore[arg-type]  # no problem: a T
        return None if data is None and problem is None else [data, problem]

    def read(data: object) -> _Outcome[T]:
        value, problem = _pair(data) if data is not None else (None, None)
        return (form.read(value), None, None) if problem is None else (None, _TEXT.read(problem), None)

    return JsonForm(write, read)


def _made_of(form: JsonForm[T]) -> JsonForm[_Made[T]]:
    """The JSON form of a pair: rank 0's value or None, and None or the error that rank 0 has raised.

    `form`: of the value.
    """

    def write(made: _Made[T]) -> object:
        value, error = made
        return [form.write(value), None] if error is None else [None, [_class_of(error), str(error)]]  # type: ignore[arg-type]  # no error: a T

    def read(data: object) -> _Made[T]:
        value, error = _pair(data)
        return (form.read(value), None) if error is None else (None, _error(error))

    return JsonForm(write, read)


def _class_of(error: ConfigError) -> str:
    """The name of the error's class or, if other ranks could not make it by `_ERRORS`, of its nearest base there."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _ERRORS)


def _error(data: object) -> ConfigError:
    name, text = _pair(data)
    if name not in _ERRORS or not isinstance(text, str):
        raise ValueError(f"{name!r} is not an error of DiffusionPipe")
    error = _ERRORS[name](text)
    error.is_common = True
    return error


def _pair(data: object) -> tuple[object, object]:
    if not isinstance(data, list) or len(data) != 2:
        raise ValueError("a list of two values is needed")
    return data[0], data[1]
