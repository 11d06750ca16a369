"""Families of transformers as data: what is read from captions, and how the transformer is called.

Everything else comes from the classes themselves: `cutting.cut` makes layers of text encoders and transformer.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.models.clip import pooled_layers, text_problems
from diffusionpipe.models.cutting import cut
from diffusionpipe.models.family import Clip, Family, Prompt, set_trainable
from diffusionpipe.models.graph import Layer, LayerGraph
from diffusionpipe.models.latents import encoding_of
from diffusionpipe.models.objective import Objective, loss_layer, noise_layer, objective_inputs
from diffusionpipe.models.pipeline_call import PipelineCall
from diffusionpipe.models.t5 import t5_layers, t5_problems

Call = Callable[..., Tensor]
Components = Mapping[str, Any]
Need = Callable[[Components, int], tuple[object, str]]
"""`need(components, channels of latents)`: the value that a field of a configuration needs, and why."""


def latents(factor: int = 1, why: str = "the channels of the VAE's latents") -> Need:
    """A multiple of the channels of latents."""
    return lambda components, channels: (channels * factor, why)


def patches(side: int) -> Need:
    """The channels of a patch of latents."""
    return latents(side**2, "a patch of the VAE's latents")


def text_width(components: Components, channels: int) -> tuple[object, str]:
    """The width of the states of "text_encoder"."""
    return components["text_encoder"].config.get_text_config().hidden_size, "the width of the text encoder"


def pooled_width(component: str) -> Need:
    """The width of the pooled embedding of a CLIP."""
    return lambda components, channels: (components[component].config.hidden_size, "the width of CLIP")


def exactly(value: object, why: str = "the patches of the published models") -> Need:
    """A fixed value."""
    return lambda components, channels: (value, why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A frozen text encoder."""

    kind: str
    """Its class."""
    prompt: Prompt
    """What its tokenizer reads, and how long."""
    component: str = "text_encoder"
    states: Call | None = None
    """`states(encoder, ids, mask)` -> what the transformer reads; None: last states of a T5."""
    stacked: int = 1
    """States of how many layers stand side by side in what `states` gives."""
    sees_padding: bool = False
    """Whether tokens of a T5 read those of padding."""
    is_pooled: bool = False
    """Whether the pooled embedding of a CLIP is read, which sees padding."""
    ids: str = "input_ids"
    mask: str = "input_mask"
    writes: str = "text_states"


