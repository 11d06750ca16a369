"""Blocks in parts: gathered ahead of their compute, dropped after it, their gradients reduced to their owners.

    runs      0F   1F   2F 2B   1B   0B       what a worker computes with one block without changing to another [1]
    whole     0000 0         000000000000     block 0: dropped after its forward, gathered again for its backward
                   1111111111111              block 1: its next run is near, so it stays whole [2]
                   2222222                    block 2: gathered while the run before it computes [3]

>>> from diffusionpipe.schedules.building.shapes import Pipe, schedule_of
>>> from diffusionpipe.ir import parse_action
>>> order = [parse_action(text) for text in "0F0 1F0 2F0 2B0 1B0 0B0".split()]
>>> sharded = shard_parameters(schedule_of("example", [Pipe(workers=(0, 0, 0), microbatches=(1,))], [order]))
>>> " ".join(map(str, sharded.orders[0])).replace("UNSHARD", "U").replace("RESHARD", "R").replace("REDUCE_GRAD", "G")
'0U 1U 0F0 0R 2U 1F0 2F0 2B0 2R 2G 0U 1B0 1R 1G 0B0 0R 0G'
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.ir import Action, Op, Schedule
from diffusionpipe.ir.action import COMPUTE_OPS
from diffusionpipe.ir.schedule import lone_blocks


def shard_parameters(schedule: Schedule, *, prefetch: int = 1) -> Schedule:
    """The schedule in which every trained block is in parts, except while a worker computes with it.

        blocks 0 1 2 on one worker    0U 1U  0F 0R 2U  1F 2F  2B 2R 2G 0U  1B 1R 1G  0B 0R 0G

    U is UNSHARD, R is RESHARD, G is REDUCE_GRAD. After Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded
    Data Parallel", VLDB 2023, https://arxiv.org/abs/2304.11277, section 3.3, and Rajbhandari et al., "ZeRO", SC 2020,
    https://arxiv.org/abs/1910.02054, stage 3. A block's gathering starts when the compute `prefetch` runs before it
    starts; a run is the computation of a worker with one block without changing to another. The first blocks are
    gathered at the start of the order, beside frozen work. A block that would be gathered again no later than it is
    dropped stays: here 1, from its forward to its backward. So at most `prefetch` + 1 blocks are whole at a time. The
    gradients of a run of backwards are reduced after it, so that none outlive their block.

    Raises:
        ConfigError: `prefetch` is negative.
        ScheduleError: messages or reductions are explicit already, or several workers hold a block.
    """
    if prefetch < 0:
        raise ConfigError(f"prefetch={prefetch}: the number of runs that a block is gathered ahead starts at 0")
    done = {Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD}
    if schedule.has_communication or any(action.op in done for _, action in schedule.actions()):
        raise ScheduleError(["shard a schedule before its messages and reductions are made explicit"])
    _check_lone(schedule)
    return replace(schedule, orders=tuple(_sharded(schedule, order, prefetch) for order in schedule.orders))


def bring_parameters(schedule: Schedule) -> Schedule:
    """The schedule with an UNSHARD of every trained block at the start, which brings its parameters from their owners.

        0U 1U 2U  0F 1F 2F  2B 2G 1B 1G 0B 0G        U is UNSHARD; the blocks stay, so there is no RESHARD

    This is the second half of an update whose first half is REDUCE_GRAD and the step at the owner (ZeRO's stage 1).

    Raises:
        ScheduleError: several workers hold a block.
    """
    _check_lone(schedule)
    stages = schedule.placement.stages
    orders = []
    for order in schedule.orders:
        first: dict[int, Action] = {}
        for action in order:
            if action.op in COMPUTE_OPS:
                first.setdefault(stages[action.stage].weights, Action(stage=action.stage, op=Op.UNSHARD))
        orders.append((*first.values(), *order))
    return replace(schedule, orders=tuple(orders))


def _check_lone(schedule: Schedule) -> None:
    shared = {stage.weights for stage in schedule.placement.stages} - lone_blocks(schedule)
    computed = {schedule.placement.stages[a.stage].weights for _, a in schedule.actions() if a.op in COMPUTE_OPS}
    if both := sorted(shared & computed):
        raise ScheduleError([f"block {both[0]} cannot be sharded: several workers hold it"])


def gathers_first(schedule: Schedule) -> Schedule:
    """The schedule in which the first gathers are issued before the frozen work at the start of each order."""
    orders = []
    for order in schedule.orders:
        encodes = [action for action in order if action.op is Op.ENCODE]
        rest = [action for action in order if action.op is not Op.ENCODE]
        first = next((i for i, action in enumerate(rest) if action.op is not Op.UNSHARD), len(rest))
        orders.append((*rest[:first], *encodes, *rest[first:]))
    return replace(schedule, orders=tuple(orders))


@dataclass(slots=True)
class _Span:
    """A stretch of a worker's runs in which a block is whole: gathered before the first run, dropped after the last."""

    stage: int
    """A stage that holds the block."""
    first: int
    """The number of the first run during which the block is whole."""
    last: int
    """The number of the last run during which the block is whole."""
    trained: int | None = None
    """The stage whose backwards are among these runs; None: there are none."""


def _sharded(schedule: Schedule, order: Sequence[Action], prefetch: int) -> tuple[Action, ...]:
    runs = _runs(schedule, order)  # [1]
    spans: list[_Span] = []
    open_spans: dict[int, _Span] = {}
    for number, (block, start, stop) in enumerate(runs):
        span = open_spans.get(block)
        # It would be gathered again, `prefetch` runs ahead, no later than it is dropped, after its last run.
        if span is None or number - span.last > 1 + prefetch:
            span = open_spans[block] = _Span(order[start].stage, number, number)
            spans.append(span)
        span.last = number  # [2]
        span.trained = next((a.stage for a in order[start:stop] if a.op in (Op.B, Op.W)), span.trained)
    before: dict[int, list[Action]] = defaultdict(list)
    behind: dict[int, list[Action]] = defaultdict(list)
    for span in spans:
        ahead = span.first - prefetch
        # At the start, beside frozen work, where fewer runs come before.
        before[runs[ahead][1] if ahead > 0 else 0].append(Action(stage=span.stage, op=Op.UNSHARD))  # [3]
        end = behind[runs[span.last][2] - 1]
        end.append(Action(stage=span.stage, op=Op.RESHARD))
        if span.trained is not None:
            end.append(Action(stage=span.trained, op=Op.REDUCE_GRAD))
    return tuple(a for i, action in enumerate(order) for a in (*before[i], action, *behind[i]))


def _runs(schedule: Schedule, order: Sequence[Action]) -> list[tuple[int, int, int]]:
    """(block, index of its first action, index after its last) of each run of an order; fills may come between."""
    stages = schedule.placement.stages
    runs: list[tuple[int, int, int]] = []
    for index, action in enumerate(order):
        if action.op in COMPUTE_OPS:
            block = stages[action.stage].weights
            if runs and runs[-1][0] == block:
                runs[-1] = (block, runs[-1][1], index + 1)
            else:
                runs.append((block, index, index + 1))
    return runs
