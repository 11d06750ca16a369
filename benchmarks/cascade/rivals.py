"""What other systems do with two backbones: one after the other over all devices, or each on devices of its own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.rivals.copies import tuned_copies
from benchmarks.rivals.replicated import replicated_spp
from diffusionpipe.costs import Cluster, Profile
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.baselines import (
    DDP,
    ZERO3,
    Baseline,
    best_baselines,
    data_parallel,
    gpipe_starts,
    pipeline,
    places,
    zero3,
)
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.units import Seconds

GPIPE, SPP = "GPipe", "1F1B + SPP"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Another system at its best sizes."""

    name: str
    layout: str
    step: Seconds
    busy: Seconds
    """Mean time that a device computes."""
    frozen: Seconds
    """The part of it in which encoders run."""
    fits: bool


def rivals(setting: Setting) -> Iterator[Rival]:
    """Copies of both as people tune them, then pipelines, first of one backbone, then of the other, then halves."""
    for one in (*best_baselines(setting), *tuned_copies(setting)):
        yield Rival(
            name=one.name, layout=one.sizes, step=one.step, busy=one.busy, frozen=one.frozen, fits=one.overflow <= 0
        )  # fmt: skip
    both = tuple(parts(setting.profile))
    for name, system in ((GPIPE, _gpipe), (SPP, replicated_spp)):
        found = [system(Judge(setting=replace(setting, profile=part))) for part in both]
        if None not in found:
            yield _in_turn(f"{name} in turn", [one for one in found if one], setting)
    for name, copies in ((DDP, partial(data_parallel, is_overlapped=True)), (ZERO3, zero3)):
        counts = divisions(setting) if len(both) > 1 else ()
        divided = [_divided(f"{name}, divided", copies, setting, count) for count in counts]
        yield from sorted((one for one in divided if one), key=lambda one: (not one.fits, one.step))[:1]


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


def _gpipe(judge: Judge) -> Baseline | None:
    return pipeline(judge, GPIPE, "gpipe", gpipe_starts, places(judge))


def _in_turn(name: str, found: list[Baseline], setting: Setting) -> Rival:
    """Both must fit beside each other; the memory of the fullest device of each counts."""
    smallest = min(device.memory for device in setting.cluster.devices)
    return Rival(
        name=name,
        layout="; ".join(one.sizes for one in found),
        step=sum(one.step for one in found),
        busy=sum(one.busy for one in found),
        frozen=sum(one.frozen for one in found),
        fits=sum(max(one.held) for one in found) <= smallest,
    )


def divisions(setting: Setting) -> Iterator[int]:
    """Numbers of devices for the first backbone with which both can share the batch."""
    ranks, batch = setting.cluster.num_ranks, setting.workload.batch
    return (count for count in range(1, ranks) if batch % count == 0 and batch % (ranks - count) == 0)


def _divided(
    name: str, copies: Callable[[Judge], Baseline | None], setting: Setting, count: int
) -> Rival | None:  # fmt: skip
    """Copies of the first backbone on so many devices, of the second on the others; all encode first, as one."""
    ranks, frozen = setting.cluster.num_ranks, Judge(setting=setting).tables.frozen_seconds
    shares = (range(count), range(count, ranks))
    found: list[Baseline] = []
    for part, own in zip(parts(setting.profile), shares, strict=True):
        cluster = _some(setting.cluster, own)
        one = copies(Judge(setting=replace(setting, profile=part, cluster=cluster)))
        if one is None:
            return None
        found.append(one)
    steps = [one.step - one.frozen for one in found]
    busy = sum(len(own) * (one.busy - one.frozen) for own, one in zip(shares, found, strict=True)) / ranks
    return Rival(
        name=name,
        layout=f"{count} + {ranks - count} copies",
        step=frozen + max(steps),
        busy=frozen + busy,
        frozen=frozen,
        fits=all(one.overflow <= 0 for one in found),
    )


def _some(cluster: Cluster, ranks: range) -> Cluster:
    """These ranks alone."""
    first = cluster.nodes[ranks[0]]
    return replace(
        cluster,
        devices=tuple(cluster.devices[rank] for rank in ranks),
        nodes=tuple(cluster.nodes[rank] - first for rank in ranks),
    )
