"""Makes the raw inputs of the model from samples: pictures, tokens or labels, noise and times, all keyed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import DataError
from diffusionpipe.models.base.coordinates import COORDINATES
from diffusionpipe.models.base.family import Absent
from diffusionpipe.models.base.self_conditioning import CONDITIONED, is_conditioned
from diffusionpipe.models.objectives.sample_weights import SAMPLE_WEIGHT
from diffusionpipe.models.objectives.speed import pair_members
from diffusionpipe.models.parts.masks import MASK, MASKED_NOISE
from diffusionpipe.runtime.compute.runs import GIVEN, KEYS
from diffusionpipe.trainer.data.cache.cached import (
    KEY_BYTES,
    NO_KEY,
    CachedPart,
    found_rows,
    key_of,
    picture_content,
    token_content,
)
from diffusionpipe.trainer.data.content import Content
from diffusionpipe.trainer.data.decoding.clip_times import timeline_of
from diffusionpipe.trainer.data.decoding.clips import FrameSelection, is_clip, load_clip
from diffusionpipe.trainer.data.decoding.images import (
    CENTRE,
    PictureError,
    Size,
    load_levels,
    placing,
    reason_of,
    upright_size,
)
from diffusionpipe.trainer.data.decoding.levels import is_picture, table_of, values_of_pictures
from diffusionpipe.trainer.data.masks.holes import NUM_DRAWS, MaskSource, drawn_mask, guide_frames, load_mask
from diffusionpipe.trainer.data.masks.kinds import MaskKind
from diffusionpipe.trainer.data.masks.loss import load_loss_mask, loss_mask_of
from diffusionpipe.trainer.data.order import Growth, place_of
from diffusionpipe.trainer.data.randomness import normal, permutation, uniform
from diffusionpipe.trainer.data.scan.dataset import Dataset
from diffusionpipe.trainer.data.scan.dataset_problems import (
    problems_of_captions,
    problems_of_conditions,
    problems_of_encoders,
    problems_of_labels,
    problems_of_rules,
)
from diffusionpipe.trainer.data.scan.skipped import Skipped, Skipping
from diffusionpipe.trainer.data.sizes.patches import corner, placed
from diffusionpipe.trainer.data.text.caption_lengths import encoder_of
from diffusionpipe.trainer.data.text.caption_rules import (
    AS_THEY_ARE,
    SeenSample,
    drawn_text,
    is_dropped_for,
    plain_text,
    texts_of,
)
from diffusionpipe.trainer.data.text.tokens import MASKS, TOKENS, Tokenizer, token_ids, token_mask
from diffusionpipe.trainer.data.text.treatment import PLAIN, Treatment

_DRAWN = ("posterior_noise", MASKED_NOISE, "noise", "time", CONDITIONED, "augmentation_noise", "augmentation_level")
INPUTS = (
    "pixels",
    "condition",
    MASK,
    *TOKENS,
    *MASKS,
    "labels",
    "time_ids",
    "guidance",
    "frame_rate",
    COORDINATES,
    SAMPLE_WEIGHT,
    *_DRAWN,
)
"""The kinds of raw inputs that a model may read."""

_CLIP = 4
"""The number of dimensions of a clip: (3, F, H, W)."""
_ATTEMPTS = 100  # a few damaged pictures could replace each other for ever


def kind_of(name: str) -> str:
    """The kind of a raw input: its name without the name of its model, e.g. "noise" for "base/noise"."""
    return name.rpartition("/")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Augmentation:
    """The random changes of training samples: crop, mirror, start in a clip, dropped conditions, noise."""

    random_crop: bool = False
    """Whether a picture is cut at a random place; else at the centre."""
    flip: bool = False
    """Whether half of the samples are mirrored."""
    random_start: bool = False
    """Whether the frames of a clip begin at a random one of its frames; else at the first."""
    condition_dropout: float = 0.0
    """The share of samples with an empty caption or the null label."""
    self_conditioning: Fraction = Fraction(1)
    """The share of samples for which a denoiser reads its own estimate, if it reads any."""
    time_pairs: bool = False
    """Whether two neighbours of the batch share one number for their times, as `speed.pair_members` says."""
    offset_noise: float = 0.0
    """The standard deviation of the number that is added to the noise of a whole channel of a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSource:
    """A dataset with all settings by which its samples become the raw inputs of a model.

    Among them are tokenizers, rules of captions, masks and a cache.
    """

    dataset: Dataset
    inputs: tuple[TensorSpec, ...]
    """The tensors that the model reads: its graph's raw inputs."""
    seed: int
    """The seed of all random numbers of the batches."""
    tokenizers: Mapping[str, Tokenizer] = field(default_factory=dict)
    """The tokenizer of each raw input whose kind is one of `TOKENS`, by the input's name."""
    null_label: int | None = None
    """The label that means "no class", above all others, for dropped labels; needed if the model reads "labels"."""
    augmentation: Augmentation = Augmentation()
    size_weight: float = 1.0
    """A factor of the loss of samples of this size."""
    skipping: Skipping | None = None
    """How pictures that cannot be decoded are replaced; None: they are errors."""
    frame_rate: float | None = None
    """The number of frames per second that are taken of clips; None: each frame of the file."""
    treatments: tuple[Treatment, ...] = (PLAIN,)
    """The rules for captions, weights and masks of each source of samples, by `Sample.source`."""
    guidance: float = 1.0
    """The guidance that a distilled model reads; with 1 it predicts the data themselves, without guidance."""

    masks: MaskSource | None = None
    """The kind and the files of masks for an inpainting model; None for other models."""
    cached: CachedPart | None = None
    """The tensors of frozen layers that a cache holds; None without a cache."""
    whole: Size | None = None
    """The width and height of the whole pictures from which patches are cut; None: pictures are trained on whole."""

    def __post_init__(self) -> None:
        """Checks that each raw input can be made from the dataset.

        Raises:
            DataError: one cannot be made; every reason is listed.
        """
        problems = [
            f"the model reads {spec.name!r}, which no data set provides; known inputs are {', '.join(INPUTS)}"
            for spec in self.inputs
            if kind_of(spec.name) not in INPUTS
        ]
        problems += [
            f"the model reads captions as {spec.name!r}, but no tokenizer is given"
            for spec in self.inputs
            if kind_of(spec.name) in TOKENS and spec.name not in self.tokenizers
        ]
        names = {kind_of(spec.name) for spec in self.inputs}
        if "labels" in names and not names.isdisjoint(TOKENS):
            problems += problems_of_captions(self.dataset)
        if names.isdisjoint(TOKENS):
            problems += problems_of_rules(one.captions for one in self.treatments)
        else:
            known = {encoder_of(spec.name).partition(" of ")[0] for spec in self.inputs if kind_of(spec.name) in TOKENS}
            problems += problems_of_encoders((one.captions for one in self.treatments), known)
        if "condition" in names:
            problems += problems_of_conditions(self.dataset)
        if "labels" in names:
            problems += problems_of_labels(self.dataset, self.null_label)
        if problems:
            raise DataError("\n".join(problems))


