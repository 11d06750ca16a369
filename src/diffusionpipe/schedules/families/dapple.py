"""DAPPLE: backwards as early as possible, with one of two warm-ups."""

from collections.abc import Callable

from diffusionpipe.ir import Schedule
from diffusionpipe.schedules.building.alternation import alternate
from diffusionpipe.schedules.building.shapes import TRAIN, backwards, chain, forwards, require_positive


def dapple_a(
    num_workers: int, num_microbatches: int, microbatch_size: int = 1, *, max_in_flight: int | None = None
) -> Schedule:
    """Stage s runs p - s forwards, fewer with little memory, then a backward and a forward in turn: 1F1B.

    Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models", PPoPP 2021,
    https://arxiv.org/abs/2007.01045, section 3, policy A. D is `max_in_flight`, the number of micro-batches whose
    activations a worker can hold; None means any number.

    With p stages of equal times F and B and m micro-batches, free communication, and D >= p or none:

        time                    (m + p - 1) (F + B)
        bubble                  (p - 1) / (m + p - 1) of it
        activations in flight   min(p - s, m, D) on the worker of stage s

    A smaller D saves memory but takes longer, up to m p (F + B) for D = 1, when nothing overlaps.

    >>> for order in dapple_a(3, 4, max_in_flight=2).orders:
    ...     print(*order)
    0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
    1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3

    Raises:
        ConfigError: a size, or `max_in_flight`, is below 1.
    """
    return _dapple(
        "dapple-a", num_workers, num_microbatches, microbatch_size, max_in_flight, lambda stages_left: stages_left
    )


def dapple_b(
    num_workers: int, num_microbatches: int, microbatch_size: int = 1, *, max_in_flight: int | None = None
) -> Schedule:
    """Stage s runs 2 (p - s) - 1 forwards, then a backward and a forward in turn; hides transfers.

    Fan et al., "DAPPLE", PPoPP 2021, https://arxiv.org/abs/2007.01045, section 3, policy B: for transfers that take
    about as long as the computation. Each link then acts as one more stage. During the round trip of a micro-batch from
    stage s, 2 (p - s) - 1 micro-batches are in flight. D is `max_in_flight`, as in `dapple_a`.

    With p stages of equal times F and B, m micro-batches, transfers of time c <= F, B, and D >= 2p - 1 or none:

        time                    (m + p - 1) (F + B) + 2 (p - 1) c
        bubble                  (p - 1) (F + B + 2c) of it
        activations in flight   min(2 (p - s) - 1, m, D) on the worker of stage s

    >>> for order in dapple_b(3, 6).orders:
    ...     print(*order)
    0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5
    1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5

    Raises:
        ConfigError: a size, or `max_in_flight`, is below 1.
    """
    return _dapple(
        "dapple-b",
        num_workers,
        num_microbatches,
        microbatch_size,
        max_in_flight,
        lambda stages_left: 2 * stages_left - 1,
    )


def _dapple(
    name: str,
    num_workers: int,
    num_microbatches: int,
    microbatch_size: int,
    max_in_flight: int | None,
    before_backward: Callable[[int], int],
) -> Schedule:
    """The schedule whose stages run `before_backward(stages from here on)` forwards before the first backward."""
    bound = num_microbatches if max_in_flight is None else max_in_flight
    require_positive(
        num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size, max_in_flight=bound
    )
    orders = []
    for stage in range(num_workers):
        in_flight = min(before_backward(num_workers - stage), num_microbatches, bound)
        forward_turns = [forwards(stage, i, i + 1) for i in range(num_microbatches)]
        backward_turns = [backwards(stage, i, i + 1) for i in range(num_microbatches)]
        # The first turn after the warm-up begins with a forward.
        orders.append(alternate(forward_turns, backward_turns, warm_up=in_flight - 1))
    return chain(name, orders, microbatches=[microbatch_size] * num_microbatches, ops=TRAIN)
