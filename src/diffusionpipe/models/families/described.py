"""Families of transformers as data: the texts read from captions, and how the transformer is called.

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
from diffusionpipe.models.base.family import Clip, Family, Prompt, set_trainable
from diffusionpipe.models.base.pipeline_call import PipelineCall
from diffusionpipe.models.cut.cutting import cut
from diffusionpipe.models.cut.streams import BlockStreams, named_streams
from diffusionpipe.models.graphs.graph import Layer, LayerGraph
from diffusionpipe.models.objectives.objective import Objective, loss_layer, noise_layer, objective_inputs
from diffusionpipe.models.parts.autoencoder import Picture
from diffusionpipe.models.parts.clip import pooled_layers, text_problems
from diffusionpipe.models.parts.latents import encoding_of
from diffusionpipe.models.parts.masks import CHANNELS, MaskedInputs
from diffusionpipe.models.parts.t5 import t5_layers, t5_problems

_CLIP = Prompt(length=77)
_EXACT = ("timesteps", "frame_rate")
"""The raw inputs that are not cast to the dtype of the weights."""
Call = Callable[..., Tensor]
Components = Mapping[str, Any]
Shape = Sequence[int]
"""The shape of a sample's latents."""
Masks = Callable[[Any, Picture, str], MaskedInputs]
"""`masks(vae, size of pictures, dtype of the floating raw inputs)` -> the layers and inputs of a mask."""
Need = Callable[[Components, int], tuple[object, str]]
"""`need(components, channels of latents)` -> (value that a field of a configuration must have, the reason)."""


def latents(factor: int = 1, why: str = "the channels of the VAE's latents") -> Need:
    """A `Need` of `factor` times the number of channels of the VAE's latents; `why`: the reason, for errors."""
    return lambda components, channels: (channels * factor, why)


def patches(side: int) -> Need:
    """A `Need` of the number of channels of a patch of `side` x `side` latents."""
    return latents(side**2, "a patch of the VAE's latents")


def text_width(components: Components, channels: int) -> tuple[object, str]:
    """The `Need` of the hidden size of "text_encoder": (this size, its name for errors)."""
    return components["text_encoder"].config.get_text_config().hidden_size, "the width of the text encoder"


def t5_width(component: str) -> Need:
    """A `Need` of the width of the states of the T5 with this component name."""
    return lambda components, channels: (components[component].config.d_model, "the width of T5")


def pooled_width(component: str) -> Need:
    """A `Need` of the width of the pooled embedding of the CLIP with this component name."""
    return lambda components, channels: (components[component].config.hidden_size, "the width of CLIP")