class View(NamedTuple):
    """The part of a picture or clip that a sample shows: place of the cut, mirror, first frame."""

    crop: tuple[float, float]
    """The place of the cut, as two fractions in [0, 1); see `images.load_levels`."""
    flip: bool
    """Whether the picture is mirrored."""
    start: float
    """The place in a clip at which its frames begin, as a fraction in [0, 1); see `clips.load_clip`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some rows of one global batch: their samples, the keys of their random numbers, and their times."""

    samples: tuple[int, ...]
    """The index into the dataset of each row's sample."""
    positions: tuple[int, ...]
    """The position of each row in the global batch, by which its random numbers are keyed."""
    passes: tuple[int, ...] | None = None
    """How often each row's sample was seen before, by which its caption is drawn; None: captions are not drawn."""
    step: int
    """The step to which the batch belongs; random numbers are keyed by it."""
    purpose: str = ""
    """A text before the name of every random number, e.g. "validation."."""
    times: tuple[float, ...] | None = None
    """The time of each row's noise; None: times are drawn."""


class Turn(NamedTuple):
    """A sample at a position in the endless order of the data."""

    sample: int
    """The index of the sample in the dataset."""
    number: int
    """The number of times that the sample was seen before."""


def turns_of(
    num_samples: int, *, seed: int, batch: int, step: int, positions: Sequence[int], growth: Growth = ()
) -> tuple[Turn, ...]:
    """The samples at some positions of a step's global batch, with the number of times that each was seen before.

    The order of the data is endless: the keyed permutations of epoch 0, 1, ... one after the other (see `order`). Step
    k takes its positions k * batch up to (k + 1) * batch. So any step can be found without the steps before it, and a
    batch may be larger than the dataset.
    """
    turns = []
    for position in positions:
        place = place_of(step * batch + position, num_samples, growth)
        turns.append(Turn(int(_order(seed, place.epoch, place.size)[place.number]), place.epoch))
    return tuple(turns)


