"""Random numbers of a run, as functions of their use.

A number belongs to a sample, not to a rank: it is keyed by (seed, step, position in the global batch, purpose), and the
order of the data by (seed, epoch). Every rank that draws it, in any order and beside any others, gets the same bits; so
the loss is the same for every layout, and a run resumes without any saved random state.

The generator, for one key:

    key    = blake2b(b"seed/step/position/purpose", digest_size=16, person=b"diffusionpipe"), decimal, UTF-8
    stream = numpy.random.Generator(numpy.random.Philox(key=key read as a little-endian integer))

Philox is the counter-based generator of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011);
streams of different keys are independent. All draws happen on the CPU. `tests/trainer/data/test_randomness.py` holds
golden values, because numpy promises equal streams only within a version of its generator's methods.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def generator(*, seed: int, purpose: str, step: int, position: int) -> np.random.Generator:
    """A new random generator of numpy whose numbers follow from seed, purpose, step and position alone."""
    text = f"{seed}/{step}/{position}/{purpose}"
    digest = blake2b(text.encode(), digest_size=16, person=b"diffusionpipe").digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def normal(*, seed: int, purpose: str, step: int, positions: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Standard normal numbers, float32, (len(positions), *shape); row i depends on positions[i] only."""
    return _rows(
        lambda position: generator(seed=seed, purpose=purpose, step=step, position=position).standard_normal(
            tuple(shape), dtype=np.float32
        ),
        positions,
        shape,
    )


def uniform(*, seed: int, purpose: str, step: int, positions: Sequence[int], shape: Sequence[int] = ()) -> Tensor:
    """Uniform numbers in [0, 1), float32, (len(positions), *shape); row i depends on positions[i] only."""
    return _rows(
        lambda position: generator(seed=seed, purpose=purpose, step=step, position=position).random(
            tuple(shape), dtype=np.float32
        ),
        positions,
        shape,
    )


def permutation(*, seed: int, epoch: int, size: int) -> NDArray[np.int64]:
    """The order of the samples in an epoch: a random permutation of the indices 0 to `size` - 1, (size,)."""
    order = generator(seed=seed, purpose="order", step=epoch, position=0).permutation(size)
    return order.astype(np.int64)


def _rows(draw: Callable[[int], NDArray[np.float32] | float], positions: Sequence[int], shape: Sequence[int]) -> Tensor:
    rows = np.empty((len(positions), *shape), dtype=np.float32)
    for row, position in enumerate(positions):
        rows[row] = draw(position)
    return torch.from_numpy(rows)
