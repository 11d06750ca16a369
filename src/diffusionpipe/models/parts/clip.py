"""A CLIP text encoder as layers: token ids to the states that cross-attention reads, or to a pooled embedding.

Token ids are (B, T), or (B, N, T) of captions in N chunks. Each chunk is encoded by itself, as if it were a caption.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.costs import TensorSpec
from diffusionpipe.models.base.family import WHOLE, CaptionReading, Step, chain, unsupported
from diffusionpipe.models.graphs.graph import Layer, attribute

_EOS_BEFORE_IT_WAS_STORED = 2


def text_layers(text_encoder: Any, captions: CaptionReading = WHOLE) -> tuple[Layer, ...]:
    """The layers of a CLIP from the raw input "input_ids" to "text_states", its last_hidden_state, chunk after chunk.

    With `captions.clip_skip` n the last n - 1 layers are left out.
    """
    steps = _steps(text_encoder)
    # clip_skip 1 keeps all layers: `steps` has one more than there are layers.
    kept = steps[: len(steps) + 1 - (captions.clip_skip or 1)]
    steps = [*kept, Step(name="final_layer_norm", run=_normalise, modules=("final_layer_norm",))]
    return chain("text_encoder", "input_ids", steps, "text_states")


def freeze_skipped(text_encoder: Any, captions: CaptionReading) -> None:
    """Set the parameters of layers that `captions.clip_skip` leaves out to need no gradient."""
    skipped = (captions.clip_skip or 1) - 1
    layers: Any = attribute(text_encoder, f"{_path(text_encoder)}encoder.layers")
    for layer in layers[len(layers) - skipped :]:
        layer.requires_grad_(False)


def penultimate_layers(text_encoder: Any, *, component: str, ids: str, states: str) -> tuple[Layer, ...]:
    """The layers of a CLIP from the token ids to `states`, the inputs of its last layer (hidden_states[-2])."""
    return chain(component, ids, _steps(text_encoder)[:-1], states)


def pooled_layers(
    text_encoder: Any, *, component: str, ids: str, states: str, pooled: str, zeroes_marked: bool = False
) -> tuple[Layer, ...]:
    """All layers of a CLIP: from token ids to `states` (`penultimate_layers`) and `pooled`, the end token's state.

    The pooled state is projected; a CLIPTextModel has no projection and gives the state itself, its pooler_output. Of
    chunks the first one is pooled. `zeroes_marked`: whether `pooled` goes through `zeroed_where_marked`.
    """
    last = _steps(text_encoder)[-1]
    last = replace(last, run=partial(_encode_first, last.name))
    path = _path(text_encoder)
    projection = ("text_projection",) if path else ()
    run = _pool_unmarked if zeroes_marked else _pool
    pool = Step(name="pooled", run=run, modules=(f"{path}final_layer_norm", *projection), reads=(ids,))
    before = penultimate_layers(text_encoder, component=component, ids=ids, states=states)
    return (*before, *chain(component, states, (last, pool), pooled))


def text_inputs(text_encoder: Any, name: str = "input_ids", *, chunks: int = 1) -> tuple[TensorSpec, ...]:
    """(description of a CLIP's raw input,): token ids, (length,) or (chunks, length), of the longest text it reads."""
    length = text_encoder.config.max_position_embeddings
    return (TensorSpec(name=name, shape=(length,) if chunks == 1 else (chunks, length), dtype="int64"),)


def text_problems(
    text_encoder: Any,
    *,
    is_trained: bool = False,
    component: str = "text_encoder",
    captions: CaptionReading = WHOLE,
) -> list[str]:
    """Sentences about settings of a CLIP, or of `captions`, that its layers do not support; [] if there are none."""
    config = text_encoder.config
    problems = unsupported(component, config.to_dict(), {"attention_dropout": (0, 0.0)} if is_trained else {})
    if config._attn_implementation != "sdpa":
        problems.append(f"{component}: attention {config._attn_implementation!r} is not supported; supported: 'sdpa'")
    if (captions.clip_skip or 1) > config.num_hidden_layers:
        problems.append(
            f"clip_skip: {captions.clip_skip} is more than the {config.num_hidden_layers} layers of {component}; 1 is "
            "the last layer, 2 the one before it"
        )
    return problems


def _path(text_encoder: Any) -> str:
    """The start of the names of a CLIP's parts: "text_model." or "".

    A CLIPTextModelWithProjection holds them one level down.
    """
    return "text_model." if hasattr(text_encoder, "text_model") else ""


def _steps(text_encoder: Any) -> list[Step]:
    return list(_embeddings_and_layers(_path(text_encoder), text_encoder.config.num_hidden_layers))


def _embeddings_and_layers(path: str, num_layers: int) -> Iterator[Step]:
    yield Step(name=f"{path}embeddings", run=partial(_embed, f"{path}embeddings"), modules=(f"{path}embeddings",))
    for i in range(num_layers):
        name = f"{path}encoder.layers.{i}"
        yield Step(name=name, run=partial(_encode, name), modules=(name,))


def _embed(name: str, text_encoder: nn.Module, input_ids: Tensor) -> Tensor:
    embeddings: Any = attribute(text_encoder, name)
    return _by_chunk(lambda ids: embeddings(input_ids=ids), input_ids, 2)  # (B, T, D) or (B, N, T, D)


def _encode(name: str, text_encoder: nn.Module, hidden: Tensor) -> Tensor:
    layer: Any = attribute(text_encoder, name)
    # Without padding the causal mask is a flag of the attention kernel; CLIP reads its padding like other tokens.
    return _by_chunk(lambda states: layer(states, None, is_causal=True), hidden, 3)


def _encode_first(name: str, text_encoder: nn.Module, hidden: Tensor) -> Tensor:
    """The result of the layer `name` for the first chunk alone, (B, T, D)."""
    return _encode(name, text_encoder, hidden if hidden.ndim == 3 else hidden[:, 0])  # (B, T, D)


def _by_chunk(run: Callable[[Tensor], Tensor], values: Tensor, ndim: int) -> Tensor:
    """The result of `run` for values of `ndim` dimensions, or, with one dimension more, for each chunk."""
    if values.ndim == ndim:
        return run(values)
    by_chunk: Tensor = run(values.flatten(0, 1)).unflatten(0, values.shape[:2])
    return by_chunk


def joined_chunks(states: Tensor) -> Tensor:
    """The states (B, T, D) as they are, or the states of chunks (B, N, T, D) one after the other, (B, N T, D)."""
    return states.flatten(1, -2)


def _normalise(text_encoder: Any, hidden: Tensor) -> Tensor:
    states: Tensor = text_encoder.final_layer_norm(hidden)
    return joined_chunks(states)


def zeroed_where_marked(values: Tensor, input_ids: Tensor) -> Tensor:
    """The values (B, ...), with zeros for samples whose tokens are all the same, which marks a sample without text."""
    tokens = input_ids.flatten(1)
    # Every text begins with one mark and ends with another.
    is_text = (tokens != tokens[:, :1]).any(dim=1).reshape(-1, *[1] * (values.ndim - 1))
    return torch.where(is_text, values, torch.zeros_like(values))


def _pool_unmarked(text_encoder: Any, hidden: Tensor, input_ids: Tensor) -> Tensor:
    return zeroed_where_marked(_pool(text_encoder, hidden, input_ids), input_ids)


def _pool(text_encoder: Any, hidden: Tensor, input_ids: Tensor) -> Tensor:
    """The state of the first token that ends the text, projected if the CLIP has a projection, (B, D)."""
    model = getattr(text_encoder, "text_model", text_encoder)
    states = model.final_layer_norm(hidden)  # (B, T, D)
    tokens = (input_ids if input_ids.ndim == 2 else input_ids[:, 0]).int()
    if model.eos_token_id == _EOS_BEFORE_IT_WAS_STORED:  # the end's token has the highest number of all
        ends = tokens.argmax(dim=-1)
    else:
        ends = (tokens == model.eos_token_id).int().argmax(dim=-1)
    pooled: Tensor = states[torch.arange(len(states), device=states.device), ends]  # (B, D)
    return text_encoder.text_projection(pooled) if model is not text_encoder else pooled
