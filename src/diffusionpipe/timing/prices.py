"""The prices of a schedule's works: the one place where costs become times of events."""

from collections.abc import Sequence

from diffusionpipe.costs import Costs
from diffusionpipe.costs.actions import NO_HOST
from diffusionpipe.ir import Op
from diffusionpipe.timing.clock import Times, timed
from diffusionpipe.timing.graph import Graph
from diffusionpipe.timing.work import Compute, Encode, Gather, Nothing, Reduce, Room, Transfer, Work
from diffusionpipe.units import Seconds


def times_of(graph: Graph, costs: Costs) -> Times:
    """The times of a graph's events at these costs, in seconds, with waking and hosts."""
    works = graph.works
    return timed(graph, prices_of(works, costs), waking=costs.waking, host_times=host_times_of(works, costs))


def host_times_of(works: Sequence[Work], costs: Costs) -> list[Seconds]:
    """The seconds in which a host issues each work, by work; [] where hosts take no time."""
    if not (any(costs.host_fills) or any(stage.host != NO_HOST for stage in costs.stages)):
        return []
    return [_host_time(work, costs) for work in works]


def _host_time(work: Work, costs: Costs) -> Seconds:
    match work:
        case Compute():
            host = costs.stages[work.stage].host
            match work.op:
                case Op.B:
                    return host.input_grad + host.weight_grad
                case Op.I:
                    return host.input_grad
                case Op.W:
                    return host.weight_grad
                case _:
                    return host.forward
        case Encode():
            return costs.host_fills[work.slot] if costs.host_fills else 0
        case _:
            return 0


def prices_of(works: Sequence[Work], costs: Costs) -> list[Seconds]:
    """The seconds of each work at these costs, by work; a place for a fill that is empty takes 0."""
    return [price_of(work, costs) for work in works]


def price_of(work: Work, costs: Costs) -> Seconds:
    """The seconds of a work at these costs, without its host and waking; 0 for an empty room."""
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
