"""The time and memory of drawing a batch over ranks, as `sample` would draw it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.planner.drawing.forecast import DrawingForecast
    from diffusionpipe.planner.pricing.setting import Setting


def forecast_of_batch(setting: "Setting", *, steps: int, rows_a_picture: int) -> "DrawingForecast":
    """The forecast of time and memory for drawing the batch of a setting, a picture for each of its samples.

    `steps`: denoising steps; `rows_a_picture`: rows of the denoiser for each picture, 2 with guidance.
    """
    from diffusionpipe.planner.drawing.forecast import forecast_drawing
    from diffusionpipe.trainer.inference.ranks_drawing import rows_together

    pictures = setting.workload.batch
    rows = pictures * rows_a_picture
    return forecast_drawing(setting, steps=steps, pictures=pictures, rows=rows, size=rows_together(rows))
