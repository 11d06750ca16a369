"""`diffusionpipe profile RECIPE`: the costs of every layer of a recipe's model, measured here or computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffusionpipe.cli.verbs.terminal import TERMINAL

if TYPE_CHECKING:
    from rich.table import Table

    from diffusionpipe.costs import LayerProfile, Profile
    from diffusionpipe.units import Seconds

NUM_SLOWEST = 12


def profile(
    recipe: Annotated[
        Path, typer.Argument(help="The recipe, a TOML file; or a file of operations to show.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Keys to change: key.path=value, e.g. data.resolution=512.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(help="The profile file to write.")] = Path("profile.json"),
    analytic: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Compute the times for a known device instead, e.g. a100-80 or rtx4090; this machine does not need "
            "it.",
        ),
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes to measure, separated by commas.")] = "1,2,4,8,16,32",
    device: Annotated[str, typer.Option(help="Where to measure: cpu, cuda, or auto: a GPU if there is one.")] = "auto",
    repeats: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Minimum number of measurements of each layer.")
    ] = 5,
    time_budget: Annotated[
        float,
        typer.Option(min=0.0, max=1e9, help="After this number of seconds, no larger batch size is measured."),
    ] = 120.0,
    operations: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="In place of the profile: where the time of the layers goes, operation by operation, on one "
            "micro-batch of the recipe; written as JSON.",
        ),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --operations, or for their file: a picture of them.")
    ] = None,
) -> None:
    """Measure the time and memory of each layer for `plan`, or compute them for another device."""
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.costs.files import write_profile
    from diffusionpipe.errors import ConfigError

    # A file of operations is shown as it is; nothing is measured.
    if operations is not None or recipe.suffix == ".json":
        made_of = {"analytic": analytic, "device": device, "repeats": repeats}
        _operations(recipe, overrides or (), operations, png, made_of)
        return
    if png is not None:
        raise ConfigError("--png: only operations are drawn; give --operations FILE too")
    from diffusionpipe.workflows.planning.recipe_profile import computed_recipe_profile, measured_profile

    sizes = _batch_sizes(batch_sizes)
    check_outputs(out)
    stated = recipe, overrides or ()
    if analytic is not None:
        made = computed_recipe_profile(*stated, sizes, device=analytic, tell=TERMINAL)
    else:
        made = measured_profile(*stated, sizes, device=device, repeats=repeats, time_budget=time_budget, tell=TERMINAL)
    _print_report(made)
    write_profile(made, out)
    typer.echo(f"Written to {out}")


def _operations(
    source: Path, overrides: Sequence[str], out: Path | None, png: Path | None, made_of: Mapping[str, Any]
) -> None:
    """Print the times of operations, and draw them as `png` if that is not None.

    Without `out`, `source` is a file of operations. With `out`, `source` is a recipe, whose operations are measured and
    written to `out` first; `made_of`: further arguments of `recipe_operations`.
    """
    from diffusionpipe.cli.text.operation_table import draw_operations, operation_lines
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.costs.operations import read_report, report_to_text
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.files.output_file import write_atomically

    check_outputs(out, pictures=(png,))
    if out is None:
        report = read_report(source)
    elif source.suffix == ".json":
        raise ConfigError(
            f"--operations: {source} is not a recipe; give the recipe, or leave out --operations to show it"
        )
    else:
        from diffusionpipe.workflows.planning.recipe_profile import recipe_operations

        report = recipe_operations(source, overrides, **made_of, tell=TERMINAL)
        write_atomically(out, report_to_text(report))
    for line in operation_lines(report):
        typer.echo(line)
    if png is not None:
        draw_operations(report, png)
    for path in (out, png):
        if path is not None:
            typer.echo(f"wrote {path}", err=True)


def _batch_sizes(text: str) -> tuple[int, ...]:
    from diffusionpipe.errors import ConfigError

    words = [word.strip() for word in text.split(",")]
    # Digits are limited before int(), which refuses very long texts.
    if not all(word.isdecimal() and len(word) < 8 and int(word) > 0 for word in words):
        raise ConfigError(
            f"--batch-sizes is {text[:200]}; give whole numbers from 1 to 9,999,999, separated by commas, e.g. 1,2,4,8"
        )
    return tuple(sorted({int(word) for word in words}))


def _print_report(made: Profile) -> None:
    from rich.console import Console

    console = Console()
    mode = f", {made.mode}" if made.mode else ""
    heading = f"{made.source} on {made.device}, {made.precision}{mode}; milliseconds for {made.batch_sizes[-1]} samples"
    console.print(heading, soft_wrap=True, highlight=False)
    console.print(_components(made))
    console.print(_slowest(made))
    console.print("kept: activations for the backward   temp: temporary memory; of several layers, the most")


def _components(made: Profile) -> Table:
    """A table with the total time and memory of the layers of each component, and of all, at the largest batch."""
    table = _table("component")
    components: dict[str, list[LayerProfile]] = {}
    for spec, layer in zip(made.graph.layers, made.layers, strict=True):
        components.setdefault(spec.component, []).append(layer)
    bytes_of = {parameter.name: parameter.num_bytes for parameter in made.graph.parameters}
    for component, layers in components.items():
        # A set, because layers may share a parameter.
        own = {name for spec in made.graph.layers if spec.component == component for name in spec.parameters}
        table.add_row(component, *_row(layers, sum(bytes_of[name] for name in own)))
    table.add_section()
    table.add_row("all", *_row(made.layers, sum(bytes_of.values())))
    return table


def _slowest(made: Profile) -> Table:
    """A table with the time and memory of the layers that take longest, at the largest batch."""
    table = _table("slowest layers")
    bytes_of = {parameter.name: parameter.num_bytes for parameter in made.graph.parameters}
    pairs = sorted(zip(made.layers, made.graph.layers, strict=True), key=lambda pair: -_total(pair[0]))
    for layer, spec in pairs[:NUM_SLOWEST]:
        table.add_row(layer.name, *_row([layer], sum(bytes_of[name] for name in spec.parameters)))
    return table


def _table(title: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(title, overflow="fold")  # long names go on in the next line, so that no figure is cut
    for heading in ("forward", "input\ngrad", "weight\ngrad", "weights\nMiB", "kept\nMiB", "temp\nMiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _total(layer: LayerProfile) -> Seconds:
    return layer.forward[-1] + layer.input_grad[-1] + layer.weight_grad[-1]


def _row(layers: Iterable[LayerProfile], parameters: int) -> list[str]:
    """Table cells for these layers together: three times in ms, then parameters, activations and workspace in MiB.

    Times and activations are sums at the largest batch, the workspace is the largest one's; `parameters`: bytes.
    """
    layers = list(layers)
    times = (sum(getattr(layer, field)[-1] for layer in layers) for field in ("forward", "input_grad", "weight_grad"))
    sizes = (parameters, sum(layer.activation[-1] for layer in layers), max(layer.workspace[-1] for layer in layers))
    return [*(f"{time * 1000:.2f}" for time in times), *(f"{size / 2**20:.1f}" for size in sizes)]
