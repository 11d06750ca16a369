"""The search for the best pipeline order: instance -> answer.

    instance    ranks, half-stages with their costs, memory limits, the time to shorten
    answer      for each rank its actions, with the figures that they reach and a bound that no order beats

`search` is the whole of it; `read_instance` reads a file, `schedule_of` makes the answer a schedule.
"""

from diffusionpipe.ordering.answer import Answer, costs_of, schedule_of
from diffusionpipe.ordering.instance import HalfStage, Instance, Placing
from diffusionpipe.ordering.search import search
from diffusionpipe.schedules.building.split_work import Goal

__all__ = ["Answer", "Goal", "HalfStage", "Instance", "Placing", "costs_of", "schedule_of", "search"]
