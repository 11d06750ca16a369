"""Filled pipelines beside filled data parallelism: by the memory of a device, and by the samples on each device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from benchmarks.paper import profiles
from benchmarks.paper.cells import Case, setting_of
from benchmarks.tables import table
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.holding import Workload
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import settings_in_storages
from diffusionpipe.planner.search.naming import name_of, sizes_of
from diffusionpipe.planner.search.search import search
from diffusionpipe.units import Seconds
from diffusionpipe.viz.pictures import new_figure, save_figure

MODEL = "SD 2.1, 512 px"
PER_DEVICE = (1, 2, 4, 8, 16, 32, 64)
NUM_DEVICES = (8, 64)
MEMORIES = (80, 40, 24, 16, 12, 10, 8)
"""GiB of a device."""
LARGE, SAMPLES = "sdxl", 8
"""The model whose size is compared with memory, and samples of a step on each of 8 devices."""
UNITS = (2, 4, 8)
"""Ranks of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The fastest of a kind that fits."""

    layout: str
    step: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Both in one setting; None where nothing of a kind fits."""

    group: str
    """What stays the same."""
    at: float
    """What is varied."""
    copies: Best | None
    pipeline: Best | None

    @property
    def ratio(self) -> float | None:
        """How many times as fast the pipeline is."""
        return self.copies.step / self.pipeline.step if self.copies and self.pipeline else None


def by_batch() -> Iterator[Contest]:
    """SD 2.1 with fewer and more samples on each device."""
    for devices in NUM_DEVICES:
        for samples in PER_DEVICE:
            setting = setting_of(Case(model=MODEL, devices=devices, per_device=samples))
            yield contest(f"{devices} A100s", samples, [setting])


def by_memory() -> Iterator[Contest]:
    """SDXL at 1024 px on 8 devices as fast as A100s, with less and less memory; layers are recomputed or not."""
    cluster = load_cluster("a100-80x8:1")
    for size in MEMORIES:
        devices = tuple(replace(one, memory=size * 2**30) for one in cluster.devices)
        settings = [
            Setting(
                profile=profiles.load(LARGE),
                cluster=replace(cluster, devices=devices),
                workload=Workload(batch=len(devices) * SAMPLES, checkpointed=checkpointed),
            )
            for checkpointed in ((), ("*",))
        ]
        yield contest("8 devices", size, settings)


def contest(group: str, at: float, settings: Sequence[Setting]) -> Contest:
    """The fastest of each kind over these settings, and over those with their encoders in host memory."""
    every = [*settings, *(moved for one in settings for moved in settings_in_storages(one))]
    return Contest(group=group, at=at, copies=_best(every, (1,)), pipeline=_best(every, UNITS))


def _best(settings: Sequence[Setting], units: tuple[int, ...]) -> Best | None:
    found = [one for setting in settings if (one := _best_in(setting, units))]
    return min(found, key=lambda one: one.step, default=None)


def _best_in(setting: Setting, units: tuple[int, ...]) -> Best | None:
    winner = search(setting, filler=filler_of(setting), units=units).winner
    if winner is None:
        return None
    candidate, proposal = winner
    words = f"{name_of(candidate)}, {sizes_of(candidate)}"
    words += setting.workload.encoders.words + (", R" if setting.workload.checkpointed else "")
    return Best(layout=words, step=proposal.step)


def table_of(found: Sequence[Contest], title: str, varied: str) -> Table:
    """One row for each contest."""
    columns = ("", varied, "data parallelism", "pipeline", "copies ms", "pipeline ms", "x")
    made = table(title, columns, num_left=1)
    for index in (2, 3):
        made.columns[index].justify = "left"
    for one in found:
        layouts = (best.layout if best else "nothing fits" for best in (one.copies, one.pipeline))
        steps = (f"{1e3 * best.step:.1f}" if best else "-" for best in (one.copies, one.pipeline))
        made.add_row(one.group, f"{one.at:g}", *layouts, *steps, "-" if one.ratio is None else f"{one.ratio:.3f}")
    return made


def draw(found: Sequence[Contest], path: Path, title: str, varied: str) -> None:
    """How many times as fast the pipeline is."""
    figure = new_figure(8, 3.4)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    for group in dict.fromkeys(one.group for one in found):
        mine = [(one.at, one.ratio) for one in found if one.group == group and one.ratio is not None]
        axes.plot([at for at, _ in mine], [ratio for _, ratio in mine], marker="o", label=group)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    places = sorted({one.at for one in found})
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.set_xlabel(varied)
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False)
    save_figure(figure, path)
