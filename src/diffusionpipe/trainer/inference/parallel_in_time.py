"""Draws pictures whose denoising steps are computed at the same time, in blocks, until they hardly change any more.

`timing.in_time` has the algorithm and its schedule of ticks. Here it meets a denoiser: each block holds the sample at
its start, refined in every refinement. The sample that a block hands to the next one is

    x'[b+1] = F(x[b]) + (G(x'[b]) - G(x[b]))                                                                     [1]

with F, the steps of block b, G, one step of the same scheduler over the block, and x', refined samples. Where x'[b] is
x[b], the sum in brackets is zero, so [1] is F(x[b]) bit for bit: blocks that are exact stay so.

    rank 0   blocks 0, 2, 4, ...       every rank has the whole denoiser. An evaluation is of all rows of one block, so
    rank 1   blocks 1, 3, 5, ...       the bits are the same on any number of ranks
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from diffusionpipe.errors import RecipeError
from diffusionpipe.ir import Range
from diffusionpipe.timing.in_time import blocks_of, is_evaluated, place_of

ONE_STEP = ("DDIMScheduler", "FlowMatchEulerDiscreteScheduler")
"""The supported schedulers, whose step depends only on the sample, the prediction and both times."""


class Walk(Protocol):
    """The times of a drawing, and the scheduler's step from any time to any later one."""

    @property
    def timesteps(self) -> Tensor:
        """The time of each step, as the denoiser reads it, (steps,)."""
        ...

    def step(self, prediction: Tensor, sample: Tensor, start: int, stop: int) -> Tensor:
        """The sample at the start of step `stop`, or at the end, after one step from the start of step `start`.

        `prediction`, `sample`: at the start of step `start`.
        """
        ...


@dataclass(frozen=True, slots=True)
class DdimWalk:
    """The times of a drawing by DDIM without noise, and its step (Song et al., 2021, equation 12).

    The paper: https://arxiv.org/abs/2010.02502.
    """

    timesteps: Tensor
    """The time of each step, as the denoiser reads it, (steps,)."""
    before: Tensor
    """The cumulative alpha at the start of each step, (steps,)."""
    after: Tensor
    """The cumulative alpha at the end of each step, (steps,)."""
    prediction: str = "epsilon"
    """The quantity that the denoiser predicts: "epsilon", "v_prediction" or "sample"."""
    clip: float | None = None
    """The largest magnitude of a number in a clean sample; None for no limit."""

    def step(self, prediction: Tensor, sample: Tensor, start: int, stop: int) -> Tensor:
        """The sample at the start of step `stop`, after one step from the start of step `start`."""
        now, then = (values.to(sample.dtype) for values in (self.before[start], self.after[stop - 1]))
        signal, sigma = now**0.5, (1 - now) ** 0.5
        match self.prediction:
            case "epsilon":
                clean, noise = (sample - sigma * prediction) / signal, prediction
            case "sample":
                clean, noise = prediction, (sample - signal * prediction) / sigma
            case _:
                clean, noise = signal * sample - sigma * prediction, signal * prediction + sigma * sample
        if self.clip is not None:
            clean = clean.clamp(-self.clip, self.clip)
        return then**0.5 * clean + (1 - then) ** 0.5 * noise


@dataclass(frozen=True, slots=True)
class FlowWalk:
    """The times and noise levels of a drawing by Euler along a flow, and its step."""

    timesteps: Tensor
    """The time of each step, as the denoiser reads it, (steps,)."""
    sigmas: Tensor
    """The noise level at the start of each step and at the end, (steps + 1,)."""

    def step(self, prediction: Tensor, sample: Tensor, start: int, stop: int) -> Tensor:
        """The sample at the start of step `stop`, after one step from the start of step `start`."""
        return sample + (self.sigmas[stop] - self.sigmas[start]).to(sample.dtype) * prediction


def walk_of(scheduler: object) -> Walk:
    """The times of a scheduler, after its `set_timesteps`, and its step from any time to any later one.

    DDIM without noise and Euler along a flow are supported.

    Raises:
        RecipeError: it is another scheduler, or an option makes its steps depend on more than sample and times.
    """
    check_scheduler(scheduler)
    config, name = scheduler.config, type(scheduler).__name__  # type: ignore[attr-defined]  # diffusers has no types
    timesteps: Tensor = scheduler.timesteps  # type: ignore[attr-defined]
    if name == "FlowMatchEulerDiscreteScheduler":
        return FlowWalk(timesteps, scheduler.sigmas)  # type: ignore[attr-defined]
    alphas: Tensor = scheduler.alphas_cumprod  # type: ignore[attr-defined]
    final: Tensor = scheduler.final_alpha_cumprod  # type: ignore[attr-defined]
    stride = config.num_train_timesteps // scheduler.num_inference_steps  # type: ignore[attr-defined]
    previous = timesteps - stride  # diffusers' own step goes there
    # The last step ends at the scheduler's own alpha.
    after = torch.where(previous >= 0, alphas[previous.clamp(min=0)], final)
    clip = config.clip_sample_range if config.clip_sample else None
    return DdimWalk(timesteps, alphas[timesteps], after, config.prediction_type, clip)


