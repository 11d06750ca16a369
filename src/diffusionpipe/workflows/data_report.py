"""`diffusionpipe data FOLDER|RECIPE`: the facts about pictures and captions, without weights or a device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from diffusionpipe.workflows.telling import SILENCE, Telling

if TYPE_CHECKING:
    import numpy as np

    from diffusionpipe.ir.data_survey import Line
    from diffusionpipe.ir.size import Clip
    from diffusionpipe.trainer.data.sizes.sizes import SizeRules
    from diffusionpipe.trainer.data.survey import Folder, SampleUse
    from diffusionpipe.trainer.data.text.caption_lengths import EncoderReading
    from diffusionpipe.trainer.recipe import DataSection, Recipe

ASPECTS = (0.5, 2.0)
"""The least and the largest width / height of the sizes that a folder's pictures get by default."""
RESOLUTION = 512
"""The side in pixels of the squares whose area a folder's pictures get by default."""
_SIDE = 224
"""The longer side of a picture on a contact sheet, in pixels."""
_USUAL = -1
"""The key of `DataReport.sizes` for the size of all samples that have no size of their own."""
_FADED = 0.75
"""The share of white in the parts of a picture that are cut away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """The lines about the data of a folder or of a recipe, with its samples and the size of each."""

    lines: "tuple[Line, ...]"
    train: "Folder"
    """The training data."""
    use: "SampleUse"
    """The samples that a run would use, and their sizes."""
    sizes: "dict[int, Clip]"
    """Number of a sample -> its own size in the first epoch, if it has one; `_USUAL` -> the size of all others."""
    is_clips: bool
    """Whether the samples are clips, not pictures."""


def report_on_folder(
    folder: Path, *, resolutions: Sequence[int] = (), aspects: tuple[float, float] = ASPECTS, tell: Telling = SILENCE
) -> DataReport:
    """The facts about a folder of pictures or clips, with the sizes that they would have in training.

    `resolutions`: sides in pixels of the squares whose areas the sizes have; () for the default. `aspects`: the
    smallest and the largest ratio of width to height.

    Raises:
        ConfigError: it holds no pictures, or none that can be read.
    """
    from diffusionpipe.ir.data_survey import Line
    from diffusionpipe.ir.size import Clip
    from diffusionpipe.trainer.data.sizes.sizes import SizeRules, areas_of, cut_away
    from diffusionpipe.trainer.recipe import DataSection

    sides = sorted(set(resolutions)) or [RESOLUTION]
    data = DataSection.model_validate({"train": str(folder), "resolution": sides[-1]})
    rules = SizeRules(areas=areas_of(sides, aspects))
    found = _report(data, None, rules, tell)
    square = Clip.square(sides[-1])
    sizes = [size for size in found.train.findings.sizes if size is not None]
    share = sum(cut_away(size, square) for size in sizes) / len(sizes)
    line = Line(name="one square", text=f"of {square} would cut {100 * share:.0f} % of the pixels away")
    return replace(found, lines=(*found.lines, line))


def report_on_file(recipe: Path, overrides: Sequence[str], *, tell: Telling = SILENCE) -> DataReport:
    """The facts about the data of the recipe in a file, some of whose keys are changed.

    Raises:
        RecipeError: the file or a changed key is wrong.
        ConfigError: as `report_on_recipe`.
    """
    from diffusionpipe.trainer.recipe import load_recipe

    return report_on_recipe(load_recipe(recipe, overrides), tell=tell)


def report_on_recipe(recipe: "Recipe", *, tell: Telling = SILENCE) -> DataReport:
    """The facts about the data of a recipe, as its run would have them at its begin.

    Raises:
        ConfigError: a folder holds no pictures, or none that can be read.
    """
    from diffusionpipe.trainer.recipe.size_rules import rules_of

    return _report(recipe.data, recipe, rules_of(recipe.data), tell)


def _report(data: "DataSection", recipe: "Recipe | None", rules: "SizeRules | None", tell: Telling) -> DataReport:
    from diffusionpipe.trainer.data.decoding.clips import selection_of
    from diffusionpipe.trainer.data.order import num_epochs, num_positions
    from diffusionpipe.trainer.data.scan.columns import Columns
    from diffusionpipe.trainer.data.scan.dataset import Condition, ScanRules
    from diffusionpipe.trainer.data.scan.listing import is_same
    from diffusionpipe.trainer.data.scan.scanning import examine_place
    from diffusionpipe.trainer.data.scan.sources import joined_of
    from diffusionpipe.trainer.data.sizes.sizes import assign
    from diffusionpipe.trainer.data.survey import Folder, SampleUse, survey
    from diffusionpipe.trainer.recipe.size_rules import run_of

    taken = selection_of(data.frame_counts, data.frame_rate)

    def scanned(folder: Path, apart: Path | None, columns: Columns) -> Folder:
        tell.say(f"reading the headers in {folder}")
        rules = ScanRules(apart=apart, reports=True)
        with tell.progress("reading headers", is_timed=False) as report:
            return Folder(
                *examine_place(folder, Condition.NOTHING, columns=columns, taken=taken, progress=report, rules=rules)
            )

    own = {}
    for name, path in data.folders.items():
        apart = None if data.validation is None or is_same(path, data.validation) else data.validation
        own[name] = scanned(path, apart, data.columns_of(name))
    train = Folder(*joined_of(own, data.sources)) if data.sources else own[""]
    held_out = None if data.validation is None else scanned(data.validation, None, data.columns_of(""))
    run = 1 if recipe is None or rules is None else run_of(recipe)
    # A header that cannot be read gives no size; any will do, since the picture is named as a fault anyway.
    pictures = [size or (1, 1) for size in train.findings.sizes]
    sources = [sample.source for sample in train.dataset.samples]
    frames = [sample.frames for sample in train.dataset.samples]
    sizes = None if rules is None else assign(pictures, rules, run, sources, frames)
    steps, batch, count = None, 1, len(train.dataset.samples) - (len(sizes.left_out) if sizes is not None else 0)
    if recipe is not None:
        batch, steps = recipe.training.batch, recipe.training.steps
        if recipe.training.epochs is not None:
            # The last step of the last epoch may be filled up with samples of the next one.
            by_epochs = ceil(num_positions(recipe.training.epochs, count) / batch)
            steps = by_epochs if steps is None else min(steps, by_epochs)
    reader = _reader_of(recipe, tell)
    use = SampleUse(
        steps=steps,
        batch=batch,
        epochs=num_epochs((steps or 0) * batch, count),
        size=(data.resolution, data.height or data.resolution),
        treatments=data.treatments,
        readings=reader.readings,
        more_chunks=reader.more_chunks,
        prompts=reader.prompts,
        sizes=sizes,
        same_size=run,
    )
    return DataReport(
        lines=(*survey(train, held_out, use), *reader.problems),
        train=train,
        use=use,
        is_clips=taken is not None,
        sizes=_sizes_of(use),
    )


class _Reader(NamedTuple):
    """How a recipe's model reads texts, and the texts that its run draws pictures from."""

    readings: "Sequence[EncoderReading] | None" = None
    """How each text encoder reads a caption; None: no model is there, or it reads no texts."""
    more_chunks: bool = False
    """Whether the model could read captions in more chunks."""
    prompts: tuple[str, ...] = ()
    """Texts that the run draws from."""
    problems: "tuple[Line, ...]" = ()
    """A warning with the reason why the run would refuse the model; () if it would not."""


