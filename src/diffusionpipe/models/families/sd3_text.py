"""The states that Stable Diffusion 3 reads of captions, from three frozen encoders.

The penultimate states of two CLIPs are joined side by side, padded to the width of T5 and put before its states. The
pooled embeddings of the CLIPs, side by side too, are embedded with the time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from diffusionpipe.models.families.described import Components, Text, pooled_clip, t5
from diffusionpipe.models.graphs.graph import Layer

_CLIPS, _T5 = ("text_encoder", "text_encoder_2"), "text_encoder_3"
_LENGTH = 256
"""The number of tokens that T5 reads, diffusers' default."""


def texts() -> tuple[Text, ...]:
    """The text encoders of Stable Diffusion 3, two CLIPs and a T5, which write "text_states" and "pooled_text"."""
    pooled = tuple(f"{name}.pooled_text" for name in _CLIPS)
    states = tuple(f"{name}.states" for name in (*_CLIPS, _T5))
    joins = (None, _layer(_CLIPS[1], "pooled_text.joined", pooled, "pooled_text", _join_pooled))
    clips = (
        pooled_clip(name, None, kind="CLIPTextModelWithProjection", writes=write, then=then)
        for name, write, then in zip(_CLIPS, pooled, joins, strict=True)
    )
    last = _layer(_T5, "text_states", states, "text_states", _join_states)
    return (*clips, t5(_T5, _LENGTH, writes=states[-1], then=last))


def pooled_width(components: Components, _: int) -> tuple[object, str]:
    """The `Need` of the width of both CLIPs' pooled embeddings together: (this width, its name for errors)."""
    return sum(components[name].config.projection_dim for name in _CLIPS), "the width of both pooled embeddings"


def width_problems(components: Components) -> list[str]:
    """[a sentence] if the CLIPs' states side by side are wider than T5's, to which they are padded; else []."""
    clips, width = sum(components[name].config.hidden_size for name in _CLIPS), components[_T5].config.d_model
    return [f"the CLIP encoders' states of width {clips} exceed T5's width {width}"] if clips > width else []


def _layer(component: str, name: str, reads: tuple[str, ...], write: str, run: Any) -> Layer:
    return Layer(name=f"{component}.{name}", component=component, reads=reads, writes=(write,), run=run)


def _join_pooled(_: Any, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    return (torch.cat([first, second], dim=-1),)  # (B, D1 + D2)


def _join_states(_: Any, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, ...]:
    clip = torch.cat([first, second], dim=-1)  # (B, T, D1 + D2)
    clip = functional.pad(clip, (0, third.shape[-1] - clip.shape[-1]))  # (B, T, D)
    return (torch.cat([clip, third], dim=-2),)  # (B, T + T3, D)
