"""Ways to run two backbones, simulated.

`python -m benchmarks.cascade [--json] [--quick] [--only TEXT] [--keep FOLDER]`
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.cascade.models import class_conditional_pair, deepfloyd_pair, equal_pair, pair, without_encoders
from benchmarks.cascade.rivals import rivals
from diffusionpipe.costs import Profile, Workload
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.ir.output_file import write_atomically
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.naming import name_of, sizes_of
from diffusionpipe.planner.search.search import search
from diffusionpipe.units import Seconds

MODELS: dict[str, Callable[[], Profile]] = {
    "IF-I-M + IF-II-M": deepfloyd_pair,
    "IF-I-M + IF-II-M, text from disk": lambda: without_encoders(deepfloyd_pair()),
    "class-conditional, 64 + 256 px": class_conditional_pair,
    "512 + 1024 px": pair,
    "512 + 1024 px, encoder outputs from disk": lambda: without_encoders(pair()),
    "512 + 512 px": equal_pair,
}
DEVICES = (8, 16, 32, 64)
PER_DEVICE = (1, 8)
QUICK = (8,)
WIDTH = 132
"""Columns of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of training both backbones at its best sizes."""

    model: str
    devices: int
    per_device: int
    """Samples of one step on each."""
    name: str
    layout: str
    is_filled: bool
    step: Seconds
    bubble: float
    """Idle part of all devices' time."""
    fits: bool


def ways(model: str, devices: int, per_device: int) -> Iterator[Way]:
    """Every way in one cell, and other systems."""
    setting = setting_of(model, devices, per_device)
    made = partial(Way, model=model, devices=devices, per_device=per_device)
    for is_filled in (True, False) if setting.graph.frozen_layers else (False,):
        best: dict[str, Way] = {}
        for candidate, proposal in search(setting, filler=filler_of(setting) if is_filled else None).finalists:
            way = made(
                name=name_of(candidate), layout=sizes_of(candidate), is_filled=is_filled, step=proposal.step,
                bubble=proposal.timeline.bubble, fits=proposal.overflow <= 0,
            )  # fmt: skip
            best.setdefault(way.name, way)
        yield from best.values()
    for one in rivals(setting):
        yield made(
            name=one.name, layout=one.layout, is_filled=False, step=one.step, bubble=1 - one.busy / one.step,
            fits=one.fits,
        )  # fmt: skip


def setting_of(model: str, devices: int, per_device: int) -> Setting:
    """A pair on so many A100s in nodes of 8."""
    return Setting(
        profile=MODELS[model](),
        cluster=load_cluster(f"a100-80x8:{devices // 8}" if devices > 8 else "a100-80x8"),
        workload=Workload(batch=devices * per_device),
    )


def cell_name(model: str, devices: int, per_device: int) -> str:
    """What a cell is called, also as a file: `--only "8x1 class"` computes those whose name contains this."""
    words = "-".join("".join(letter if letter.isalnum() else " " for letter in model).split())
    return f"{devices}x{per_device} {words}"


def kept_ways(folder: Path | None, model: str, devices: int, per_device: int) -> list[Way]:
    """Every way in one cell: read from the folder if it was kept there, else computed and kept."""
    if folder is None:
        return list(ways(model, devices, per_device))
    file = folder / f"{cell_name(model, devices, per_device)}.json"
    if file.is_file():
        return [Way(**way) for way in json.loads(file.read_text(encoding="utf-8"))]
    found = list(ways(model, devices, per_device))
    write_atomically(file, json.dumps([asdict(way) for way in found], indent=1).encode())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cascade", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print all ways as JSON, without tables")
    parser.add_argument("--quick", action="store_true", help="8 devices alone")
    parser.add_argument("--only", default="", metavar="TEXT", help='cells whose name has this, e.g. "8x1 class"')
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="finished cells are kept here, and not redone")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    found = []
    console = Console(width=WIDTH)
    for devices in QUICK if arguments.quick else DEVICES:
        for model in MODELS:
            for per_device in PER_DEVICE:
                if arguments.only not in cell_name(model, devices, per_device):
                    continue
                own = kept_ways(arguments.keep, model, devices, per_device)
                found += own
                if not arguments.json:
                    console.print(_table(own))
    if arguments.json:
        print(json.dumps([asdict(way) | {"step": round(way.step, 6)} for way in found], indent=1))


def _table(found: list[Way]) -> Table:
    first = found[0]
    table = Table(
        box=None,
        title_justify="left",
        title=f"{first.model}, {first.devices} A100, {first.per_device} samples each (simulated)",
    )
    for head in ("way", "layout", "step ms", "times as long", "idle"):
        table.add_column(head, justify="left" if head in ("way", "layout") else "right")
    if not any(way.is_filled for way in found):
        table.title = f"{table.title}; no encoders, so nothing is filled"
    best = min(way.step for way in found if way.fits)
    for way in sorted(found, key=lambda way: (not way.fits, way.step)):
        name = f"{way.name}, filled" if way.is_filled else way.name
        ratio = f"{way.step / best:.3f}" if way.fits else "does not fit"
        table.add_row(name, way.layout, f"{way.step * 1e3:.1f}", ratio, f"{way.bubble:.1%}")
    return table


if __name__ == "__main__":
    main()
