"""The parts that adapters share: their entry in the registry, chains of layers, checks of configurations."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.errors import ModelError
from diffusionpipe.ir.size import Clip as Clip
from diffusionpipe.models.base.pipeline_call import PipelineCall
from diffusionpipe.models.graphs.graph import Layer, LayerGraph

HINT = "; if it reads its own estimate (self-conditioning), set objective.self_conditioning"
"""The advice about a denoiser with twice the inputs."""
PLACED = "; if it reads coordinates (it was trained on patches), set data.patches"
"""The advice about a denoiser with two more inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """How a caption becomes tokens of a text encoder: template, padded length, and tokens whose states are not read."""

    length: int
    """The number of tokens to which a caption is padded or cut."""
    template: str = "{}"
    """The text around the caption."""
    chat: Callable[[str], Mapping[str, Any]] | None = None
    """`chat(caption)` -> arguments for the tokenizer's own template of a chat, which then stands for `template`."""
    adds_marks: bool = True
    """Whether the tokenizer adds tokens of its own for start and end, which templates of chats may hold already."""
    side: str | None = "right"
    """The side of the padding; None: the side that the tokenizer's folder says."""
    clean: Callable[[str], str] = str
    """A function that changes the caption first; a function of a module, because data workers get it."""
    dropped: int = 0
    """Tokens of the template whose states are not read."""
    instruction: str = ""
    """The text before a caption, not before a `Negative`. The first token and the last `length - dropped - 1` are read;
    a gap of padding before these makes `length` tokens of any tokenizer's."""
    suffix: str = ""
    """The text after the caption and its padding."""


def lowered(caption: str) -> str:
    """The caption in lower case, without blanks around it."""
    return caption.lower().strip()


def question(caption: str, *, is_thinking: bool) -> dict[str, Any]:
    """Arguments for a tokenizer's chat template: the caption as the first message, and the start of an answer.

    `is_thinking`: whether the model may think before the answer.
    """
    messages = [{"role": "user", "content": caption}]
    return {"conversation": messages, "add_generation_prompt": True, "enable_thinking": is_thinking}


class Negative(str):
    """A text that guidance leads away from, or that stands for no caption."""

    __slots__ = ()


class Absent(Negative):
    """No text at all: the caption was dropped, or no negative prompt was given."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LowResolution:
    """The small pictures that a model of super-resolution reads: their side in pixels and the most noise on them."""

    resolution: int
    augmentation: float
    """In training they are noised at levels below this share of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionReading:
    """How CLIP encoders read captions: in how many chunks and up to which layer; by default as diffusers does."""

    chunks: int = 1
    """Parts of a caption that are encoded one by one, each as long as the encoder reads; their states are joined."""
    clip_skip: int | None = None
    """Which of the last layers gives the states, counted from 1, the last one; None: the last one."""


