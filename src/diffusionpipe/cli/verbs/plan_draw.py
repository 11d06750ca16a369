"""The text of `plan --draw`: how long pictures take over all devices of a cluster, and whether they fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

import typer

from diffusionpipe.planner.choosing.band import UNCERTAINTY

if TYPE_CHECKING:
    from diffusionpipe.planner.drawing.drawing import Drawing, DrawingMemory
    from diffusionpipe.planner.drawing.forecast import DrawingForecast
    from diffusionpipe.planner.drawing.in_time import DrawingInTime
    from diffusionpipe.planner.pricing.setting import Setting
    from diffusionpipe.units import Seconds

GIB = 2**30
HEADS = ("rank", "encoders", "weights", "tensors", "decoder", "peak", "of")
_INDENT = "  "


def print_drawing(setting: Setting, *, steps: int, rows_a_picture: int, out: Path | None = None) -> None:
    """Print the time and memory of drawing the batch, and write them to the file `out`.

    Raises:
        ConfigError: it does not fit, with the figures of the fullest rank and the remedies.
    """
    from rich.console import Console

    from diffusionpipe.ir.files import write_file
    from diffusionpipe.planner.drawing.forecast import DRAWING
    from diffusionpipe.workflows.drawing.forecast import forecast_of_batch

    forecast = forecast_of_batch(setting, steps=steps, rows_a_picture=rows_a_picture)
    check_room(forecast.drawing.memory, [device.memory for device in setting.cluster.devices])
    console = Console(highlight=False)
    for line in drawing_lines(forecast, setting, width=max(console.width, 72)):
        console.print(line, markup=False, soft_wrap=True)
    if out is not None:
        write_file(forecast, out, DRAWING)
        typer.echo(f"wrote {out}", err=True)


def check_room(memory: Sequence[DrawingMemory], rooms: Sequence[int]) -> None:
    """Refuses to draw where a rank needs more memory than its device has; `rooms`: bytes of each rank's device.

    Raises:
        ConfigError: names the rank that lacks most.
    """
    from diffusionpipe.errors import ConfigError

    # The rank that lacks most, or has least left.
    rank = max(range(len(memory)), key=lambda rank: memory[rank].peak - rooms[rank])
    use, room = memory[rank], rooms[rank]
    if use.peak <= room:
        return
    # Encoders, weights and decoder follow each other, so the largest decides the remedy.
    if use.encoders > room:
        remedy = "every rank encodes all texts; use devices with more memory, or a smaller --batch"
    elif use.decoding > room:
        remedy = "one rank decodes; use devices with more memory, or a smaller --resolution"
    else:
        remedy = "use a cluster with more devices, or a smaller --batch"
    decoder = f", then a decoder of {use.decoding / GIB:.2f} GiB" if use.decoding else ""
    raise ConfigError(
        f"drawing does not fit: rank {rank} lacks {(use.peak - room) / GIB:.2f} GiB. It would hold encoders of "
        f"{use.encoders / GIB:.2f} GiB, then weights of {use.weights / GIB:.2f} GiB and tensors of "
        f"{use.tensors / GIB:.2f} GiB{decoder}, and has {room / GIB:.2f} GiB; {remedy}"
    )


def drawing_lines(forecast: DrawingForecast, setting: Setting, *, width: int) -> Iterator[str]:
    """The lines of the screen on drawing pictures over all devices: times, then a table of each rank's memory."""
    ranks, drawing, steps = setting.cluster.num_ranks, forecast.drawing, forecast.steps
    pictures = "1 picture" if drawing.pictures == 1 else f"{drawing.pictures} pictures at a time"
    there = "it is" if drawing.pictures == 1 else "all are"
    yield from wrap(
        f"drawing: {pictures} on {setting.cluster.name}, {ranks} devices, as sample --ranks {ranks} does: "
        f"{_seconds(forecast.a_picture)} s a picture, {_seconds(forecast.latency)} s until {there} there",
        width,
        break_on_hyphens=False,
    )
    if forecast.band is not None:
        a_picture, latency = (
            " to ".join(map(_seconds, ends)) for ends in (forecast.band.a_picture, forecast.band.latency)
        )
        yield from wrap(
            f"band: with layer times {UNCERTAINTY:.0%} shorter or longer {a_picture} s a picture, {latency} s until "
            f"{there} there",
            width,
            break_on_hyphens=False,
        )
    if forecast.in_time is not None:
        yield from wrap(_in_time(forecast.in_time, steps, setting), width, break_on_hyphens=False)
    guided = " with and without its text (guidance)" if drawing.rows > drawing.pictures else ""
    yield from wrap(
        f"texts {_seconds(drawing.encoding)} s, then {steps} steps of {_seconds(drawing.step)} s, each picture{guided} "
        f"through all stages; {_decoding(drawing)}",
        width,
        break_on_hyphens=False,
    )
    yield ""
    cells = [HEADS, *(_cells(rank, use, setting) for rank, use in enumerate(drawing.memory))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield _INDENT.join(cell.rjust(size) for cell, size in zip(row, widths, strict=True))
    yield ""
    yield from wrap(
        "GiB; encoders are gone before a rank has its weights   weights: of the rank's stage, in bfloat16   tensors: "
        "texts and latents of all pictures, and the workspace of the hungriest layer   decoder: in float32, when the "
        "weights are gone   of: memory of the device",
        width,
        break_on_hyphens=False,
    )


def _in_time(found: DrawingInTime, steps: int, setting: Setting) -> str:
    """A sentence on drawing parallel in time: its duration, refinements, evaluations, and each rank's memory."""
    peak, room = found.memory.peak, min(device.memory for device in setting.cluster.devices)
    fits = "" if peak <= room else f", which does not fit in {room / GIB:.2f} GiB"
    return (
        f"in time: with DDIM or Euler steps, sample --ranks {found.ranks} --parallel-in-time 1e-3 takes about "
        f"{_seconds(found.latency)} s, if {found.refinements} refinements suffice: {found.in_turn} evaluations one "
        f"after the other in place of {steps}, {found.evaluations} in all; each rank has the whole denoiser, "
        f"{peak / GIB:.2f} GiB{fits}"
    )


def _seconds(time: Seconds) -> str:
    return f"{time:.1f}" if time >= 10 else f"{time:.3g}"


def _decoding(drawing: Drawing) -> str:
    """A clause on decoding: that its time is not counted, and whether pictures are decoded whole or tile by tile."""
    if not drawing.is_decoding_known:
        return "decoding is not counted, because the profile does not say what the VAE takes"
    way = "tile by tile, because a whole picture does not fit" if drawing.is_tiled else "each as a whole"
    return f"the time of decoding is not counted; rank 0 decodes one picture after the other, {way}"


def _cells(rank: int, use: DrawingMemory, setting: Setting) -> tuple[str, ...]:
    sizes = (use.encoders, use.weights, use.tensors, use.decoding, use.peak, setting.cluster.devices[rank].memory)
    return str(rank), *(f"{size / GIB:.2f}" for size in sizes)