def sample_indices(
    num_samples: int, *, seed: int, batch: int, step: int, positions: Sequence[int], growth: Growth = ()
) -> tuple[int, ...]:
    """The indices into the dataset of the samples at some positions of a step's batch, as `turns_of` finds them."""
    turns = turns_of(num_samples, seed=seed, batch=batch, step=step, positions=positions, growth=growth)
    return tuple(turn.sample for turn in turns)


def make_batch(source: BatchSource, rows: Rows, *, has_levels: bool = False) -> dict[str, Tensor]:
    """The raw inputs of these rows by name, each (len(rows.samples), *shape) in the dtype that the model wants.

    With `has_levels` pictures stay uint8 levels (see `levels`). With a cache there are also the cached tensors, their
    keys (`KEYS`) and marks of those that were found (`GIVEN`).

    Raises:
        DataError: a picture cannot be decoded and is not replaced, or too many have been replaced.
    """
    for _ in range(_ATTEMPTS):
        try:
            if source.cached is not None:
                return _batch_with_cache(source, source.cached, rows, has_levels)
            return {spec.name: _value(source, rows, spec, has_levels) for spec in source.inputs}
        except PictureError as error:
            if source.skipping is None:
                raise
            rows = _with_replacement(source, rows, error)
    raise DataError(f"step {rows.step}: {_ATTEMPTS} times in a row a picture could not be decoded; repair the data set")


def _batch_with_cache(source: BatchSource, cached: CachedPart, rows: Rows, has_levels: bool) -> dict[str, Tensor]:
    """The raw inputs and the cached tensors of these rows by name, with the tensors' keys and marks of found ones.

    Pictures are decoded only where a tensor is missing that follows from them.

    Keys are (rows, tensors, KEY_BYTES), marks (rows, tensors).
    """
    specs, num_rows = {spec.name: spec for spec in source.inputs}, len(rows.samples)
    # Texts come first, because keys follow from them, and keys say which pictures have to be decoded.
    batch = {
        name: _value(source, rows, spec, has_levels) for name, spec in specs.items() if not is_picture(kind_of(name))
    }
    contents = {
        name: _picture_contents(source, rows, specs[name])
        if is_picture(kind_of(name))
        else [token_content(row) for row in batch[name]]
        for name in dict.fromkeys(name for tensor in cached.tensors for name in tensor.reads)
    }
    all_keys, marks = [], []
    for tensor in cached.tensors:
        keys = [
            NO_KEY
            if source.dataset.samples[sample].source in tensor.left_out
            else key_of([contents[name][row] for name in tensor.reads], tensor.spec)
            for row, sample in enumerate(rows.samples)
        ]
        batch[tensor.spec.name], given = found_rows(tensor, keys)
        all_keys.append(keys)
        marks.append(given)
    of_rows = list(zip(*marks, strict=True))
    for name, spec in specs.items():
        if is_picture(kind_of(name)):
            spared = frozenset(row for row, given in enumerate(of_rows) if cached.is_spared(name, given))
            batch[name] = _value(source, rows, spec, has_levels, spared)
    batch[GIVEN] = torch.tensor(of_rows, dtype=torch.uint8).reshape(num_rows, len(cached.tensors))
    # A bytearray: `frombuffer` wants memory that may be written.
    joined = bytearray(b"".join(key for row in zip(*all_keys, strict=True) for key in row))
    batch[KEYS] = torch.frombuffer(joined, dtype=torch.uint8).reshape(num_rows, len(cached.tensors), KEY_BYTES)
    return batch


def _picture_contents(source: BatchSource, rows: Rows, spec: TensorSpec) -> list[bytes]:
    """For each row, bytes that identify the content of its picture or clip and the part that is seen."""
    contents = []
    for path, view in zip(_picture_paths(source, rows, spec), _views(source, rows), strict=True):
        try:
            contents.append(picture_content(path, (spec.shape, view, source.frame_rate)))
        except (OSError, ValueError) as error:
            raise PictureError(path, reason_of(error)) from error
    return contents


