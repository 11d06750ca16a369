"""`diffusionpipe example NAME`: an example of the package, with the commands that run it."""

from pathlib import Path
from typing import Annotated

import typer


def example(
    name: Annotated[
        str | None, typer.Argument(help="The example; without one they are listed.", show_default=False)
    ] = None,
    into: Annotated[Path, typer.Option(help="The folder below which it is written.")] = Path(),
) -> None:
    """Write an example (digits, cascade, a recipe of each model), or list them."""
    from diffusionpipe.workflows.examples import commands_of, examples, first_words, write_example

    if name is None:
        known = examples()
        width = max(map(len, known))
        for one, path in known.items():
            typer.echo(f"{one:<{width}}  {first_words(path)}")
        return
    place = write_example(name, into)
    commands = commands_of(place)
    typer.echo(f"{place} is written" + ("; run" if commands else ""))
    if commands and into != Path():
        typer.echo(f"    cd {into}")
    for command in commands:
        typer.echo(f"    {command}")
