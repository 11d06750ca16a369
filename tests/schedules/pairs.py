"""DualPipe's pairs: a forward and a backward of the other stage that run as one."""

from collections import defaultdict

from diffusionpipe.ir import Op
from diffusionpipe.ir.flows import flows

RATIOS = [(1, 1, 1), (2, 2, 1), (3, 2, 1), (3, 2, 2), (4, 3, 1), (2, 1, 1), (9, 7, 5)]
"""Times W <= I <= F <= I + W."""


def paired_makespan(schedule):
    """The time for F = I = W = 1 where a forward and a backward of the other stage run as one and end together."""
    inputs = defaultdict(list)
    for flow in flows(schedule):
        inputs[flow.consumer] += flow.producers
    cells = [list(cells_of(order)) for order in schedule.orders]
    ends, free = {}, [0] * schedule.num_workers
    while any(cells):
        for worker, rest in enumerate(cells):
            while rest and all(p in ends or p in rest[0] for action in rest[0] for p in inputs[action]):
                cell = rest.pop(0)
                before = [ends[p] for action in cell for p in inputs[action] if p not in cell]
                free[worker] = max([free[worker], *before]) + len(cell)
                ends |= dict.fromkeys(cell, free[worker])
    return max(free)


def cells_of(order):
    """The order in pieces: a forward with the input and weight gradient of another stage behind it, or one action."""
    i = 0
    while i < len(order):
        three = order[i : i + 3]
        is_pair = [a.op for a in three] == [Op.F, Op.I, Op.W] and three[0].stage != three[1].stage == three[2].stage
        yield three if is_pair else order[i : i + 1]
        i += 3 if is_pair else 1