def level_tables(inputs: Sequence[TensorSpec], device: torch.device) -> dict[str, Tensor]:
    """For each raw input that is a picture, by name, the value of each level, (256,), in its dtype on `device`."""
    return {
        spec.name: table_of(kind_of(spec.name)).to(getattr(torch, spec.dtype)).to(device)
        for spec in inputs
        if is_picture(kind_of(spec.name))
    }


def _with_replacement(source: BatchSource, rows: Rows, error: PictureError) -> Rows:
    """The rows with another sample in place of the one that cannot be decoded; notes it in the list of skipped.

    The new sample follows from seed, step and position, as all random choices do, so it is the same on every layout.
    """
    assert source.skipping is not None
    samples, dataset = list(rows.samples), source.dataset
    damaged = next(sample for sample in rows.samples if error.path in _paths(source, sample))
    for row, position in enumerate(rows.positions):
        if rows.samples[row] != damaged:
            continue
        drawn = uniform(
            seed=source.seed, purpose=f"{rows.purpose}replacement.{damaged}", step=rows.step, positions=(position,)
        )
        # One of the other samples: the numbers from `damaged` on move up by one.
        other = int(drawn[0] * (len(dataset.samples) - 1)) if len(dataset.samples) > 1 else damaged
        samples[row] = other + (other >= damaged)
        source.skipping.note(
            Skipped(
                step=rows.step,
                position=position,
                skipped=dataset.samples[damaged].name,
                instead=dataset.samples[samples[row] % len(dataset.samples)].name,
                reason=error.reason,
            )
        )
    return replace(rows, samples=tuple(sample % len(dataset.samples) for sample in samples))


def _paths(source: BatchSource, sample: int) -> tuple[Content, ...]:
    """The places of a sample's files: its picture, conditioning picture and masks."""
    dataset = source.dataset
    paths: list[Content] = [dataset.path(sample), dataset.condition_path(sample)]
    if source.masks is not None and source.masks.pattern is not None:
        paths.append(source.masks.path(dataset.samples[sample].name))
    if (path := loss_mask_of(dataset, source.treatments, sample)) is not None:
        paths.append(path)
    return tuple(paths)


def _value(
    source: BatchSource, rows: Rows, spec: TensorSpec, has_levels: bool, spared: frozenset[int] = frozenset()
) -> Tensor:
    """One raw input of these rows, in the dtype that the model wants; with `has_levels` pictures as uint8 levels.

    Pictures of the rows `spared` are not decoded, but zeros.
    """
    kind = kind_of(spec.name)
    if not is_picture(kind):
        return _input(source, rows, spec).to(getattr(torch, spec.dtype))
    levels = _pictures(source, rows, spec, spared)
    return levels if has_levels else values_of_pictures(kind, levels).to(getattr(torch, spec.dtype))


def _input(source: BatchSource, rows: Rows, spec: TensorSpec) -> Tensor:
    """One raw input of these rows that is not a picture, in the dtype in which it arises."""
    match kind_of(spec.name):
        case kind if kind in TOKENS:
            return _input_ids(source, rows, spec)
        case name if name in MASKS:
            return _input_mask(source, rows, spec)
        case "time_ids":
            return _time_ids(source, rows)
        case kind if kind == CONDITIONED:
            share = source.augmentation.self_conditioning
            return torch.tensor([float(is_conditioned(position, share)) for position in rows.positions])
        case kind if kind == MASK:
            return _masks(source, rows, spec)
        case kind if kind == SAMPLE_WEIGHT:
            return _sample_weights(source, rows, spec)
        case "guidance":
            return torch.full((len(rows.samples),), source.guidance)
        case "frame_rate":
            return _frame_rates(source, rows)
        case "labels":
            return _labels(source, rows)
        case kind if kind == COORDINATES:
            return _coordinates(source, rows, spec)
        case "time" if rows.times is not None:
            return torch.tensor(rows.times, dtype=torch.float32)
        case "time" if source.augmentation.time_pairs:
            return _paired_times(source, rows, spec.name)
        case "time" | "augmentation_level":
            return _uniform(source, rows, spec.name)
        case "noise" if source.augmentation.offset_noise > 0:
            return _normal(source, rows, spec.name, spec.shape) + _offset(source, rows, spec)
        case _:
            return _normal(source, rows, spec.name, spec.shape)


