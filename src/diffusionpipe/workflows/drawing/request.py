"""The drawing that `diffusionpipe sample` is asked for, from its options and a folder; and the files of pictures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.trainer.inference.conditions import SampleRequest
    from diffusionpipe.trainer.inference.denoise import SamplingSettings
    from diffusionpipe.trainer.inference.drawing import Picture
    from diffusionpipe.trainer.inference.known_pixels import KnownPixels
    from diffusionpipe.trainer.recipe import RecipePrecision, SamplingSection
    from diffusionpipe.workflows.drawing.ranks import DrawingRequest
    from diffusionpipe.workflows.drawing.run_recipe import SampleSize
    from diffusionpipe.workflows.drawing.trained_model import TrainedModel

MAX_COUNT = 10_000
"""The most pictures drawn in one command; they are kept in memory until all are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingOptions:
    """The options of a drawing as a user gives them; None: as the run draws, or else as diffusers' pipeline draws."""

    prompts: tuple[str, ...] = ()
    prompts_file: Path | None = None
    """A file with further prompts, one in each line."""
    negative: str | None = None
    labels: tuple[int, ...] = ()
    conditions: tuple[Path, ...] = ()
    """Pictures that steer a ControlNet: one for all, or one for each prompt."""
    images: tuple[Path, ...] = ()
    """Pictures whose holes are filled: one for all, or one for each prompt."""
    masks: tuple[Path, ...] = ()
    """The masks of `images`."""
    count: int = 1
    """Pictures of each prompt or label."""
    steps: int | None = None
    guidance: float | None = None
    true_cfg_scale: float | None = None
    seed: int = 0
    scheduler: str | None = None
    noise_level: int | None = None
    parallel_in_time: float | None = None
    """The tolerance at which refinements end; None: denoising steps come one after the other."""
    resolution: int | None = None
    height: int | None = None
    frames: int | None = None
    frame_rate: float | None = None
    until: str | None = None
    """The last model of a chain that draws."""
    precision: str | None = None
    variant: str | None = None
    config: str | None = None
    """The diffusers folder or hub id of a model in one file."""
    caption_chunks: int | None = None
    clip_skip: int | None = None
    device: str = "auto"


def drawing_of(run: Path, asked: DrawingOptions) -> "DrawingRequest":
    """The drawing for these options and a run's folder, an export or a diffusers folder; loads no weights.

    Raises:
        ConfigError: the folder, its recipe or an option is wrong; the message names it.
    """
    from diffusionpipe.workflows.device import chosen_device
    from diffusionpipe.workflows.drawing.conditions import steered
    from diffusionpipe.workflows.drawing.ranks import DrawingRequest
    from diffusionpipe.workflows.drawing.run_recipe import captions_of, sampling_of
    from diffusionpipe.workflows.drawing.trained_model import trained_model

    wish = _wish(asked)
    chosen_device(asked.device)
    model, own = _until(trained_model(run, asked.variant, asked.config), asked.until), sampling_of(run)
    size = _size(run, model, asked)
    wish = replace(steered(wish, run, model.folder, asked.conditions, asked.count), frame_rate=size.frame_rate)
    wish = replace(wish, known=_known(asked, len(wish)))
    return DrawingRequest(
        model=model,
        wish=wish,
        settings=[_settings(one, own, asked, has_negative=bool(wish.negatives)) for one in model.chain],
        size=size,
        precision=_precision(run, asked.precision),
        captions=captions_of(run, asked.caption_chunks, asked.clip_skip),
        device=asked.device,
    )


def write_drawn(drawing: "DrawingRequest", drawn: "Sequence[list[Picture]]", out: Path) -> int:
    """Write the pictures of all models into one file, a grid with captions; returns their number.

    The file's ending says its kind. In a file in which clips play, a single clip is written without a grid.

    Raises:
        ConfigError: the file cannot be written, or its ending is unknown.
    """
    from diffusionpipe.trainer.inference.cascade_drawing import captions_of, shown
    from diffusionpipe.viz.drawing_file import MOVING, write_clip
    from diffusionpipe.viz.grid import sample_grid, square_columns

    pictures, rate = shown(drawn), drawing.size.played
    if rate is not None and out.suffix.lower() in MOVING and len(pictures) == 1:
        write_clip(drawn[-1][0], out, rate=rate)
        return 1
    captions = captions_of([one.name for one in drawing.model.chain], drawing.wish.captions)
    in_grid = pictures if rate is None or out.suffix.lower() not in MOVING else drawn[-1]
    captioned = list(zip(captions, in_grid, strict=True))
    sample_grid(captioned, out, columns=square_columns(len(pictures)), rate=rate or 1.0)
    return len(pictures)


def keep_drawn(
    drawing: "DrawingRequest", drawn: "Sequence[list[Picture]]", run: Path, rows: int | None, folder: Path
) -> None:
    """Write each picture of the last model into `folder` as a file that can be drawn again.

    `rows`: the most that went through the stages together; None for one process.
    """
    from diffusionpipe.trainer.course.kept_samples import keep_samples
    from diffusionpipe.workflows.drawing.redraw import origin_of

    origin = origin_of(run, drawing.settings[-1], drawing.size, drawing.precision, rows, drawing.captions)
    keep_samples(drawn[-1], drawing.wish, origin, folder)


