"""1F1B with the weight gradient put off: the pattern of the zero-bubble schedules made by hand."""

from collections.abc import Sequence

from diffusionpipe.ir import Action, Op, compute_action


def delayed(num_microbatches: int, *, warm_ups: Sequence[int], delays: Sequence[int]) -> list[list[Action]]:
    """The order of each stage s: warm_ups[s] forwards, then turns of an F, an I and the W of delays[s] turns before.

    The actions that are left follow at the end.

    Stage s holds at most warm_ups[s] + 1 activations before their I and delays[s] between I and W.

    >>> print(*delayed(3, warm_ups=[1], delays=[0])[0])
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    >>> print(*delayed(3, warm_ups=[0], delays=[1])[0])
    0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2
    """
    return [_order(s, num_microbatches, *pair) for s, pair in enumerate(zip(warm_ups, delays, strict=True))]


def _order(stage: int, num_microbatches: int, warm_up: int, delay: int) -> list[Action]:
    order = [compute_action(stage, Op.F, i) for i in range(min(warm_up, num_microbatches))]
    for turn in range(num_microbatches + delay):  # the last turns have only delayed W
        for op, microbatch in ((Op.F, turn + warm_up), (Op.I, turn), (Op.W, turn - delay)):
            if 0 <= microbatch < num_microbatches:
                order.append(compute_action(stage, op, microbatch))
    return order
