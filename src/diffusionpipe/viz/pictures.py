"""Figures without pyplot: no global state, no display, safe beside a training run."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.errors import ConfigError
from diffusionpipe.files.output_file import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 120


def new_figure(width: float, height: float) -> Figure:
    """A new empty matplotlib figure of this width and height in inches, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure to a file, in the format of the name's ending; texts of an SVG stay texts.

    A PNG gets a palette of 256 colours, which makes it a third of the size.

    Raises:
        ConfigError: the ending is unknown, or the file cannot be written.
    """
    import matplotlib

    check_picture(path)
    drawn = BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(drawn, format=_ending(path))
    write_atomically(path, _with_palette(drawn) if _ending(path) == "png" else drawn.getvalue())


def _with_palette(drawn: BytesIO) -> bytes:
    from PIL import Image

    packed = BytesIO()
    with Image.open(drawn) as picture:
        flat = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    flat.save(packed, "PNG", optimize=True)
    return packed.getvalue()


def check_picture(path: Path) -> None:
    """Check that the file name's ending is a format in which pictures can be drawn.

    Raises:
        ConfigError: it is not.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if _ending(path) not in FigureCanvasAgg.get_supported_filetypes():
        raise ConfigError(f"cannot draw {path}: no picture format {path.suffix!r}; use .png, .svg or .pdf")


def _ending(path: Path) -> str:
    return path.suffix.lstrip(".").lower()
