"""Pictures: text sketch, Gantt chart, Perfetto trace, loss curve, sample grid. Libraries load on use."""

from diffusionpipe.viz.gantt import MILLISECONDS, UNITS, TimeAxis, gantt
from diffusionpipe.viz.grid import sample_grid
from diffusionpipe.viz.metrics import loss_curve
from diffusionpipe.viz.perfetto import perfetto
from diffusionpipe.viz.sketch import sketch
from diffusionpipe.viz.sketch_legend import explained_sketch

__all__ = [
    "MILLISECONDS",
    "UNITS",
    "TimeAxis",
    "explained_sketch",
    "gantt",
    "loss_curve",
    "perfetto",
    "sample_grid",
    "sketch",
]