def _wish(asked: DrawingOptions) -> "SampleRequest":
    """The pictures to draw, each prompt or label `count` times.

    Raises:
        ConfigError: there is nothing to draw, or there are prompts and labels, or the file of prompts is wrong.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.inference.conditions import SampleRequest
    from diffusionpipe.trainer.recipe import PromptLine, negatives_of, read_prompts

    of_file = read_prompts(asked.prompts_file) if asked.prompts_file is not None else ()
    prompts = (*(PromptLine(text, None) for text in asked.prompts), *of_file)
    if bool(prompts) == bool(asked.labels):
        raise ConfigError(
            'say what to draw: --prompt "..." or --prompts FILE for a text model, or --label N for a class model'
        )
    if asked.labels and asked.negative is not None:
        raise ConfigError("--negative is for models with text; leave it out with --label")
    wanted = asked.count * (len(prompts) + len(asked.labels))
    if wanted > MAX_COUNT:
        raise ConfigError(f"{wanted:,} pictures are asked for; draw at most {MAX_COUNT:,} in one command")
    repeated = tuple(one for one in prompts for _ in range(asked.count))
    return SampleRequest(
        prompts=tuple(one.text for one in repeated),
        labels=tuple(number for number in asked.labels for _ in range(asked.count)),
        negatives=negatives_of(repeated, asked.negative),
    )


def _known(asked: DrawingOptions, count: int) -> "tuple[KnownPixels, ...]":
    """The picture with a hole, and its mask, for each of `count` samples; () without --image.

    Raises:
        ConfigError: the numbers of pictures, masks and prompts do not match.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.inference.known_pixels import known_of

    wanted = count // asked.count
    if len(asked.masks) not in (0, len(asked.images)) or len(asked.images) not in (0, 1, wanted):
        raise ConfigError(
            f"{len(asked.images)} --image and {len(asked.masks)} --mask do not match {wanted} prompts; give both once "
            "for all, or once for each prompt"
        )
    return tuple(one for one in known_of(asked.images, asked.masks, wanted) for _ in range(asked.count))


def _settings(
    model: "TrainedModel", own: "SamplingSection", asked: DrawingOptions, *, has_negative: bool
) -> "SamplingSettings":
    """The settings with which one model draws: options as given, the rest from `own`, the run's section [sampling].

    `has_negative`: whether some prompt has a negative prompt.

    Raises:
        ConfigError: the guidance has no effect, there is no such level of noise, or the model cannot be drawn parallel
            in time.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.inference.conditions import check_noise_level
    from diffusionpipe.trainer.inference.denoise import SamplingSettings
    from diffusionpipe.trainer.inference.drawing_in_time import check_in_time
    from diffusionpipe.trainer.model.guidance import guidance_of

    strength = guidance_of(
        model.folder,
        own.guidance if asked.guidance is None else asked.guidance,
        own.true_cfg_scale if asked.true_cfg_scale is None else asked.true_cfg_scale,
        has_negative=has_negative,
    )
    level = own.noise_level if asked.noise_level is None else asked.noise_level
    settings = SamplingSettings(
        steps=asked.steps or own.steps,
        guidance=strength.scale,
        embedded_guidance=strength.embedded,
        unguided=strength.unguided,
        seed=asked.seed,
        scheduler=model.scheduler,
        scheduler_class=asked.scheduler or own.scheduler,
        noise_level=level if model.before is not None else None,
        tolerance=asked.parallel_in_time,
    )
    check_noise_level(model.folder, settings)
    if asked.parallel_in_time is not None and model.before is not None:
        raise ConfigError(
            "--parallel-in-time is for one model; draw with the first one alone (--until), or leave it out"
        )
    check_in_time(model.folder, settings)
    return settings


def _until(model: "TrainedModel", name: str | None) -> "TrainedModel":
    """The model of this name in the chain; None: the last one.

    Raises:
        ConfigError: there is none.
    """
    from diffusionpipe.errors import ConfigError

    if name is None:
        return model
    of_name = {one.name: one for one in model.chain if one.name}
    if name not in of_name:
        known = f"its models are {', '.join(of_name)}" if of_name else "the run has one model; leave --until out"
        raise ConfigError(f"--until {name}: there is no such model; {known}")
    return of_name[name]


def _size(run: Path, model: "TrainedModel", asked: DrawingOptions) -> "SampleSize":
    """The size of the pictures or clips to draw, by the options, the model and the run's recipe.

    Raises:
        ConfigError: it is asked for where the models say it, or nothing says it; or pictures shall have a frame rate.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.models.opening.folder import family_of
    from diffusionpipe.workflows.drawing.run_recipe import SampleSize, size_of

    if model.resolution is None:
        found = size_of(run, model.folder, asked.resolution, asked.height, asked.frames)
        if found.frames is None and asked.frame_rate is not None:
            raise ConfigError("--frame-rate: only clips have frames; give --frames, or leave it out")
        rate = asked.frame_rate or found.frame_rate or family_of(model.folder).frame_rate
        return replace(found, frame_rate=rate if found.frames is not None else None)
    sizes = ("resolution", "height", "frames", "frame_rate")
    if options := [f"--{key.replace('_', '-')}" for key in sizes if getattr(asked, key) is not None]:
        raise ConfigError(
            f"the models of a cascade draw pictures of the sizes that they read; leave out {', '.join(options)}"
        )
    return SampleSize(resolution=model.resolution)


def _precision(run: Path, asked: str | None) -> "RecipePrecision":
    """The precision in which the denoiser computes: `asked`, or else the run's.

    Raises:
        ConfigError: there is no such precision to draw in.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.recipe import RecipePrecision
    from diffusionpipe.workflows.drawing.run_recipe import precision_of

    if asked is not None:
        if asked not in (RecipePrecision.FLOAT32, RecipePrecision.BFLOAT16):
            raise ConfigError(f"--precision {asked}: pictures are drawn in float32 or bfloat16")
        return RecipePrecision(asked)
    return RecipePrecision.BFLOAT16 if precision_of(run) is RecipePrecision.BFLOAT16 else RecipePrecision.FLOAT32
