"""On which queue of its worker an action runs: the machines that schedules are timed and checked on.

    host        issues the worker's actions in order. At an action of the host's own queue it waits until the action
                has ended; every other action it only issues, and continues
    queue       runs what was issued on it, one after the other. An action with two ends, such as a message, begins
                when it is the first on the queues of both ends: sends are never buffered

           host 0   F0 | F1 |                      SEND and RECV of one message start together (rendezvous),
     queue 0 "up"      s0======                    when the later end is ready,
                       |                           and the next transfer on either queue waits for their end
     queue 1 "up"      r0======
           host 1      .......F0 |

A machine is a function that names the queue. So another resource, such as a copy engine, is another function.
"""

from collections.abc import Callable, Hashable
from enum import StrEnum

from diffusionpipe.ir import MESSAGE_OPS, Action, Op, Schedule

HOST = "host"
"""The name of the queue for actions that occupy the worker itself."""
COLLECTIVES = "of reductions and gathers"
"""The name of the queue for gradient reductions and for gathers of sharded blocks."""

Machine = Callable[[Schedule, int, Action], Hashable]
"""A function from (schedule, worker, action) to the name of the worker's queue on which the action runs."""


class Streams(StrEnum):
    """The queues in which a worker's transfers run one after the other."""

    PAIR = "pair"
    """Every ordered pair of workers has a queue of its own."""
    DIRECTION = "direction"
    """A worker has one queue for all transfers towards higher workers and one for all towards lower ones, its
    receives and its sends alike: one NCCL communicator per direction."""
    HOST = "host"
    """The host waits for every transfer, reduction and gather to end: the strictest machine. An order that runs on it
    runs on all others, and on a device that waits for all of its queues at any moment, as CUDA does to load a kernel
    or to free memory."""


def machine_of(streams: Streams) -> Machine:
    """The function that gives the queue of an action on a machine with these queues for transfers."""
    return _MACHINES[streams]


def _pairs(schedule: Schedule, worker: int, action: Action) -> Hashable:
    if action.op not in MESSAGE_OPS:
        return _own(action)
    source, destination = _ends(schedule, action)
    return f"from worker {source} to worker {destination}"


def _directions(schedule: Schedule, worker: int, action: Action) -> Hashable:
    if action.op not in MESSAGE_OPS:
        return _own(action)
    source, destination = _ends(schedule, action)
    return "towards higher workers" if source < destination else "towards lower workers"


def _hosts(schedule: Schedule, worker: int, action: Action) -> Hashable:
    return HOST


def _own(action: Action) -> Hashable:
    return COLLECTIVES if action.op in (Op.REDUCE_GRAD, Op.UNSHARD) else HOST


def _ends(schedule: Schedule, action: Action) -> tuple[int, int]:
    assert action.slot is not None, action
    message, stages = schedule.messages[action.slot], schedule.placement.stages
    return stages[message.source].worker, stages[message.destination].worker


_MACHINES = {Streams.PAIR: _pairs, Streams.DIRECTION: _directions, Streams.HOST: _hosts}
