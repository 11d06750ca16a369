"""`diffusionpipe sample RUN`: draw pictures from a trained model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffusionpipe.cli.verbs.drawing_work import drawing_work
from diffusionpipe.cli.verbs.terminal import TERMINAL
from diffusionpipe.workflows.sample_ranks import Drawing, start_ranks

if TYPE_CHECKING:
    from diffusionpipe.trainer.inference.conditions import SampleRequest
    from diffusionpipe.trainer.inference.denoise import SamplingSettings
    from diffusionpipe.trainer.recipe import Precision, SamplingSection
    from diffusionpipe.workflows.run_recipe import SampleSize
    from diffusionpipe.workflows.trained_model import TrainedModel

_GUIDANCE_HELP = (
    "How closely a picture follows its prompt: the scale of classifier-free guidance (1 turns it off), or the guidance "
    "embedding of a distilled model (FLUX.1-dev); default: the run's, or the value of diffusers' pipeline."
)
_OF_LAUNCHER = ("ranks",)
"""Options that are not for the ranks."""
MAX_COUNT = 10_000
"""The most pictures drawn in one command; they are kept in memory until all are drawn."""
MAX_GUIDANCE = 1e6
_TRUE_CFG_HELP = (
    "Scale of classifier-free guidance of a distilled model (FLUX.1-dev), 1 turns it off; default: the run's, or 1."
)


RunArgument = Annotated[
    Path, typer.Argument(help="The run's folder, its export/, or any diffusers folder.", show_default=False)
]
PromptOption = Annotated[list[str] | None, typer.Option(help="A caption to draw; may be given several times.")]
PromptsOption = Annotated[Path | None, typer.Option(help="A file with a caption to draw on each line.")]
NegativeOption = Annotated[
    str | None, typer.Option(help="Negative prompt: things that the pictures should not show. Needs guidance.")
]
ConditionOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Of a ControlNet: the picture that steers, once for each prompt or once for all; default: the "
        "pictures of the run's validation data.",
        show_default=False,
    ),
]
LabelOption = Annotated[list[int] | None, typer.Option(help="A class to draw; may be given several times.")]
OutOption = Annotated[
    Path,
    typer.Option(
        help="The file to write, a captioned grid: .png, .webp, .gif or .mp4. In the last three clips play, and one "
        "clip alone is written as it is."
    ),
]
KeepOption = Annotated[
    Path | None, typer.Option(help="A folder in which to write each picture as a file that --like can draw again.")
]
LikeOption = Annotated[
    Path | None,
    typer.Option(help="Draw this picture of a run or of --keep again, bit for bit, and write it to --out."),
]
CountOption = Annotated[int, typer.Option(min=1, max=MAX_COUNT, help="Pictures of each prompt or label.")]
StepsOption = Annotated[
    int | None,
    typer.Option(min=1, max=10_000, help="Denoising steps; default: the run's, or 30.", show_default=False),
]
GuidanceOption = Annotated[
    float | None, typer.Option(min=0.0, max=MAX_GUIDANCE, help=_GUIDANCE_HELP, show_default=False)
]
TrueCfgScaleOption = Annotated[
    float | None, typer.Option(min=1.0, max=MAX_GUIDANCE, help=_TRUE_CFG_HELP, show_default=False)
]
SeedOption = Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Seed of the noise.")]
ResolutionOption = Annotated[
    int | None,
    typer.Option(
        min=8,
        max=2**24,
        help="Height and width in pixels; default: the resolution of the run, or of diffusers' pipeline.",
        show_default=False,
    ),
]
HeightOption = Annotated[
    int | None,
    typer.Option(
        min=8, max=2**24, help="Height of clips that are not square; --resolution is their width.", show_default=False
    ),
]
FramesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=10_000,
        help="Frames of clips, 1 for pictures; default: as many as the run's, or 1.",
        show_default=False,
    ),
]
FrameRateOption = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        max=1000,
        help="Frames per second of clips, in the file and for LTX-Video; default: the rate of the run, or of "
        "diffusers' pipeline.",
        show_default=False,
    ),
]
SchedulerOption = Annotated[
    str | None,
    typer.Option(help="A diffusers scheduler, e.g. DDIMScheduler; default: the run's.", show_default=False),
]
UntilOption = Annotated[
    str | None,
    typer.Option(help="Of models that draw one after the other: the last one to draw, e.g. base.", show_default=False),
]
RanksOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1024,
        help="Processes to start, one per device, each with a part of the model; default: draw in this process.",
        show_default=False,
    ),
]
PrecisionOption = Annotated[
    str | None,
    typer.Option(help="float32 or bfloat16; default: the run's, or float32 of other folders.", show_default=False),
]
VariantOption = Annotated[
    str | None,
    typer.Option(
        help="The variant of a folder's weights, e.g. fp16; default: plain files, or the only variant.",
        show_default=False,
    ),
]
NoiseLevelOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=999_999,
        help="Of super-resolution: the time step whose noise the small pictures get; default: the run's, or 250.",
        show_default=False,
    ),
]


ChunksOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4,
        help="Of Stable Diffusion 1, 2 and XL: parts of 75 tokens that are read of each prompt; default: as trained.",
        show_default=False,
    ),
]
ClipSkipOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=100,
        help="Of Stable Diffusion 1 and 2: the layer of CLIP that is read, 1 the last; default: as trained.",
        show_default=False,
    ),
]


def sample(
    context: typer.Context,
    run: RunArgument,
    prompt: PromptOption = None,
    prompts: PromptsOption = None,
    negative: NegativeOption = None,
    condition: ConditionOption = None,
    label: LabelOption = None,
    out: OutOption = Path("grid.png"),
    keep: KeepOption = None,
    like: LikeOption = None,
    count: CountOption = 1,
    steps: StepsOption = None,
    guidance: GuidanceOption = None,
    true_cfg_scale: TrueCfgScaleOption = None,
    seed: SeedOption = 0,
    resolution: ResolutionOption = None,
    height: HeightOption = None,
    frames: FramesOption = None,
    frame_rate: FrameRateOption = None,
    scheduler: SchedulerOption = None,
    until: UntilOption = None,
    noise_level: NoiseLevelOption = None,
    ranks: RanksOption = None,
    precision: PrecisionOption = None,
    variant: VariantOption = None,
    caption_chunks: ChunksOption = None,
    clip_skip: ClipSkipOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Draw pictures with a run's exported model or adapters (LoRA), or with any diffusers model."""
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.viz.drawing_file import check_drawing_file
    from diffusionpipe.workflows.device import chosen_device
    from diffusionpipe.workflows.run_recipe import captions_of, sampling_of
    from diffusionpipe.workflows.sample_conditions import steered
    from diffusionpipe.workflows.trained_model import trained_model

    check_outputs(out)
    check_drawing_file(out)
    if like is not None:
        _draw_again(context, run, like, out, device)
        return
    wish = _wish(prompt or (), prompts, negative, label or (), count)
    chosen_device(device)
    model, own = _until(trained_model(run, variant), until), sampling_of(run)
    asked = _Asked(
        steps=steps,
        guidance=guidance,
        true_cfg_scale=true_cfg_scale,
        seed=seed,
        scheduler=scheduler,
        noise_level=noise_level,
    )
    asked_size = _AskedSize(resolution=resolution, height=height, frames=frames, frame_rate=frame_rate)
    size = _size(run, model, asked_size)
    check_drawing_file(out, size.played)
    drawing = Drawing(
        model=model,
        wish=replace(steered(wish, run, model.folder, condition or (), count), frame_rate=size.frame_rate),
        settings=[_settings(one, own, asked, has_negative=bool(wish.negatives)) for one in model.chain],
        size=size,
        precision=_precision(run, precision),
        captions=captions_of(run, caption_chunks, clip_skip),
        device=device,
    )
    if ranks is None:
        _draw(drawing, run, out, keep)
    else:
        status = start_ranks(arguments_of_rank(context), drawing, ranks)
        if status:
            raise typer.Exit(status)


