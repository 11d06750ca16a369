"""When the actions of a schedule happen, how much their workers hold, and whether the actions can happen at all."""

from diffusionpipe.timing.clock import Times, ends_of, timed
from diffusionpipe.timing.graph import START, Graph, graph_of
from diffusionpipe.timing.machine import Streams, machine_of
from diffusionpipe.timing.prices import prices_of, times_of

__all__ = ["START", "Graph", "Streams", "Times", "ends_of", "graph_of", "machine_of", "prices_of", "timed", "times_of"]
