"""A new resource and a new term of costs need no change of `timing` and of nobody who calls it."""

from diffusionpipe.ir import Op, Range
from diffusionpipe.passes import PlacedFill, insert_fills
from diffusionpipe.schedules import gpipe
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing import Streams, graph_of, machine_of, prices_of, timed
from diffusionpipe.timing.work import Compute, Encode

STARTING = 0.5
"""What the host needs to start a kernel, in the unit of the costs."""


def with_a_copy_engine(schedule, worker, action):
    """Fills do not occupy the host: an engine of its own runs them."""
    return "copy engine" if action.op is Op.ENCODE else machine_of(Streams.DIRECTION)(schedule, worker, action)


def with_starts(works, costs):
    """Every compute and every fill takes the time of its start, too."""
    return [
        price + STARTING * isinstance(work, Compute | Encode)
        for work, price in zip(works, prices_of(works, costs), strict=True)
    ]


def test_a_copy_engine_and_the_starts_of_kernels_are_timed():
    fills = [PlacedFill(position=at, component="vae", layers=Range(at, at + 1), samples=Range(0, 4)) for at in range(3)]
    schedule = insert_fills(gpipe(1, 4), {0: fills}, block=9, outputs={0: ("latents",)})
    costs = uniform_costs(schedule, encode=3)
    assert simulate(schedule, costs).makespan == 4 * (1 + 2) + 3 * 3, "on the host"
    graph = graph_of(schedule, with_a_copy_engine)
    assert timed(graph, prices_of(graph.works, costs)).makespan == 4 * (1 + 2), "beside the computes"
    assert timed(graph, with_starts(graph.works, costs)).makespan == 4 * (1 + 2) + 8 * STARTING