def arguments_of_rank(context: typer.Context) -> list[str]:
    """The command line of each rank: this command's own, without options of the launcher."""
    options, positional = [], []
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if name in _OF_LAUNCHER or value is None:
            continue
        if parameter.param_type_name == "argument":
            positional.append(str(value))
            continue
        values = value if isinstance(value, list | tuple) else [value]
        options += [f"{parameter.opts[0]}={one}" for one in values]
    return ["sample", *options, "--", *positional]


def _draw_again(context: typer.Context, run: Path, like: Path, out: Path, device: str) -> None:
    """Draw what a picture is; options whose values the picture has are refused."""
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.workflows.device import chosen_device
    from diffusionpipe.workflows.redraw import redraw

    allowed = {"run", "like", "out", "device"}
    given = [
        name
        for name in context.params
        if name not in allowed and getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"
    ]
    if given:
        options = ", ".join(f"--{name}" for name in given)
        raise ConfigError(f"--like takes everything from the picture; leave out {options}")
    caption = redraw(run, like, out, chosen_device(device), drawing_work, TERMINAL)
    typer.echo(f'"{caption}" in {out}')


def _wish(
    prompt: Sequence[str], prompts: Path | None, negative: str | None, label: Sequence[int], count: int
) -> "SampleRequest":
    """The pictures to draw, each prompt or label `count` times.

    Raises:
        ConfigError: there is nothing to draw, or there are prompts and labels, or the file of prompts is wrong.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.inference.conditions import SampleRequest
    from diffusionpipe.trainer.recipe import Prompt, negatives_of, read_prompts

    asked = (*(Prompt(text, None) for text in prompt), *(read_prompts(prompts) if prompts is not None else ()))
    if bool(asked) == bool(label):
        raise ConfigError(
            'say what to draw: --prompt "..." or --prompts FILE for a text model, or --label N for a class model'
        )
    if label and negative is not None:
        raise ConfigError("--negative is for models with text; leave it out with --label")
    wanted = count * (len(asked) + len(label))
    if wanted > MAX_COUNT:
        raise ConfigError(f"{wanted:,} pictures are asked for; draw at most {MAX_COUNT:,} in one command")
    repeated = tuple(one for one in asked for _ in range(count))
    return SampleRequest(
        prompts=tuple(one.text for one in repeated),
        labels=tuple(number for number in label for _ in range(count)),
        negatives=negatives_of(repeated, negative),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """How pictures are to be drawn; None: as the run draws."""

    steps: int | None
    guidance: float | None
    true_cfg_scale: float | None
    seed: int
    scheduler: str | None
    noise_level: int | None


def _settings(
    model: "TrainedModel", own: "SamplingSection", asked: _Asked, *, has_negative: bool
) -> "SamplingSettings":
    """How one model draws; `own` is the run's recipe section.

    Raises:
        ConfigError: the guidance has no effect, or there is no such level of noise.
    """
    from diffusionpipe.trainer.inference.conditions import check_noise_level
    from diffusionpipe.trainer.inference.denoise import SamplingSettings
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
    )
    check_noise_level(model.folder, settings)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _AskedSize:
    """The size that is asked for; None: as the run, or diffusers' pipeline, has it."""

    resolution: int | None
    height: int | None
    frames: int | None
    frame_rate: float | None


