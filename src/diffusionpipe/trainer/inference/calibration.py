"""The ranges of the inputs of a denoiser's layers, seen while pictures are drawn.

Ranges change with the time step. So the layers are watched at times that are drawn like those of Ye et al.'s PQD, 2025,
https://arxiv.org/abs/2501.00124: normally distributed, with the mean and the deviation of the drawing's own time steps.
One picture is watched at one of its steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor, nn

from diffusionpipe.models.parameters.exported_layers import observed
from diffusionpipe.runtime.compute.stage import LayerStage
from diffusionpipe.trainer.data.randomness import generator
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.drawing import PLAIN, Arithmetic, drawn
from diffusionpipe.trainer.inference.folder_drawing import OpenedSource, Predictor


class WatchedTimes(StrEnum):
    """The distribution of the time steps at which the inputs of layers are watched."""

    NORMAL = "normal"
    """Normally distributed, cut off at the first and the last time step."""
    UNIFORM = "uniform"
    """Each time step with the same probability."""
    ONE = "one"
    """All at the middle time step, for comparisons."""


class _Recorder(Predictor):
    """A predictor that also keeps the latents, times and estimates of all rows at each step, in host memory."""

    def __init__(
        self, stage: LayerStage, conditions: Mapping[str, Tensor], arithmetic: Arithmetic, times: torch.dtype | None
    ) -> None:
        super().__init__(stage, conditions, arithmetic, times)
        self.steps: list[dict[str, Tensor]] = []

    def predicted(self, moving: Mapping[str, Tensor], rows: Tensor | None = None) -> Tensor:
        """The denoiser's prediction, as `Predictor.predicted` returns it.

        If it is for all rows, `moving` is added to the steps that are kept.
        """
        if rows is None:
            self.steps.append({name: tensor.cpu() for name, tensor in moving.items()})
        return super().predicted(moving, rows)


def steps_watched(times: Tensor, count: int, kind: WatchedTimes, seed: int) -> list[int]:
    """For each of `count` pictures, the number of the step, from 0, at which the inputs of layers are watched.

    `times`: the time of each step of the drawing. `kind`: the distribution from which the steps are drawn.

    >>> steps_watched(torch.arange(1000, 0, -20.0), 4, WatchedTimes.ONE, 0)
    [24, 24, 24, 24]
    """
    values = times.double().numpy()
    if kind is WatchedTimes.ONE:
        return [(len(values) - 1) // 2] * count
    draws = generator(seed=seed, purpose="calibration", step=0, position=0)
    if kind is WatchedTimes.UNIFORM:
        return [int(step) for step in draws.integers(len(values), size=count)]
    found: list[int] = []
    while len(found) < count:  # a time outside is drawn again
        time = draws.normal(values.mean(), values.std())
        if values.min() <= time <= values.max():
            found.append(int(np.abs(values - time).argmin()))
    return found


def watch(
    opened: OpenedSource,
    count: int,
    settings: SamplingSettings,
    layers: Mapping[str, nn.Module],
    *,
    device: torch.device,
    times: WatchedTimes = WatchedTimes.NORMAL,
    on_step: Callable[[int, int], None] | None = None,
) -> dict[str, float]:
    """The largest magnitude among each layer's inputs while `count` pictures are drawn, by the layer's name.

    `opened`: the model, opened for these pictures; its weights are freed at the end. `layers`: the layers to watch, by
    name. Each picture is watched at one of its steps, chosen by `times`.

    Raises:
        ModelError: weights cannot be read.
    """
    predict = opened.predictor(device, PLAIN, _Recorder)
    assert isinstance(predict, _Recorder)
    order = replace(opened.order(settings, count, device), release=lambda: None)  # the denoiser runs once more
    remember = predict.remember if predict.reads_estimate else None
    with torch.no_grad():
        drawn(order, predict, opened.graph, model="", feed_back=remember, is_shown=False, on_step=on_step)
        found = observed(layers, lambda: _run_again(predict, count, times, settings.seed, device))
    opened.release()
    return found


def _run_again(predict: _Recorder, count: int, times: WatchedTimes, seed: int, device: torch.device) -> None:
    """Runs the denoiser again for each picture at one of its steps, which is drawn for it.

    `predict`: has kept the inputs of all steps.
    """
    steps = list(predict.steps)
    # All rows of a step have one time.
    chosen = steps_watched(torch.stack([step["timesteps"][0] for step in steps]), count, times, seed)
    for picture, number in enumerate(chosen):
        step = steps[number]
        rows = torch.arange(picture, len(step["noisy"]), count)  # the picture with its condition, then without
        predict.predicted({name: tensor[rows].to(device) for name, tensor in step.items()}, rows.to(device))