def _reader_of(recipe: "Recipe | None", tell: Telling) -> _Reader:
    """How the recipe's model reads texts, by its tokenizers and configurations; nothing where its folder is missing."""
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.data_survey import Line
    from diffusionpipe.ir.home import expanded_path
    from diffusionpipe.trainer.course.preparation import reads_more, tokenizers_of
    from diffusionpipe.trainer.data.text.caption_lengths import readings_of
    from diffusionpipe.trainer.model.members import open_members

    folders = [recipe.alone(name).model.path for name in recipe.backbones] if recipe is not None else []
    if recipe is None or not all(expanded_path(Path(folder)).is_dir() for folder in folders):
        return _Reader()
    tell.say(f"reading the configurations of {', '.join(folders)}")
    try:
        members, graph = open_members(recipe)
        readings = readings_of(graph.inputs, tokenizers_of(members))
    except ConfigError as error:
        return _Reader(problems=(Line(name="model", text=str(error), is_warning=True),))
    drawn = recipe.sampling
    return _Reader(
        readings=readings or None,
        more_chunks=reads_more(recipe, members),
        prompts=(*drawn.prompts, *drawn.negative_prompt) if drawn.every is not None else (),
    )


def _sizes_of(use: "SampleUse") -> "dict[int, Clip]":
    """Number of a sample -> its own size in the first epoch, if it has one; `_USUAL` -> the size of all others."""
    from diffusionpipe.ir.size import Clip

    found = {_USUAL: Clip(width=use.size[0], height=use.size[1])}
    if use.sizes is not None:
        found |= {number: share.size for share in use.sizes.shares for number in share.members[0]}
    return found


