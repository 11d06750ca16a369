"""Schedule -> Schedule: real edges, replicas, encoding, gradient reduction, communication.

In the order in which they are applied; each is pure and optional, and each result satisfies `timing.legal`:

    connect           a model's edges and micro-batch sizes in place of the generator's chain
    replicate         several workers per stage
    insert_encoding   frozen work before the first forward, or
    insert_fills      frozen work of the next batch between the compute of this one
    reduce_gradients  REDUCE_GRAD after the last backward, or
    shard_parameters  UNSHARD and RESHARD around every use of a block, REDUCE_GRAD after each of its backwards
    bring_parameters  UNSHARD of every block at the start, where each parameter has an owner
    communicate       sends and receives, ordered by a simulated timeline

Without a flush, `without_flush` makes the window of a schedule, and `with_versions` says which weights its actions
read.
"""

from diffusionpipe.passes.communication import communicate
from diffusionpipe.passes.connect import connect, connect_blocks
from diffusionpipe.passes.encoding import insert_encoding
from diffusionpipe.passes.filling import PlacedFill, encoding_of, insert_fills, prologue
from diffusionpipe.passes.overlap import turn_of, without_flush
from diffusionpipe.passes.reduction import reduce_gradients
from diffusionpipe.passes.replicate import replicate
from diffusionpipe.passes.sharding import bring_parameters, gathers_first, shard_parameters
from diffusionpipe.passes.versions import with_versions

__all__ = [
    "PlacedFill",
    "bring_parameters",
    "communicate",
    "connect",
    "connect_blocks",
    "encoding_of",
    "gathers_first",
    "insert_encoding",
    "insert_fills",
    "prologue",
    "reduce_gradients",
    "replicate",
    "shard_parameters",
    "turn_of",
    "with_versions",
    "without_flush",
]
