"""Makes the conditions of a drawing from prompts and labels."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from diffusionpipe.errors import DataError, ModelError, RecipeError
from diffusionpipe.models.base.coordinates import COORDINATES, coordinates_of
from diffusionpipe.models.base.family import Absent, Negative, Prompt
from diffusionpipe.models.families.deepfloyd import enlarged, noise_levels, noised_at
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.opening.folder import family_of, model_index, scheduler_config
from diffusionpipe.models.parts.masks import MASK, reads_mask
from diffusionpipe.trainer.data.decoding.images import load_levels
from diffusionpipe.trainer.data.decoding.levels import values_of_pictures
from diffusionpipe.trainer.data.scan.captions import METADATA
from diffusionpipe.trainer.data.scan.dataset import Condition, scan
from diffusionpipe.trainer.data.scan.dataset_problems import problems_of_conditions
from diffusionpipe.trainer.data.text.caption_lengths import encoder_of
from diffusionpipe.trainer.data.text.tokens import MASKS, TOKENS, Tokenizer, token_ids, token_mask
from diffusionpipe.trainer.inference.denoise import SamplingSettings, drawn_noise
from diffusionpipe.trainer.inference.known_pixels import KnownPixels, known_conditions

T = TypeVar("T")
_CLIP = 4
"""The number of dimensions of a clip's pixels."""
_TOKENIZERS = ("CLIPTokenizer", "T5Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer", "GemmaTokenizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """The samples to draw: prompts or labels, and the negative prompts and pictures that belong to them."""

    prompts: tuple[str, ...] = ()
    """The texts to draw, for a model that reads captions."""
    labels: tuple[int, ...] = ()
    """The classes to draw, for a model that reads labels."""
    negatives: tuple[str, ...] = ()
    """The negative prompts, one for each prompt; () for none: then guidance leads away from the empty text for most
    models."""
    conditions: tuple[Path, ...] = ()
    """The conditioning pictures of a ControlNet, one for each prompt; () for other models."""
    known: tuple[KnownPixels, ...] = ()
    """The pictures whose holes are filled, one for each sample; () for other models."""
    frame_rate: float | None = None
    """The frames per second of clips; None: as diffusers' pipeline tells the model by default."""

    def __len__(self) -> int:
        return len(self.prompts) or len(self.labels)

    def part(self, places: Sequence[int]) -> "SampleRequest":
        """The request for the samples with these indices alone."""

        def of(values: tuple[T, ...]) -> tuple[T, ...]:
            return tuple(values[place] for place in places) if values else ()

        return replace(
            self,
            prompts=of(self.prompts),
            labels=of(self.labels),
            negatives=of(self.negatives),
            conditions=of(self.conditions),
            known=of(self.known),
        )

    @property
    def captions(self) -> tuple[str, ...]:
        """The text for each sample: its prompt, or "class N" for a label."""
        return self.prompts or tuple(f"class {label}" for label in self.labels)


def raw_conditions(
    wish: SampleRequest, graph: LayerGraph, folder: Path, settings: SamplingSettings
) -> dict[str, Tensor]:
    """The raw inputs of the conditions by name: one row for each sample, then, if guided, its row without condition.

    Raises:
        PictureError: a conditioning picture, or one with a hole, cannot be decoded.
        RecipeError: pictures with holes are missing or not read, a class model has prompts, a text model has labels,
            negative prompts have no guidance, or a prompt for a ControlNet has no conditioning picture.
        ModelError: the model has neither captions nor classes, or its tokenizer cannot be read.
    """
    inputs = {spec.name for spec in graph.inputs}
    if wish.known and not reads_mask(graph):
        raise RecipeError(f"{folder} fills no holes of pictures; leave out pictures and masks")
    if reads_mask(graph) and (lack := _lack_of_known(wish, graph, folder)) is not None:
        raise RecipeError(lack)
    if wish.conditions and "condition" not in inputs:
        raise RecipeError("conditioning pictures steer a ControlNet, and the model is none; leave them out")
    if "input_ids" in inputs:
        if not wish.prompts:
            raise RecipeError("the model draws from captions; give prompts, not labels")
        if any(wish.negatives) and not settings.is_guided:
            key = "guidance" if settings.embedded_guidance is None else "true_cfg_scale"
            raise RecipeError(f"a negative prompt has no effect without guidance; set {key} above 1, or remove it")
        # Some models read a missing text in another way than an empty one.
        negatives = [Negative(text) for text in wish.negatives] or [Absent()] * len(wish.prompts)
        texts = [*wish.prompts, *(negatives if settings.is_guided else ())]
        found = _text_conditions(graph, folder, texts, settings.embedded_guidance)
        if "frame_rate" in inputs:
            rate = family_of(folder).frame_rate if wish.frame_rate is None else wish.frame_rate
            assert rate is not None, "it is set for models that read it"
            found["frame_rate"] = torch.full((len(texts),), float(rate))
        if wish.known:
            found |= known_conditions(wish.known, graph, settings)
        found |= _everywhere(graph, len(texts))
        return found | (_steering(wish, graph, settings) if "condition" in inputs else {})
    if "labels" in inputs:
        if not wish.labels:
            raise RecipeError("the model draws classes; give labels, not prompts")
        null = null_label(graph)
        if bad := [label for label in wish.labels if not 0 <= label < null]:
            raise RecipeError(f"there is no class {bad[0]}; the model has classes 0 to {null - 1}")
        labels = [*wish.labels, *([null] * len(wish.labels) if settings.is_guided else [])]
        return {"labels": torch.tensor(labels), **_everywhere(graph, len(labels))}
    raise ModelError("the model has neither captions nor classes, so there is nothing to draw from")


def _lack_of_known(wish: SampleRequest, graph: LayerGraph, folder: Path) -> str | None:
    """A sentence on the pictures or masks that an inpainting model lacks; None if it lacks none."""
    is_clip = any(spec.name == MASK and len(spec.shape) == _CLIP for spec in graph.inputs)
    if len(wish.known) != len(wish):
        return f"{folder} {NO_FIRST if is_clip else NO_KNOWN}"
    if is_clip or all(one.mask is not None for one in wish.known):
        return None
    as_clip = ", or --frames for a clip from its first frame" if family_of(folder).has_clips else ""
    return f"a picture without a mask has no hole to fill; give --mask too{as_clip}, in a run sampling.masks"


def _everywhere(graph: LayerGraph, count: int) -> dict[str, Tensor]:
    """The coordinates of whole pictures by name, `count` rows; {} for a model that was not trained on patches."""
    spec = next((one for one in graph.inputs if one.name == COORDINATES), None)
    if spec is None:
        return {}
    return {COORDINATES: coordinates_of(spec.shape[-1], spec.shape[-2]).expand(count, *spec.shape)}


def _steering(wish: SampleRequest, graph: LayerGraph, settings: SamplingSettings) -> dict[str, Tensor]:
    """The conditioning pictures by name, with values in [0, 1]; if guided, each twice.

    Raises:
        PictureError: a picture cannot be decoded.
        RecipeError: the numbers of conditioning pictures and prompts differ.
    """
    if len(wish.conditions) != len(wish.prompts):
        raise RecipeError(
            f"a ControlNet draws from a conditioning picture for each prompt; there are {len(wish.conditions)} for "
            f"{len(wish.prompts)}: {NO_CONDITIONS}"
        )
    channels, height, width = next(spec.shape for spec in graph.inputs if spec.name == "condition")
    of_path = {
        path: load_levels(path, size=(width, height), channels=channels) for path in dict.fromkeys(wish.conditions)
    }
    values = values_of_pictures("condition", torch.stack([of_path[path] for path in wish.conditions]))
    return {"condition": torch.cat([values] * settings.copies)}


NO_KNOWN = (
    "fills holes of pictures: give --image and --mask to sample, and sampling.images and sampling.masks to a run that "
    "draws"
)
"""The remedy for missing pictures with holes."""
NO_FIRST = "draws clips from their first frames: give --image to sample, and sampling.images to a run that draws"
"""The remedy for missing first frames."""
NO_CONDITIONS = (
    f'name one as "conditioning_image" for each picture of data.validation in its {METADATA}, or give --condition to '
    "sample"
)
"""The remedy for missing conditioning pictures."""


def steering_pictures(data: Path, count: int) -> tuple[Path, ...]:
    """The path of a conditioning picture for each of `count` prompts, from the data folder in order, maybe repeated.

    Raises:
        DataError: the folder's metadata cannot be used, or a picture has no conditioning picture.
    """
    dataset = scan(data, Condition.TEXT, check_headers=False)
    if problems := problems_of_conditions(dataset):
        raise DataError("\n".join(problems))
    paths = [data / str(sample.condition) for sample in dataset.samples]
    return tuple(paths[number % len(paths)] for number in range(count))


def is_steered(folder: Path) -> bool:
    """Whether the folder's model is a ControlNet."""
    return "controlnet" in family_of(folder).components


def check_noise_level(folder: Path, settings: SamplingSettings) -> None:
    """Refuses a noise level for small pictures above the last level of the super-resolution model in a folder.

    Raises:
        RecipeError: the level is above the last one.
    """
    augmentation = family_of(folder).augmentation
    if augmentation is None or settings.noise_level is None:
        return
    last = noise_levels(scheduler_config(folder, augmentation)).num_timesteps - 1
    if settings.noise_level > last:
        raise RecipeError(f"noise_level: {settings.noise_level} is above the last level, {last}; use at most {last}")


def small_conditions(
    small: Tensor, graph: LayerGraph, folder: Path, settings: SamplingSettings, model: str
) -> dict[str, Tensor]:
    """The tensors that super-resolution reads by name: the small pictures, enlarged and noised, and the noise level.

    `small`: (N, C, r, r).

    If guided, each picture is there twice with the same noise, (2 N, ...). `model`: the model's name among several, by
    which the noise is keyed.
    """
    augmentation = family_of(folder).augmentation
    assert augmentation is not None
    assert settings.noise_level is not None, "it is set for models of super-resolution"
    levels = noise_levels(scheduler_config(folder, augmentation))
    shape = next(spec.shape for spec in graph.inputs if spec.name == "pixels")
    large = enlarged(small.cpu(), shape[-1])
    noise = drawn_noise("augmentation", settings, len(small), shape, model)
    noised = noised_at(levels, large, noise, settings.noise_level)
    return {
        "upsampled": torch.cat([noised] * settings.copies),
        "noise_level": torch.full((settings.copies * len(small),), settings.noise_level),
    }


def num_classes_of(config: Mapping[str, Any]) -> int | None:
    """The number of classes of a denoiser with this configuration; None if it reads no classes.

    The embedding of a U-Net has one row more than classes. The last one means no class.
    """
    own, rows = config.get("num_embeds_ada_norm"), config.get("num_class_embeds")
    if isinstance(own, int):
        return own
    return rows - 1 if isinstance(rows, int) else None


def null_label(graph: LayerGraph) -> int:
    """The label that means no class: the number of classes, which is the last row of the embedding.

    Raises:
        ModelError: the model reads no classes.
    """
    for component in graph.components.values():
        classes = num_classes_of(getattr(component, "config", {}))
        if classes is not None:
            return classes
    raise ModelError("the model has no class embedding")


def _text_conditions(
    graph: LayerGraph, folder: Path, texts: Sequence[str], embedded_guidance: float | None
) -> dict[str, Tensor]:
    """The raw inputs by name that follow from texts and the pictures' size, with a row for each text.

    They are token ids, masks, sizes, and the guidance that a distilled model reads (`embedded_guidance`).
    """
    shapes = {spec.name: spec.shape for spec in graph.inputs}
    tokenizers = tokenizers_of(graph, folder)
    conditions = {name: token_ids(tokenizer, texts, *shapes[name]) for name, tokenizer in tokenizers.items()}
    for mask, name in MASKS.items():
        if mask in shapes:
            conditions[mask] = token_mask(tokenizers[name], texts, shapes[mask][0])
    height, width = map(float, shapes["pixels"][-2:])
    if "time_ids" in shapes:
        # Original size, corner of the cut, size.
        conditions["time_ids"] = torch.tensor([[height, width, 0, 0, height, width]] * len(texts))
    if "guidance" in shapes:
        assert embedded_guidance is not None, "it is set for distilled models"
        conditions["guidance"] = torch.full((len(texts),), embedded_guidance)
    return conditions


def tokenizers_of(graph: LayerGraph, folder: Path) -> dict[str, Tokenizer]:
    """The tokenizers of a model folder, keyed by the raw inputs that they make; {} for a model without captions.

    Raises:
        ModelError: a tokenizer is missing, cannot be read, or makes tokens for which its encoder has no embedding.
    """
    shapes = {spec.name: spec.shape for spec in graph.inputs}
    found = {name: open_tokenizer(folder, name) for name in TOKENS if name in shapes}
    for name, tokenizer in found.items():
        if encoder := graph.components.get(encoder_of(name)):
            # Its marks and padding, which every text has.
            blank = set(token_ids(tokenizer, [""], *shapes[name]).flatten().tolist())
            _check_vocabulary(folder, name, getattr(tokenizer, "plain", tokenizer), blank, encoder)
    return found


def _check_vocabulary(folder: Path, name: str, tokenizer: Any, blank: Set[int], encoder: Any) -> None:
    """Refuses a tokenizer with a token that has no row in the embedding of its encoder.

    `blank`: the tokens of an empty text, its marks and padding. Words that were added count too. Special tokens that no
    text has, e.g. for pictures in a chat, may lie above the embedding.

    Raises:
        ModelError: there is such a token.
    """
    rows = getattr(encoder.get_input_embeddings(), "num_embeddings", None)
    if rows is None:
        return
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    most = max(blank | (set(tokenizer.get_vocab().values()) - special))
    if most >= rows:
        path = folder / name.replace("input_ids", "tokenizer")
        raise ModelError(
            f"{path} has tokens up to {most}, and {encoder_of(name)} embeds tokens up to {rows - 1}; put the "
            "tokenizer there that this encoder was trained with"
        )


def open_tokenizer(folder: Path, name: str = "input_ids") -> Tokenizer:
    """The tokenizer in a model folder that makes the raw input `name`.

    Raises:
        ModelError: the folder has no such tokenizer, or one that cannot be read.
    """
    import transformers

    path = folder / name.replace("input_ids", "tokenizer")
    kind = _tokenizer_class(folder, path.name)
    if not path.is_dir():
        raise ModelError(f"{path} is missing; a model that reads captions needs a {kind} there")
    try:
        tokenizer: Tokenizer = getattr(transformers, kind).from_pretrained(path)
    except Exception as error:  # a damaged file raises nearly anything
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"{path} does not hold a {kind} ({reason}); get this folder again") from error
    family = family_of(folder)
    if family.zeroed is not None and model_index(folder).get(family.zeroed, True):
        return _Marked(tokenizer)
    prompt = family.prompts.get(name)
    return tokenizer if prompt is None else _Prompted(tokenizer, prompt)


