"""`diffusionpipe export RUN`: a trained model in the form that other programs read."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[
        Path, typer.Argument(help="The run's folder, its export/, or any diffusers folder.", show_default=False)
    ],
    single_file: Annotated[
        Path,
        typer.Option(
            help="The .safetensors file to write: the whole model under the names of its authors.", show_default=False
        ),
    ],
    variant: Annotated[
        str | None,
        typer.Option(help="The variant of a folder's weights, e.g. fp16; default: plain files.", show_default=False),
    ] = None,
) -> None:
    """Write a model into one file, as ComfyUI and diffusers' from_single_file read it (SD 1, 2, XL, 3; FLUX.1)."""
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.workflows.single_file import single_file_of

    if single_file.suffix != ".safetensors":
        raise ConfigError(f"--single-file {single_file}: the file's name must end in .safetensors")
    check_outputs(single_file)
    parts = single_file_of(run, single_file, variant)
    typer.echo(f"{single_file} holds {', '.join(parts)}")
