"""DualPipeV: DualPipe cut in half, one pipeline in the shape of a V in place of two directions."""

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Schedule
from diffusionpipe.schedules.building.shapes import SPLIT, Pipe, require_positive, schedule_of, wave
from diffusionpipe.schedules.families.dualpipe import paired


def dualpipe_v(num_workers: int, num_microbatches: int, microbatch_size: int = 1) -> Schedule:
    """Every worker runs the order of one half of DualPipe, with two stages of one pipeline: one down and one up.

    "Cut-in-half" of Sea AI Lab, 2025, https://hackmd.io/@ufotalent/r1lVXsa9Jg; the name comes from
    https://github.com/deepseek-ai/DualPipe. In DualPipe a worker and its mirror image hold the same two stages; here
    one worker holds them, so no second copy of the weights is needed. The actions of a pair follow each other, as in
    `dualpipe`. With p workers, 2p stages of equal times W <= I <= F <= I + W, m micro-batches, and free communication:

        time                    2m (F + I + W) + (p - 1) (F + I - W): 6m + p - 1 where F = I = W = 1
        bubble                  (p - 1) / (6m + p - 1) of it where F = I = W
        activations in flight   2p + 1 on every worker, counted in stages, of which it has two; held until W
        weights                 1 copy of the model, on each worker 2 stages

    If all results of a pair came at its end, the bubble would be (p - 1) (F + 2I - W), as in `dualpipe`.

    Any number of micro-batches from 2p up works. Stages 0 to 3 form the pipe, down and up:

    >>> for order in dualpipe_v(2, 4).orders:
    ...     print(*order)
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3I1 3W1 3F2 0I0 0W0 3I2 3W2 3F3 0I1 0W1 3I3 3W3 0I2 0W2 0I3 0W3
    1F0 2F0 1F1 2F1 1F2 2I0 2W0 2F2 1I0 1W0 1F3 2I1 2W1 2F3 1I1 1W1 2I2 2W2 1I2 1W2 2I3 1I3 2W3 1W3

    Raises:
        ConfigError: a size is below 1, or there are fewer than 2p micro-batches.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    if num_microbatches < 2 * num_workers:
        raise ConfigError(
            f"{num_microbatches} micro-batches are too few for {num_workers} workers; use at least {2 * num_workers}"
        )
    orders = [
        paired(worker, 2 * num_workers - 1 - worker, distance=worker, depth=num_workers, count=num_microbatches)
        for worker in range(num_workers)
    ]
    pipe = Pipe(workers=wave(num_workers, 2), microbatches=(microbatch_size,) * num_microbatches, ops=SPLIT)
    return schedule_of("dualpipe-v", [pipe], [list(order) for order in orders])
