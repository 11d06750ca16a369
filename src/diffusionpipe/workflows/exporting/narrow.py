"""`diffusionpipe export RUN --quantize WIDTH`: a run's model with a denoiser in 8 or 4 bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.workflows.drawing.request import DrawingOptions
from diffusionpipe.workflows.telling import SILENCE, Telling

if TYPE_CHECKING:
    from diffusionpipe.models.graphs.graph import LayerGraph
    from diffusionpipe.models.parameters.exported_layers import Width
    from diffusionpipe.trainer.exports.narrow_export import Narrowed
    from diffusionpipe.trainer.inference.calibration import WatchedTimes
    from diffusionpipe.workflows.drawing.ranks import Work

PICTURES = 32
"""The default number of pictures that are drawn to see the ranges of inputs."""


def width_named(name: str) -> "Width":
    """The width of narrow exports with this name.

    Raises:
        ConfigError: no width has this name.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.models.parameters.exported_layers import Width

    try:
        return Width(name)
    except ValueError:
        raise ConfigError(f"--quantize {name}: the widths are {', '.join(Width)}") from None


def narrow_export_of(
    run: Path,
    out: Path,
    width: "Width",
    asked: DrawingOptions,
    work: "Work",
    *,
    pictures: int = PICTURES,
    times: "WatchedTimes | None" = None,
    tell: Telling = SILENCE,
) -> "Narrowed":
    """Write the model of a run or of a diffusers folder with a narrow denoiser; returns facts about its layers.

    Adapters are merged. `asked`: the pictures that are drawn to see the ranges of inputs, where `width` rounds them;
    without prompts and labels the run's own, or all classes. `work` shows the drawing. `times`: the denoising steps at
    which inputs are seen; normally distributed if None.

    Raises:
        ConfigError: there is no model of this kind, `out` exists, or there is nothing to draw.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.exports.narrow_export import write_narrow_export
    from diffusionpipe.trainer.inference.folder_drawing import Source, graph_of
    from diffusionpipe.workflows.drawing.run_recipe import size_of

    if out.exists():
        raise ConfigError(f"--out {out} exists; give a folder that does not")
    with _whole_model(run) as folder:
        size = size_of(run, folder, None, None, None)
        source = Source(folder=folder, resolution=size.resolution, clip=size.clip, variant=asked.variant)
        graph = graph_of(source)
        ranges: dict[str, float] = {}
        if width.rounds_inputs:
            ranges = _ranges(run, folder, _with_wishes(run, graph, asked, pictures), times, work)
        with tell.progress("writing") as progress:
            return write_narrow_export(folder, out, graph, width, ranges, variant=asked.variant, on_tensor=progress)


@contextmanager
def _whole_model(run: Path) -> Iterator[Path]:
    """A context with the diffusers folder of a run's whole model.

    For a run of adapters it is a temporary folder with the merged model, gone when the block ends.
    """
    from tempfile import TemporaryDirectory

    from diffusionpipe.workflows.exporting.single_file import merged_export, whole_folder

    folder = whole_folder(run)
    if folder is not None:
        yield folder
        return
    with TemporaryDirectory() as temporary:
        yield merged_export(run, Path(temporary) / "export")


def _ranges(
    run: Path, folder: Path, asked: DrawingOptions, times: "WatchedTimes | None", work: "Work"
) -> dict[str, float]:
    """Path of each layer of the denoiser that can be narrow -> the largest magnitude of its inputs while it draws."""
    from diffusionpipe.models.opening.folder import family_of
    from diffusionpipe.models.parameters.exported_layers import exportable
    from diffusionpipe.trainer.inference.calibration import WatchedTimes, watch
    from diffusionpipe.trainer.inference.folder_drawing import open_source
    from diffusionpipe.workflows.device import chosen_device
    from diffusionpipe.workflows.drawing.request import drawing_of

    drawing = drawing_of(run, asked)
    device = chosen_device(drawing.device)
    source, settings = replace(drawing.sources[-1], folder=folder, adapters=None, frozen=None), drawing.settings[-1]
    opened = open_source(source, drawing.wish, settings)
    layers = {path: layer for path, (_, _, layer) in exportable(opened.graph, family_of(folder).trainable[0]).items()}
    with work(None) as on_step:
        chosen = times or WatchedTimes.NORMAL
        return watch(opened, len(drawing.wish), settings, layers, device=device, times=chosen, on_step=on_step)


def _with_wishes(run: Path, graph: "LayerGraph", asked: DrawingOptions, pictures: int) -> DrawingOptions:
    """The options with prompts or labels to draw, repeated so that about `pictures` pictures are drawn.

    Without any in the options, they are the run's own, or all classes.

    Raises:
        ConfigError: the model reads texts, and there are none.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.inference.conditions import null_label
    from diffusionpipe.trainer.recipe import read_prompts
    from diffusionpipe.workflows.drawing.run_recipe import sampling_of

    if asked.prompts_file is not None:
        count = len(read_prompts(asked.prompts_file)) + len(asked.prompts)
        return replace(asked, count=max(1, pictures // count))
    prompts, labels = asked.prompts, asked.labels
    if not prompts and not labels:
        own = sampling_of(run)
        prompts, labels = tuple(own.prompts), tuple(own.labels)
    if not prompts and not labels and any(spec.name == "labels" for spec in graph.inputs):
        labels = tuple(range(null_label(graph)))[:pictures]
    if not prompts and not labels:
        raise ConfigError(
            "the ranges of inputs are seen while pictures are drawn; say of what: --prompts FILE with a caption in "
            "each line"
        )
    return replace(asked, prompts=prompts, labels=labels, count=max(1, pictures // (len(prompts) + len(labels))))
