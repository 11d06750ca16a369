"""How diffusers' own pipeline of a family is called to draw, with a replacement for its transformer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from torch import Tensor


def _same(value: Any) -> Any:
    return value


def _as_predicted(prediction: Tensor, config: Any) -> Any:
    return prediction


def _as_latents(hidden: Tensor, shape: Sequence[int]) -> Tensor:
    return hidden.reshape(-1, *shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCall:
    """The call of diffusers' own pipeline to draw with our layers in place of its transformer."""

    takes: Callable[[Tensor], Tensor] = _same
    """`takes(latents of our layers, (B, ...))` -> the first noise, as the pipeline takes it."""
    reads: Callable[[Any, Sequence[int]], Tensor] = _as_latents
    """`reads(first argument of the transformer, shape of a sample)` -> latents of our layers."""
    returns: Callable[[Tensor, Any], Any] = _as_predicted
    """`returns(prediction of our layers, the transformer's configuration)` -> the result that a transformer returns."""
    text: str = "encoder_hidden_states"
    """The name of the transformer's argument with the states of the prompts."""
    rows: Callable[[Tensor], Any] = _same
    """`rows(numbers of rows, (B, 1, 1))` -> the pipeline's argument in which they replace the states of prompts."""
    scale: str | None = "guidance_scale"
    """The name of the pipeline's argument with the scale of guidance; None: it cannot guide, so our code does."""
    unguided: float = 1.0
    """The value of the scale that turns guidance off."""
    pipeline: str | None = None
    """The class of another pipeline that draws, if the folder's own would make inputs that our layers make; None: the
    folder's own."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of the pipeline's call, by name."""


def packed(noisy: Tensor, patch: int) -> Tensor:
    """Latents (B, C, H, W), or (B, C, F, H, W) of clips, as tokens, one for each patch, (B, T, C * patch * patch)."""
    B, C, F, H, W = noisy.shape[0], noisy.shape[1], prod(noisy.shape[2:-2]), noisy.shape[-2], noisy.shape[-1]
    # (B, C, F, H / p, p, W / p, p) becomes (B, F, H / p, W / p, C, p, p).
    tokens = noisy.reshape(B, C, F, H // patch, patch, W // patch, patch).permute(0, 2, 3, 5, 1, 4, 6)
    return tokens.reshape(B, F * (H // patch) * (W // patch), C * patch**2)


def unpacked(tokens: Tensor, shape: Sequence[int], patch: int) -> Tensor:
    """Tokens (B, T, C * patch * patch) as latents (B, C, H, W), or (B, C, F, H, W) of clips.

    `shape`: the shape of one sample's latents. `patch`: the side of a patch.
    """
    B, C, F, H, W = tokens.shape[0], shape[0], prod(shape[1:-2]), shape[-2], shape[-1]
    # (B, F, H / p, W / p, C, p, p) becomes (B, C, F, H / p, p, W / p, p).
    latents = tokens.view(B, F, H // patch, W // patch, C, patch, patch).permute(0, 4, 1, 2, 5, 3, 6)
    return latents.reshape(B, *shape)


def packed_call(patch: int, **more: Any) -> PipelineCall:
    """The `PipelineCall` of a pipeline that packs latents into tokens of `patch` x `patch`; `more`: other fields."""
    return PipelineCall(
        takes=partial(packed, patch=patch),
        reads=partial(unpacked, patch=patch),
        returns=lambda prediction, config: packed(prediction, patch),
        **more,
    )
