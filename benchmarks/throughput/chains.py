"""Our schedules over a chain of stages, and torch's of the same name."""

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from diffusionpipe.ir import Edge, Schedule
from diffusionpipe.passes import communicate, connect
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing.legal import check

SCHEDULES = ("gpipe", "1f1b")
_TORCH = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def our_schedule(
    name: str, num_stages: int, num_microbatches: int, size: int = 1, edges: tuple[Edge, ...] = ()
) -> Schedule:
    """The schedule with explicit messages, through the passes that every plan goes through."""
    schedule = REGISTRY[name](num_stages, num_microbatches, size)
    if edges:
        schedule = connect(schedule, edges)
    schedule = communicate(schedule, simulate(schedule, uniform_costs(schedule)))
    check(schedule)
    return schedule


def torch_schedule(name: str, stage: PipelineStage, num_microbatches: int, loss: Callable[..., Any]) -> Any:
    """torch's hand-written schedule; the loss is a sum over samples already, so gradients are not scaled."""
    return _TORCH[name](stage, num_microbatches, loss_fn=loss, scale_grads=False)
