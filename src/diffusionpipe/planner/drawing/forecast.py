"""Predicts the seconds a picture and the seconds until all pictures are drawn, and how uncertain both are.

{"format": "diffusionpipe-drawing", "version": 1, "steps": 28, "a_picture": 1.9, "latency": 15.2, "band": ...}
"""

from dataclasses import dataclass

from diffusionpipe.ir.files import Format
from diffusionpipe.planner.choosing.band import UNCERTAINTY, stretched
from diffusionpipe.planner.drawing.drawing import Drawing, predict_drawing
from diffusionpipe.planner.drawing.in_time import DrawingInTime, predict_in_time
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingBand:
    """The shortest and longest seconds of drawing: with all layer times a quarter shorter, and a quarter longer."""

    a_picture: tuple[Seconds, Seconds]
    latency: tuple[Seconds, Seconds]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingForecast:
    """The predicted times of drawing pictures together, with their uncertainty and the memory."""

    cluster: str
    """Name of the cluster."""
    steps: int
    a_picture: Seconds
    """Time of all pictures divided by their number."""
    latency: Seconds
    """Time from the texts until the latents of all pictures are there."""
    band: DrawingBand | None
    """The uncertainty of both times on a computed profile; None on a measured one."""
    drawing: Drawing
    """The times of a step and of encoding, and the memory."""
    in_time: DrawingInTime | None = None
    """The time and memory of the same pictures with denoising steps computed at the same time; None on one device."""


DRAWING = Format("diffusionpipe-drawing", DrawingForecast)


def forecast_drawing(setting: Setting, *, steps: int, pictures: int, rows: int, size: int) -> DrawingForecast:
    """The forecast of drawing over all devices of the cluster with `steps` steps, `size` rows at a time.

    `rows`: the rows of all pictures, two for each with classifier-free guidance.

    Raises:
        ConfigError: as `predict_drawing`.
    """
    drawing = predict_drawing(setting, pictures=pictures, rows=rows, size=size)
    band = None
    if setting.profile.source != "measured":
        ends = [
            predict_drawing(stretched(setting, 1 + sign * UNCERTAINTY), pictures=pictures, rows=rows, size=size)
            for sign in (-1, 1)
        ]
        shortest, longest = (end.latency(steps) for end in ends)
        band = DrawingBand(a_picture=(shortest / pictures, longest / pictures), latency=(shortest, longest))
    return DrawingForecast(
        cluster=setting.cluster.name,
        steps=steps,
        a_picture=drawing.seconds_a_picture(steps),
        latency=drawing.latency(steps),
        band=band,
        drawing=drawing,
        in_time=predict_in_time(setting, steps=steps, pictures=pictures, rows=rows),
    )
