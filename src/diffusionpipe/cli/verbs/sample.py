"""`diffusionpipe sample RUN`: draw pictures from a trained model."""

from pathlib import Path
from typing import Annotated

import typer

from diffusionpipe.cli.verbs.drawing_work import drawing_work
from diffusionpipe.cli.verbs.terminal import TERMINAL
from diffusionpipe.workflows.drawing.ranks import DrawingRequest, start_ranks
from diffusionpipe.workflows.drawing.request import MAX_COUNT

_GUIDANCE_HELP = (
    "How closely a picture follows its prompt: the scale of classifier-free guidance (1 turns it off), or the guidance "
    "embedding of a distilled model (FLUX.1-dev); default: the run's, or the value of diffusers' pipeline."
)
_OF_LAUNCHER = ("ranks",)
"""Options that only the launcher reads; the ranks are started without them."""
MAX_GUIDANCE = 1e6
_TRUE_CFG_HELP = (
    "Scale of classifier-free guidance of a distilled model (FLUX.1-dev), 1 turns it off; default: the run's, or 1."
)


RunArgument = Annotated[
    Path,
    typer.Argument(
        help="The run's folder, its export/, any diffusers folder, or a model in one .safetensors file.",
        show_default=False,
    ),
]
PromptOption = Annotated[list[str] | None, typer.Option(help="A caption to draw; may be given several times.")]
PromptsOption = Annotated[Path | None, typer.Option(help="A file with a caption to draw on each line.")]
NegativeOption = Annotated[
    str | None, typer.Option(help="Negative prompt: things that the pictures should not show. Needs guidance.")
]
ConditionOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="ControlNet conditioning picture; give one, or one per prompt; default: the pictures of the run's "
        "validation data.",
        show_default=False,
    ),
]
ImageOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Of a model for inpainting: the picture whose hole is filled, once for each prompt or once for all.",
        show_default=False,
    ),
]
MaskOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="The mask of --image: black where the picture is known and stays as it is, white in the hole.",
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
        min=8, max=2**24, help="Height of what is not square; --resolution is the width then.", show_default=False
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
ConfigOption = Annotated[
    str | None,
    typer.Option(
        help="Of a model in one file: the diffusers folder or hub id that has its configurations, tokenizers and "
        "scheduler.",
        show_default=False,
    ),
]
NoiseLevelOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=999_999,
        help="For super-resolution models: the time step whose noise is added to the small pictures; default: the "
        "run's, or 250.",
        show_default=False,
    ),
]


InTimeOption = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Compute denoising steps at the same time on --ranks, each with the whole model, until the mean change of "
        "the latents is below this, e.g. 1e-3. For DDIM and Euler steps of flows.",
        show_default=False,
    ),
]
ChunksOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=4,
        help="For Stable Diffusion 1, 2 and XL: how many parts of 75 tokens of each prompt are read; default: as "
        "trained.",
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
    image: ImageOption = None,
    mask: MaskOption = None,
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
    parallel_in_time: InTimeOption = None,
    precision: PrecisionOption = None,
    variant: VariantOption = None,
    config: ConfigOption = None,
    caption_chunks: ChunksOption = None,
    clip_skip: ClipSkipOption = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
) -> None:
    """Draw pictures with a run's exported model or adapters (LoRA), or with any diffusers model."""
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.viz.drawing_file import check_drawing_file
    from diffusionpipe.workflows.drawing.request import DrawingOptions, drawing_of

    check_outputs(out)
    check_drawing_file(out)
    if like is not None:
        _draw_again(context, run, like, out, device, config)
        return
    asked = DrawingOptions(
        prompts=tuple(prompt or ()),
        prompts_file=prompts,
        negative=negative,
        labels=tuple(label or ()),
        conditions=tuple(condition or ()),
        images=tuple(image or ()),
        masks=tuple(mask or ()),
        count=count,
        steps=steps,
        guidance=guidance,
        true_cfg_scale=true_cfg_scale,
        seed=seed,
        scheduler=scheduler,
        noise_level=noise_level,
        parallel_in_time=parallel_in_time,
        resolution=resolution,
        height=height,
        frames=frames,
        frame_rate=frame_rate,
        until=until,
        precision=precision,
        variant=variant,
        config=config,
        caption_chunks=caption_chunks,
        clip_skip=clip_skip,
        device=device,
    )
    drawing = drawing_of(run, asked)
    check_drawing_file(out, drawing.size.played)
    if ranks is None:
        _draw(drawing, run, out, keep)
    else:
        status = start_ranks(arguments_of_rank(context), drawing, ranks)
        if status:
            raise typer.Exit(status)


def arguments_of_rank(context: typer.Context) -> list[str]:
    """The arguments with which each rank is started: this command's own, without options of the launcher."""
    options, positional = [], []
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if name in _OF_LAUNCHER or value is None:
            continue
        if parameter.param_type_name == "argument":
            positional.append(str(value))
            continue
        values = value if isinstance(value, list | tuple) else [value]
        # With "=", so that a value that begins with a dash is not taken for an option.
        options += [f"{parameter.opts[0]}={one}" for one in values]
    return ["sample", *options, "--", *positional]


def _draw_again(context: typer.Context, run: Path, like: Path, out: Path, device: str, config: str | None) -> None:
    """Draw a kept picture again, with the caption and settings that its file `like` holds, into the file `out`.

    Raises:
        ConfigError: an option is given whose value comes from the picture.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.workflows.device import chosen_device
    from diffusionpipe.workflows.drawing.redraw import redraw

    allowed = {"run", "like", "out", "device", "config"}
    given = [
        name
        for name in context.params
        if name not in allowed and getattr(context.get_parameter_source(name), "name", "DEFAULT") != "DEFAULT"
    ]
    if given:
        options = ", ".join(f"--{name}" for name in given)
        raise ConfigError(f"--like takes everything from the picture; leave out {options}")
    caption = redraw(run, like, out, chosen_device(device), drawing_work, TERMINAL, config=config)
    typer.echo(f'"{caption}" in {out}')


def _draw(drawing: DrawingRequest, run: Path, out: Path, keep: Path | None) -> None:
    """Draw in this process or, if it is a rank, with the other ranks; rank 0 writes the pictures to `out`.

    `keep`: a folder for each picture as a file; None for none.
    """
    from diffusionpipe.workflows.drawing.ranks import draw_as_rank, draw_here, is_rank
    from diffusionpipe.workflows.drawing.request import keep_drawn, write_drawn

    drawn, rows = draw_as_rank(drawing, drawing_work) if is_rank() else (draw_here(drawing, drawing_work), None)
    # Other ranks have sent theirs to rank 0.
    if drawn is None:
        return
    number = write_drawn(drawing, drawn, out)
    if keep is not None:
        keep_drawn(drawing, drawn, run, rows, keep)
    noun = "picture" if drawing.size.frames is None else "clip"
    count = f"{number} {noun}{'s' * (number > 1)}"
    typer.echo(f"{count} in {out}" + (f", and each as a file in {keep}" if keep is not None else ""))
