"""DynaPipe's adaptive schedule: micro-batches of unequal size, admitted by memory."""

from collections import deque
from collections.abc import Sequence

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Action, Schedule
from diffusionpipe.schedules.building.shapes import TRAIN, backwards, chain, forwards, require_positive


def dynapipe(
    num_workers: int,
    num_microbatches: int,
    microbatch_size: int = 1,
    *,
    microbatch_sizes: Sequence[int] | None = None,
    max_samples: int | None = None,
) -> Schedule:
    """In each cycle every worker runs the next available backward and the next available forward, if memory allows.

    Jiang et al., "DynaPipe: Optimizing Multi-task Training through Dynamic Pipelines", EuroSys 2024,
    https://arxiv.org/abs/2311.10418, the adaptive (cyclic) schedule. Only the order of actions matters, not the end of
    a cycle: an input that becomes available in one cycle can be used in the next. A worker admits a forward if it then
    holds activations of at most `max_samples` samples (None: any number). So there is no fixed warm-up, and a worker
    has work in reserve when micro-batches have unequal times. Micro-batches enter in the given order. The paper
    estimates the bytes of each micro-batch; here memory is in proportion to samples.

        num_microbatches    of `microbatch_size` each, or of `microbatch_sizes`, one for each

    With p stages of equal times F and B, m equal micro-batches, free communication and no limit, the orders are the
    same as in DAPPLE's policy B:

        time                    (m + p - 1) (F + B)
        bubble                  (p - 1) / (m + p - 1) of it
        activations in flight   min(2 (p - s) - 1, m) micro-batches on worker s; never more than `max_samples` samples

    >>> for order in dynapipe(2, 4, microbatch_sizes=(3, 1, 1, 2), max_samples=4).orders:
    ...     print(*order)
    0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3

    Raises:
        ConfigError: a size is below 1, the sizes are not one for each micro-batch, one of them is above `max_samples`,
            or `microbatch_size` is given beside them.
    """
    sizes = (microbatch_size,) * max(num_microbatches, 0) if microbatch_sizes is None else tuple(microbatch_sizes)
    require_positive(
        num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=min(sizes, default=microbatch_size)
    )
    if microbatch_sizes is not None and microbatch_size != 1:
        raise ConfigError(f"microbatch_size={microbatch_size} has no effect beside microbatch_sizes; leave it out")
    limit = sum(sizes) if max_samples is None else max_samples
    _refuse(num_microbatches, sizes, limit)
    orders = adaptive_orders([sizes] * num_workers, [limit] * num_workers)
    return chain("dynapipe", orders, microbatches=sizes, ops=TRAIN)


def _refuse(num_microbatches: int, sizes: tuple[int, ...], limit: int) -> None:
    if len(sizes) != num_microbatches:
        raise ConfigError(
            f"{num_microbatches} micro-batches have {len(sizes)} sizes in microbatch_sizes; give one for each"
        )
    if max(sizes) > limit:
        raise ConfigError(
            f"a micro-batch of {max(sizes)} samples exceeds max_samples={limit}; use max_samples of {max(sizes)} or "
            "more, or smaller micro-batches"
        )


def adaptive_orders(held: Sequence[Sequence[float]], limits: Sequence[float]) -> list[list[Action]]:
    """The order of each worker in DynaPipe's adaptive schedule, where every worker has a memory limit of its own.

    held        by worker and micro-batch: activations of the micro-batch, in bytes or in any unit
    limits      by worker: the activations that it may hold at once, each at least its largest micro-batch
    """
    num_workers = len(held)
    orders: list[list[Action]] = [[] for _ in range(num_workers)]
    ahead = [deque(range(len(held[0])) if worker == 0 else ()) for worker in range(num_workers)]
    back: list[deque[int]] = [deque() for _ in range(num_workers)]
    now: list[float] = [0] * num_workers
    while any(ahead) or any(back):
        # Handed on after the cycle: a result of one cycle can be used in the next.
        arrivals: list[tuple[deque[int], int]] = []
        for worker, order in enumerate(orders):
            if back[worker]:
                microbatch = back[worker].popleft()
                order += backwards(worker, microbatch, microbatch + 1)
                now[worker] -= held[worker][microbatch]
                if worker:
                    arrivals.append((back[worker - 1], microbatch))
            if ahead[worker] and now[worker] + held[worker][ahead[worker][0]] <= limits[worker]:
                microbatch = ahead[worker].popleft()
                order += forwards(worker, microbatch, microbatch + 1)
                now[worker] += held[worker][microbatch]
                is_last = worker == num_workers - 1
                arrivals.append((back[worker] if is_last else ahead[worker + 1], microbatch))
        for queue, microbatch in arrivals:
            queue.append(microbatch)
    return orders