def _paired_times(source: BatchSource, rows: Rows, purpose: str) -> Tensor:
    """The numbers from which times follow, (B,), where two neighbours of the batch form a pair.

    Positions 2 k and 2 k + 1 of the global batch share the number of 2 k.
    """
    # The partner may be on another rank; both draw by the position of the first.
    firsts = replace(rows, positions=tuple(position - position % 2 for position in rows.positions))
    is_partner = torch.tensor([position % 2 == 1 for position in rows.positions], dtype=torch.bool)
    return pair_members(_uniform(source, firsts, purpose), is_partner)


def _offset(source: BatchSource, rows: Rows, spec: TensorSpec) -> Tensor:
    """Noise that is the same for all places of a channel, (B, C, 1, 1).

    After Guttenberg, 2023, https://www.crosslabs.org/blog/diffusion-with-offset-noise.

    So models learn pictures that are darker or brighter as a whole than noise is on average.
    """
    ones = [1] * (len(spec.shape) - 1)
    offsets = _normal(source, rows, f"{spec.name}.offset", (spec.shape[0], *ones))  # (B, C, 1, 1)
    return source.augmentation.offset_noise * offsets


def _normal(source: BatchSource, rows: Rows, purpose: str, shape: Sequence[int]) -> Tensor:
    return normal(
        seed=source.seed, purpose=rows.purpose + purpose, step=rows.step, positions=rows.positions, shape=shape
    )


def _uniform(source: BatchSource, rows: Rows, purpose: str, shape: Sequence[int] = ()) -> Tensor:
    return uniform(
        seed=source.seed, purpose=rows.purpose + purpose, step=rows.step, positions=rows.positions, shape=shape
    )


def _views(source: BatchSource, rows: Rows) -> list[View]:
    """The part of its picture or clip that each row shows: cut, mirror and first frame."""
    augmentation, num_rows = source.augmentation, len(rows.samples)
    crops = _uniform(source, rows, "crop", (2,)).tolist() if augmentation.random_crop else [CENTRE] * num_rows
    flips = (_uniform(source, rows, "flip") < 0.5).tolist() if augmentation.flip else [False] * num_rows
    starts = _uniform(source, rows, "start").tolist() if augmentation.random_start else [0.0] * num_rows
    return [View((crop[0], crop[1]), flip, start) for crop, flip, start in zip(crops, flips, starts, strict=True)]


def _time_ids(source: BatchSource, rows: Rows) -> Tensor:
    """For each row height and width of the picture, top and left of the cut, height and width of the result, (B, 6)."""
    size = next(_size_of(spec) for spec in source.inputs if spec.name == "pixels")
    whole, corners = source.whole or size, _corners(source, rows)
    ids = []
    for sample, view, (across, down) in zip(rows.samples, _views(source, rows), corners, strict=True):
        width, height = upright_size(source.dataset.path(sample))
        place = placing((width, height), whole, view.crop)
        # Mirrored after the cut, so what was right of it counts.
        left = place.resized[0] - whole[0] - place.left if view.flip else place.left
        ids.append((height, width, place.top + down, left + across, size[1], size[0]))
    return torch.tensor(ids, dtype=torch.float32).reshape(-1, 6)


def _size_of(spec: TensorSpec) -> Size:
    return spec.shape[-1], spec.shape[-2]


