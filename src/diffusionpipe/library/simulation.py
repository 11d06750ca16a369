"""`dp.simulate`: the times of a schedule where the model is cut into equal parts."""

from math import isfinite

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Schedule
from diffusionpipe.library.timelines import UNITS, Timeline
from diffusionpipe.simulator import simulate as simulated
from diffusionpipe.simulator import uniform_costs
from diffusionpipe.simulator.comparison import part_of_worker
from diffusionpipe.units import Seconds


def simulate(
    schedule: Schedule,
    *,
    forward: Seconds = 1,
    backward: Seconds = 2,
    input_grad: Seconds = 1,
    weight_grad: Seconds = 1,
    comm: Seconds = 0,
) -> Timeline:
    """The simulated timeline of a schedule, in the unit of the times that are given.

    Args:
        schedule: from `dp.schedule`.
        forward: time of a forward of one rank's part of the model, however many stages the schedule makes of it.
        backward: time of a whole backward of this part, in schedules that do not split it.
        input_grad: time of the gradient of the inputs, in schedules that split backwards.
        weight_grad: time of the gradient of the weights, in schedules that split backwards.
        comm: time of a transfer between two ranks.

    Raises:
        ConfigError: a time is negative or infinite.
        ScheduleError: the schedule gets stuck.

    >>> from diffusionpipe.library.schedules import schedule
    >>> simulate(schedule("1f1b", ranks=2, microbatches=2), backward=1).makespan
    6
    """
    if not isinstance(schedule, Schedule):
        raise ConfigError(f"dp.simulate takes a schedule, not a {type(schedule).__name__}; make one with dp.schedule")
    times = {
        "forward": forward,
        "backward": backward,
        "input_grad": input_grad,
        "weight_grad": weight_grad,
        "comm": comm,
    }
    if wrong := [f"{name}={time}" for name, time in times.items() if not (isfinite(time) and time >= 0)]:
        raise ConfigError(f"{', '.join(wrong)}: a time is a number of at least 0")
    part = part_of_worker(schedule)
    costs = uniform_costs(
        schedule,
        forward=forward * part,
        backward=backward * part,
        input_grad=input_grad * part,
        weight_grad=weight_grad * part,
        latency=comm,
    )
    return Timeline(schedule, simulated(schedule, costs), axis=UNITS)