class _Marked:
    """A tokenizer that makes a row of one repeated token, which no text begins with, of an absent text; see `sdxl`."""

    def __init__(self, tokenizer: Any) -> None:
        self.plain = tokenizer

    def __call__(self, texts: Sequence[str], **options: Any) -> Mapping[str, Any]:
        """The tokens and masks of the texts, by name, as the tokenizer makes them.

        The row of an `Absent` text has its last token everywhere.
        """
        tokens: Mapping[str, Any] = self.plain(list(texts), **options)
        rows = zip(texts, tokens["input_ids"], strict=True)
        # The last token of an empty row, which no text has in the first place.
        marked = [[row[-1]] * len(row) if isinstance(text, Absent) else row for text, row in rows]
        return {**tokens, "input_ids": marked}


class _Prompted:
    """A tokenizer that puts a template around its texts and pads where the model expects it."""

    def __init__(self, tokenizer: Any, prompt: Prompt) -> None:
        self.plain, self._prompt = tokenizer, prompt
        self._suffix: Mapping[str, list[int]] | None = tokenizer(prompt.suffix) if prompt.suffix else None
        if prompt.side is not None:
            tokenizer.padding_side = prompt.side

    def __call__(self, texts: Sequence[str], **options: Any) -> Mapping[str, Any]:
        """The tokens and masks, by name, of the texts with the template around them."""
        if self._prompt.instruction:
            return self._instructed(texts, is_cut=options.get("truncation", False))
        around = [self._around(text) for text in texts]
        end = self._suffix
        if end is not None and "max_length" in options:
            options["max_length"] -= len(end["input_ids"])  # the suffix must not be cut off
        tokens: Mapping[str, Any] = self.plain(around, add_special_tokens=self._prompt.adds_marks, **options)
        return tokens if end is None else {name: [[*row, *end[name]] for row in tokens[name]] for name in end}

    @property
    def has_template(self) -> bool:
        """Whether a template is put around captions, beside the tokenizer's own marks."""
        prompt = self._prompt
        return bool(prompt.instruction or prompt.suffix or prompt.chat is not None or prompt.template != "{}")

    def _instructed(self, texts: Sequence[str], *, is_cut: bool) -> Mapping[str, Any]:
        """The tokens and masks of the texts after an instruction, with padding between the two.

        `is_cut`: cut and pad the texts to the encoder's length.

        Raises:
            ModelError: the tokenizer makes too many tokens of the instruction.
        """
        prompt, rows = self._prompt, []
        first = len(self.plain(prompt.instruction)["input_ids"]) - 1  # one more than diffusers' encoding adds
        if first > prompt.dropped + 1:
            raise ModelError(
                f"the tokenizer makes {first + 1} tokens of the instruction before each caption; at most "
                f"{prompt.dropped + 2} are supported; use the tokenizer of the published model"
            )
        for text in texts:
            # A negative prompt is encoded without the instruction, as in diffusers' pipeline.
            lead, split = ("", 1) if isinstance(text, Negative) else (prompt.instruction, first)
            length = split + prompt.length - prompt.dropped - 1
            cut = {"padding": "max_length", "max_length": length, "truncation": True} if is_cut else {}
            row = self.plain(lead + self._around(text), verbose=False, **cut)
            gap = [0] * (prompt.length - length)
            rows.append(
                {name: [*row[name][:split], *gap, *row[name][split:]] for name in ("input_ids", "attention_mask")}
            )
        return {name: [row[name] for row in rows] for name in ("input_ids", "attention_mask")}

    def _around(self, caption: str) -> str:
        text = self._prompt.clean(caption)
        if self._prompt.chat is None:
            return self._prompt.template.format(text)
        chat: str = self.plain.apply_chat_template(**self._prompt.chat(text), tokenize=False)
        return chat


def _tokenizer_class(folder: Path, name: str) -> str:
    """The name of the class of a tokenizer by the folder's model_index.json.

    Raises:
        ModelError: the class is not supported.
    """
    entry = model_index(folder).get(name)
    kind = str(entry[1]) if isinstance(entry, list) and len(entry) == 2 else "None"
    kind = kind.removesuffix("Fast")
    if kind == "None":
        return _TOKENIZERS[0]
    if kind == "PixtralProcessor":
        return "AutoTokenizer"  # the folder is that of its tokenizer, too; captions need no more
    if kind not in _TOKENIZERS:
        raise ModelError(f"{folder / 'model_index.json'}: {name} is {kind}; supported: {', '.join(_TOKENIZERS)}")
    return kind
