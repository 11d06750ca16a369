"""Makes plans for several batches and finds the batch from which on a larger one gains little.

    batch       2     4     8    16
    samples/s  10    18    24    25     the knee is 8: its rate is within 5 % of the best one

Batches begin at one sample for each device and double while that gains more than a twentieth. Where one
sample for each device does not fit, fewer are tried down to one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from diffusionpipe.planner.choosing.chosen import Choice
from diffusionpipe.planner.choosing.recomputation import best_way
from diffusionpipe.planner.pricing.setting import Setting

MOST_ROWS = 7
GAIN = 0.05
"""A batch is doubled as long as that gives more samples a second by more than this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A batch, and the plan that was found for it, if any."""

    batch: int
    """Samples of a step."""
    choice: Choice | None
    """The plan; None: nothing fits."""

    @property
    def rate(self) -> float:
        """Samples a second of the plan; 0 where nothing fits."""
        return self.batch / self.choice.step if self.choice is not None else 0.0


def with_batch(setting: Setting, batch: int) -> Setting:
    """The same setting with `batch` samples a step."""
    return replace(setting, workload=replace(setting.workload, batch=batch))


def stated_batches(
    setting: Setting, batches: Iterable[int], *, fill: bool | None = None, may_recompute: bool = False
) -> list[BatchPlan]:
    """The plans for these batches, smallest first; each batch once.

    `fill`: whether encoders run in bubbles, None tries both. `may_recompute`: whether all layers may be recomputed.
    """
    return [_tried(setting, batch, fill, may_recompute) for batch in sorted(set(batches))]


def found_batches(
    setting: Setting,
    *,
    fill: bool | None = None,
    may_recompute: bool = False,
    tell: Callable[[BatchPlan], object] = lambda tried: None,
) -> list[BatchPlan]:
    """The plans for batches that double while that gains more than 5 %, smallest first; [] where none fits.

    Args:
        setting: the setting; its own batch is ignored.
        fill: whether encoders run in bubbles; None tries both.
        may_recompute: whether all layers may be recomputed.
        tell: is called with each plan of a doubled batch as soon as it is found.
    """
    first, found = setting.cluster.num_ranks, list[BatchPlan]()
    for doubled in range(MOST_ROWS):
        one = _tried(setting, first << doubled, fill, may_recompute)  # one sample a device, doubled each time
        if one.choice is None:
            break
        best = max((before.rate for before in found), default=0.0)
        found.append(one)
        tell(one)
        if one.rate < (1 + GAIN) * best:
            break
    # The largest power of two below the number of devices; 0 for one device.
    batch = 1 << (first - 1).bit_length() >> 1
    while not found and batch:
        one = _tried(setting, batch, fill, may_recompute)
        found += [one] if one.choice is not None else []
        batch //= 2
    return found


def knee_of(tried: Sequence[BatchPlan]) -> BatchPlan | None:
    """The smallest batch whose samples a second are within 5 % of the most; None where nothing fits."""
    best = max((one.rate for one in tried), default=0.0)
    return next((one for one in tried if one.choice is not None and one.rate >= best * (1 - GAIN)), None)


def _tried(setting: Setting, batch: int, fill: bool | None, may_recompute: bool) -> BatchPlan:
    choice = best_way(with_batch(setting, batch), fill=fill, may_recompute=may_recompute)
    return BatchPlan(batch=batch, choice=choice)
