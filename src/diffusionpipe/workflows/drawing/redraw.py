"""Pictures that `diffusionpipe sample` keeps singly, and `--like PICTURE`: draw one again, from what its file says."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from diffusionpipe.workflows.telling import SILENCE, Telling

if TYPE_CHECKING:
    import torch

    from diffusionpipe.models.base.family import CaptionReading
    from diffusionpipe.trainer.inference.denoise import SamplingSettings
    from diffusionpipe.trainer.inference.drawing import Picture
    from diffusionpipe.trainer.inference.sample_file import SampleOrigin
    from diffusionpipe.trainer.recipe import RecipePrecision
    from diffusionpipe.workflows.drawing.ranks import Work
    from diffusionpipe.workflows.drawing.run_recipe import SampleSize
    from diffusionpipe.workflows.drawing.trained_model import TrainedModel


def redraw(
    run: Path,
    like: Path,
    out: Path,
    device: "torch.device",
    work: "Work",
    tell: Telling = SILENCE,
    *,
    config: str | None = None,
) -> str:
    """Draw the picture in the file `like` again, with the weights that drew it, into `out`; returns its caption.

    `config`: the diffusers folder or hub id of a model in one file.

    Raises:
        ConfigError: the file does not say how it was drawn, or those weights are gone.
    """
    from diffusionpipe.trainer.data.decoding.clips import PLAYED
    from diffusionpipe.trainer.inference.sample_file import read_origin, write_sample
    from diffusionpipe.trainer.recipe import RecipePrecision
    from diffusionpipe.viz.drawing_file import MOVING, check_drawing_file, write_clip
    from diffusionpipe.workflows.drawing.trained_model import model_after, trained_model

    origin = read_origin(like)
    check_drawing_file(out, None if origin.frames is None else origin.frame_rate)
    if origin.precision is RecipePrecision.FLOAT64:
        tell.say(f"{like} was drawn in float64 and is drawn again in float32, so pixels may differ by 1 of 255")
        origin = replace(origin, precision=RecipePrecision.FLOAT32)
    with TemporaryDirectory() as temporary:
        step = origin.training_step
        model = trained_model(run, config=config) if step is None else model_after(run, step, Path(temporary))
        picture = _draw(model, origin, device, work)
    if out.suffix.lower() in MOVING:
        write_clip(picture, out, rate=origin.frame_rate or PLAYED)
    else:
        write_sample(picture, origin, out)
    return origin.caption


def _draw(model: "TrainedModel", origin: "SampleOrigin", device: "torch.device", work: "Work") -> "Picture":
    """The picture of this origin, drawn again.

    As many rows are drawn as were drawn with it, and it has its old position among them, so that every number is
    rounded as before.

    Raises:
        ConfigError: several models have drawn it.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.inference.conditions import SampleRequest
    from diffusionpipe.trainer.inference.drawing import Arithmetic
    from diffusionpipe.trainer.inference.folder_drawing import draw_from_folder
    from diffusionpipe.trainer.inference.known_pixels import known_of
    from diffusionpipe.workflows.drawing.memory import check_memory, named_shortage
    from diffusionpipe.workflows.drawing.run_recipe import SampleSize

    def of_origin(path: str | None) -> tuple[Path, ...]:
        return () if path is None else (Path(path),)

    # The number of rows is the same as then: kernels round differently for other batches.
    wish = SampleRequest(
        prompts=() if origin.prompt is None else (origin.prompt,) * origin.count,
        labels=() if origin.label is None else (origin.label,) * origin.count,
        negatives=(origin.negative_prompt,) * origin.count if origin.negative_prompt is not None else (),
        conditions=(Path(origin.condition),) * origin.count if origin.condition is not None else (),
        known=known_of(of_origin(origin.image), of_origin(origin.mask), origin.count),
        frame_rate=origin.frame_rate,
    )
    if model.before is not None:
        raise ConfigError(
            "pictures that several models have drawn cannot be drawn again from one file; draw them with sample and "
            f"the same --seed, {origin.settings.seed}"
        )
    size = SampleSize(resolution=origin.resolution, height=origin.height, frames=origin.frames)
    check_memory(model.folder, len(wish), size.sample, device)
    with named_shortage(), work(None) as on_step:
        pictures = draw_from_folder(
            model.folder,
            wish,
            origin.settings,
            resolution=origin.resolution,
            device=device,
            adapters=model.adapters,
            variant=model.variant,
            clip=size.clip,
            captions=origin.captions,
            arithmetic=Arithmetic(rows=origin.rows, precision=origin.precision),
            on_step=on_step,
        )
    return pictures[origin.index]


def origin_of(
    run: Path,
    settings: "SamplingSettings",
    size: "SampleSize",
    precision: "RecipePrecision",
    rows: int | None,
    captions: "CaptionReading",
) -> "SampleOrigin":
    """The origin to write into files of pictures that are drawn together: settings, size, precision and model.

    `run`: the run or folder that draws. `rows`: the most rows that went through the stages together; None for one
    process.
    """
    from diffusionpipe.trainer.inference.sample_file import SampleOrigin
    from diffusionpipe.trainer.recipe import recorded_recipe
    from diffusionpipe.workflows.drawing.run_recipe import recipe_of

    recipe = recipe_of(run)
    step = recorded_recipe(recipe).training.num_steps if recipe.is_file() else None
    return SampleOrigin(
        settings=settings,
        resolution=size.resolution,
        height=size.height,
        frames=size.frames,
        caption_chunks=captions.chunks if captions.chunks > 1 else None,
        clip_skip=captions.clip_skip,
        precision=precision,
        rows=rows,
        model=str(run),
        training_step=step,
        weights="folder" if step is None else "export",
    )
