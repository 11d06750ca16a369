"""The course of a training run from its metrics.jsonl: losses, learning rate, speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.errors import FileFormatError
from diffusionpipe.viz.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = tuple[list[float], list[float]]
"""Steps and values, the finite ones."""

_TRAIN, _VALIDATION, _MUTED = "#2171b5", "#d55e00", "#5a5a5a"


def loss_curve(metrics_path: Path, png_path: Path) -> None:
    """Draw training and validation loss over the steps, and below them learning rate and samples per second.

    The training loss is drawn raw (faint) and smoothed. A last line without its end is one that is being written and is
    left out. Whatever the file does not hold is not drawn.

    Raises:
        FileFormatError: the file is missing, holds no step, or has a line that is no JSON object.
        ConfigError: the picture cannot be written.
    """
    rows = _read(metrics_path)
    loss, validation = _curve(rows, "loss"), _curve(rows, "validation_loss")
    if not loss[0] and not validation[0]:
        raise FileFormatError(f'{metrics_path}: no line has "step" and "loss"; the run has not finished a step yet')
    panels = [("learning rate", _curve(rows, "learning_rate")), ("samples/s", _curve(rows, "samples_per_s"))]
    panels = [(label, curve) for label, curve in panels if curve[0]]
    figure = new_figure(10, 4.6 + 1.3 * len(panels))
    axes = figure.subplots(1 + len(panels), 1, sharex=True, squeeze=False, height_ratios=[3.6] + [1] * len(panels))[
        :, 0
    ]
    _draw_losses(axes[0], loss, validation)
    for panel, (label, curve) in zip(axes[1:], panels, strict=True):
        panel.plot(*curve, color=_MUTED, linewidth=1.4)
        panel.set_ylabel(label, fontsize=11)
        panel.set_ylim(0, 1.12 * max(curve[1]) or 1)
        _clean(panel)
    axes[-1].set_xlabel("step", fontsize=12)
    axes[0].margins(x=0.01)
    figure.align_ylabels(list(axes))
    figure.tight_layout()
    save_figure(figure, png_path)


def _read(path: Path) -> list[dict[str, object]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileFormatError(f"cannot read {path}: {error.strerror}; check the path") from error
    rows = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise FileFormatError(f"{path}, line {number}: is no JSON: {error}; remove the line") from None
        if not isinstance(row, dict):
            raise FileFormatError(f"{path}, line {number}: must be a JSON object; remove the line")
        rows.append(row)
    return rows


def _curve(rows: Sequence[dict[str, object]], key: str) -> Curve:
    steps: list[float] = []
    values: list[float] = []
    for row in rows:
        step, value = row.get("step"), row.get(key)
        if isinstance(step, int | float) and isinstance(value, int | float) and isfinite(value):
            steps.append(step)
            values.append(value)
    return steps, values


def smoothed(values: Sequence[float], half_window: int) -> list[float]:
    """The mean over up to `half_window` values on either side; equally many on both at the start, so nothing lags."""
    sums = [0.0, *accumulate(values)]
    means = []
    for index in range(len(values)):
        start = index - min(half_window, index)
        stop = min(index + min(half_window, index), len(values) - 1) + 1
        means.append((sums[stop] - sums[start]) / (stop - start))
    return means


def _draw_losses(axes: Axes, loss: Curve, validation: Curve) -> None:
    steps, values = loss
    means = smoothed(values, len(values) // 40)
    if steps:
        axes.plot(steps, values, color=_TRAIN, alpha=0.25, linewidth=0.9)
        axes.plot(steps, means, color=_TRAIN, linewidth=2, label="training loss, smoothed")
    if validation[0]:
        label = f"validation loss, last {validation[1][-1]:.4g}"
        axes.plot(*validation, color=_VALIDATION, marker="o", markersize=5, linewidth=1.2, label=label)
    drawn = [value for value in (*means, *validation[1]) if value > 0]
    if drawn and max(drawn) > 20 * min(drawn):
        axes.set_yscale("log")
    axes.set_ylabel("loss", fontsize=12)
    axes.legend(frameon=False, fontsize=11, loc="upper right")
    _clean(axes)


def _clean(axes: Axes) -> None:
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
