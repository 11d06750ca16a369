"""Timelines of steps that ran schedules of their own, with the messages and fills of all in one table.

Spans name messages and fills by their places in a schedule. Where each copy of the pipeline has cut its own samples,
the same place is another message in each. A picture or a page has one table, the plan's first:

    plan      messages 0 1 2 3
    copy 0    messages 0 1          4 5 in the table
    copy 1    messages 0 1 2        6 7 8
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from diffusionpipe.ir.action import MESSAGE_OPS, Action, Op
from diffusionpipe.ir.schedule import Schedule
from diffusionpipe.ir.timeline import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSchedule:
    """The schedule that one copy of the pipeline ran, with the places of its messages and fills in the table of all."""

    ranks: tuple[int, ...]
    """The ranks of the copy, in the order of its workers."""
    schedule: Schedule
    message: int
    """The index of its first message in the table."""
    fill: int
    """The index of its first fill in the table."""


def own_schedules(timeline: Timeline, schedule: Schedule) -> Iterator[OwnSchedule]:
    """The schedules that a timeline's copies ran instead of the plan's `schedule`; none where all ran this one."""
    message, fill = len(schedule.messages), len(schedule.fills)
    # A timeline of one pipeline has no copies: its workers are the ranks.
    copies = timeline.copies or (tuple(range(timeline.num_workers)),)
    for ranks, own in zip(copies, timeline.schedules, strict=False):
        yield OwnSchedule(ranks=ranks, schedule=own, message=message, fill=fill)
        message, fill = message + len(own.messages), fill + len(own.fills)


def in_one_table(timeline: Timeline, schedule: Schedule) -> tuple[Timeline, Schedule]:
    """(the timeline, whose slots now count in one table, the plan's schedule with all messages and fills as the table).

    Both are unchanged where all copies ran the plan's schedule.
    """
    owns = list(own_schedules(timeline, schedule))
    own_of = {rank: own for own in owns for rank in own.ranks}
    spans = tuple(
        replace(span, action=_placed(span.action, own_of[span.worker])) if span.worker in own_of else span
        for span in timeline.spans
    )
    messages = tuple(message for own in owns for message in own.schedule.messages)
    fills = tuple(fill for own in owns for fill in own.schedule.fills)
    table = replace(schedule, messages=schedule.messages + messages, fills=schedule.fills + fills)
    return replace(timeline, spans=spans), table


def _placed(action: Action, own: OwnSchedule) -> Action:
    if action.slot is None:
        return action
    if action.op is Op.ENCODE:
        return replace(action, slot=own.fill + action.slot)
    assert action.op in MESSAGE_OPS, action
    return replace(action, slot=own.message + action.slot)
