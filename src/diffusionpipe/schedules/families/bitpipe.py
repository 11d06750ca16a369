"""BitPipe: two directions and two stages of each pipeline on every worker, in the shape of a V."""

from diffusionpipe.ir import Schedule
from diffusionpipe.schedules.building.directions import merged, require_directions
from diffusionpipe.schedules.building.shapes import wave


def bitpipe(num_workers: int, num_microbatches: int, microbatch_size: int = 1) -> Schedule:
    """The BitPipe schedule: half of the micro-batches run down and then up, the others up and then down.

    Wu et al., "BitPipe: Bidirectional Interleaved Pipeline Parallelism for Accelerating Large Models Training", 2024,
    https://arxiv.org/abs/2410.19367, section 3. This is Chimera with stages of half the size, and so with half its
    bubble. Where a pipe turns, nothing is sent. With p workers, m micro-batches, stages whose forward takes F (half the
    time of one of p stages), and free communication:

        time, B = F             4m + p - 2 in units of F, where p divides m
        bubble                  (p - 2) / (4m + p - 2) of it
        time, B = 2F, m = p     6m + 2p - 4: a bubble of (p - 2) / (3m + p - 2)
        activations in flight   2p at most, counted in stages of half the size
        weights                 2 copies of the model, on each worker 4 stages

    With B = 2F and more micro-batches than workers, there are waits between the units, as in Chimera.

    The paper starts the reductions of all workers but the middle two before their last backward.
    `passes.reduce_gradients` puts each directly after the last backward of its own block, which is never later.

    Any number of micro-batches from 2 up works. Stages 0 to 3 form the pipe down and up, 4 to 7 the pipe up and down:

    >>> for order in bitpipe(2, 2).orders:
    ...     print(*order)
    0F0 5F0 6F0 3F0 3B0 6B0 5B0 0B0
    4F0 1F0 2F0 7F0 7B0 2B0 1B0 4B0

    Raises:
        ConfigError: the workers are odd, or there is only one micro-batch.
    """
    require_directions(num_workers, num_microbatches, microbatch_size)
    down = wave(num_workers, 2)
    up = tuple(num_workers - 1 - worker for worker in down)
    return merged("bitpipe", [down, up], num_workers, num_microbatches, microbatch_size)
