"""Files of pictures that were drawn together, each with its origin: the settings that it was drawn with."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from diffusionpipe.ir.size import Clip
from diffusionpipe.trainer.inference.cascade_drawing import drawn_sizes
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.drawing import Picture, still
from diffusionpipe.trainer.inference.sample_file import SampleOrigin, file_name, write_sample
from diffusionpipe.trainer.model.parameter_groups import is_averaged
from diffusionpipe.trainer.recipe.size_rules import sizes_of
from diffusionpipe.trainer.reporting.tracker import LoggedImage
from diffusionpipe.trainer.setup.session import Session


def sample_folder(run_folder: Path, step: int) -> Path:
    """The path of the folder samples/step-NNNNNNNN for the pictures that a run draws after a step.

    The grid of these pictures has the same name with .png.
    """
    return run_folder / "samples" / f"step-{step:08d}"


def _at(origin: SampleOrigin, size: Clip) -> SampleOrigin:
    """The origin with the width, height and frames of `size`; frames are None for a picture."""
    frames = size.frames if size.frames > 1 else None
    return replace(origin, resolution=size.width, height=size.height, frames=frames)


def keep_samples(
    pictures: Sequence[Picture],
    wish: SampleRequest,
    shared: SampleOrigin,
    folder: Path,
    sizes: Sequence[Clip] = (),
) -> tuple[LoggedImage, ...]:
    """Writes each picture into the folder with its origin, and returns each with its name, caption and path.

    `wish`: the prompts, labels and pictures by which they were drawn.

    `shared`: the common part of the origins. `sizes`: the size of each picture; () where all have the size in `shared`.

    Raises:
        ConfigError: a file cannot be written.
    """
    shown = []
    for index, picture in enumerate(pictures):
        origin = replace(
            _at(shared, sizes[index]) if sizes else shared,
            prompt=wish.prompts[index] if wish.prompts else None,
            negative_prompt=wish.negatives[index] if wish.negatives else None,
            label=wish.labels[index] if wish.labels else None,
            condition=str(wish.conditions[index]) if wish.conditions else None,
            image=str(wish.known[index].picture) if wish.known else None,
            mask=str(own) if wish.known and (own := wish.known[index].mask) is not None else None,
            frame_rate=None if sizes and sizes[index].frames == 1 else wish.frame_rate,
            index=index,
            count=len(pictures),
        )
        path = folder / file_name(origin)
        write_sample(picture, origin, path)
        shown.append(LoggedImage(name=path.stem, caption=origin.caption, picture=still(picture), path=path))
    return tuple(shown)


def keep_in_session(
    session: Session, step: int, pictures: Sequence[Picture], wish: SampleRequest, settings: SamplingSettings
) -> tuple[LoggedImage, ...]:
    """Writes the pictures that a run has drawn after a step into the step's folder, which it empties first.

    Returns each picture with its name, caption and path. `wish`: the prompts, labels and pictures by which they were
    drawn.

    Raises:
        ConfigError: a file cannot be written.
    """
    recipe = session.recipe
    shared = SampleOrigin(
        settings=settings,
        rows=session.plan.sample[-1].placement.pipelines[0].microbatches[0],
        resolution=recipe.data.resolution,
        height=recipe.data.height,
        frames=recipe.data.frames,
        caption_chunks=recipe.data.caption_chunks if recipe.data.caption_chunks > 1 else None,
        clip_skip=recipe.data.clip_skip,
        precision=recipe.training.precision,
        model=recipe.model.path,
        training_step=step,
        weights="average" if is_averaged(session.members[-1].recipe.groups()) else "trained",
    )
    folder = sample_folder(recipe.run.folder, step)
    # An earlier attempt may have passed this step and drawn.
    shutil.rmtree(folder, ignore_errors=True)
    built = sizes_of(recipe.data)
    sizes = [built[number] for number in drawn_sizes(recipe, len(wish))] if built else []
    return keep_samples(pictures, wish, shared, folder, sizes)
