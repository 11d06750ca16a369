"""Compares batches by the time of training to one loss, which follows from a run's gradient noise scale.

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
"""The schedule of all pipelines that are compared: a search over all schedules for each batch would take minutes."""
BEYOND = 4
"""Batches are looked at up to this multiple of the noise scale and of the run's own batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachedLoss:
    """The batch, the steps and the noise scale with which a run reached some loss."""

    batch: int
    """Samples of a step."""
    steps: int
    """Steps until the run reached the loss."""
    scale: float
    """The run's gradient noise scale in samples."""

    def steps_at(self, batch: int) -> float:
        """The number of steps to the same loss with `batch` samples a step."""
        return self.steps * steps_with(batch, self.scale) / steps_with(self.batch, self.scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesWay:
    """The fastest plan for a batch with a given number of stages, and the steps that it needs to the loss."""

    batch: int
    stages: int
    """Stages of each pipeline; 1: copies of the whole model."""
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
    """The fastest plan that fits for each batch and each number of stages; sizes that the setting gives are ignored.

    `fill`: whether encoders run in bubbles, None tries both. `may_recompute`: whether all layers may be recomputed.
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
    """The smallest batch from which on copies of a pipeline reach the loss before copies of the whole model do.

    None if there is none. On the same devices, with the same samples for each copy, copies of the whole model take
    `num_stages` times the batch. A batch is looked at only if the rates of both are known.

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
