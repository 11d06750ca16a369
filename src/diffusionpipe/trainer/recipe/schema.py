"""A recipe: everything that a training run depends on, checked.

Each class is one section of the TOML file, each field one key; `recipe_file.load_recipe` reads the file. Where a key
may be switched off, the word "none" does it. Paths are relative to the current directory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.costs.graph import as_fraction
from diffusionpipe.ir.versions import Versions
from diffusionpipe.trainer.data.masks.kinds import NAME, MaskKind
from diffusionpipe.trainer.data.scan.columns import Columns
from diffusionpipe.trainer.data.sizes.sizes import (
    MOST_CUT,
    MULTIPLE,
    Areas,
    areas_of,
    nearest_of,
    size_text,
    stated_size,
)
from diffusionpipe.trainer.data.text.treatment import Treatment
from diffusionpipe.trainer.recipe.captions_section import CaptionsSection
from diffusionpipe.trainer.recipe.checkpoint_section import CheckpointSection
from diffusionpipe.trainer.recipe.group_section import own_values, problems_of_group
from diffusionpipe.trainer.recipe.hole_rules import drawn_holes_have_pictures, masks_fit_the_model
from diffusionpipe.trainer.recipe.in_backward_check import updates_in_backward_suit
from diffusionpipe.trainer.recipe.learning_rate_section import LearningRateSection
from diffusionpipe.trainer.recipe.model_folder import components_of_folder
from diffusionpipe.trainer.recipe.model_section import (
    FrozenArithmetic,
    FrozenDtype,
    LoraSection,
    ModelSection,
    is_narrow_store,
    stored_form,
)
from diffusionpipe.trainer.recipe.models_section import MemberSection, refused_with_models
from diffusionpipe.trainer.recipe.objective_section import ObjectiveSection
from diffusionpipe.trainer.recipe.optimizer_check import optimizer_suits_the_training
from diffusionpipe.trainer.recipe.optimizer_section import OptimizerSection
from diffusionpipe.trainer.recipe.pipeline_section import PipelineSection
from diffusionpipe.trainer.recipe.run_section import RunSection
from diffusionpipe.trainer.recipe.sampling_section import SamplingSection
from diffusionpipe.trainer.recipe.section import (
    Auto,
    Choice,
    Count,
    Fraction,
    Maybe,
    Place,
    Positive,
    ProperFraction,
    Section,
    Several,
    of_user,
    raise_problems,
)
from diffusionpipe.trainer.recipe.sources_section import (
    ColumnsSection,
    MaskPattern,
    PatchesSection,
    SourceSection,
    checked_sizes,
    stated_sizes,
)
from diffusionpipe.trainer.recipe.training_section import RecipePrecision, TrainingSection
from diffusionpipe.trainer.recipe.versions_check import versions_suit_the_training
from diffusionpipe.trainer.recipe.weights_check import weights_suit_the_training


class OnError(StrEnum):
    """The action for a picture that cannot be decoded."""

    STOP = "stop"
    SKIP = "skip"


class Measure(StrEnum):
    """The unit in which batches and weights are counted: samples, or the tokens of samples."""

    SAMPLES = "samples"
    TOKENS = "tokens"


def _one_side(value: object) -> object:
    """The same value of `data.resolution`, for pydantic.

    A list arrives here only if one of its items is not a size.

    Raises:
        ValueError: an item of a list is not a size.
    """
    return checked_sizes(value) if isinstance(value, list | tuple) else value


class DataSection(Section):
    """[data]: pictures or clips, and captions."""

    train: Maybe[Place] = None
    """Folder of pictures, or with `frames` of clips, with `metadata.jsonl` or `.csv` (`file_name` and `text`, or
    `label`) or `.txt` files beside them. Required without `sources`; `"none"`: the folders that they name."""
    sources: dict[str, SourceSection] = Field(default_factory=dict)
    """Several folders in place of `train`, with repeats, loss weights and captions of their own."""
    validation: Maybe[Place] = None
    """Folder of the same kind for validation, which needs `validation.every`. It may lie in `train`; its samples are
    never used for training."""
    resolution: Annotated[Count, Field(le=65_536), BeforeValidator(_one_side)]
    """Side of the square that pictures are resized and cropped to, in pixels; with `height` their width; or a list of
    several sizes. Not required where each source has its own."""
    sizes: Several[int | str] = ()
    """Several sizes: sides, and texts such as `"768x512"`, width and height, or `"832x480x33"`, with frames. A list in
    `resolution` means these: a run's own recipe has the sizes here and the longest side in `resolution`."""
    aspects: Maybe[Annotated[Several[Positive], Field(min_length=2, max_length=2)]] = None
    """The least and the largest width / height of pictures, e.g. `[0.5, 2.0]`: pictures keep about their shape, because
    each side of `resolution` then gives several sizes of its area, between these two; `"none"`: squares."""
    multiple: Annotated[Count, Field(le=1024)] = MULTIPLE
    """With `aspects`: the number that sides are multiples of."""
    max_cut: ProperFraction = MOST_CUT
    """The largest share of a picture that is cut away where a size has too few pictures and gives them to another."""
    same_size: Auto[Count] = None
    """Samples in a row that have one size, where there are several: a multiple of the samples of a micro-batch.
    `"auto"`: the samples of a micro-batch, or of a whole step where a plan chooses the micro-batches."""
    batching: Choice[Measure] = Measure.SAMPLES
    """Micro-batches of equally many samples (`"samples"`), or of as many tokens at most, cut in every step
    (`"tokens"`)."""
    weigh: Choice[Measure] = Measure.SAMPLES
    """With several sizes: whether every sample counts alike in the loss (`"samples"`), or as much as it has pixels
    (`"tokens"`)."""
    min_side: Maybe[Count] = None
    """Pictures with a shorter side are left out, by name; `"none"`: none are."""
    enlarge: bool = True
    """Whether pictures that are smaller than their size are enlarged; else they take smaller areas or are left out, by
    name."""
    height: Maybe[Annotated[Count, Field(le=65_536)]] = None
    """Height of what is not square, for models of clips; `"none"`: as wide as high."""
    frames: Maybe[Annotated[int, Field(ge=2, le=65_536)]] = None
    """Frames of a clip, for models of clips; `"none"`: the data are pictures."""
    frame_rate: Maybe[Positive] = None
    """Frames of a second that are taken of clips; `"none"`: each frame of their files."""
    random_crop: bool = False
    """Crop at a random place instead of the centre."""
    flip: bool = False
    """Mirror pictures from left to right at random, with probability 1/2."""
    caption_dropout: Fraction = 0.1
    """Share of samples trained with an empty caption (or the null label), for classifier-free guidance."""
    columns: ColumnsSection = ColumnsSection()
    """The section [data.columns]: the columns of a table of samples."""
    captions: CaptionsSection = CaptionsSection()
    """The section [data.captions]: several captions, tags, alternatives, prefix, trigger word."""
    patches: Maybe[PatchesSection] = None
    """The section [data.patches]: most steps train on patches of pictures; `"none"`: all on whole pictures."""
    caption_chunks: Annotated[int, Field(ge=1, le=4)] = 1
    """Parts of 75 tokens that are read of each caption, for Stable Diffusion 1, 2 and XL; 1 reads as diffusers does."""
    clip_skip: Maybe[Count] = None
    """The layer of CLIP that gives the states, for Stable Diffusion 1 and 2: 1 is the last, 2 the one before it;
    `"none"`: the last."""
    masks: Maybe[Choice[MaskKind]] = None
    """The holes that a model fills: `"edges"`, `"boxes"`, from files (`"file"`), or all of a clip but its first frame
    (`"first"`); `"none"`: no masks."""
    mask_file: Maybe[Annotated[str, Field(min_length=1), AfterValidator(of_user)]] = None
    """For `masks = "file"`: the path of a picture's mask, where `{name}` becomes the picture's name without its
    ending, e.g. `"masks/{name}.png"`."""
    loss_mask: Maybe[MaskPattern] = None
    """The path of a grey picture that weighs the loss of a picture's parts, where white counts fully; `{name}` as in
    `mask_file`."""
    workers: Auto[Annotated[int, Field(ge=0, le=128)]] = None
    """Processes per rank that decode pictures ahead; 0 decodes in the training process; `"auto"`: 1 on CPUs; on GPUs
    the cores of the machine divided by its ranks, less one, from 1 to 8."""
    allow_growth: bool = False
    """Whether a resumed run may find more training pictures than before; they enter at its next epoch."""
    on_error: Choice[OnError] = OnError.STOP
    """The reaction to a training picture that cannot be read or decoded: stop the run, or skip the picture."""
    max_skipped: Count = 100
    """With `on_error = "skip"`: different pictures that may be skipped before the run stops."""

    @property
    def folders(self) -> dict[str, Path]:
        """The folders of training data, by the names of their sources; `train` alone has the name ""."""
        found = {name: source.path for name, source in self.sources.items()}
        return found if self.train is None else {"": self.train}

    def columns_of(self, name: str) -> Columns:
        """The names of the columns to read in the table of the source with this name; "" for `train`."""
        own = self.sources[name].columns if name else None
        return (own or self.columns).columns

    @property
    def where(self) -> str:
        """The paths of the folders of training data as one text, with commas between."""
        return ", ".join(map(str, self.folders.values()))

    @property
    def treatments(self) -> tuple[Treatment, ...]:
        """The treatment of each source's samples, in the order of sources; one treatment for `train` alone.

        It holds the rules of captions, the weight and the mask of the loss, and the sizes.
        """
        if not self.sources:
            return (Treatment(captions=self.captions.rules, loss_mask=self.loss_mask),)
        general = self.captions.rules
        return tuple(
            Treatment(
                captions=one.captions.rules
                if one.captions is not None
                else replace(general, trigger=None)
                if one.regularisation
                else general,
                loss_weight=one.loss_weight,
                loss_mask=one.loss_mask or self.loss_mask,
                resolution=one.resolution or (),
            )
            for one in self.sources.values()
        )

    @property
    def has_loss_masks(self) -> bool:
        """Whether any source has masks of the loss, so that parts of pictures count differently."""
        return any(one.loss_mask is not None for one in self.treatments)

    @property
    def is_weighted(self) -> bool:
        """Whether samples or their parts count differently in the loss, by weights, masks or tokens."""
        is_by_source = any(one.loss_weight != 1 for one in self.treatments)
        return self.has_loss_masks or is_by_source or self.weigh is not Measure.SAMPLES

    @model_validator(mode="after")
    def _has_no_faults(self) -> Self:
        raise_problems(
            problem
            for faults in (
                self._faults_of_folders,
                self._faults_of_masks,
                self._faults_of_sizes,
                self._faults_of_patches,
                self._faults_of_clips,
            )
            for problem in faults()
        )
        return self

    def _faults_of_folders(self) -> Iterator[str]:
        if self.train is None and not self.sources:
            yield "train: a folder of pictures is required; name it here, or several as [data.sources.NAME]"
        if self.train is not None and self.sources:
            yield "train: [data.sources.NAME] names the folders; make it one of them, and remove data.train"
        for name in self.sources:
            if not name or "/" in name or name in (".", ".."):
                yield f"sources.{name!r}: a name of a source has no slash and is not empty; rename it"
        if self.sources and all(one.regularisation for one in self.sources.values()):
            yield "sources: all are regularisation sets; set regularisation = false for one that is new"
        if self.loss_mask is not None and self.has_clips:
            yield "loss_mask: masks of clips are not supported; remove loss_mask"

    def _faults_of_masks(self) -> Iterator[str]:
        if self.masks is MaskKind.FILE and (self.mask_file is None or NAME not in self.mask_file):
            yield f'mask_file: masks = "file" needs the path of each picture\'s mask, e.g. "masks/{NAME}.png"'
        if self.mask_file is not None and self.masks is not MaskKind.FILE:
            yield 'mask_file: only masks = "file" reads it; set masks = "file", or remove mask_file'
        if self.masks is not None and self.has_sizes and self.has_clips:
            yield "masks: holes of clips of several sizes are not supported; give one size and frames, or remove masks"
        elif self.masks is MaskKind.FILE and self.frames is not None:
            yield 'masks: holes of clips are not read from files; set masks to "edges", "boxes" or "first"'
        elif self.masks is MaskKind.FIRST and self.frames is None:
            yield 'masks: "first" is the first frame of a clip; set frames, or masks to "edges" or "boxes"'

    @model_validator(mode="before")
    @classmethod
    def _several_sizes_are_a_list(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        stated = values["resolution"] if "resolution" in values else _sizes_of_sources(values.get("sources"))
        if not isinstance(stated, list | tuple):
            return values
        try:
            # The sizes go into their own key; `resolution` keeps the longest side.
            longest = max(side for size in stated_sizes(stated) for side in (size.width, size.height))
            return {**values, "resolution": longest, "sizes": list(stated)}
        except ValueError:
            return {**values, "resolution": stated}  # refused with all other faults of the section

    def _faults_of_sizes(self) -> Iterator[str]:
        if self.aspects is not None and self.aspects[0] > self.aspects[1]:
            yield "aspects: the first is the least width / height; exchange them"
        if self.aspects is not None and not self.has_area:
            also = " and multiple" if self.multiple != MULTIPLE else ""
            yield (
                "aspects: every size states its width and its height; give sides in resolution, e.g. "
                f"{self.resolution}, or remove aspects{also}"
            )
        if self.aspects is None and self.multiple != MULTIPLE:
            way = "" if self.patches else "set aspects, or "
            yield f"multiple: only sizes of an area have it; {way}remove multiple"
        if not self.has_sizes:
            keys = "max_cut", "same_size", "batching", "weigh"
            idle = [key for key in keys if getattr(self, key) != _default(DataSection, key)]
            for key in idle:
                if self.patches is None:
                    yield f"{key}: all samples have one size; set aspects or several sizes, or remove {key}"
                else:
                    yield f"{key}: all patches of a step have one size; remove {key}, or patches"
            return
        ways_of = {"height": "list the sizes in resolution", "frames": 'give sizes with frames, such as "832x480x33"'}
        for key, ways in ways_of.items():
            if getattr(self, key) is not None:
                yield f"{key}: it does not go with several sizes; {ways}, or remove {key}"
        if self.allow_growth:
            yield "allow_growth: new pictures would change the sizes of others; remove it"
        if self.batching is Measure.TOKENS and self.same_size is not None:
            yield 'same_size: with batching = "tokens" any size may follow any other; remove same_size'

    def _faults_of_patches(self) -> Iterator[str]:
        if self.patches is None:
            return
        if self.has_sizes:
            own = {
                "aspects": self.aspects is not None,
                "min_side": self.min_side is not None,
                "enlarge": not self.enlarge,
                "resolution of sources": any(one.resolution for one in self.sources.values()),
            }
            others = ", ".join(key for key, is_set in own.items() if is_set)
            way = "give one side in resolution alone" + (f", and remove {others}" if others else "")
            yield f"patches: they are cut from squares of one size; {way}"
        if self.frames is not None:
            yield "patches: patches of clips are not supported; remove patches, or frames"
        elif self.height is not None:
            yield "patches: they are cut from squares; remove height, or patches"
        if self.masks is not None:
            yield "patches: a model that fills holes reads no coordinates; remove patches, or masks"
        if self.has_loss_masks:
            yield "patches: masks of the loss belong to whole pictures; remove patches, or loss_mask"
        if self.resolution % 4:
            nearest = max(8, round(self.resolution / 8) * 8)
            yield (
                f"resolution: patches need a multiple of 4, not {self.resolution}, and of 8 or more where the model "
                f"shrinks pictures; use e.g. {nearest}"
            )

    def _faults_of_clips(self) -> Iterator[str]:
        if self.frame_rate is not None and not self.has_clips:
            way = "" if self.patches else "set data.frames, or "
            yield f"frame_rate: only clips have frames; {way}remove frame_rate"

    @property
    def has_area(self) -> bool:
        """Whether any size is a side alone, so that `aspects` can divide its area; else all state width and height."""
        general = self.sizes or (self.resolution,)
        stated = [one.resolution or general for one in self.sources.values()] or [general]
        return any(isinstance(size, int) for sizes in stated for size in sizes)

    @property
    def areas(self) -> Areas:
        """The sizes of samples, grouped by area, that follow from `resolution`, `sizes`, `aspects` and `multiple`.

        It holds one square if there is one size.
        """
        return self._areas_of(self.sizes or (self.resolution,))

    @property
    def areas_of_sources(self) -> tuple[Areas, ...]:
        """The sizes of samples, grouped by area, of each source, in order; () if no source has sizes of its own."""
        if not any(one.resolution for one in self.sources.values()):
            return ()
        return tuple(self._areas_of(one.resolution) if one.resolution else self.areas for one in self.sources.values())

    def _areas_of(self, stated: Sequence[int | str]) -> Areas:
        aspects = None if self.aspects is None else (self.aspects[0], self.aspects[1])
        return areas_of(stated, aspects, self.multiple)

    @property
    def frame_counts(self) -> tuple[int, ...]:
        """The different numbers of frames that samples have, ascending; (1,) for pictures alone."""
        if not self.has_sizes:
            return (self.frames or 1,)
        every = (self.areas, *self.areas_of_sources)
        return tuple(sorted({size.frames for areas in every for area in areas for size in area})) or (1,)

    @property
    def has_clips(self) -> bool:
        """Whether any sample has more than one frame."""
        return self.frame_counts[-1] > 1

    @property
    def has_sizes(self) -> bool:
        """Whether pictures are brought to several sizes, or some are left out because of their size."""
        is_by_source = any(one.resolution for one in self.sources.values())
        is_several = bool(self.sizes) or self.aspects is not None or is_by_source
        return is_several or self.min_side is not None or not self.enlarge


def _sizes_of_sources(sources: object) -> list[object] | None:
    """The sizes of all sources together as the recipe states them, each once; None if a source has none of its own."""
    tables = list(sources.values()) if isinstance(sources, Mapping) else []
    if not all(isinstance(one, Mapping) for one in tables):
        return None
    own = [one.get("resolution") for one in tables]
    if not own or not all(own) or "none" in own:  # a source without sizes of its own needs `resolution`
        return None
    return list(dict.fromkeys(size for one in own for size in (one if isinstance(one, list | tuple) else [one])))


def _default(section: type[Section], key: str) -> object:
    return section.model_fields[key].default


class ValidationSection(Section):
    """[validation]: the loss on held-out samples."""

    every: Maybe[Count] = None
    """Steps between validations; the run also validates after the last step."""
    timesteps: Annotated[Several[ProperFraction], Field(min_length=1)] = (0.1, 0.3, 0.5, 0.7, 0.9)
    """Training times, from 0 to below 1, at which the loss of each sample is computed."""
    samples: Count = 64
    """Number of held-out samples to use, the first by name; fewer if the folder has fewer."""


class Recipe(Section):
    """The sections of one recipe, checked each and against one another."""

    model: ModelSection
    """The section [model]; of several models only their paths, one after the other: see `alone`."""
    models: dict[str, MemberSection] = Field(default_factory=dict)
    """Several models in the order of sampling, by the names of their backbones; {} where [model] is the only one."""
    lora: LoraSection = LoraSection(rank=None)
    objective: ObjectiveSection = ObjectiveSection()
    data: DataSection
    training: TrainingSection
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    learning_rate: LearningRateSection = LearningRateSection()
    pipeline: PipelineSection = PipelineSection()
    validation: ValidationSection = ValidationSection()
    sampling: SamplingSection = SamplingSection()
    checkpoint: CheckpointSection = CheckpointSection()
    run: RunSection

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        sections = self._sections
        refused = refused_with_models(self.models, sections) if self.models else ()
        raise_problems([*problems_between(sections), *refused])
        return self

    @property
    def trigger(self) -> str | None:
        """The trigger word that files of adapters name: `lora.trigger`, else `data.captions.trigger`; may be None."""
        return self.lora.trigger or self.data.captions.trigger

    @property
    def backbones(self) -> tuple[str, ...]:
        """The names of the models that are trained; ("",) for [model]."""
        return tuple(self.models) or ("",)

    def alone(self, name: str) -> "Recipe":
        """The recipe of the model called `name` alone, as its [model]; the recipe itself if it has [model]."""
        if not self.models:
            return self
        own = self.models[name]
        # Keys that both sections have; `own_values` puts the others into the sections for all.
        model = {key: getattr(own, key) for key in MemberSection.model_fields if key in ModelSection.model_fields}
        return self.model_copy(update={"models": {}, "model": ModelSection(**model), **own_values(own, self._sections)})

    def groups(self) -> dict[str, "Recipe"]:
        """Name of a group of parameters that are trained alike -> the recipe with the values that hold for the group.

        A group is either one component with values of its own, or all other components of a model. It has the name of
        the component in the graph of all models ("text_encoder", "base/text_encoder") or of the model ("" for [model]).
        """
        found = {}
        for name in self.backbones:
            alone = self.alone(name)
            found[name] = alone
            for component, own in alone.model.components.items():
                full = f"{name}/{component}" if name else component
                found[full] = alone.model_copy(update=own_values(own, alone._sections))
        return found

    def subgroups(self) -> dict[str, "Recipe"]:
        """Name of a part of this group that has an optimizer of its own -> the recipe with the values for the part.

        The names are "" (for parameters that fit no other part), "rest", and patterns of `optimizer.groups`: "*.bias",
        "rest|*.bias".
        """
        own = {"": self.optimizer, **({"rest": self.optimizer.of_rest} if self.optimizer.rest is not None else {})}
        found = dict(own)
        for name, section in own.items():
            for pattern in section.groups:
                found[f"{name}|{pattern}" if name else pattern] = section.of_group(pattern)
        return {name: self.model_copy(update={"optimizer": section}) for name, section in found.items()}

    @property
    def _sections(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in type(self).model_fields}


Check = Callable[..., Iterator[str]]
"""A function whose arguments are sections, by their names, and that yields "section.key: problem" for each problem."""


def problems_between(sections: Mapping[str, object], further: Sequence[Check] = ()) -> Iterator[str]:
    """A sentence for each pair of keys in different sections that do not fit, by our checks and `further` checks.

    A check that takes a section which is not in `sections` is left out.
    """
    for check in (*_CHECKS, *further):
        names = signature(check).parameters
        if all(name in sections for name in names):
            yield from check(**{name: sections[name] for name in names})


def why_not_searched(sections: Mapping[str, Any]) -> str:
    """The reason why sizes cannot be searched for these sections, in words; "" where they can."""
    if len(sections["models"]) > 2:
        return "sizes are searched for two models at most"
    if any(own.microbatches is not None for own in sections["models"].values()):
        return "models have micro-batches of their own"
    if sections["models"] and sections["objective"].self_conditioning:
        return "sizes are searched for models that read no estimates"
    return ""


def _batch_can_be_cut(
    *, training: TrainingSection, pipeline: PipelineSection, models: Mapping[str, MemberSection]
) -> Iterator[str]:
    if pipeline.plan_file is not None or models:  # several models have micro-batches of their own
        return
    microbatches, copies = pipeline.sizes.microbatches, pipeline.sizes.data_parallel
    if pipeline.is_searched:
        # Open sizes are left to the search.
        microbatches, copies = pipeline.microbatches or 1, pipeline.data_parallel or 1
    parts = microbatches * copies
    if training.batch % parts:
        nearest = max(1, round(training.batch / parts)) * parts
        yield (
            f"training.batch: {training.batch} samples cannot be cut into {microbatches} micro-batches for "
            f"each of {copies} pipelines; use a multiple of {parts}, e.g. {nearest}"
        )
        return
    size = training.batch // parts
    bad = sorted({replicas for replicas in pipeline.replicas if size % replicas})
    if bad:
        yield (
            f"pipeline.replicas: a micro-batch of {size} samples cannot be shared by {' or '.join(map(str, bad))} "
            "replicas; use larger or fewer micro-batches, or other numbers of replicas"
        )


def _pictures_are_read_as_they_are(*, data: DataSection, models: Mapping[str, MemberSection]) -> Iterator[str]:
    if models and all((own.resolution or data.resolution) < data.resolution for own in models.values()):
        yield f"data.resolution: no model reads pictures of {data.resolution}; set it to the largest resolution"


def _drawn_sizes_are_trained(*, data: DataSection, sampling: SamplingSection) -> Iterator[str]:
    if not sampling.sizes:
        return
    areas = (data.areas, *data.areas_of_sources) if data.has_sizes else ()
    built = [size for one in areas for area in one for size in area]
    for stated in sampling.sizes:
        try:
            size = stated_size(stated)
        except ValueError as error:
            yield f"sampling.sizes: {error}"
            continue
        if not built:
            way = "" if data.patches else "set data.aspects or several sizes, or "
            yield f"sampling.sizes: all pictures have one size; {way}remove sizes"
            return
        if size not in built:
            near = size_text(nearest_of(size, built))
            yield f"sampling.sizes: the run has no size {stated}; the nearest is {near}"


def _sizes_go_with_the_rest(
    *,
    data: DataSection,
    training: TrainingSection,
    pipeline: PipelineSection,
    models: Mapping[str, MemberSection],
    objective: ObjectiveSection,
) -> Iterator[str]:
    if not data.has_sizes:
        return
    if models:
        yield "data.resolution: several models read pictures of one size each; give one side"
    if objective.self_conditioning:
        yield "objective.self_conditioning: estimates are read at one size alone; remove it, or give one resolution"
    if pipeline.versions is not Versions.FLUSHED:
        yield 'pipeline.versions: training without a flush has one size; set it to "flushed", or give one resolution'
    if data.same_size is not None and training.batch % data.same_size:
        yield f"data.same_size: {data.same_size} does not divide training.batch = {training.batch}; use a divisor"
    if data.batching is Measure.TOKENS:
        yield from _problems_of_tokens(pipeline)


def _problems_of_tokens(pipeline: PipelineSection) -> Iterator[str]:
    way = 'or remove data.batching = "tokens"'
    if pipeline.is_searched:
        given = {
            "stages": pipeline.stages is not None,
            'schedule = "1f1b"': pipeline.schedule is not None,  # a plan of another kind is refused by its name
            "fill = false": pipeline.fill is False,
            "sharded = false": pipeline.sharded is False,
        }
        lacking = ", ".join(key for key, is_given in given.items() if not is_given)
        if lacking:
            yield (
                "pipeline.plan: steps by tokens have one stage on each rank and no fills, so a search chooses "
                f"micro-batches, copies and cuts alone; set {lacking} in [pipeline], {way}"
            )
    elif pipeline.plan is None and pipeline.sizes.microbatches == 1:
        yield f"pipeline.microbatches: a step of several sizes has more than one; set it to 2 or more, {way}"
    usual = PipelineSection().sizes.schedule
    if not pipeline.is_searched:
        for key, stated in {"schedule": pipeline.schedule, "orders": pipeline.orders}.items():
            if stated not in (None, usual):
                yield (
                    f"pipeline.{key}: each step is cut and ordered by its own pictures, so {stated} would never be "
                    f"run; remove {key}, {way}"
                )
    elif pipeline.schedule not in (None, usual):
        yield f'pipeline.schedule: each step is ordered by its own pictures; set it to "{usual}", {way}'
    if pipeline.may_cache:
        yield (
            "pipeline.encoders: the fills that write a cache encode the next step, which is cut otherwise than this "
            f"one; remove it, {way}"
        )
    elif pipeline.fill:
        yield (
            "pipeline.fill: bubbles are filled with the next step's pictures, which are cut otherwise than this one's; "
            f"remove it, {way}"
        )
    if pipeline.sharded:
        yield f"pipeline.sharded: sharded copies gather for fixed micro-batches; remove it, {way}"


def _patches_go_with_the_rest(
    *,
    data: DataSection,
    pipeline: PipelineSection,
    models: Mapping[str, MemberSection],
    objective: ObjectiveSection,
    lora: LoraSection,
) -> Iterator[str]:
    if data.patches is None:
        return
    if models:
        yield f"data.patches: {refusal(Feature.SEVERAL_MODELS, Feature.PATCHES)}"
    if objective.self_conditioning:
        yield f"data.patches: {refusal(Feature.SELF_CONDITIONING, Feature.PATCHES)}"
    if lora.rank is not None:
        yield f"data.patches: {refusal(Feature.LORA, Feature.PATCHES)}"
    if pipeline.versions is not Versions.FLUSHED:
        yield f"data.patches: {refusal(Feature.VERSIONS, Feature.PATCHES)}"


def _groups_can_be_trained(
    *,
    model: ModelSection,
    models: Mapping[str, MemberSection],
    optimizer: OptimizerSection,
    learning_rate: LearningRateSection,
    training: TrainingSection,
) -> Iterator[str]:
    sections = {"optimizer": optimizer, "learning_rate": learning_rate, "training": training}
    for component, own in model.components.items():
        yield from problems_of_group(f"model.components.{component}", own, sections)
    for name, member in models.items():
        yield from problems_of_group(f"models.{name}", member, sections)
        merged = {**sections, **own_values(member, sections)}
        for component, own in member.components.items():
            yield from problems_of_group(f"models.{name}.components.{component}", own, merged)


def _warmup_ends_before_the_run(*, training: TrainingSection, learning_rate: LearningRateSection) -> Iterator[str]:
    # Where the run ends by epochs, its steps are known, and this is checked again, once its data are counted.
    if training.steps is not None and learning_rate.warmup_steps >= training.steps:
        yield (
            f"learning_rate.warmup_steps: {learning_rate.warmup_steps} is not less than the {training.steps} steps of "
            "the run; use a shorter warm-up"
        )


def _schedule_can_be_had(
    *, training: TrainingSection, learning_rate: LearningRateSection, pipeline: PipelineSection
) -> Iterator[str]:
    schedule = learning_rate.schedule
    if schedule.is_own:
        return
    # Imported only here: torch takes seconds, and a recipe's schema must not need it.
    from diffusionpipe.trainer.optim.named_rates import problem_of_schedule

    # Epochs give the steps later; here any number after the warm-up will do.
    steps = learning_rate.warmup_steps + 1 if training.steps is None else training.steps
    problem = problem_of_schedule(
        schedule.value, learning_rate.arguments, warmup_steps=learning_rate.warmup_steps, total_steps=steps
    )
    if problem is not None:
        yield f"learning_rate.arguments: {problem}"
    if schedule.reads_losses and learning_rate.warmup_steps:
        yield f"learning_rate.warmup_steps: it has no effect on a {schedule} schedule; remove it"
    if schedule.reads_losses and pipeline.versions is not Versions.FLUSHED:
        yield (
            f"learning_rate.schedule: {schedule} reads the loss of each step, which comes late without a flush; choose "
            'another one, or set pipeline.versions = "flushed"'
        )


def _validation_has_data(*, data: DataSection, validation: ValidationSection) -> Iterator[str]:
    if validation.every and data.validation is None:
        yield "validation.every: there is no data to validate on; set data.validation to a folder"
    if data.validation is not None and validation.every is None:
        yield "data.validation: this folder is never used; set validation.every to a number of steps"


def _start_has_something_to_show(*, sampling: SamplingSection, validation: ValidationSection) -> Iterator[str]:
    if sampling.at_start and sampling.every is None and validation.every is None:
        yield (
            "sampling.at_start: nothing is drawn or validated; set sampling.every or validation.every to a number of "
            "steps"
        )


def _adapters_have_a_base(*, model: ModelSection, lora: LoraSection) -> Iterator[str]:
    if lora.rank is None:
        return
    if model.from_scratch:
        yield f"model.from_scratch: {refusal(Feature.LORA, Feature.FROM_SCRATCH)}"
    if lora.dora and stored_form(model.frozen_dtype) is not None:
        yield f"model.frozen_dtype: {refusal(Feature.DORA, Feature.QUANTISED)}"
    elif lora.dora and is_narrow_store(model.frozen_dtype):
        yield f"model.frozen_dtype: {refusal(Feature.DORA, Feature.NARROW_STORE)}"


def _adapters_are_exported(*, checkpoint: CheckpointSection, lora: LoraSection) -> Iterator[str]:
    if checkpoint.adapters and lora.rank is None:
        yield "checkpoint.adapters: it has no effect without adapters; set lora.rank, e.g. 16, or remove it"
    # Exports of checkpoints are adapters, which these keys shape, also where the last export is merged.
    if lora.merge and not checkpoint.adapters:
        defaults = LoraSection(rank=None)
        for key in ("formats", "dora_as_difference", "save_dtype", "trigger"):
            if getattr(lora, key) != getattr(defaults, key):
                yield f"lora.{key}: it has no effect on a whole model; remove it, or remove lora.merge"


def _estimates_are_of_whole_samples(*, objective: ObjectiveSection, training: TrainingSection) -> Iterator[str]:
    share = as_fraction(objective.self_conditioning)
    if (share * training.batch).denominator != 1:
        nearest = max(1, round(share * training.batch)) / training.batch
        yield (
            f"objective.self_conditioning: {objective.self_conditioning} of a batch of {training.batch} is not a whole "
            f"number of samples; use e.g. {nearest:g}"
        )


def _self_conditioning_has_what_it_needs(
    *,
    objective: ObjectiveSection,
    lora: LoraSection,
    models: Mapping[str, MemberSection],
    pipeline: PipelineSection,
    data: DataSection,
) -> Iterator[str]:
    if objective.self_conditioning and data.masks is not None:
        yield f"objective.self_conditioning: {refusal(Feature.SELF_CONDITIONING, Feature.MASKS)}"
    if objective.self_conditioning and lora.rank is not None:
        yield f"objective.self_conditioning: {refusal(Feature.SELF_CONDITIONING, Feature.LORA)}"
    if objective.self_conditioning and models and pipeline.plan == "auto":
        yield "pipeline.plan: sizes are searched for models that read no estimates; remove it and give the sizes"


def too_wide(model: ModelSection, precision: RecipePrecision) -> str:
    """A sentence: why frozen weights are not stored narrower than float32 with this precision, and the remedy."""
    if stored_form(model.frozen_dtype) is not None:
        return refusal(Feature.QUANTISED, Feature.WIDE, precision=precision)
    return refusal(Feature.NARROW_STORE, Feature.WIDE, precision=precision)


def _frozen_weights_are_read_as_stored(*, model: ModelSection, training: TrainingSection) -> Iterator[str]:
    if training.precision in (RecipePrecision.FLOAT32, RecipePrecision.FLOAT64) and is_narrow_store(model.frozen_dtype):
        yield f"model.frozen_dtype: {too_wide(model, training.precision)}"
    stated = model.frozen_dtype
    forms = stated.values() if isinstance(stated, dict) else (stated,)
    known = components_of_folder(model.path) if isinstance(stated, dict) else ()
    # A hub id or a model in one file has no folder to look into yet.
    for name in stated if isinstance(stated, dict) and known else ():
        if name not in known:
            yield f"model.frozen_dtype: the model has no component {name}; it has {', '.join(known)}"
    if model.frozen_arithmetic is FrozenArithmetic.INT8 and FrozenDtype.INT8 not in forms:
        yield 'model.frozen_arithmetic: no weights are stored in int8; set frozen_dtype = "int8", or remove it'
    form = stored_form(stated)
    if model.from_scratch and isinstance(form, FrozenDtype) and not isinstance(stated, dict):
        yield f"model.frozen_dtype: {refusal(Feature.QUANTISED, Feature.FROM_SCRATCH, form=form)}"


_CHECKS: tuple[Check, ...] = (
    _adapters_have_a_base,
    _adapters_are_exported,
    _estimates_are_of_whole_samples,
    _self_conditioning_has_what_it_needs,
    _frozen_weights_are_read_as_stored,
    _batch_can_be_cut,
    _pictures_are_read_as_they_are,
    _sizes_go_with_the_rest,
    _patches_go_with_the_rest,
    masks_fit_the_model,
    drawn_holes_have_pictures,
    _drawn_sizes_are_trained,
    _groups_can_be_trained,
    _warmup_ends_before_the_run,
    _schedule_can_be_had,
    _validation_has_data,
    _start_has_something_to_show,
    versions_suit_the_training,
    optimizer_suits_the_training,
    weights_suit_the_training,
    updates_in_backward_suit,
)