def pooled_clip(component: str) -> Text:
    """The pooled embedding of a CLIPTextModel, "pooled_text"."""
    ids = component.replace("text_encoder", "input_ids")
    return Text(
        kind="CLIPTextModel",
        prompt=Prompt(length=77),
        component=component,
        ids=ids,
        writes="pooled_text",
        is_pooled=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A family."""

    vae: str
    """Class of the VAE."""
    transformer: str
    """Class of the transformer."""
    texts: tuple[Text, ...]
    predict: Call
    """`predict(transformer, noisy=, timesteps=, **reads)` -> prediction, of the shape of the noisy latents."""
    reads: tuple[str, ...]
    """What the transformer reads beside noisy latents and times: states and masks of texts."""
    patch: int
    guidance: float
    """Scale of classifier-free guidance of diffusers' pipeline."""
    embedded_guidance: float | None = None
    """As in `Family`; a transformer with guidance embeddings then also reads "guidance"."""
    needs: Mapping[str, Need]
    """Field of the transformer's configuration -> what it needs."""
    call: PipelineCall
    """How diffusers' pipeline draws with it."""
    problems: Callable[[Components, int], list[str]] = lambda components, channels: []
    """What else of the components does not fit."""
    sample_size: int | None = None
    """As in `Family`."""
    absent: tuple[str, ...] = ()
    """Entries of model_index.json that must be empty."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """As in `Family`."""
    has_adapters: bool = True
    """As in `Family`."""


def family(described: Described) -> Family:
    """The family's entry in the registry."""
    return Family(
        components={
            **{text.component: text.kind for text in described.texts},
            "vae": described.vae,
            "transformer": described.transformer,
        },
        trainable=("transformer",),
        graph=partial(described_graph, described),
        guidance=described.guidance,
        embedded_guidance=described.embedded_guidance,
        prompts={text.ids: text.prompt for text in described.texts},
        absent=described.absent,
        settings=described.settings,
        call=described.call,
        sample_size=described.sample_size,
        has_adapters=described.has_adapters,
        has_clips="num_frames" in described.call.options,
    )


def _unfit(needs: Mapping[str, Need], components: Components, channels: int) -> list[str]:
    """A problem for each field of the transformer's configuration that has not the value that it needs."""
    config = components["transformer"].config
    wanted = {field: need(components, channels) for field, need in needs.items()}
    return [
        f"transformer: {field} {_plain(config[field])} is not {_plain(value)}, {why}"
        for field, (value, why) in wanted.items()
        if _plain(config[field]) != _plain(value)
    ]


def _plain(value: object) -> object:
    """Lists of JSON as the tuples of constructors."""
    return tuple(value) if isinstance(value, list) else value


def masked(states: Tensor, mask: Tensor) -> Tensor:
    """The states (B, T, D), zero where the mask is."""
    return states * mask.unsqueeze(-1).to(states.dtype)


def last_states(encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """The last hidden states (B, T, D) of an encoder, zero where the mask is."""
    return masked(encoder(input_ids=ids, attention_mask=mask).last_hidden_state, mask)


def described_graph(
    described: Described,
    components: Mapping[str, Any],
    *,
    objective: Objective,
    resolution: int,
    train: Collection[str] = ("transformer",),
    dtype: str = "float32",
    clip: Clip | None = None,
) -> LayerGraph:
    """The graph over text encoders, "vae" and "transformer" for square pictures, which are clips of one frame.

    `clip`: for clips of this size instead.

    Raises ModelError for everything in the configurations that the layers would not run exactly.
    """
    vae, transformer = components["vae"], components["transformer"]
    encoding = encoding_of(vae, resolution, dtype, clip)
    if problems := _problems(described, components, encoding.latents):
        raise ModelError("\n".join(problems))
    used = {name: components[name] for name in (*(t.component for t in described.texts), "vae", "transformer")}
    set_trainable(used, train, ("transformer",))
    wide = next(p.dtype for p in transformer.parameters() if p.is_floating_point())
    given: dict[str, Tensor] = {
        "noisy": torch.empty((1, *encoding.latents), dtype=getattr(torch, dtype), device="meta"),
        "timesteps": torch.empty(1, dtype=torch.float32 if objective.is_flow else torch.int64, device="meta"),
    }
    layers: list[Layer] = []
    specs: list[TensorSpec] = []
    for text in described.texts:
        layers += _text_layers(text, components[text.component], given, specs)
    narrowed = partial(_narrowed, described.predict, wide)
    told: tuple[str, ...] = ()
    if described.embedded_guidance is not None and transformer.config.guidance_embeds:
        told = ("guidance",)
        given["guidance"] = torch.empty(1, dtype=torch.float32, device="meta")
        specs.append(TensorSpec(name="guidance", shape=()))
    read = {name: given[name] for name in ("noisy", "timesteps", *described.reads, *told)}
    return LayerGraph(
        layers=(
            *layers,
            *encoding.layers,
            noise_layer(described.patch),
            *cut(transformer, narrowed, read),
            loss_layer(),
        ),
        components={**used, "objective": objective},
        inputs=(*encoding.inputs, *specs, *objective_inputs(encoding.latents, dtype)),
        patch=described.patch,
    )


def _problems(described: Described, components: Components, latents: Sequence[int]) -> list[str]:
    """What of the components and of the latents' shape, (C, ..., H, W), does not fit."""
    problems = _unfit(described.needs, components, latents[0]) + described.problems(components, latents[0])
    for text in described.texts:
        if text.is_pooled:
            problems += text_problems(components[text.component], component=text.component)
        elif text.states is None:
            problems += t5_problems(components[text.component], component=text.component)
    return problems + [
        f"transformer: latents of size {side} cannot be cut into patches of {described.patch}"
        for side in sorted(set(latents[-2:]))
        if side % described.patch
    ]


def _narrowed(predict: Call, dtype: torch.dtype, transformer: Any, **tensors: Tensor) -> Tensor:
    """Latents and states in the dtype of the weights; times stay as they are."""
    wanted = {
        name: tensor.to(dtype) if tensor.is_floating_point() and name != "timesteps" else tensor
        for name, tensor in tensors.items()
    }
    return predict(transformer, **wanted)


def _text_layers(text: Text, encoder: Any, given: dict[str, Tensor], specs: list[TensorSpec]) -> tuple[Layer, ...]:
    """The encoder's layers; what they and the tokenizer give is added to `given`, raw inputs to `specs`."""
    length = text.prompt.length
    for name in (text.ids,) if text.is_pooled else (text.ids, text.mask):
        given[name] = torch.empty((1, length), dtype=torch.int64, device="meta")
        specs.append(TensorSpec(name=name, shape=(length,), dtype="int64"))
    width = encoder.config.get_text_config().hidden_size * text.stacked
    shape: tuple[int, ...] = (1, length - text.prompt.dropped, width)
    if text.is_pooled:
        shape = (1, width)
        layers = pooled_layers(
            encoder, component=text.component, ids=text.ids, states=f"{text.component}.states", pooled=text.writes
        )
    elif text.states is None:
        mask = None if text.sees_padding else text.mask
        layers = t5_layers(encoder, component=text.component, ids=text.ids, states=text.writes, mask=mask)
    else:
        read = {name: given[name] for name in (text.ids, text.mask)}
        layers = cut(encoder, partial(_states, text), read, component=text.component, output=text.writes)
    given[text.writes] = torch.empty(shape, dtype=next(encoder.parameters()).dtype, device="meta")
    return layers


def _states(text: Text, encoder: Any, **tensors: Tensor) -> Tensor:
    assert text.states is not None
    return text.states(encoder, tensors[text.ids], tensors[text.mask])
