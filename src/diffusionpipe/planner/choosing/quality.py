"""Batches by the time to one loss, from a run's gradient noise scale: copies beside pipelines of copies.

A larger batch has more samples a second but needs more samples (`costs.noise`). For each batch and number of stages the
fastest plan with 1F1B is searched; of these the one with the shortest time to the loss is the best.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from diffusionpipe.costs.noise import samples_with, steps_with
from diffusionpipe.planner.choosing.batches import with_batch
from diffusionpipe.planner.choosing.chosen import Choice
from diffusionpipe.planner.choosing.recomputation import best_way
from diffusionpipe.planner.pricing.given import Given, is_possible
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.units import Seconds

MOST_BATCHES = 6
FAMILY = "1f1b"
"""The schedule of pipelines here: a search over all of them for each batch would take minutes."""
BEYOND = 4
"""Batches are looked at up to this multiple of the noise scale and of the run's own batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachedLoss:
    """The batch, the steps and the noise scale with which a run reached some loss."""

    batch: int
    steps: int
    scale: float
    """The run's gradient noise scale in samples."""

    def steps_at(self, batch: int) -> float:
        """The steps to the same loss with `batch` samples a step."""
        return self.steps * steps_with(batch, self.scale) / steps_with(self.batch, self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesWay:
    """The fastest plan of a batch in pipelines of some number of stages, and its steps to the loss."""

    batch: int
    stages: int
    """1: copies alone."""
    choice: Choice
    steps: float
    """Steps to the loss."""

    @property
    def rate(self) -> float:
        """Samples a second of the plan."""
        return self.batch / self.choice.step

    @property
    def seconds(self) -> Seconds:
        """The seconds of training to the loss."""
        return self.steps * self.choice.step


def batches_for(reached: ReachedLoss, num_ranks: int) -> tuple[int, ...]:
    """Batches to compare: one sample for each device, doubled up to 4 times the noise scale or batch; the 6 largest."""
    most = BEYOND * max(reached.scale, reached.batch, num_ranks)
    found = [num_ranks]
    while 2 * found[-1] <= most:
        found.append(2 * found[-1])
    return tuple(found[-MOST_BATCHES:])


def ways(
    setting: Setting,
    batches: Sequence[int],
    reached: ReachedLoss,
    *,
    fill: bool | None = None,
    may_recompute: bool = False,
) -> Iterator[StagesWay]:
    """The plans that fit, batch by batch, one for each number of stages; sizes that the setting gives are ignored.

    `fill` and `may_recompute` as in `choose`.
    """
    ranks = setting.cluster.num_ranks
    for batch in batches:
        for stages in (count for count in range(1, ranks + 1) if ranks % count == 0):
            family = FAMILY if stages > 1 else None
            given = Given(stages=stages, data_parallel=ranks // stages, schedule=family)
            if not is_possible(given, batch=batch, num_ranks=ranks, num_backbones=len(setting.graph.backbones)):
                continue
            asked = with_batch(replace(setting, given=given), batch)
            choice = best_way(asked, fill=fill, may_recompute=may_recompute)
            if choice is not None:
                yield StagesWay(batch=batch, stages=stages, choice=choice, steps=reached.steps_at(batch))


def switch_in(pipelines: Mapping[int, float], copies: Mapping[int, float], num_stages: int, scale: float) -> int | None:
    """The smallest batch from which on pipelines of copies reach the loss before more copies do; None: no batch.

    As many devices in copies alone take `num_stages` times the batch, each the samples of one copy. A batch counts
    where the rates of both are known.

    Args:
        pipelines: batch -> samples a second of pipelines of `num_stages` stages.
        copies: batch -> samples a second of copies alone on as many devices.
        num_stages: stages of each copy.
        scale: the gradient noise scale.
    """
    found = None
    # From the largest batch down, as long as pipelines win.
    for batch in sorted((own for own in pipelines if own * num_stages in copies), reverse=True):
        other = batch * num_stages
        if samples_with(batch, scale) / pipelines[batch] >= samples_with(other, scale) / copies[other]:
            break
        found = batch
    return found
