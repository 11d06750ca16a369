"""What the works of a schedule cost: the one place where costs become times of events."""

from collections.abc import Sequence

from diffusionpipe.costs import Costs
from diffusionpipe.ir import Op
from diffusionpipe.timing.work import Compute, Encode, Gather, Nothing, Reduce, Room, Transfer, Work
from diffusionpipe.units import Seconds


def prices_of(works: Sequence[Work], costs: Costs) -> list[Seconds]:
    """The time of each work; rooms are empty."""
    return [price_of(work, costs) for work in works]


def price_of(work: Work, costs: Costs) -> Seconds:
    """The time of a work."""
    match work:
        case Compute():
            return _compute(work, costs)
        case Transfer():
            num_bytes = work.num_samples * sum(costs.tensor_bytes.get(name, 0) for name in work.tensors)
            return costs.link_between(work.source, work.destination).transfer(num_bytes)
        case Encode():
            return costs.fills[work.slot]
        case Reduce():
            return max(costs.reduces[stage] for stage in work.stages) if costs.reduces else 0
        case Gather():
            return costs.unshards[work.stage] if costs.unshards else 0
        case Room() | Nothing():
            return 0


def _compute(work: Compute, costs: Costs) -> Seconds:
    stage = costs.stages[work.stage]
    match work.op:
        case Op.B:
            return stage.backward
        case Op.I:
            return stage.input_grad
        case Op.W:
            return stage.weight_grad
        case _:
            return stage.forward
