"""`diffusionpipe export RUN`: a trained model in the form that other programs read, or in fewer bytes."""

from pathlib import Path
from typing import Annotated

import typer

from diffusionpipe.cli.verbs.sample import LabelOption, PromptsOption


def export(
    run: Annotated[
        Path, typer.Argument(help="The run's folder, its export/, or any diffusers folder.", show_default=False)
    ],
    single_file: Annotated[
        Path | None,
        typer.Option(
            help="The .safetensors file to write: the whole model under the names of its authors.", show_default=False
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Write a folder whose denoiser is narrow, for `sample` alone: w8 (weights in 8 bits), w8a8 (inputs of "
            "layers too) or w4 (weights in 4 bits).",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The folder to write, with --quantize.", show_default=False)] = None,
    prompts: PromptsOption = None,
    label: LabelOption = None,
    pictures: Annotated[
        int, typer.Option(min=1, max=10_000, help="With w8a8: pictures that are drawn to see the ranges of inputs.")
    ] = 32,
    variant: Annotated[
        str | None,
        typer.Option(help="The variant of a folder's weights, e.g. fp16; default: plain files.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(help="With w8a8: cpu, cuda, or auto: a GPU where there is one.")] = "auto",
) -> None:
    """Write a model into one file, as ComfyUI and diffusers read it (SD 1, 2, XL, 3; FLUX.1), or in 8 or 4 bits."""
    from diffusionpipe.errors import ConfigError

    if (single_file is None) is (quantize is None):
        raise ConfigError("say what to write: --single-file FILE.safetensors, or --quantize w8 with --out FOLDER")
    if single_file is not None:
        if out is not None or prompts is not None or label:
            raise ConfigError("--out, --prompts and --label belong to --quantize; leave them out with --single-file")
        _write_single_file(run, single_file, variant)
    else:
        _write_narrow(str(quantize), run, out, prompts, tuple(label or ()), pictures, variant, device)


def _write_single_file(run: Path, single_file: Path, variant: str | None) -> None:
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.workflows.exporting.single_file import single_file_of

    if single_file.suffix != ".safetensors":
        raise ConfigError(f"--single-file {single_file}: the file's name must end in .safetensors")
    check_outputs(single_file)
    parts = single_file_of(run, single_file, variant)
    typer.echo(f"{single_file} holds {', '.join(parts)}")


def _write_narrow(
    quantize: str,
    run: Path,
    out: Path | None,
    prompts: Path | None,
    labels: tuple[int, ...],
    pictures: int,
    variant: str | None,
    device: str,
) -> None:
    from diffusionpipe.cli.verbs.drawing_work import drawing_work
    from diffusionpipe.cli.verbs.terminal import TERMINAL
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.workflows.drawing.request import DrawingOptions
    from diffusionpipe.workflows.exporting.narrow import narrow_export_of, width_named

    width = width_named(quantize)
    if out is None:
        raise ConfigError("--quantize writes a folder; name it by --out FOLDER")
    if not width.rounds_inputs and (prompts is not None or labels):
        raise ConfigError(f"--prompts and --label are for w8a8, which draws pictures; leave them out with {width}")
    asked = DrawingOptions(prompts_file=prompts, labels=labels, variant=variant, device=device)
    found = narrow_export_of(run, out, width, asked, drawing_work, pictures=pictures, tell=TERMINAL)
    typer.echo(
        f"{out}: {found.narrow / found.numbers:.0%} of the numbers of {found.component} are in {width}; "
        f"{found.narrow_bytes / 1e6:,.1f} MB in place of {found.wide_bytes / 1e6:,.1f}"
    )
