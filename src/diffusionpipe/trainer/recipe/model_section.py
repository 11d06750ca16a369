"""[model] and [lora] of a recipe: the model and the parts of it that are trained."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from diffusionpipe.trainer.recipe.group_section import GroupSection
from diffusionpipe.trainer.recipe.section import (
    Auto,
    Choice,
    Count,
    Maybe,
    Place,
    Positive,
    Section,
    Several,
    raise_problems,
    texts_for_text,
)


class FrozenDtype(StrEnum):
    """The form in which frozen weights are stored, by its name in a recipe."""

    AUTO = "auto"
    """Not yet decided: the arithmetic of the layers decides it (see `decided`)."""
    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"
    INT8 = "int8"
    NF4 = "nf4"


class FrozenArithmetic(StrEnum):
    """The arithmetic in forwards of layers with int8 weights: wide, or products of integers."""

    WIDE = "wide"
    INT8 = "int8"


FrozenStore = FrozenDtype | dict[str, FrozenDtype] | None
"""The type of `model.frozen_dtype`: a form for all components, forms by component, or None for "none".

Components without a form of their own in such a table are stored in bfloat16.
"""


def stored_form(stated: FrozenStore, component: str = "") -> FrozenDtype | None:
    """The form in which linear layers of a component are stored, by a stated `frozen_dtype`; None for a dtype of torch.

    Without a component: the first form of any component. With one form for all, autoencoders have None: they have few
    linear layers, and every sample passes them.

    >>> stored_form(FrozenDtype.NF4, "transformer"), stored_form({"text_encoder": FrozenDtype.INT8}, "transformer")
    (<FrozenDtype.NF4: 'nf4'>, None)
    """
    if not isinstance(stated, dict):
        return None if component.startswith("vae") or stated in _OF_TORCH else stated
    chosen = stated.values() if not component else [stated.get(component)]
    return next((form for form in chosen if form not in _OF_TORCH), None)


_OF_TORCH = (None, FrozenDtype.AUTO, FrozenDtype.BFLOAT16)


def is_narrow_store(stated: FrozenStore) -> bool:
    """Whether a stated `frozen_dtype` is narrower than float32: any but "none" and the undecided "auto"."""
    return stated is not None and stated is not FrozenDtype.AUTO


def _word_or_components(value: object) -> object:
    if value is None or value == "none":
        return None
    forms = {form.value: form for form in FrozenDtype}
    if isinstance(value, str) and value in forms:
        return forms[value]
    named = {name: form for name, form in forms.items() if form is not FrozenDtype.AUTO}
    if isinstance(value, dict) and value and all(isinstance(form, str) and form in named for form in value.values()):
        return {str(component): named[form] for component, form in value.items()}
    known = ", ".join(f'"{word}"' for word in named)
    raise ValueError(
        f': expected {known}, "none" or "auto", or a table of components, each with one of {known}, e.g. '
        f'{{ transformer = "nf4", text_encoder = "int8" }}; got {value!r}'
    )


class ModelKeys(Section):
    """The keys that [model] and each [models.NAME] have: the folder, and the parts of it that are trained."""

    path: str
    """A diffusers folder, the id of one on the Hugging Face Hub, `owner/name`, which is fetched into the hub's cache
    (`HF_HOME`), or only read there (`HF_HUB_OFFLINE=1`), or a model in one `.safetensors` file."""
    config: Maybe[str] = None
    """The folder or id with all that a model in one file lacks: configurations, tokenizers, scheduler, some components;
    `"none"`: `path` has all."""
    train: Several[str] = ()
    """Components to train, e.g. `["unet"]`; empty: the denoiser of the pipeline's class, or the ControlNet."""
    from_scratch: bool = False
    """Whether the trained components start from random weights; only their `config.json` is read."""
    variant: Maybe[str] = None
    """The variant of the folder's weights that is read, e.g. `"fp16"` of `model.fp16.safetensors`; `"none"`: the plain
    files, or the only variant."""
    components: dict[str, GroupSection] = Field(default_factory=dict)
    """Trained components with a learning rate, optimizer arguments or an average of their own, by name."""
    low_resolution: Auto[Count] = None
    """For super-resolution: side of the small pictures that the model reads, which is required with one model;
    `"auto"`: the side of the model before it in `[models]`."""
    noise_augmentation: Auto[Annotated[float, Field(gt=0, le=1)]] = None
    """For super-resolution: the small pictures get noise of a random level below this share of all levels; `"auto"`:
    0.5."""


class ModelSection(ModelKeys):
    """[model]: the model to train."""

    frozen_dtype: Annotated[FrozenStore, BeforeValidator(_word_or_components)] = FrozenDtype.AUTO
    """The form in which frozen weights are stored. `"bfloat16"`: linear layers and convolutions in bfloat16, with half
    the memory and the same results. `"float8"`, `"int8"`, `"nf4"`: linear layers with one byte or four bits a number,
    with small errors; or by component, e.g. `{ transformer = "nf4", text_encoder = "int8" }`. `"none"`: the dtype of
    the trained weights. `"auto"`: bfloat16 where the arithmetic is."""
    frozen_arithmetic: Choice[FrozenArithmetic] = FrozenArithmetic.WIDE
    """`"wide"`: layers with stored weights multiply in bfloat16. `"int8"`: forwards of layers in int8 multiply
    integers, but for numbers beyond 6 (LLM.int8, https://arxiv.org/abs/2208.07339)."""
    class_embeddings: Maybe[Place] = None
    """For a model of classes: a `.safetensors` file of `diffusionpipe prototypes`, a prototype of each class, from
    which the embeddings of classes are read; `"none"`: they start as the model has them."""
    freeze_class_embeddings: bool = True
    """Whether embeddings that are read from that file stay as they are."""

    @model_validator(mode="after")
    def _prototypes_are_there_to_be_trained(self) -> Self:
        if self.class_embeddings is None and not self.freeze_class_embeddings:
            raise ValueError(
                "freeze_class_embeddings: without class_embeddings the embeddings are trained anyway; remove it"
            )
        return self


