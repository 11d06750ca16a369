"""`diffusionpipe data FOLDER|RECIPE`: the facts about pictures and captions, before a model is there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def data(
    place: Annotated[
        Path, typer.Argument(help="A folder, shards or a table of samples, or a recipe, .toml.", show_default=False)
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Keys of the recipe to change, e.g. data.resolution=768.", show_default=False),
    ] = None,
    resolution: Annotated[
        list[int] | None,
        typer.Option(min=16, max=65_536, help="For a folder: side of a square of the area; may be repeated. [512]"),
    ] = None,
    aspects: Annotated[
        tuple[float, float] | None,
        typer.Option(min=0.01, max=100.0, help="For a folder: the least and the largest width / height. [0.5 2]"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a contact sheet: .png, .webp. Parts that are cut away are faded.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=400, help="Pictures on the contact sheet.")] = 24,
) -> None:
    """Show sizes, crops, captions and overlooked files of a folder or a recipe, without a model or a device."""
    from diffusionpipe.cli.text.run_text import print_data
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.cli.verbs.terminal import TERMINAL
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.workflows.data_report import ASPECTS, report_on_file, report_on_folder, write_sheet

    check_outputs(out)
    # A file that is not a recipe may be a shard or a table of samples.
    if place.is_dir() or place.suffix != ".toml":
        if settings:
            raise ConfigError(
                f"{settings[0]} sets a key of a recipe, but {place} is data and no recipe (.toml); give a recipe, or "
                "--resolution and --aspects"
            )
        least, most = aspects or ASPECTS
        if least > most:
            raise ConfigError(f"--aspects {least:g} {most:g}: give the least width / height first")
        report = report_on_folder(place, resolutions=resolution or (), aspects=(least, most), tell=TERMINAL)
    else:
        if resolution or aspects:
            raise ConfigError("--resolution and --aspects are for folders; a recipe has its sizes: data.resolution=768")
        report = report_on_file(place, settings or [], tell=TERMINAL)
    print_data(report.lines)
    if out is not None:
        typer.echo(f"{out} shows {write_sheet(report, out, count=count)} of them")
