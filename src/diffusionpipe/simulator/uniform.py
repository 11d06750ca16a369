"""Costs that are the same everywhere: for text pictures, formulas and tests."""

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.ir import Schedule
from diffusionpipe.units import Bytes, Seconds


def uniform_costs(
    schedule: Schedule,
    *,
    forward: Seconds = 1,
    backward: Seconds = 2,
    input_grad: Seconds = 1,
    weight_grad: Seconds = 1,
    encode: Seconds = 1,
    reduce: Seconds = 0,
    latency: Seconds = 0,
    activation: Bytes = 1,
) -> Costs:
    """The costs of a schedule whose stages, fills and reductions are all alike, and whose links have only latency."""
    stage = StageCosts(
        forward=forward,
        backward=backward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        activation=activation,
        kept_after_input_grad=activation,
    )
    num_stages = len(schedule.placement.stages)
    return Costs(
        stages=(stage,) * num_stages,
        fills=(encode,) * len(schedule.fills),
        reduces=(reduce,) * num_stages if reduce else (),
        link=Link(latency=latency),
    )