def _size(run: Path, model: "TrainedModel", asked: _AskedSize) -> "SampleSize":
    """The size of what is drawn.

    Raises:
        ConfigError: it is asked for where the models say it, or nothing says it; or pictures shall have a frame rate.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.models.opening.folder import family_of
    from diffusionpipe.workflows.run_recipe import SampleSize, size_of

    if model.resolution is None:
        found = size_of(run, model.folder, asked.resolution, asked.height, asked.frames)
        if found.frames is None and asked.frame_rate is not None:
            raise ConfigError("--frame-rate: only clips have frames; give --frames, or leave it out")
        rate = asked.frame_rate or found.frame_rate or family_of(model.folder).frame_rate
        return replace(found, frame_rate=rate if found.frames is not None else None)
    given = {f"--{key.replace('_', '-')}": value for key, value in asdict(asked).items()}
    if options := [option for option, value in given.items() if value is not None]:
        raise ConfigError(
            f"the models of a cascade draw pictures of the sizes that they read; leave out {', '.join(options)}"
        )
    return SampleSize(resolution=model.resolution)


def _precision(run: Path, asked: str | None) -> "Precision":
    """In which the denoiser computes.

    Raises:
        ConfigError: there is no such precision to draw in.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.trainer.recipe import Precision
    from diffusionpipe.workflows.run_recipe import precision_of

    if asked is not None:
        if asked not in (Precision.FLOAT32, Precision.BFLOAT16):
            raise ConfigError(f"--precision {asked}: pictures are drawn in float32 or bfloat16")
        return Precision(asked)
    return Precision.BFLOAT16 if precision_of(run) is Precision.BFLOAT16 else Precision.FLOAT32


def _draw(drawing: Drawing, run: Path, out: Path, keep: Path | None) -> None:
    """Draw in this process or, if it is a rank, with the others, and write the pictures."""
    from diffusionpipe.cli.verbs.train import grid_columns
    from diffusionpipe.trainer.course.kept_samples import keep_samples
    from diffusionpipe.trainer.inference.cascade_drawing import captions_of, shown
    from diffusionpipe.viz.drawing_file import MOVING, write_clip
    from diffusionpipe.viz.grid import sample_grid
    from diffusionpipe.workflows.redraw import origin_of
    from diffusionpipe.workflows.sample_ranks import draw_as_rank, draw_here, is_rank

    drawn, rows = draw_as_rank(drawing, drawing_work) if is_rank() else (draw_here(drawing, drawing_work), None)
    if drawn is None:
        return
    wish, pictures = drawing.wish, shown(drawn)
    captions = captions_of([one.name for one in drawing.model.chain], wish.captions)
    rate = drawing.size.played
    if rate is not None and out.suffix.lower() in MOVING and len(pictures) == 1:
        write_clip(drawn[-1][0], out, rate=rate)
    else:
        shown_in_grid = pictures if rate is None or out.suffix.lower() not in MOVING else drawn[-1]
        captioned = list(zip(captions, shown_in_grid, strict=True))
        sample_grid(captioned, out, columns=grid_columns(len(pictures)), rate=rate or 1.0)
    if keep is not None:
        origin = origin_of(run, drawing.settings[-1], drawing.size, drawing.precision, rows, drawing.captions)
        keep_samples(drawn[-1], wish, origin, keep)
    noun = "picture" if drawing.size.frames is None else "clip"
    count = f"{len(pictures)} {noun}{'s' * (len(pictures) > 1)}"
    typer.echo(f"{count} in {out}" + (f", and each as a file in {keep}" if keep is not None else ""))
