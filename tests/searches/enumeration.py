"""Every 1F1B layout of a small setting, simulated in full: what the planner's search is held against.

It knows nothing of the search: layouts are listed, not found. So that 300 settings take minutes, a layout is not
simulated if a bound says that it cannot be the fastest:

    busy       the dearest stage computes all micro-batches, after the first one came to it and before the last one
               is back at the first stage
    shared     all training work in equal shares over all devices

Each simulation is held against its own bound, so a wrong bound is noticed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from math import lcm

from diffusionpipe.planner.assembly.layout import Filler, Layout
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.proposal import Proposal, propose
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Enumerated:
    """One layout, not yet simulated."""

    layout: Layout
    bound: Seconds

    def __str__(self) -> str:
        """Its sizes, e.g. "(1,2) x 2, 4 micro-batches, cut at layer2"."""
        one = self.layout
        cuts = ", ".join(one.splits) or "nothing"
        replicas = ",".join(map(str, one.replicas))
        return f"({replicas}) x {one.data_parallel}, {one.microbatches} micro-batches, cut at {cuts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The fastest of all layouts that fit."""

    step: Seconds
    """inf: none fits."""
    text: str
    num_layouts: int
    num_simulated: int


def optimum(setting: Setting, *, limit: Seconds = float("inf")) -> Optimum:
    """The fastest 1F1B layout on all devices of a setting, filled or not, that takes less than the limit."""
    ways: list[Filler | None] = [filler_of(setting), None] if setting.graph.frozen_layers else [None]
    layouts = sorted(layouts_of(setting), key=lambda one: one.bound)
    step, text, count = limit, "nothing", 0
    for one in layouts:
        if one.bound >= step:
            break
        for filler in ways:
            found = propose(setting, one.layout, filler)
            count += 1
            assert found.step >= one.bound * (1 - 1e-9), f"{one} takes {found.step}, its bound says {one.bound}"
            if found.overflow <= 0 and found.step < step:
                step, text = found.step, f"{one}{', filled' if filler else ''}"
    step = float("inf") if text == "nothing" else step
    return Optimum(step=step, text=text, num_layouts=len(layouts), num_simulated=count)


def layouts_of(setting: Setting) -> Iterator[Enumerated]:
    """Every 1F1B layout on all devices."""
    devices, layers = setting.cluster.num_ranks, setting.graph.backbone_layers
    for groups in _divisors(devices):
        units = devices // groups
        for adjacent in _divisors(groups) if units > 1 else [1]:
            for stages in range(1, min(units, len(layers)) + 1):
                for replicas in _compositions(units, stages):
                    for microbatches in _divisors(setting.workload.batch // groups):
                        if setting.workload.batch % (groups * microbatches * lcm(*replicas)):
                            continue
                        for cuts in combinations(range(1, len(layers)), stages - 1):
                            layout = Layout(
                                batch=setting.workload.batch,
                                stages=stages,
                                microbatches=microbatches,
                                schedule="1f1b",
                                replicas=replicas,
                                data_parallel=groups,
                                adjacent=adjacent,
                                splits=tuple(layers[cut] for cut in cuts),
                            )
                            yield Enumerated(layout=layout, bound=_bound(setting, layout, (0, *cuts, len(layers))))


def fullest(proposal: Proposal) -> Bytes:
    """What the fullest worker holds."""
    return max(use.total for use in proposal.memory)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write the total as a sum of so many positive numbers, in order."""
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, total), strict=True))


def _bound(setting: Setting, layout: Layout, cuts: tuple[int, ...]) -> Seconds:
    """No run of the layout takes less."""
    samples, unit = layout.batch / (layout.data_parallel * layout.microbatches), 0
    profile, cluster, names, mesh = setting.profile, setting.cluster, setting.graph.backbone_layers, layout.mesh
    path, busy, work = 0.0, 0.0, 0.0
    for stage, replicas in enumerate(layout.replicas):
        share = samples / replicas
        seconds = sum(
            profile.forward(name, share) + profile.input_grad(name, share) + profile.weight_grad(name, share)
            for name in names[cuts[stage] : cuts[stage + 1]]
        )
        speeds = [
            min(cluster.devices[mesh.rank(group, unit + i)].speed for group in range(layout.data_parallel))
            for i in range(replicas)
        ]
        busy = max(busy, path + layout.microbatches * seconds / min(speeds))
        path += seconds / max(speeds)
        work += layout.microbatches * seconds * replicas * layout.data_parallel
        unit += replicas
    return max(busy, work / sum(device.speed for device in cluster.devices))
