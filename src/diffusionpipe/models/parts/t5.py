"""A T5EncoderModel as layers: token ids to the states of their last layer.

Every layer computes the bias by relative position again from the table of the first: it is the same for all samples and
large (heads x T x T numbers), so it does not pass between layers.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.models.base.family import Step, chain
from diffusionpipe.models.graphs.graph import Layer, attribute

_BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"


def t5_layers(
    text_encoder: Any, *, component: str, ids: str, states: str, mask: str | None = None
) -> tuple[Layer, ...]:
    """The layers of a T5's encoder from the token ids to `states`, its last_hidden_state.

    `mask`: the name of the tensor that is zero at tokens that are not read; None: padding is read like other tokens.
    """
    return chain(component, ids, _steps(text_encoder, () if mask is None else (mask,)), states)


def t5_problems(text_encoder: Any, *, component: str) -> list[str]:
    """Sentences about settings in a T5's configuration that its layers do not support; [] if there are none."""
    implementation = text_encoder.config._attn_implementation
    if implementation == "sdpa":
        return []
    return [f"{component}: attention {implementation!r} is not supported; supported: 'sdpa'"]


def _steps(text_encoder: Any, mask: tuple[str, ...]) -> Iterator[Step]:
    yield Step(name="encoder.embed_tokens", run=_embed, modules=("encoder.embed_tokens",))
    for i in range(len(text_encoder.encoder.block)):
        name = f"encoder.block.{i}"
        # Later blocks read the first one's table, so they name it as a part of theirs.
        yield Step(name=name, run=partial(_encode, name), modules=(name,) if i == 0 else (name, _BIAS), reads=mask)
    yield Step(name="encoder.final_layer_norm", run=_normalise, modules=("encoder.final_layer_norm",))


def _embed(text_encoder: Any, input_ids: Tensor) -> Tensor:
    hidden: Tensor = text_encoder.encoder.embed_tokens(input_ids)  # (B, T, D)
    return hidden


def _encode(name: str, text_encoder: Any, hidden: Tensor, *masks: Tensor) -> Tensor:
    length = hidden.shape[1]
    attention = text_encoder.encoder.block[0].layer[0].SelfAttention
    bias = attention.compute_bias(length, length, device=hidden.device)  # (1, heads, T, T)
    # At most one; without it padding is read like other tokens.
    for mask in masks:
        bias = bias.masked_fill(mask[:, None, None, :] == 0, torch.finfo(bias.dtype).min)  # (B, heads, T, T)
    block: Any = attribute(text_encoder, name)
    result: Tensor = block(hidden, None, bias)[0]
    return result


def _normalise(text_encoder: Any, hidden: Tensor) -> Tensor:
    states: Tensor = text_encoder.encoder.final_layer_norm(hidden)
    return states