def _corners(source: BatchSource, rows: Rows) -> list[tuple[int, int]]:
    """Left and top of each row's patch in its whole picture, in pixels; (0, 0) where whole pictures are trained on."""
    size = next(_size_of(spec) for spec in source.inputs if kind_of(spec.name) == "pixels")
    if source.whole is None or source.whole == size:
        return [(0, 0)] * len(rows.samples)
    latents = next(_size_of(spec) for spec in source.inputs if kind_of(spec.name) == COORDINATES)
    numbers = _uniform(source, rows, "patch", (2,)).tolist()
    # At whole latents: pixels of a latent.
    return [corner(own, source.whole, size, size[0] // latents[0]) for own in numbers]


def _coordinates(source: BatchSource, rows: Rows, spec: TensorSpec) -> Tensor:
    """The place of each latent in the whole picture, (B, 2, h, w)."""
    assert source.whole is not None, "it is set for models that read coordinates"
    size = next(_size_of(one) for one in source.inputs if kind_of(one.name) == "pixels")
    return placed(_corners(source, rows), source.whole, size, size[0] // spec.shape[-1])


def _picture_paths(source: BatchSource, rows: Rows, spec: TensorSpec) -> list[Content]:
    """The place of each row's picture or clip, or of its conditioning picture, as `spec` names it."""
    dataset, is_own = source.dataset, kind_of(spec.name) == "pixels"
    return [dataset.path(sample) if is_own else dataset.condition_path(sample) for sample in rows.samples]


def _pictures(source: BatchSource, rows: Rows, spec: TensorSpec, spared: frozenset[int]) -> Tensor:
    """The levels of the rows' pictures or clips, uint8, (B, C, H, W), of clips (B, 3, F, H, W).

    A conditioning picture is cut and mirrored as its sample's picture is. Rows in `spared` are zeros.
    """
    paths = _picture_paths(source, rows, spec)
    if source.whole is not None and source.whole != _size_of(spec):
        return _patches(source, rows, spec, paths)
    levels = torch.empty(len(paths), *spec.shape, dtype=torch.uint8)
    decoded: dict[tuple[Content, View], int] = {}
    for row, key in enumerate(zip(paths, _views(source, rows), strict=True)):
        if row in spared:
            levels[row] = 0
            continue
        if key in decoded:  # validation takes each picture at several times
            levels[row] = levels[decoded[key]]
            continue
        levels[row] = _seen(*key, spec, source.frame_rate)
        decoded[key] = row
    return levels  # (B, C, H, W), of clips (B, 3, F, H, W)


def _patches(source: BatchSource, rows: Rows, spec: TensorSpec, paths: Sequence[Content]) -> Tensor:
    """The levels of the rows' patches, (B, C, height, width), cut from the pictures as they would be seen whole."""
    assert source.whole is not None
    whole = replace(spec, shape=(spec.shape[0], source.whole[1], source.whole[0]))
    width, height = _size_of(spec)
    seen = zip(paths, _views(source, rows), _corners(source, rows), strict=True)
    return torch.stack(
        [_seen(path, view, whole, None)[:, top : top + height, left : left + width] for path, view, (left, top) in seen]
    )


def _seen(path: Content, view: View, spec: TensorSpec, rate: float | None) -> Tensor:
    """The levels of the part of a picture or clip that `view` shows, (C, H, W), of a clip (3, F, H, W).

    `rate`: the number of frames per second that are taken of a clip; None: each frame.
    """
    if len(spec.shape) == _CLIP:
        taken = FrameSelection(frames=spec.shape[1], rate=rate)
        assert isinstance(path, Path), "clips are files"
        return load_clip(path, size=_size_of(spec), taken=taken, start=view.start, crop=view.crop, flip=view.flip)
    if is_clip(path):  # one frame of it, where it is too short for more
        assert isinstance(path, Path), "clips are files"
        taken = FrameSelection(frames=1, rate=rate)
        frames = load_clip(path, size=_size_of(spec), taken=taken, start=view.start, crop=view.crop, flip=view.flip)
        return frames[:, 0]
    return load_levels(path, size=_size_of(spec), channels=spec.shape[0], crop=view.crop, flip=view.flip)


def _frame_rates(source: BatchSource, rows: Rows) -> Tensor:
    """The number of frames per second of each row's clip, (B,): as they are taken, or else its file's own.

    For a model of pictures all are 1.
    """
    if not any(kind_of(spec.name) == "pixels" and len(spec.shape) == _CLIP for spec in source.inputs):
        return torch.ones(len(rows.samples))
    if source.frame_rate is not None:
        return torch.full((len(rows.samples),), source.frame_rate)
    return torch.tensor([timeline_of(Path(str(source.dataset.path(sample)))).rate for sample in rows.samples])


def _masks(source: BatchSource, rows: Rows, spec: TensorSpec) -> Tensor:
    """The mask of each row, (B, 1, H, W): from a file, cut as its picture is, or drawn from the row's random numbers.

    Drawn masks of clips are (B, 1, F, H, W).
    """
    assert source.masks is not None, "it is set for models that read masks"
    if source.masks.kind is not MaskKind.FILE:
        numbers = _uniform(source, rows, "mask", (NUM_DRAWS,)).tolist()
        drawn = torch.stack([drawn_mask(source.masks.kind, row, _size_of(spec)) for row in numbers])
        return drawn if len(spec.shape) < _CLIP else _over_frames(source, source.masks.kind, rows, drawn, spec.shape[1])
    found = []
    for sample, view in zip(rows.samples, _views(source, rows), strict=True):
        size = upright_size(source.dataset.path(sample))
        path = source.masks.path(source.dataset.samples[sample].name)
        found.append(load_mask(path, found=size, size=_size_of(spec), crop=view.crop, flip=view.flip))
    return torch.stack(found)


def _over_frames(source: BatchSource, kind: MaskKind, rows: Rows, drawn: Tensor, frames: int) -> Tensor:
    """The masks of clips, (B, 1, F, H, W): zeros in guide frames, the drawn mask (B, 1, H, W) in all other frames."""
    numbers = _uniform(source, rows, "guide_frames", (1 + frames,)).tolist()
    guides = torch.tensor([guide_frames(kind, own, frames) for own in numbers])  # (B, F)
    return drawn.unsqueeze(2) * (~guides).to(drawn.dtype)[:, None, :, None, None]


def _sample_weights(source: BatchSource, rows: Rows, spec: TensorSpec) -> Tensor:
    """The weight of each row in the loss, (B,), or of each of its latents, (B, 1, h, w); in validation all are 1."""
    weights = torch.ones(len(rows.samples), *spec.shape)
    if rows.times is not None:
        return weights
    size = next(_size_of(one) for one in source.inputs if kind_of(one.name) == "pixels")
    for row, (sample, view) in enumerate(zip(rows.samples, _views(source, rows), strict=True)):
        treatment = source.treatments[source.dataset.samples[sample].source]
        if (path := loss_mask_of(source.dataset, source.treatments, sample)) is not None:
            latents = spec.shape[-2], spec.shape[-1]
            weights[row] = load_loss_mask(path, size=size, latents=latents, crop=view.crop, flip=view.flip)
        weights[row] *= treatment.loss_weight * source.size_weight
    return weights


def _is_dropped(source: BatchSource, rows: Rows) -> list[bool]:
    share = source.augmentation.condition_dropout
    if share == 0:
        return [False] * len(rows.samples)
    dropped: list[bool] = (_uniform(source, rows, "condition_dropout") < share).tolist()
    return dropped


def _input_ids(source: BatchSource, rows: Rows, spec: TensorSpec) -> Tensor:
    return token_ids(source.tokenizers[spec.name], _texts(source, rows, spec.name), *spec.shape)


def _input_mask(source: BatchSource, rows: Rows, spec: TensorSpec) -> Tensor:
    own, kind = kind_of(spec.name), MASKS[kind_of(spec.name)]
    name = spec.name.removesuffix(own) + kind  # a mask belongs to the tokens of the same model
    return token_mask(source.tokenizers[name], _texts(source, rows, name), spec.shape[0])


def _texts(source: BatchSource, rows: Rows, tokens: str) -> list[str]:
    """The caption of each row for the encoder that reads these tokens; an `Absent` where the caption is dropped."""
    encoder, dropped = encoder_of(kind_of(tokens)), _is_dropped(source, rows)
    return [Absent() if dropped[row] else _text(source, rows, row, encoder) for row in range(len(rows.samples))]


def _text(source: BatchSource, rows: Rows, row: int, encoder: str) -> str:
    sample = rows.samples[row]
    about = source.dataset.samples[sample]
    captions, rules = about.captions, source.treatments[about.source].captions
    if rows.passes is None:
        assert rules == AS_THEY_ARE or rows.times is not None, "rows to train on say how often samples were seen"
        return plain_text(texts_of(captions, rules)[0], rules)
    seen = SeenSample(seed=source.seed, sample=sample, number=rows.passes[row])
    return Absent() if is_dropped_for(encoder, rules, seen) else drawn_text(captions, rules, seen)


def _labels(source: BatchSource, rows: Rows) -> Tensor:
    labels = [source.dataset.samples[sample].label for sample in rows.samples]
    kept = [
        source.null_label if dropped else label
        for label, dropped in zip(labels, _is_dropped(source, rows), strict=True)
    ]
    return torch.tensor(kept, dtype=torch.int64)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    return permutation(seed=seed, epoch=epoch, size=num_samples)