def write_sheet(report: DataReport, path: Path, *, count: int) -> int:
    """Write a contact sheet of at most `count` samples, spread evenly over the data; returns how many it shows.

    Each picture is shown whole, with the parts faded that are cut away, over its name and a caption.

    Raises:
        ConfigError: the file cannot be written, or its ending is unknown.
    """
    from diffusionpipe.viz.grid import sample_grid, square_columns

    images = list(_images(report, count))
    sample_grid(images, path, columns=min(8, square_columns(len(images))))
    return len(images)


def _images(report: DataReport, count: int) -> "Iterator[tuple[str, np.ndarray]]":
    from diffusionpipe.trainer.data.decoding.clips import FrameSelection, is_clip, load_clip
    from diffusionpipe.trainer.data.decoding.images import load_levels
    from diffusionpipe.trainer.data.text.caption_rules import plain_text, texts_of

    dataset, treatments = report.train.dataset, report.use.treatments
    names = {sample.name: place for place, sample in enumerate(dataset.samples)}  # repeats of a picture look alike
    places = sorted(names.values())
    for number in range(min(count, len(places))):
        place = places[number * len(places) // min(count, len(places))]
        sample, path = dataset.samples[place], dataset.path(place)
        rules = treatments[sample.source].captions
        text = " | ".join(plain_text(one, rules) for one in texts_of(sample.captions, rules)) if sample.captions else ""
        label = "" if sample.label is None else f" [{sample.label}]"
        size = report.train.findings.sizes[place]
        assert size is not None, "what has no header is left out"
        scale = _SIDE / max(size)
        own = report.sizes.get(place, report.sizes[_USUAL])
        shown = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
        if is_clip(path):
            assert isinstance(path, Path), "clips are files"
            levels = load_clip(path, size=shown, taken=FrameSelection(frames=1))[:, 0]
        else:
            levels = load_levels(path, size=shown)
        yield f"{sample.name}{label}: {text}", _faded(levels.permute(1, 2, 0).numpy(), own)


def _faded(levels: "np.ndarray", size: "Clip") -> "np.ndarray":
    """The picture (H, W, 3) with its edges faded that training cuts away to get `size` from its centre."""
    import numpy as np

    height, width = levels.shape[:2]
    scale = max(size.width / width, size.height / height)
    seen = min(width, round(size.width / scale)), min(height, round(size.height / scale))
    left, top = (width - seen[0]) // 2, (height - seen[1]) // 2
    shown = np.round(levels * (1 - _FADED) + 255 * _FADED).astype(np.uint8)
    inner = slice(top, top + seen[1]), slice(left, left + seen[0])
    shown[inner] = levels[inner]
    return shown
