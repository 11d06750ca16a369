"""The order of samples where each step has patches of one size."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from diffusionpipe.ir.size import Clip
from diffusionpipe.trainer.data.batches.batch import turns_of
from diffusionpipe.trainer.data.order import Growth
from diffusionpipe.trainer.data.randomness import uniform
from diffusionpipe.trainer.data.sizes.order import SizedPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchOrder:
    """The endless order of samples where all samples of a step have patches of one size, drawn for the step."""

    sizes: tuple[Clip, ...]
    """The sizes of patches."""
    shares: tuple[float, ...]
    """The probability of each size."""
    num_samples: int
    """The number of samples in the dataset."""
    growth: Growth
    """The positions at which further samples enter, and their numbers."""
    seed: int
    """The seed of the order and of the sizes."""
    run: int
    """The number of positions in a row that have one size: the batch."""

    def at(self, position: int) -> SizedPlace:
        """The sample at a position of the endless order, its size's number, and how often it was seen before."""
        step, place = divmod(position, self.run)
        (turn,) = turns_of(
            self.num_samples, seed=self.seed, batch=self.run, step=step, positions=(place,), growth=self.growth
        )
        return SizedPlace(self._size(step), turn.sample, turn.number)

    def size_numbers(self, positions: Sequence[int]) -> tuple[int, ...]:
        """The index in `sizes` of the patch size at each of these positions of the endless order."""
        return tuple(self._size(position // self.run) for position in positions)

    def side_at(self, step: int) -> int:
        """The side of the patches of a step, in pixels; steps count from 0."""
        return self.sizes[self._size(step)].width

    def _size(self, step: int) -> int:
        drawn = float(uniform(seed=self.seed, purpose="patch_size", step=step, positions=(0,))[0])
        # Without the last end, which rounding may leave below 1.
        return sum(drawn >= end for end in list(accumulate(self.shares))[:-1])
