"""The course of a training run from its metrics.jsonl: losses, learning rate, speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, cycle
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.errors import FileFormatError
from diffusionpipe.viz.pictures import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = tuple[list[float], list[float]]
"""(steps, values) of a curve, without values that are not finite."""

_TRAIN, _VALIDATION, _MUTED = "#2171b5", "#d55e00", "#5a5a5a"
_OF_MODELS = (_TRAIN, "#6a51a3", "#cb181d", "#009e73")
"""The colours of the curves of several models that train together, by turns."""


def loss_curve(metrics_path: Path, png_path: Path) -> None:
    """Draw training and validation loss over the steps, and below them learning rate and samples per second.

    Models that train together have losses of their own, and learning rates where these differ. The training loss is
    drawn raw (faint) and smoothed. A last line without its end is one that is being written and is left out. Curves
    that the file does not hold are not drawn.

    Raises:
        FileFormatError: the file is missing, holds no step, or has a line that is not a JSON object.
        ConfigError: the picture cannot be written.
    """
    rows = _read(metrics_path)
    if not _curve(rows, "loss")[0] and not _curve(rows, "validation_loss")[0]:
        raise FileFormatError(f'{metrics_path}: no line has "step" and "loss"; the run has not finished a step yet')
    rates = {label: curve for label, curve, _ in _curves(rows, "learning_rate")}
    if all(curve == _curve(rows, "learning_rate") for curve in rates.values()):
        rates = {"": _curve(rows, "learning_rate")}
    panels = [("learning rate", rates), ("samples/s", {"": _curve(rows, "samples_per_s")})]
    panels = [(label, curves) for label, curves in panels if any(curve[0] for curve in curves.values())]
    figure = new_figure(10, 4.6 + 1.3 * len(panels))
    axes = figure.subplots(1 + len(panels), 1, sharex=True, squeeze=False, height_ratios=[3.6] + [1] * len(panels))[
        :, 0
    ]
    _draw_losses(axes[0], rows)
    for panel, (label, curves) in zip(axes[1:], panels, strict=True):
        for (name, curve), colour in zip(curves.items(), cycle(_OF_MODELS)):
            panel.plot(*curve, color=colour if name else _MUTED, linewidth=1.4, label=name)
        if len(curves) > 1:
            panel.legend(frameon=False, fontsize=9, loc="upper right")
        panel.set_ylabel(label, fontsize=11)
        panel.set_ylim(0, 1.12 * max(value for _, values in curves.values() for value in values) or 1)
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
            raise FileFormatError(f"{path}, line {number}: not valid JSON: {error}; remove the line") from None
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
    """The moving mean of the values: for each value, the mean of it and up to `half_window` neighbours on either side.

    Near the ends there are fewer neighbours, equally many on both sides, so that nothing lags.
    """
    sums = [0.0, *accumulate(values)]
    means = []
    for index in range(len(values)):
        # As many on the left as on the right, as far as the shorter side goes.
        start = index - min(half_window, index)
        stop = min(index + min(half_window, index), len(values) - 1) + 1
        means.append((sums[stop] - sums[start]) / (stop - start))
    return means


def _curves(rows: Sequence[dict[str, object]], key: str) -> list[tuple[str, Curve, str]]:
    """(name, curve, colour) for each model's values of a key of the log, or with the name "" for the run's only model.

    Curves without values are left out.
    """
    found = dict.fromkeys(name for row in rows for name in row if name.startswith(f"{key}/")) or [key]
    curves = [(name.partition("/")[2], _curve(rows, name)) for name in found]
    return [(name, curve, colour) for (name, curve), colour in zip(curves, cycle(_OF_MODELS)) if curve[0]]


def _draw_losses(axes: Axes, rows: Sequence[dict[str, object]]) -> None:
    drawn: list[float] = []
    for name, (steps, values), colour in _curves(rows, "loss"):
        half_window = len(values) // 40
        means = smoothed(values, half_window)
        drawn += means
        axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.9)
        label = f"training loss{f' of {name}' * bool(name)}{', smoothed' * bool(half_window)}"
        axes.plot(steps, means, color=colour, linewidth=2, label=label)
    for name, (steps, values), colour in _curves(rows, "validation_loss"):
        drawn += values
        label = f"validation loss{f' of {name}' * bool(name)}, last {values[-1]:.4g}"
        own = colour if name else _VALIDATION
        axes.plot(steps, values, color=own, marker="o", markersize=5, linewidth=1.2, label=label)
    drawn = [value for value in drawn if value > 0]
    if drawn and max(drawn) > 20 * min(drawn):  # then small losses would lie on the axis
        axes.set_yscale("log")
    axes.set_ylabel("loss", fontsize=12)
    axes.legend(frameon=False, fontsize=11, loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0)
    _clean(axes)


def _clean(axes: Axes) -> None:
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
