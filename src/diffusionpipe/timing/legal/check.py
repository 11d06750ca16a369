"""The rules of legal schedules: their specification.

placement      every stage in one pipeline; shares of a block cut every micro-batch at whole samples; edges bring
               everything that their readers read
completeness   every stage does each of its pipeline's ops exactly once for every micro-batch, on its own worker;
               the fills of an encoder stage run every layer on every sample of its share exactly once
order          F before B, I before W; the layers of a component in order; reductions after the last backward
sharding       a sharded block is computed with only between its UNSHARD and its RESHARD, and is in parts at the end;
               one worker of a group holds it; every gradient is reduced
messages       one SEND and one RECV each; every edge between workers is carried, for exactly its samples; sent
               after it is produced, received before it is read; equal order at both ends of a channel
versions       in a window, every trained block has one STEP after its gradients, and nothing reads weights of the
               future; all other rules apply to the schedule that it unrolls to
progress       the events of `timing.graph` have an order in which they can happen: nothing waits in a circle, even
               when sends are unbuffered rendezvous and, once messages are explicit, the host waits for each transfer,
               reduction and gather
"""

from collections.abc import Sequence

from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir.action import Op
from diffusionpipe.ir.flows import flows
from diffusionpipe.ir.plan import Plan
from diffusionpipe.ir.schedule import Schedule
from diffusionpipe.ir.unroll import unroll
from diffusionpipe.timing.graph import graph_of
from diffusionpipe.timing.legal.compute import (
    completeness_problems,
    fill_problems,
    order_problems,
    reduction_problems,
    sharding_problems,
)
from diffusionpipe.timing.legal.messages import channel_problems, message_problems, timing_problems
from diffusionpipe.timing.legal.placement import placement_problems, supply_problems
from diffusionpipe.timing.legal.versions import step_problems, window_problems, without_encoding
from diffusionpipe.timing.machine import Streams, machine_of


def check(schedule: Schedule, *, streams: Streams | None = None, source: object = None) -> None:
    """Raise an error if the schedule is illegal; return None if it is legal.

    `source` is the file that the schedule comes from; a refusal names it. `streams` is the machine on which it must not
    get stuck; None: the strictest one that it is for. `passes.communicate` puts reductions in one order with the
    messages, so before it the host cannot wait for them. Messages are looked at where there are any. Cost: linear in
    actions, messages and flows. A rule that builds on a broken one is left out: only a sound placement is looked into,
    only a complete schedule is executed.

    Raises:
        ScheduleError: it is illegal; every problem found is named, with worker and action.
    """
    if schedule.lead:
        # Without fills, an ENCODE of a window only marks a place and names no fill, which the rules of placement would
        # refuse.
        _refuse(placement_problems(without_encoding(schedule)), source)
        _refuse([*window_problems(schedule)], source)
        # Enough batches that all that can be in flight at once are there (`ir.versions.batches_held`).
        schedule = unroll(schedule, schedule.lead + 2)
    _refuse(placement_problems(schedule), source)
    all_flows = flows(schedule)
    positions = {action: i for order in schedule.orders for i, action in enumerate(order)}
    structure = [
        *completeness_problems(schedule),
        *fill_problems(schedule),
        *supply_problems(schedule, all_flows),
    ]
    order = [*order_problems(schedule, positions), *reduction_problems(schedule), *sharding_problems(schedule)]
    order += step_problems(schedule)
    if schedule.has_communication or schedule.messages:
        structure += message_problems(schedule, all_flows)
        order += [*timing_problems(schedule, all_flows, positions), *channel_problems(schedule)]
    # Events of a broken structure would name actions that do not exist.
    if not structure:
        is_explicit = schedule.has_communication or not any(a.op is Op.REDUCE_GRAD for _, a in schedule.actions())
        order += _stuck(schedule, streams or (Streams.HOST if is_explicit else Streams.DIRECTION))
    _refuse(structure + order, source)


def _stuck(schedule: Schedule, streams: Streams) -> tuple[str, ...]:
    """One sentence for each place at which the schedule gets stuck with these queues for transfers; () for none."""
    try:
        graph_of(schedule, machine_of(streams))
    except ScheduleError as error:
        return error.problems
    return ()


def check_plan(plan: Plan, *, source: object) -> None:
    """Raise an error if the plan's training schedule is illegal or does not suit the plan's mesh and blocks.

    The plan's other schedules are not checked. `source` is the file of the plan; errors name it.

    Raises:
        ScheduleError: it is illegal, or has another number of workers than the mesh, or a block that is not there.
    """
    check(plan.train, source=source)
    problems = []
    if plan.mesh.pipeline != plan.train.num_workers:
        problems.append(
            f"the mesh has {plan.mesh.pipeline} workers, but the schedule has orders for {plan.train.num_workers}"
        )
    missing = sorted({stage.weights for stage in plan.train.placement.stages} - set(range(len(plan.blocks))))
    if missing:
        problems.append(f"stages hold block {missing[0]}, the plan has {len(plan.blocks)} blocks")
    _refuse(problems, source)


def _refuse(problems: Sequence[str], source: object) -> None:
    if problems:
        raise ScheduleError(problems if source is None else [f"{source}: the schedule is illegal:", *problems])
