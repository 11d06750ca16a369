"""What is legal: the specification of schedules.

placement      every stage in one pipeline; shares of a block cut every micro-batch at whole samples; edges bring
everything that their readers read
completeness   every stage does each of its pipeline's ops exactly once for every micro-batch, on its own worker;
the fills of an encoder stage run every layer on every sample of its share exactly once
order          F before B, I before W; the layers of a component in order; reductions after the last backward
sharding       a sharded block is computed with only between its UNSHARD and its RESHARD, and is in parts at the end;
one worker of a group holds it; every gradient is reduced
messages       one SEND and one RECV each; every edge between workers is carried, for exactly its samples; sent
after it is produced, received before it is read; equal order at both ends of a channel
progress       the abstract machine of `ir.execution` comes to its end: nothing waits in a circle, even when sends
are unbuffered rendezvous and a stream carries one transfer at a time
"""

from collections.abc import Sequence

from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir.check_compute import (
    completeness_problems,
    fill_problems,
    order_problems,
    reduction_problems,
    sharding_problems,
)
from diffusionpipe.ir.check_messages import channel_problems, message_problems, timing_problems
from diffusionpipe.ir.check_placement import placement_problems, supply_problems
from diffusionpipe.ir.execution import NO_TIME, Streams, execute
from diffusionpipe.ir.flows import flows
from diffusionpipe.ir.schedule import Schedule

__all__ = ["Streams", "check"]


def check(schedule: Schedule, *, streams: Streams = Streams.DIRECTION, source: object = None) -> None:
    """Do nothing if the schedule is legal.

    `source` is the file that the schedule comes from; a refusal names it. Messages are looked at where there are any.
    Cost: linear in actions, messages and flows. What builds on something broken is left out: only a sound placement is
    looked into, only a complete schedule is executed.

    Raises:
        ScheduleError: it is illegal; every problem found is named, with worker and action.
    """
    _refuse(placement_problems(schedule), source)
    all_flows = flows(schedule)
    positions = {action: i for order in schedule.orders for i, action in enumerate(order)}
    structure = [
        *completeness_problems(schedule),
        *fill_problems(schedule),
        *supply_problems(schedule, all_flows),
    ]
    order = [*order_problems(schedule, positions), *reduction_problems(schedule), *sharding_problems(schedule)]
    if schedule.has_communication or schedule.messages:
        structure += message_problems(schedule, all_flows)
        order += [*timing_problems(schedule, all_flows, positions), *channel_problems(schedule)]
    if not structure:
        order += [
            f"deadlock: {line}" for line in execute(schedule, NO_TIME, streams=streams, all_flows=all_flows).blocked
        ]
    _refuse(structure + order, source)


def _refuse(problems: Sequence[str], source: object) -> None:
    if problems:
        raise ScheduleError(problems if source is None else [f"{source}: the schedule is illegal:", *problems])
