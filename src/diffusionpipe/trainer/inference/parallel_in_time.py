"""Pictures whose denoising steps are computed at the same time, in blocks, until they hardly change any more.

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
"""The schedulers that can be used, whose step depends on nothing but the sample, the prediction and both times."""


class Walk(Protocol):
    """The times of a drawing, and one step of its scheduler from any of them to any later one."""

    @property
    def timesteps(self) -> Tensor:
        """The time of each step, as the denoiser reads it, (steps,)."""
        ...

    def step(self, prediction: Tensor, sample: Tensor, start: int, stop: int) -> Tensor:
        """The sample at the start of step `stop`, or at the end, from the sample at the start of step `start`."""
        ...


@dataclass(frozen=True, slots=True)
class DdimWalk:
    """The times of a drawing by DDIM without noise, and its step (Song et al., 2021, equation 12).

    The paper: https://arxiv.org/abs/2010.02502.
    """

    timesteps: Tensor
    before: Tensor
    """The cumulative alpha at the start of each step, (steps,)."""
    after: Tensor
    """The cumulative alpha at the end of each step, (steps,)."""
    prediction: str = "epsilon"
    """The quantity that the denoiser predicts: "epsilon", "v_prediction" or "sample"."""
    clip: float | None = None
    """The largest value of a clean sample; None: any."""

    def step(self, prediction: Tensor, sample: Tensor, start: int, stop: int) -> Tensor:
        """The sample at the start of step `stop` from the sample at the start of step `start`."""
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
    sigmas: Tensor
    """The noise level at the start of each step and at the end, (steps + 1,)."""

    def step(self, prediction: Tensor, sample: Tensor, start: int, stop: int) -> Tensor:
        """The sample at the start of step `stop` from the sample at the start of step `start`."""
        return sample + (self.sigmas[stop] - self.sigmas[start]).to(sample.dtype) * prediction


def walk_of(scheduler: object) -> Walk:
    """A scheduler's times after its `set_timesteps`, with its step from any of them to any later one.

    Known are DDIM without noise and Euler along a flow.

    Raises:
        RecipeError: it is another scheduler, or an option makes its steps depend on more than the sample and times.
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
        RecipeError: names it, and one that fits, or the option that must be off.
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
    """The number of this rank, and of the ranks that share the blocks of denoising steps."""

    rank: int = 0
    ranks: int = 1

    def owns(self, block: int) -> bool:
        """Whether this rank computes the block: every `ranks`-th one from its own number on."""
        return block % self.ranks == self.rank

    def share(self, sample: Tensor | None, block: int, like: Tensor) -> Tensor:
        """The sample of the rank that owns the block, on every rank; all ranks call it, others with None.

        `like`: a tensor of its shape and type.
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
    refinements: int
    in_turn: int
    """Evaluations one after the other where each block has a rank: ticks of the schedule."""
    on_this_rank: int
    """Evaluations that this rank has made."""
    total: int
    """Evaluations of all ranks together."""


@dataclass(slots=True)
class _Block:
    """The samples of a block. Mutable."""

    start: Tensor | None = None
    """The sample at its start, as refined last."""
    inner: Tensor | None = None
    """The sample after the steps that it has made in this refinement."""
    coarse: Tensor | None = None
    """G of its start in this refinement."""
    fine: Tensor | None = None
    """F of its start in the refinement that it has ended last."""
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
    """The sample at the end of a walk from `first`, refined until its mean absolute change is below `tolerance`.

    `predict(sample, step)` is the (guided) prediction at the start of a step. With a tolerance of 0 as many refinements
    are made as there are blocks; the result is then the sequential one. `on_refined(k, sample)` gets each result,
    `on_tick` the ticks done and the most that there may be.
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
    """One step of a block; the first one of a refinement also makes the coarse step of the same prediction."""
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
