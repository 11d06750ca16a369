"""Predicts `sample --parallel-in-time` on a cluster: each device has the whole denoiser and some blocks of steps."""

from dataclasses import dataclass, replace

from diffusionpipe.costs.cluster import of_ranks
from diffusionpipe.planner.drawing.drawing import DrawingMemory, predict_drawing
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.timing.in_time import USUAL_REFINEMENTS, blocks_of, evaluations, latency
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingInTime:
    """The predicted time and memory of pictures whose denoising steps are computed at the same time."""

    refinements: int
    """The number of refinements."""
    ranks: int
    """The number of devices that compute: not more than blocks of steps."""
    in_turn: int
    """Evaluations of the denoiser that the busiest devices make one after the other."""
    evaluations: int
    """Evaluations of the denoiser by all devices together."""
    latency: Seconds
    """Time until the latents of all pictures are there."""
    memory: DrawingMemory
    """The memory of a device, which holds the whole denoiser."""


def predict_in_time(setting: Setting, *, steps: int, pictures: int, rows: int) -> DrawingInTime | None:
    """The time and memory of drawing with steps at the same time, by the slowest device; None if one device computes.

    `rows`: the rows of all pictures, two for each with classifier-free guidance.

    Raises:
        ConfigError: as `predict_drawing`.
    """
    cluster, blocks = setting.cluster, blocks_of(steps)
    ranks = min(cluster.num_ranks, len(blocks))
    if ranks == 1:
        return None
    slowest = min(range(cluster.num_ranks), key=lambda rank: cluster.devices[rank].speed)
    one = replace(setting, cluster=of_ranks(cluster, [slowest]))
    alone = predict_drawing(one, pictures=pictures, rows=rows, size=rows)
    schedule = len(blocks), len(blocks[0]), USUAL_REFINEMENTS
    in_turn = latency(*schedule, ranks=ranks)
    return DrawingInTime(
        refinements=USUAL_REFINEMENTS,
        ranks=ranks,
        in_turn=in_turn,
        evaluations=sum(map(len, evaluations(*schedule))),
        latency=alone.encoding + in_turn * alone.step,
        memory=alone.memory[0],
    )
