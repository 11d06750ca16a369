"""Steps that succeed on every rank or fail on every rank."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from diffusionpipe.errors import CheckpointError, ConfigError, PeerError

T = TypeVar("T")


def agree(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Runs the action on every rank of the group and returns all results in the order of the ranks.

    Every rank of the group must call it; results and messages travel pickled, so they should be small. Without
    torch.distributed there is one rank. If a peer dies, the collective's own error passes through unchanged (with NCCL
    nothing ends the wait but a watchdog).

    Raises:
        CheckpointError: the action failed somewhere; all ranks raise it, with the same message.
    """
    result: T | None = None
    problem: str | None = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:
        cause = error
        problem = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    outcomes = _gather((result, problem), group)
    problems = [(rank, text) for rank, (_, text) in enumerate(outcomes) if text is not None]
    if not problems:
        return [value for value, _ in outcomes]  # type: ignore[misc]  # no problem: every rank has its result
    if len(problems) == len(outcomes) and len({text for _, text in problems}) == 1:
        raise CheckpointError(problems[0][1]) from cause
    raise CheckpointError("\n".join(f"rank {rank}: {text}" for rank, text in problems)) from cause


def from_first(make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank; all ranks call it, and only rank 0 calls `make`.

    Raises:
        ConfigError: on every rank, what `make` has raised on rank 0.
    """
    outcome: list[T | ConfigError | None] = [None]
    if rank_in() == 0:
        try:
            outcome = [make()]
        except ConfigError as error:
            error.is_common = True
            outcome = [error]
    if _is_distributed():
        dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], ConfigError):
        raise outcome[0]
    return outcome[0]  # type: ignore[return-value]  # T may include None


def on_all(make: Callable[[], T]) -> T:
    """What every rank makes for itself; all ranks call it.

    Raises:
        ConfigError: what `make` has raised on this rank.
        PeerError: it has raised one on another rank only.
    """
    mine: ConfigError | None = None
    try:
        result = make()
    except ConfigError as error:
        mine = error
    texts = [str(one) if one is not None else None for one in _gather(mine, None)]
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


def _gather(item: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's item, on every rank."""
    if size_of(group) == 1:
        return [item]
    items: list[T] = [item] * size_of(group)
    dist.all_gather_object(items, item, group=group)
    return items
