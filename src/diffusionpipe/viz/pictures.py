"""Figures without pyplot: no global state, no display, safe beside a training run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of that size in inches, drawn by Agg."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure in the format that the file name's ending says; texts of an SVG stay texts.

    Raises:
        ConfigError: unknown ending, or the file cannot be written.
    """
    import matplotlib

    known = figure.canvas.get_supported_filetypes()
    ending = path.suffix.lstrip(".").lower()
    if ending not in known:
        raise ConfigError(f"cannot draw {path}: no picture format {path.suffix!r}; use .png, .svg or .pdf")
    try:
        with matplotlib.rc_context({"svg.fonttype": "none"}):
            figure.savefig(path, format=ending)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; check that the folder exists, is writable and has free space"
        ) from error
