"""The search for the best pipeline order: instance -> answer.

    instance    ranks, half-stages with their costs, memory limits, what is to be short
    answer      for each rank its actions, with what they reach and what nothing can beat

`search` is the whole of it; `read_instance` reads a file, `schedule_of` makes the answer a schedule.
"""

from diffusionpipe.ordering.answer import Answer, costs_of, schedule_of
from diffusionpipe.ordering.instance import HalfStage, Instance, Placing
from diffusionpipe.ordering.search import search
from diffusionpipe.schedules.building.split_work import Objective

__all__ = ["Answer", "HalfStage", "Instance", "Objective", "Placing", "costs_of", "schedule_of", "search"]
