"""`diffusionpipe prototypes FOLDER`: prototypes of the classes of pictures, for `model.class_embeddings`."""

from pathlib import Path
from typing import Annotated

import typer


def prototypes(
    folder: Annotated[Path, typer.Argument(help="A folder of pictures with labels.", show_default=False)],
    model: Annotated[
        str,
        typer.Option(
            help="The model of classes, a diffusers folder or hub id: its VAE makes the features.", show_default=False
        ),
    ],
    resolution: Annotated[int, typer.Option(min=1, max=65_536, help="Side of the pictures.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The .safetensors file to write.")] = Path("prototypes.safetensors"),
    seed: Annotated[int, typer.Option(help="Seed of the projection to the model's width.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
) -> None:
    """Write the mean features of each class of pictures, as embeddings of classes for training."""
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.cli.verbs.terminal import TERMINAL
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.workflows.exporting.prototypes import write_prototypes

    if out.suffix != ".safetensors":
        raise ConfigError(f"--out {out}: the file's name must end in .safetensors")
    check_outputs(out)
    found = write_prototypes(folder, model, out, resolution=resolution, seed=seed, device=device, tell=TERMINAL)
    classes, width = found.values.shape
    typer.echo(
        f"{out} holds {classes} prototypes of width {width}, of {found.pictures} pictures with {found.features} "
        "features each"
    )
