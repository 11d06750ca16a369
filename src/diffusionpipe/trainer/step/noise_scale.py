"""The gradient noise scale of a step, from squared norms of gradients over two numbers of samples.

With G the gradient of the expected loss and S the covariance of one sample's gradient, the gradient G_b over b samples
has E |G_b|² = |G|² + tr S / b. From b samples and the whole batch of B

    |G|² = (B |G_B|² - b |G_b|²) / (B - b)        tr S = (|G_b|² - |G_B|²) / (1/b - 1/B)

are without bias, and B_noise = tr S / |G|² after both have been averaged over many steps (McCandlish et al., "An
Empirical Model of Large-Batch Training", 2018, https://arxiv.org/abs/1812.06162, appendix A.1). Squared norms are sums
over parameters. So each block has its own b: the samples of one holder before the sum over all holders or, where one
rank alone holds it, the samples of the first micro-batch. Each rank adds up its own blocks.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from diffusionpipe.ir import Op, Plan
from diffusionpipe.runtime.comm.places import holders_of
from diffusionpipe.runtime.engine.worker import Worker
from diffusionpipe.runtime.weights.gradients import BlockGradients

NOTHING_SMALLER = (
    "a step has one micro-batch and one group, so no part of the batch has a gradient of its own; set "
    "pipeline.microbatches = 2, or train with two copies"
)


class NoiseMeter:
    """Measures |G|² and tr S of the gradient noise scale on one rank, from gradients that are watched in a step."""

    def __init__(self, worker: Worker, device: torch.device) -> None:
        """Prepares to measure the gradients of this worker, whose plan must be measurable, see `unmeasurable`."""
        self._device = device
        self._batch = worker.plan.batch
        self._parts = parts_of(worker.plan)
        holders = holders_of(worker.plan)
        self._blocks: dict[int, BlockGradients] = {}
        for block, gradients in worker.gradients.items():
            assert isinstance(gradients, BlockGradients), "blocks with owners are not measured"
            self._blocks[block] = gradients
        self._counts = {block: len(holders[block]) for block in self._blocks}

    def watch(self, is_on: bool) -> None:
        """Sets whether the next steps note the squared norm of each block's gradient over a part of the batch."""
        for gradients in self._blocks.values():
            gradients.is_watched = is_on

    def own(self) -> Tensor:
        """The rank's terms of |G|² and tr S for the last step, (2,) float64; their sums over ranks are estimates."""
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        for block, gradients in self._blocks.items():
            if gradients.part is None:
                continue  # it has no gradients: nothing of it is trained
            small, whole = self._parts[block], self._batch
            # The step's loss is divided by the batch: a part's gradients are b / B of its own mean gradient.
            # Each holder of a block adds its part of the block's terms, so that they count once in the sum over ranks.
            of_small = gradients.part * (whole / small) ** 2 / self._counts[block]
            of_whole = gradients.squares() / self._counts[block]
            total += torch.stack(both_of(of_small, of_whole, small, whole))
        return total


def both_of(of_small: Tensor, of_whole: Tensor, small: float, whole: float) -> tuple[Tensor, Tensor]:
    """(|G|², tr S), unbiased estimates from the squared norms of gradients over `small` and over `whole` samples."""
    square = (whole * of_whole - small * of_small) / (whole - small)
    trace = (of_small - of_whole) / (1 / small - 1 / whole)
    return square, trace


def unmeasurable(plan: Plan) -> str | None:
    """Why the noise scale of a run of this plan cannot be measured, in words; None if it can. The same on all ranks."""
    if plan.train.lead:
        return "batches follow each other without a flush, so gradients of a batch are of several weights"
    if plan.mesh.parts > 1:
        return "sharded copies have no gradients of their own batches at the end of a step"
    if len({pipeline.model for pipeline in plan.train.placement.pipelines if Op.ENCODE not in pipeline.ops}) > 1:
        return "several models train together"
    parts, holders = parts_of(plan), holders_of(plan)
    if any(small >= plan.batch for small in parts.values()):
        return NOTHING_SMALLER
    if plan.train.splits_backwards and any(len(ranks) == 1 for ranks in holders.values()):
        return "split backwards of several micro-batches take turns, so no micro-batch has a gradient of its own"
    counts = {block: len(ranks) for block, ranks in holders.items()}
    if any(counts[block] > 1 and round(small * counts[block]) != plan.batch for block, small in parts.items()):
        return "holders of a stage have unequal parts of the batch"
    return None


def parts_of(plan: Plan) -> Mapping[int, float]:
    """Block id -> the number of samples in the part of the batch whose gradient is measured apart from the whole."""
    placement, found = plan.train.placement, dict[int, float]()
    for block, ranks in holders_of(plan).items():
        worker = plan.mesh.place(ranks[0])[1]
        own = [
            float(stage.share.stop - stage.share.start) * size
            for pipeline in placement.pipelines
            if Op.ENCODE not in pipeline.ops and not pipeline.is_probe  # a probe runs without gradients
            for number in pipeline.stages
            for stage in (placement.stages[number],)
            if stage.weights == block and stage.worker == worker
            for size in pipeline.microbatches
        ]
        # With several holders, the batch of one holder: all its micro-batches. With one, its first micro-batch.
        found[block] = sum(own) if len(ranks) > 1 else own[0]
    return found
