"""What other systems do with two backbones: they train one after the other, over all devices."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from diffusionpipe.costs import Profile
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.baselines import (
    Baseline,
    best_baselines,
    gpipe_starts,
    pipeline,
    places,
    spp_starts,
)
from diffusionpipe.planner.rivals.copies import tuned_copies
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.units import Seconds

PIPELINES = (("GPipe", "gpipe", gpipe_starts), ("1F1B + SPP", "1f1b", spp_starts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another system at its best sizes."""

    name: str
    layout: str
    step: Seconds
    busy: Seconds
    """Mean time that a device computes."""
    fits: bool


def rivals(setting: Setting) -> Iterator[Rival]:
    """Copies of both as people tune them, then pipelines, first of one backbone, then of the other."""
    for one in (*best_baselines(setting), *tuned_copies(setting)):
        yield Rival(name=one.name, layout=one.sizes, step=one.step, busy=one.busy, fits=one.overflow <= 0)
    for name, schedule, partitioner in PIPELINES:
        found: list[Baseline] = []
        for part in parts(setting.profile):
            judge = Judge(setting=replace(setting, profile=part))
            best = pipeline(judge, name, schedule, partitioner, places(judge))
            found += [] if best is None else [best]
        if len(found) == len(setting.graph.backbones):
            yield _in_turn(f"{name} in turn", found, setting)


def parts(profile: Profile) -> Iterator[Profile]:
    """The profile of each backbone; the encoders are with the first, the others read their outputs."""
    graph, encoders = profile.graph, set(profile.graph.frozen_layers)
    for number, backbone in enumerate(graph.backbones):
        own = set(graph.layers_of(backbone)) | (encoders if number == 0 else set())
        kept = tuple(layer for layer in graph.layers if layer.name in own)
        written = {name for layer in kept for name in layer.writes}
        read = dict.fromkeys(name for layer in kept for name in layer.reads if name not in written)
        yield replace(
            profile,
            graph=replace(graph, layers=kept, inputs=tuple(read), backbones=(backbone,)),
            layers=tuple(layer for layer in profile.layers if layer.name in own),
        )


def _in_turn(name: str, found: list[Baseline], setting: Setting) -> Rival:
    """Both must fit beside each other; the memory of the fullest device of each counts."""
    smallest = min(device.memory for device in setting.cluster.devices)
    return Rival(
        name=name,
        layout="; ".join(one.sizes for one in found),
        step=sum(one.step for one in found),
        busy=sum(one.busy for one in found),
        fits=sum(max(one.held) for one in found) <= smallest,
    )