def check_scheduler(scheduler: object) -> None:
    """Refuses a scheduler whose steps cannot be computed at the same time.

    Raises:
        RecipeError: names the scheduler and one that fits, or the option that must be off.
    """
    name, config = type(scheduler).__name__, getattr(scheduler, "config", {})
    if name not in ONE_STEP:
        # False is 0, True is 1.
        instead = ONE_STEP["Flow" in name or config.get("prediction_type") == "flow_prediction"]
        raise RecipeError(
            f"parallel in time: a step of {name} is not one step without noise from its sample alone; use --scheduler "
            f"{instead}"
        )
    for key in ("thresholding", "stochastic_sampling"):
        if config.get(key):
            raise RecipeError(
                f"parallel in time: the scheduler's {key} makes its steps depend on more than sample and times; leave "
                "out --parallel-in-time"
            )


@dataclass(frozen=True, slots=True)
class BlockRanks:
    """The ranks that share the blocks of denoising steps, and the number of this rank among them."""

    rank: int = 0
    """The number of this rank."""
    ranks: int = 1
    """The number of ranks."""

    def owns(self, block: int) -> bool:
        """Whether this rank computes the block with this number: the ranks take blocks in turn."""
        return block % self.ranks == self.rank

    def share(self, sample: Tensor | None, block: int, like: Tensor) -> Tensor:
        """The sample that the owner of the block has, on every rank.

        All ranks call it, others than the owner with None.

        `like`: a tensor with the sample's shape and type.
        """
        if self.ranks == 1:
            assert sample is not None
            return sample
        import torch.distributed as dist

        shared = torch.empty_like(like) if sample is None else sample.contiguous()
        dist.broadcast(shared, block % self.ranks)
        return shared


ALONE = BlockRanks()


@dataclass(frozen=True, slots=True)
class Refined:
    """A drawn sample, the refinements that it took, and the number of evaluations of the denoiser."""

    sample: Tensor
    """The drawn sample."""
    refinements: int
    """The number of refinements until it hardly changed."""
    in_turn: int
    """The number of evaluations one after the other if each block had a rank: ticks of the schedule."""
    on_this_rank: int
    """The number of evaluations that this rank has made."""
    total: int
    """The number of evaluations of all ranks together."""


@dataclass(slots=True)
class _Block:
    """The samples of a block of steps, which change in each refinement. It is mutable."""

    start: Tensor | None = None
    """The sample at its start, from the last refinement; None before the first."""
    inner: Tensor | None = None
    """The sample after the steps that the block has made in this refinement."""
    coarse: Tensor | None = None
    """G of the start in this refinement: one step over the whole block."""
    fine: Tensor | None = None
    """F of the start in the refinement that has ended last: the steps of the block."""
    handed: Tensor | None = None
    """The sample for the start of the next block."""


def draw_in_time(
    walk: Walk,
    predict: Callable[[Tensor, int], Tensor],
    first: Tensor,
    *,
    tolerance: float,
    crew: BlockRanks = ALONE,
    on_refined: Callable[[int, Tensor], None] | None = None,
    on_tick: Callable[[int, int], None] | None = None,
) -> Refined:
    """The sample at the end of a drawing that begins with `first`, refined until its mean change is below `tolerance`.

    `walk`: the times of the drawing and its steps. The change is a mean of magnitudes.

    `predict(sample, step)` is the (guided) prediction at the start of a step. With a tolerance of 0 the number of
    refinements is the number of blocks; the result is then the sequential one. `on_refined(k, sample)` is called with
    each refinement's result, `on_tick` with the ticks done and the largest number that there may be.
    """
    blocks = blocks_of(len(walk.timesteps))
    count, period = len(blocks), len(blocks[0])
    known = [_Block() for _ in blocks]
    known[0].start = first
    last: Tensor | None = None
    made = total = 0
    for tick in range(count + count * period):
        for number, block in enumerate(blocks):
            refinement, inner = place_of(tick, number, period)
            if refinement < 0 or not is_evaluated(refinement, number) or inner >= len(block):
                continue
            total += 1
            if not crew.owns(number):
                continue
            made += 1
            _evaluate(walk, predict, known[number], block, inner)
        for number in range(count):
            refinement, inner = place_of(tick, number, period)
            if refinement < 0 or inner or refinement > number + 1:
                continue  # it hands nothing over, or what it has handed over is exact
            own = known[number]
            is_exact = not is_evaluated(refinement, number)
            handed = crew.share(own.fine if is_exact else own.handed, number, first)
            if number + 1 < count:
                known[number + 1].start = handed
                continue
            if on_refined is not None:
                on_refined(refinement, handed)
            # After as many refinements as blocks all are exact.
            is_done = refinement == count or (last is not None and float((handed - last).abs().mean()) < tolerance)
            last = handed
            if is_done:
                return Refined(handed, refinement, tick + 1, made, total)
        if on_tick is not None:
            on_tick(tick + 1, count + count * period)
    raise AssertionError("as many refinements as blocks are the last")


def _evaluate(walk: Walk, predict: Callable[[Tensor, int], Tensor], own: _Block, block: Range, inner: int) -> None:
    """Runs one step of a block and changes its samples; `inner` is the step's number in the block.

    The first step of a refinement also makes the coarse step, from the same prediction.
    """
    sample, at = own.start if inner == 0 else own.inner, block.start + inner
    assert sample is not None, "the block before has handed it over"
    prediction = predict(sample, at)
    if inner == 0:
        coarse = walk.step(prediction, sample, block.start, block.stop)
        own.handed = coarse if own.fine is None or own.coarse is None else own.fine + (coarse - own.coarse)  # [1]
        own.coarse = coarse
    own.inner = walk.step(prediction, sample, at, at + 1)
    if at + 1 == block.stop:
        own.fine = own.inner
