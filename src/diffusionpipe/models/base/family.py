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
"""The advice, at the end of an error, about a denoiser with twice the input channels of its samples."""
PLACED = "; if it reads coordinates (it was trained on patches), set data.patches"
"""The advice, at the end of an error, about a denoiser with two more input channels than its samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The way from a caption to tokens of a text encoder: template, padded length, tokens whose states are not read."""

    length: int
    """The number of tokens to which a caption is padded or cut."""
    template: str = "{}"
    """The text around the caption."""
    chat: Callable[[str], Mapping[str, Any]] | None = None
    """`chat(caption)` -> arguments for the tokenizer's own template of a chat, used in place of `template`."""
    adds_marks: bool = True
    """Whether the tokenizer adds tokens of its own for start and end, which templates of chats may hold already."""
    side: str | None = "right"
    """The side of the padding; None: the side that the tokenizer's folder states."""
    clean: Callable[[str], str] = str
    """A function that changes the caption first; a function of a module, because data workers get it."""
    dropped: int = 0
    """The number of tokens of the template, or of the instruction, whose states are not read."""
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
    """A text in place of a caption, which is encoded without `Prompt.instruction`: a negative prompt, or `Absent`."""

    __slots__ = ()


class Absent(Negative):
    """The empty text in place of a caption that is dropped in training, or of a negative prompt that is not given."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LowResolution:
    """The small pictures that a model of super-resolution reads: their side in pixels and the most noise on them."""

    resolution: int
    """Their side in pixels."""
    augmentation: float
    """The share of all noise levels, from the lowest, at which they are noised in training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionReading:
    """How CLIP encoders read captions: in how many chunks and up to which layer; by default as diffusers does."""

    chunks: int = 1
    """The number of parts in which a caption is encoded, each as long as the encoder reads; their states are joined."""
    clip_skip: int | None = None
    """The number of the layer that gives the states, counted from the last one, which is 1; None: the last one."""


WHOLE = CaptionReading()
"""The reading of captions as in diffusers' pipelines: one chunk, up to the last layer."""
MOST_CHUNKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The facts about one kind of diffusers pipeline: components, function that builds its graph, prompts, guidance."""

    components: Mapping[str, str]
    """Name of a component in model_index.json -> its class, e.g. "unet": "UNet2DConditionModel"."""
    trainable: tuple[str, ...]
    """Components that can be trained; the first is the denoiser, trained unless the recipe says otherwise."""
    graph: Callable[..., LayerGraph]
    """The function that builds the layer graph: `graph(components, objective=Objective, resolution=pixels,
    train=names, dtype="float32")`."""
    guidance: float
    """The scale of guidance with which diffusers' pipeline draws by default; see `PipelineCall.unguided`."""
    embedded_guidance: float | None = None
    """The guidance that diffusers' pipeline gives a distilled model, one with guidance embeddings, by default; None for
    a pipeline without such models."""
    prompts: Mapping[str, Prompt] = field(default_factory=dict)
    """Name of a raw input -> its prompt, for raw inputs of tokens that hold more than the caption."""
    absent: tuple[str, ...] = ()
    """Entries of model_index.json for which there is no adapter; they must be empty."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Entry of model_index.json -> the value that it must have if it is there."""
    zeroed: str | None = None
    """The entry of model_index.json that says whether the denoiser reads zeros in place of an `Absent` text; it does if
    there is no entry. None: it reads what the encoders make of the empty text."""
    call: PipelineCall | None = None
    """The call of diffusers' own pipeline to draw with our layers in place of its transformer; None: our loop draws."""
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
    """The folder's scheduler that noises the small pictures which the denoiser reads; None: it reads none."""
    has_chunks: bool = False
    """Whether `graph` also takes `captions`, a `CaptionReading` of several chunks."""
    has_clip_skip: bool = False
    """Whether the `captions` of `graph` may also have a `clip_skip`."""
    has_clips: bool = False
    """Whether `graph` also takes `clip`, a `Clip`: the size of a clip in place of a square picture."""
    has_aspects: bool = False
    """Whether `graph` also takes a `clip` of one frame: a picture that is not square."""
    frame_rate: float | None = None
    """Frames of a second that diffusers' pipeline gives the model by default; the graph reads "frame_rate". None: the
    model reads no frame rate."""
    sample_size: int | None = None
    """Side of the latents that diffusers' pipeline draws by default; None: the side in the denoiser's configuration."""

    @property
    def needs_negative(self) -> bool:
        """Whether diffusers' pipeline guides only where it is given a negative prompt, which may be "".

        Those pipelines call the scale true_cfg_scale. Our own loop draws for one of them, FLUX.1's.
        """
        return self.embedded_guidance is not None if self.call is None else self.call.scale == "true_cfg_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One layer of a `chain`: it reads the tensor that the layer before it wrote, and further tensors by name."""

    name: str
    """The name of the layer below the component, and of the tensor that it writes."""
    run: Callable[..., Tensor]
    """`run(component, hidden, *reads)` -> the tensor that the layer writes."""
    modules: tuple[str, ...]
    """The names, below the component, of the modules that the layer runs."""
    reads: tuple[str, ...] = ()
    """The names of the further tensors that it reads."""


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
    """The `run` of a layer, which returns a tuple, from a function that returns one tensor."""

    function: Callable[..., Tensor]
    """`function(component, *tensors)` -> the tensor."""

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
    """Put the components named in `train` into training mode, all others into evaluation mode without gradients.

    Raises ModelError for a name that is not among `trainable`, and if nothing is trained.
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

    Under autocast it is at least float32: times and positions are computed in this dtype, and frozen weights may be
    stored narrower. Autocast itself narrows the inputs of the operations that it runs narrow.
    """
    weight = next(module.parameters())
    if weight.device.type != "meta" and torch.is_autocast_enabled(weight.device.type):
        return torch.promote_types(weight.dtype, torch.float32)
    return weight.dtype