def exactly(value: object, why: str = "the patches of the published models") -> Need:
    """A `Need` of this one value, the same for all components; `why`: the reason, for errors."""
    return lambda components, channels: (value, why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One frozen text encoder of a family: class, prompt, and the names of the tensors that it reads and writes."""

    kind: str
    """The class of the text encoder."""
    prompt: Prompt | None
    """The texts that its tokenizer reads, and their length; None: plain captions, as long as the encoder can read."""
    component: str = "text_encoder"
    """The name of its component."""
    states: Call | None = None
    """`states(encoder, ids, mask)` -> the states that the transformer reads; None: last states of a T5."""
    stacked: int = 1
    """The number of layers whose states are joined side by side in the result of `states`."""
    sees_padding: bool = False
    """Whether tokens of a T5 attend to tokens of padding."""
    is_pooled: bool = False
    """Whether the pooled embedding of a CLIP is read, which sees padding."""
    ids: str = "input_ids"
    """The raw input with the ids of its tokens."""
    mask: str = "input_mask"
    """The raw input that is 0 at tokens of padding."""
    writes: str = "text_states"
    """The tensor of its states, or of its pooled embedding."""
    then: Layer | None = None
    """A layer after this encoder's, which joins the results of the encoders so far."""


def pooled_clip(component: str, prompt: Prompt | None = _CLIP, **more: Any) -> Text:
    """A text encoder of class CLIPTextModel whose pooled embedding is read as "pooled_text".

    `more`: other fields of `Text`, which may also replace these.
    """
    ids = component.replace("text_encoder", "input_ids")
    told = {"kind": "CLIPTextModel", "writes": "pooled_text", **more}
    return Text(prompt=prompt, component=component, ids=ids, is_pooled=True, **told)


def t5(component: str, length: int, **more: Any) -> Text:
    """A text encoder of class T5EncoderModel that reads padding like other tokens and writes "text_states".

    `length`: the number of tokens of a caption. `more`: other fields of `Text`.
    """
    ids = component.replace("text_encoder", "input_ids")
    prompt = Prompt(length=length, side=None)
    return Text(kind="T5EncoderModel", prompt=prompt, component=component, ids=ids, sees_padding=True, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A family with a transformer as data: classes, text encoders, forward, and needs of its configuration."""

    vae: str
    """Class of the VAE."""
    transformer: str
    """Class of the transformer."""
    texts: tuple[Text, ...]
    """Its text encoders."""
    predict: Call
    """`predict(transformer, noisy=, timesteps=, **reads)` -> prediction, of the shape of the noisy latents."""
    reads: tuple[str, ...]
    """The tensors that the transformer reads beside noisy latents and times: states and masks of texts."""
    patch: int | None
    """Side of a patch of latents that is one token; None: it is in the transformer's configuration."""
    guidance: float
    """Scale of classifier-free guidance of diffusers' pipeline."""
    embedded_guidance: float | None = None
    """The guidance that diffusers' pipeline gives a distilled model, as in `Family`; a transformer with guidance
    embeddings then also reads "guidance"."""
    frame_rate: float | None = None
    """Frames of a second that the model reads by default, as in `Family`."""
    needs: Mapping[str, Need]
    """Field of the transformer's configuration -> the value that it must have."""
    call: PipelineCall | None = None
    """The call of diffusers' pipeline to draw with it; None: our own loop draws."""
    problems: Callable[[Components, Shape], list[str]] = lambda components, latents: []
    """`problems(components, shape of latents)` -> sentences about other faults of them."""
    sample_size: int | None = None
    """Side of the latents that diffusers' pipeline draws by default, as in `Family`."""
    absent: tuple[str, ...] = ()
    """Entries of model_index.json that must be empty."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Entries of model_index.json that must have these values, where they are there, as in `Family`."""
    has_adapters: bool = True
    """Whether diffusers' pipeline loads adapters, so that they can be trained and exported, as in `Family`."""
    streams: BlockStreams | None = None
    """The children whose layers and tensors get other names than `cut` gives them; None: all names are from `cut`."""
    masks: Callable[[Any, Any], Masks | None] | None = None
    """`masks(vae, transformer)` -> the function that makes the layers of masks; None if it reads no mask."""
    has_even_sigmas: bool = False
    """Whether diffusers' pipeline gives a flow's scheduler evenly spaced noise levels, as in `LayerGraph`."""


def family(described: Described) -> Family:
    """The `Family`, for the registry of families, of a described one."""
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
        prompts={text.ids: text.prompt for text in described.texts if text.prompt is not None},
        absent=described.absent,
        settings=described.settings,
        call=described.call,
        sample_size=described.sample_size,
        has_adapters=described.has_adapters,
        has_clips=described.call is not None and "num_frames" in described.call.options,
        has_aspects=True,
        frame_rate=described.frame_rate,
    )


def _unfit(needs: Mapping[str, Need], components: Components, channels: int) -> list[str]:
    """A sentence for each field of the transformer's configuration that does not have the value that it needs."""
    config = components["transformer"].config
    wanted = {field: need(components, channels) for field, need in needs.items()}
    return [
        f"transformer: {field} {_plain(config[field])} is not {_plain(value)}, {why}"
        for field, (value, why) in wanted.items()
        if _plain(config[field]) != _plain(value)
    ]


def _plain(value: object) -> object:
    """The value, or a tuple in place of a list: JSON has lists where constructors have tuples."""
    return tuple(value) if isinstance(value, list) else value


def masked(states: Tensor, mask: Tensor) -> Tensor:
    """The states (B, T, D), zero where the mask (B, T) is zero."""
    return states * mask.unsqueeze(-1).to(states.dtype)


def last_states(encoder: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """The last hidden states (B, T, D) of an encoder for token ids (B, T), zero where the mask (B, T) is zero."""
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
    """The layer graph over text encoders, "vae" and "transformer" for square pictures of `resolution` pixels.

    `clip`: the size of pictures or clips, in place of `resolution`. A picture is a clip of one frame.

    Raises ModelError for everything in the configurations that the layers would not run exactly.
    """
    vae, transformer = components["vae"], components["transformer"]
    encoding = encoding_of(vae, resolution, dtype, clip)
    if problems := _problems(described, components, encoding.latents):
        raise ModelError("\n".join(problems))
    patch = _patch(described, transformer)
    used = {name: components[name] for name in (*(t.component for t in described.texts), "vae", "transformer")}
    set_trainable(used, train, ("transformer",))
    given: dict[str, Tensor] = {
        "noisy": torch.empty((1, *encoding.latents), dtype=getattr(torch, dtype), device="meta"),
        # A flow's times are fractions, others whole numbers.
        "timesteps": torch.empty(1, dtype=torch.float32 if objective.is_flow else torch.int64, device="meta"),
    }
    make_masks = described.masks(vae, transformer) if described.masks is not None else None
    masks = MaskedInputs() if make_masks is None else make_masks(vae, clip or resolution, dtype)
    if masks.channels:
        shape = (1, masks.channels, *encoding.latents[1:])
        given[CHANNELS] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    layers: list[Layer] = []
    specs: list[TensorSpec] = []
    for text in described.texts:
        layers += _text_layers(text, components[text.component], given, specs, described.reads)
    told: list[str] = []
    if described.embedded_guidance is not None and transformer.config.guidance_embeds:
        told.append("guidance")
    if described.frame_rate is not None:
        told.append("frame_rate")
    # One number for each sample.
    for name in told:
        given[name] = torch.empty(1, dtype=torch.float32, device="meta")
        specs.append(TensorSpec(name=name, shape=()))
    filled = (CHANNELS,) if masks.channels else ()
    read = {name: given[name] for name in ("noisy", "timesteps", *described.reads, *filled, *told)}
    return LayerGraph(
        layers=(
            *layers,
            *encoding.layers,
            *masks.layers,
            noise_layer(patch),
            *_cut(described, transformer, read),
            loss_layer(),
        ),
        components={**used, "objective": objective},
        inputs=(*encoding.inputs, *masks.inputs, *specs, *objective_inputs(encoding.latents, dtype)),
        patch=patch,
        has_even_sigmas=described.has_even_sigmas,
    )


def _cut(described: Described, transformer: Any, read: Mapping[str, Tensor]) -> tuple[Layer, ...]:
    """The layers of the transformer, which read the tensors named in `read`, examples of which are given."""
    wide = next(p.dtype for p in transformer.parameters() if p.is_floating_point())
    narrowed, streams = partial(_narrowed, described.predict, wide), described.streams
    if streams is None:
        return cut(transformer, narrowed, read)
    return named_streams(cut(transformer, narrowed, read, joined=streams.joined), streams, read)


def _problems(described: Described, components: Components, latents: Sequence[int]) -> list[str]:
    """Sentences about faults of the components and of the latents' shape, (C, ..., H, W); [] if there are none."""
    problems = _unfit(described.needs, components, latents[0]) + described.problems(components, latents)
    for text in described.texts:
        if text.is_pooled:
            problems += text_problems(components[text.component], component=text.component)
        elif text.states is None:
            problems += t5_problems(components[text.component], component=text.component)
    patch = _patch(described, components["transformer"])
    return problems + [
        f"transformer: latents of size {side} cannot be cut into patches of {patch}"
        for side in sorted(set(latents[-2:]))
        if side % patch
    ]


def _patch(described: Described, transformer: Any) -> int:
    """The side of the square of latents that is one token of the transformer."""
    return transformer.config.patch_size if described.patch is None else described.patch


def _narrowed(predict: Call, dtype: torch.dtype, transformer: Any, **tensors: Tensor) -> Tensor:
    """The prediction of `predict` for these tensors, cast to the dtype of the weights but for times and frame rates."""
    wanted = {
        name: tensor.to(dtype) if tensor.is_floating_point() and name not in _EXACT else tensor
        for name, tensor in tensors.items()
    }
    return predict(transformer, **wanted)


def _text_layers(
    text: Text, encoder: Any, given: dict[str, Tensor], specs: list[TensorSpec], read: Collection[str]
) -> tuple[Layer, ...]:
    """The encoder's layers; their outputs and the tokenizer's are added to `given`, raw inputs to `specs`."""
    length = text.prompt.length if text.prompt is not None else encoder.config.max_position_embeddings
    dropped = text.prompt.dropped if text.prompt is not None else 0
    # A pooled CLIP reads padding as it is. A T5 that does so needs a mask only for the transformer.
    has_mask = not text.is_pooled and (text.mask in read or not text.sees_padding)
    for name in (text.ids, text.mask) if has_mask else (text.ids,):
        given[name] = torch.empty((1, length), dtype=torch.int64, device="meta")
        specs.append(TensorSpec(name=name, shape=(length,), dtype="int64"))
    hidden, dtype = encoder.config.get_text_config().hidden_size, next(encoder.parameters()).dtype
    shape: tuple[int, ...] = (1, length - dropped, hidden * text.stacked)
    if text.is_pooled:
        states = f"{text.component}.states"
        given[states] = torch.empty((1, length, hidden), dtype=dtype, device="meta")
        # Only a projection changes the width of the pooled state.
        shape = (1, encoder.config.projection_dim if hasattr(encoder, "text_projection") else hidden)
        layers = pooled_layers(encoder, component=text.component, ids=text.ids, states=states, pooled=text.writes)
    elif text.states is None:
        mask = None if text.sees_padding else text.mask
        layers = t5_layers(encoder, component=text.component, ids=text.ids, states=text.writes, mask=mask)
    else:
        read = {name: given[name] for name in (text.ids, text.mask)}
        layers = cut(encoder, partial(_states, text), read, component=text.component, output=text.writes)
    given[text.writes] = torch.empty(shape, dtype=dtype, device="meta")
    if text.then is None:
        return layers
    # Run on the meta device, to learn the shapes of its results.
    joined = text.then.run(encoder, *(given[name] for name in text.then.reads))
    given.update(zip(text.then.writes, joined, strict=True))
    return (*layers, text.then)


def _states(text: Text, encoder: Any, **tensors: Tensor) -> Tensor:
    assert text.states is not None
    return text.states(encoder, tensors[text.ids], tensors[text.mask])
