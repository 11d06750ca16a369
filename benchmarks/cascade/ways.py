"""Every way of training two backbones in one setting, each at its best sizes."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time

from benchmarks.cascade.models import class_conditional_pair, deepfloyd_pair, equal_pair, pair, without_encoders
from benchmarks.cascade.rivals import Rival, rivals
from diffusionpipe.costs import Profile
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.files.output_file import write_atomically
from diffusionpipe.holding import Workload
from diffusionpipe.ir import Op
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of, sizes_of
from diffusionpipe.planner.search.proposal import Proposal
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of training both backbones at its best sizes."""

    name: str
    layout: str
    is_filled: bool
    step: Seconds
    bubble: float
    """Idle part of all devices' time."""
    fits: bool
    waits: Seconds
    """Mean idle time of a device in the same step without frozen work;"""
    frozen: Seconds
    """and mean time that a device encodes."""

    @property
    def is_full(self) -> bool:
        """Whether there is as much frozen work as waits that it could fill."""
        return self.is_filled and self.frozen >= self.waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A pair of backbones on so many devices."""

    model: str
    devices: int
    per_device: int
    """Samples of one step on each."""
    seconds: Seconds
    """Of one core for both searches, filled and not."""
    ways: tuple[Way, ...]

    @property
    def best(self) -> dict[str, Way]:
        """Of each way that fits the faster of filled and not, fastest first."""
        found: dict[str, Way] = {}
        for way in sorted((way for way in self.ways if way.fits), key=lambda way: way.step):
            found.setdefault(way.name, way)
        return found

    def ratios(self, to: str | None = None) -> dict[str, float]:
        """How many times as long as that way all others take; None: as the fastest of those that this planner makes."""
        best = self.best
        ours = best[to] if to else next(way for way in best.values() if way.name in OURS)
        return {name: way.step / ours.step for name, way in best.items()}


OURS = ("opposed", "together", "in turn", "divided", "data parallel", "sharded data parallel")
"""The ways between which `plan` chooses."""


def computed_cell(model: str, devices: int, per_device: int) -> Cell:
    """Every way in one cell, and other systems."""
    setting = setting_of(model, devices, per_device)
    began = process_time()
    own = tuple(ways(setting))
    seconds = process_time() - began
    return Cell(
        model=model,
        devices=devices,
        per_device=per_device,
        seconds=seconds,
        ways=(*own, *map(_rival_way, rivals(setting))),
    )


def ways(setting: Setting) -> Iterator[Way]:
    """What the search finds, filled and not."""
    judge = Judge(setting=setting)
    for is_filled in (True, False) if setting.graph.frozen_layers else (False,):
        best: dict[str, Way] = {}
        filler = filler_of(setting) if is_filled else None
        for candidate, proposal in search(setting, filler=filler, judge=judge).finalists:
            way = _way(judge, candidate, proposal, is_filled=is_filled)
            best.setdefault(way.name, way)
        yield from best.values()


def _way(judge: Judge, candidate: Candidate, proposal: Proposal, *, is_filled: bool) -> Way:
    alone, timeline = judge.estimates.estimate(candidate, is_filled=True), proposal.timeline
    encoding = sum(span.end - span.start for span in timeline.spans if span.action.op is Op.ENCODE)
    return Way(
        name=name_of(candidate),
        layout=sizes_of(candidate),
        is_filled=is_filled,
        step=proposal.step,
        bubble=timeline.bubble,
        fits=proposal.overflow <= 0,
        waits=alone.pipeline - alone.busy,
        frozen=encoding / timeline.num_workers,
    )


def _rival_way(one: Rival) -> Way:
    """Other systems encode first, so their encoders fill nothing."""
    return Way(
        name=one.name,
        layout=one.layout,
        is_filled=False,
        step=one.step,
        bubble=1 - one.busy / one.step,
        fits=one.fits,
        waits=one.step - one.busy,
        frozen=one.frozen,
    )


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


def kept_cell(folder: Path | None, model: str, devices: int, per_device: int) -> Cell:
    """A cell: read from the folder if it was kept there, else computed and kept."""
    if folder is None:
        return computed_cell(model, devices, per_device)
    file = folder / f"{cell_name(model, devices, per_device)}.json"
    if file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        return Cell(**kept | {"ways": tuple(Way(**way) for way in kept["ways"])})
    found = computed_cell(model, devices, per_device)
    write_atomically(file, json.dumps(asdict(found), indent=1).encode())
    return found
