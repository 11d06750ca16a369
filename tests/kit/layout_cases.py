"""Layouts and fillings to try; nothing here computes, so that tests of plans need no torch."""

import random
from functools import cache
from itertools import pairwise

from diffusionpipe.costs import ModelGraph
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Range, Sharded
from diffusionpipe.ir.schedule import lone_blocks
from diffusionpipe.ordering import Goal, HalfStage, Instance, Placing, schedule_of, search
from diffusionpipe.passes import PlacedFill
from diffusionpipe.planner import Layout


def can_run(layout: Layout, model: ModelGraph) -> bool:
    """Whether the schedule is defined for these sizes, can be sharded where it is, and the model has enough layers."""
    try:
        if layout.sharded is not Sharded.NONE and len(lone_blocks(layout.generated())) < layout.num_blocks():
            return False
        return layout.num_blocks() <= len(model.backbone_layers)
    except ConfigError:
        return False


def layouts_of(stages: int, schedule: str, batch: int = 16) -> list[Layout]:
    """One copy; every stage twice by share; the first stage twice; twice by the data-parallel axis; both."""
    shared = {"batch": batch, "stages": stages, "microbatches": 4, "schedule": schedule, "encode_chunk": 3}
    first_twice = (2, *(1,) * (stages - 1))
    return [
        Layout(**shared),
        Layout(**shared, replicas=(2,) * stages),
        Layout(**shared, replicas=first_twice),
        Layout(**shared, data_parallel=2),
        Layout(**shared, replicas=first_twice, data_parallel=2),
    ]


def scattered(seed):
    """A filler that cuts samples and layers at random and puts the pieces anywhere; in a window behind a compute."""
    rng = random.Random(seed)

    def filler(unfilled):
        schedule, num_layers = unfilled.schedule, len(unfilled.blocks[-1])
        batch = schedule.placement.num_samples
        borders = sorted(rng.randrange(batch + 1) for _ in range(schedule.num_workers - 1))
        fills = {}
        for worker, (start, stop) in enumerate(zip([0, *borders], [*borders, batch], strict=True)):
            if start == stop:
                continue
            cuts = sorted({0, num_layers, *(rng.randrange(1, num_layers) for _ in range(2))})
            length = len(schedule.orders[worker])
            pieces = []
            for first, last in pairwise(cuts):
                chunk = rng.choice([2, 3, stop - start])
                starts = range(start, stop, chunk)
                pieces += [(Range(first, last), Range(sample, min(sample + chunk, stop))) for sample in starts]
            positions = sorted(rng.randrange(bool(schedule.lead), length + 1) for _ in pieces)
            fills[worker] = [
                PlacedFill(position=position, component="", layers=layers, samples=samples)
                for position, (layers, samples) in zip(positions, pieces, strict=True)
            ]
        return fills

    return filler


@cache
def searched(placing: Placing):
    """The orders that the search finds for 2 ranks and 4 micro-batches."""
    halves = tuple(HalfStage(forward=2, input_grad=3, weight_grad=1, activation=4, kept_after_input_grad=2)
                   for _ in range(4))  # fmt: skip
    return schedule_of(search(Instance(
        ranks=2, microbatches=4, placement=placing, stages=halves, comm=1, memory_limit=(20, 20),
        objective=Goal.MAKESPAN, seconds=0.02,
    )))  # fmt: skip
