"""`diffusionpipe watch RUN`: the page of a run in the browser while it trains."""

from pathlib import Path
from typing import Annotated

import typer

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run.", show_default=False)]


def watch(
    folder: RunArgument,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1; default: any free one.")] = 0,
) -> None:
    """Show a run in the browser while it trains, with buttons to save, to draw and to stop."""
    from diffusionpipe.workflows.report.watching import Watch

    with Watch(folder, port) as server:
        typer.echo(f"watching {folder}; Ctrl-C ends this and leaves the run alone")
        typer.echo(server.address)
        server.serve_forever()