class AdaptedLayers(StrEnum):
    """A word for the layers that get an adapter."""

    ATTENTION = "attention"
    LINEAR = "linear"
    ALL = "all"


class AdapterFormat(StrEnum):
    """The program whose names for layers a file of adapters uses."""

    DIFFUSERS = "diffusers"
    COMFY = "comfy"


class SaveDtype(StrEnum):
    """The dtype of the numbers in a file of adapters."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def _names_or_word(value: object) -> object:
    words = [word.value for word in AdaptedLayers]
    if isinstance(value, str) and value in words:
        return AdaptedLayers(value)
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return tuple(value)
    named = ", ".join(f'"{word}"' for word in words)
    raise ValueError(f": expected a list of the ends of layers' names, or one of the words {named}; got {value!r}")


class LoraSection(Section):
    """[lora]: low-rank adapters beside the weights of model.train's components, which stay frozen."""

    rank: Maybe[Count]
    """Rank of every adapter, e.g. 16; `"none"` trains whole components."""
    alpha: Maybe[Positive] = None
    """The output of an adapter is scaled by `alpha` / `rank`; `"none"`: alpha equals the rank."""
    target_modules: Annotated[tuple[str, ...] | AdaptedLayers, BeforeValidator(_names_or_word)] = ()
    """Name endings of the linear layers and convolutions that get an adapter, or a word. `[]` and `"attention"`: the
    attention layers, `["to_q", "to_k", "to_v", "to_out.0"]`, of FLUX.2's single-stream blocks also `to_qkv_mlp_proj`
    and `attn.to_out`, of CLIP `q_proj`, `k_proj`, `v_proj`, `out_proj`, of T5 `q`, `k`, `v`, `o`. `"linear"`: all
    linear layers of the denoiser, and attention and MLPs of text encoders. `"all"`: convolutions too."""
    exclude: Several[str] = ()
    """Name endings of layers that get none of these adapters."""
    rank_pattern: dict[str, Count] = Field(default_factory=dict)
    """Other ranks by name endings, e.g. `{ "to_q" = 8, "ff.net.2" = 32 }`; the longest ending that fits counts. Alphas
    follow: every adapter has the scale that `rank` and `alpha` give."""
    dora: bool = False
    """Whether the norm of each row of a weight is trained apart from its direction (DoRA). Not with a
    `model.frozen_dtype` that stores weights narrow."""
    rank_stabilized: bool = False
    """Whether outputs are scaled by `alpha` / sqrt(`rank`) in place of `alpha` / `rank` (rsLoRA)."""
    start: Maybe[Place] = None
    """A file of adapters of diffusers, peft, kohya or ComfyUI that the adapters start from, its folder, or the folder
    of a run; `"none"`: they add nothing at first."""
    resize: bool = False
    """Whether adapters in that file may have another rank; the largest singular values are kept."""
    merge: bool = False
    """Whether the export is the whole model with the adapters added to its weights, instead of the adapters alone."""
    formats: Annotated[Several[Choice[AdapterFormat]], BeforeValidator(texts_for_text)] = (AdapterFormat.DIFFUSERS,)
    """Formats of the exported adapters: `["diffusers"]`, or `["diffusers", "comfy"]`, whose second file ComfyUI
    reads."""
    dora_as_difference: bool = False
    """With `dora` and `"comfy"`: whether ComfyUI's file has the whole difference of each weight, which is all that
    ComfyUI can read of DoRA."""
    save_dtype: Maybe[Choice[SaveDtype]] = None
    """Dtype of the numbers in these files; `"none"`: as they were trained."""
    trigger: Maybe[str] = None
    """Words that the captions have for the subject, e.g. `"a photo of sks dog"`. The files' headers and the model card
    name them; training does not read them."""

    @model_validator(mode="after")
    def _formats_hold_what_is_drawn_from(self) -> Self:
        if AdapterFormat.DIFFUSERS not in self.formats:
            raise ValueError('formats: the run and `sample` draw from "diffusers"; use ["diffusers", "comfy"]')
        has_both = self.dora and AdapterFormat.COMFY in self.formats
        if has_both and not self.dora_as_difference:
            raise ValueError(
                "formats: ComfyUI divides by the norm of other weights than DoRA, and diffusers drops the norms of "
                'such a file; set dora_as_difference = true, remove "comfy", or remove dora'
            )
        if self.dora_as_difference and not has_both and self.rank is not None:
            raise ValueError('dora_as_difference: it has no effect without dora and "comfy" in formats; remove it')
        return self

    @model_validator(mode="after")
    def _every_setting_has_an_effect(self) -> Self:
        if self.rank is None:
            defaults = LoraSection.model_construct(rank=None)
            raise_problems(
                f"{key}: it has no effect without adapters; set rank, e.g. 16, or remove it"
                for key in type(self).model_fields
                if key != "rank" and getattr(self, key) != getattr(defaults, key)
            )
        if self.resize and self.start is None:
            raise_problems(["resize: it has no effect without a file to start from; set start, or remove it"])
        return self
