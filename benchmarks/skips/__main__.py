"""What a U-Net's skips cost to send, by where its stages stand: `python -m benchmarks.skips [--json]`."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from rich.console import Console
from rich.table import Table

from benchmarks.paper import profiles
from diffusionpipe.costs import Profile
from diffusionpipe.planner.assembly.folded import folded_cuts
from diffusionpipe.planner.assembly.partition import balanced_cuts
from diffusionpipe.schedules.building.shapes import linear, loop, wave
from diffusionpipe.units import Seconds

RANKS = (2, 4, 8)
SAMPLES = 8
"""Samples at which the layers' times are balanced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one sample sends between ranks in one iteration, activations and their gradients."""

    ranks: int
    placement: str
    stages: int
    direct: int
    """Every tensor straight from the stage that writes it to each rank that reads it."""
    relayed: int
    """Every tensor handed on from stage to stage, as runtimes for chains do."""
    skips: int
    """The part of `direct` that goes further than to the next stage."""
    imbalance: float
    """By how much the slowest rank's compute exceeds the mean."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.skips", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    found = measure(profiles.load("sd-2.1"))
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        Console(width=140, highlight=False).print(table(found))


def measure(profile: Profile) -> list[Traffic]:
    """Linear, looped and V-shaped placements, cut so that ranks take about equal times."""
    graph, layers = profile.graph, profile.graph.backbone_layers
    times = [_time(profile, name) for name in layers]
    found = []
    for ranks in RANKS:
        for name, workers, starts in (
            ("linear", linear(ranks), balanced_cuts(times, ranks)),
            ("loop", loop(ranks, 2), balanced_cuts(times, 2 * ranks)),
            ("V, equal stages", wave(ranks, 2), balanced_cuts(times, 2 * ranks)),
            ("V, folded", wave(ranks, 2), folded_cuts(graph, times, ranks)),
        ):
            bounds = pairwise((*starts, len(layers)))
            blocks = [tuple(layers[start:stop]) for start, stop in bounds]
            found.append(traffic(profile, blocks, workers, ranks, name))
    return found


def _time(profile: Profile, layer: str) -> Seconds:
    return profile.forward(layer, SAMPLES) + profile.input_grad(layer, SAMPLES) + profile.weight_grad(layer, SAMPLES)


def traffic(
    profile: Profile, blocks: Sequence[Sequence[str]], workers: Sequence[int], ranks: int, placement: str
) -> Traffic:
    """What crosses between ranks when block s stands on `workers[s]`."""
    graph = profile.graph
    loads = [0.0] * ranks
    for block, worker in zip(blocks, workers, strict=True):
        loads[worker] += sum(_time(profile, name) for name in block)
    readers: dict[tuple[int, str], list[int]] = {}
    for (producer, consumer), tensors in graph.flows(blocks).items():
        for name in tensors:
            readers.setdefault((producer, name), []).append(consumer)
    direct = relayed = skips = 0
    for (producer, name), consumers in readers.items():
        spec = graph.tensor(name)
        size = spec.num_bytes * (2 if spec.needs_gradient else 1)
        home = workers[producer]
        away = {workers[consumer]: consumer for consumer in sorted(consumers, reverse=True)}
        away.pop(home, None)
        direct += size * len(away)
        skips += size * sum(consumer > producer + 1 for consumer in away.values())
        path = workers[producer : max(consumers) + 1]
        relayed += size * sum(a != b for a, b in pairwise(path))
    return Traffic(
        ranks=ranks,
        placement=placement,
        stages=len(blocks),
        direct=direct,
        relayed=relayed,
        skips=skips,
        imbalance=max(loads) * ranks / sum(loads) - 1,
    )


def table(found: Sequence[Traffic]) -> Table:
    """Megabytes a sample, and what is saved against the linear placement."""
    result = Table(title="SD 2.1 at 512 px, MB a sample and iteration", title_justify="left", box=None)
    for name in (
        "ranks",
        "placement",
        "stages",
        "sent",
        "of it skips",
        "if relayed",
        "less than relayed on a line",
        "slowest rank",
    ):
        result.add_column(name, justify="right")
    line = {one.ranks: one.relayed for one in found if one.placement == "linear"}
    for one in found:
        saved = 1 - one.direct / line[one.ranks]
        cells = (
            one.ranks,
            one.placement,
            one.stages,
            *(f"{b / 1e6:.1f}" for b in (one.direct, one.skips, one.relayed)),
        )
        result.add_row(*map(str, cells), f"{saved:.0%}", f"+{one.imbalance:.0%}")
    return result


if __name__ == "__main__":
    main()