WHOLE = CaptionReading()
"""Captions are read as diffusers' pipelines read them."""
MOST_CHUNKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The facts about one kind of diffusers pipeline: components, function that builds its graph, prompts, guidance."""

    components: Mapping[str, str]
    """The classes by the names that model_index.json gives them, e.g. "unet": "UNet2DConditionModel"."""
    trainable: tuple[str, ...]
    """Components that can be trained; the first is the denoiser, trained unless the recipe says otherwise."""
    graph: Callable[..., LayerGraph]
    """`graph(components, objective=Objective, resolution=pixels, train=components, dtype="float32")`."""
    guidance: float
    """Scale of classifier-free guidance that diffusers' pipeline draws with unless told otherwise; 1 is without."""
    embedded_guidance: float | None = None
    """The guidance that diffusers' pipeline gives a distilled model, one with guidance embeddings, by default; None for
    a pipeline without such models."""
    prompts: Mapping[str, Prompt] = field(default_factory=dict)
    """The prompts of raw inputs that are more than the caption's tokens, by the input's name."""
    absent: tuple[str, ...] = ()
    """Entries of model_index.json for which there is no adapter; they must be empty."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Entries of model_index.json that must have these values, where they are there."""
    zeroed: str | None = None
    """The entry of model_index.json that says whether the denoiser reads zeros in place of an `Absent` text; it does if
    there is no entry. None: it reads what the encoders make of the empty text."""
    call: PipelineCall | None = None
    """How diffusers' own pipeline draws from it, with our layers for its transformer; None: our own loop draws."""
    has_adapters: bool = True
    """Whether diffusers' pipeline loads adapters, so that they can be trained and exported."""
    convolution: str | None = None
    """The first convolution of the denoiser, by its name below it, which self-conditioning widens; None: a denoiser
    without it cannot read its own estimate."""
    places: str | None = None
    """The first convolution of a denoiser without absolute positions, by its name below it, which patches widen by
    coordinates; None: it cannot be trained on patches."""
    has_variances: bool = False
    """Whether the denoiser also states variances, which `learned_variance` trains."""
    augmentation: str | None = None
    """The scheduler that noises the small pictures which the denoiser reads; None: it reads none."""
    has_chunks: bool = False
    """Whether `graph` also takes `captions`, a `CaptionReading` of several chunks."""
    has_clip_skip: bool = False
    """Whether that may name a layer too."""
    has_clips: bool = False
    """Whether `graph` also takes `clip`, a `Clip`."""
    has_aspects: bool = False
    """Whether `graph` also takes a `clip` of one frame: a picture that is not square."""
    frame_rate: float | None = None
    """Frames of a second that diffusers' pipeline gives the model by default; the graph reads "frame_rate". None: the
    model reads no frame rate."""
    sample_size: int | None = None
    """Side of the latents that diffusers' pipeline draws unless told otherwise; None: as the denoiser's configuration
    says."""

    @property
    def needs_negative(self) -> bool:
        """Whether diffusers' pipeline guides only where it is given a negative prompt, which may be "".

        Those pipelines call the scale true_cfg_scale; FLUX.1's is the one of them that our own loop draws for.
        """
        return self.embedded_guidance is not None if self.call is None else self.call.scale == "true_cfg_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One layer of a `chain`: it reads the tensor that the layer before it wrote, and further tensors by name."""

    name: str
    """Below the component; also names the tensor that the layer writes."""
    run: Callable[..., Tensor]
    """`run(component, hidden, *reads)`."""
    modules: tuple[str, ...]
    reads: tuple[str, ...] = ()


def chain(component: str, read: str, steps: Iterable[Step], write: str) -> tuple[Layer, ...]:
    """The steps as layers of `component`, each of which reads the tensor that the one before wrote.

    The first reads `read`, the last writes `write`, the others write tensors with their own names.
    """
    steps = tuple(steps)
    names = [f"{component}.{step.name}" for step in steps]
    return tuple(
        Layer(
            name=name,
            component=component,
            reads=(hidden, *step.reads),
            writes=(written,),
            modules=step.modules,
            run=_Single(step.run),
        )
        # Not strict: nothing reads the last of the names that are read.
        for step, name, hidden, written in zip(steps, names, [read, *names], [*names[:-1], write], strict=False)
    )


@dataclass(frozen=True, slots=True)
class _Single:
    """A layer's `run` from a function that returns one tensor."""

    function: Callable[..., Tensor]

    def __call__(self, component: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
        return (self.function(component, *tensors),)


def unsupported(component: str, config: Mapping[str, object], allowed: Mapping[str, tuple[object, ...]]) -> list[str]:
    """A sentence for each field of the configuration whose value is not among the allowed ones; [] if all are.

    A field that is absent has its default, and the defaults are all supported.
    """
    return [
        f"{component}: {field} = {config[field]!r} is not supported; supported: {', '.join(map(repr, values))}"
        for field, values in allowed.items()
        if field in config and config[field] not in values
    ]


def set_trainable(components: Mapping[str, nn.Module], train: Collection[str], trainable: Collection[str]) -> None:
    """Puts the components to train into training mode and all others into evaluation mode without gradients.

    Raises ModelError for a component that cannot be trained.
    """
    unknown = [name for name in train if name not in trainable]
    if unknown or not train:
        what = f"{', '.join(unknown)} cannot be trained" if unknown else "nothing is trained"
        raise ModelError(f"{what}; choose from {', '.join(trainable)}")
    for name, component in components.items():
        component.train(name in train)
        component.requires_grad_(name in train)


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of the module's weights, which is the one that it reads outside autocast.

    Under autocast, which narrows by itself what needs it, at least float32: frozen weights may be stored narrower than
    the times and positions that are computed in this dtype.
    """
    weight = next(module.parameters())
    if weight.device.type != "meta" and torch.is_autocast_enabled(weight.device.type):
        return torch.promote_types(weight.dtype, torch.float32)
    return weight.dtype
