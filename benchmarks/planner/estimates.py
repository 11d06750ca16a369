"""What ranks the candidates against what simulates them: `python -m benchmarks.planner.estimates [--json]`.

A search ranks thousands of candidates by an estimate and simulates a few of them in full. Each setting here is
searched; then candidates that came near, drawn evenly over the ranking, are simulated too.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.cards import profiles
from diffusionpipe.costs import Cluster
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.holding import Workload, plain_states
from diffusionpipe.passes import PlacedFill
from diffusionpipe.planner.assembly.layout import Filler, Layout, Unfilled
from diffusionpipe.planner.filling.filler import fill_plan, filler_of
from diffusionpipe.planner.filling.fills import frozen_layers
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate, Estimate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of, sizes_of
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.planner.search.search import search
from diffusionpipe.units import Seconds

NETWORKS = (1.0, 2.5, 10.0)
"""Gb/s of links between nodes of one RTX 4090."""
ADAPTERS = Workload(batch=32, checkpointed=("*",))
EQUAL = ", all alike"
"""Ends the names of settings whose devices and links are alike."""
REACHED = 0.8
"""Of a network's rate, as in the shipped clusters."""
LAYOUTS = {False: 40, True: 30}
"""Of each setting are compared so many at most, without and with fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A setting with its name."""

    name: str
    is_equal: bool
    """Whether all devices and links are alike."""
    setting: Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One layout."""

    case: str
    is_equal: bool
    is_filled: bool
    is_placed_again: bool
    """Whether the fills that the estimate is about lack memory, and smaller ones or other hosts took their place."""
    layout: str
    estimated: Seconds
    simulated: Seconds

    @property
    def error(self) -> float:
        """Of the estimate: positive where it says more than the simulation."""
        return self.estimated / self.simulated - 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.estimates", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print every layout as JSON instead of a table")
    parser.add_argument("--only", default="", help="settings whose names contain this")
    arguments = parser.parse_args()
    found: list[Compared] = []
    with Console(stderr=True).status("starting") as status:
        for case in cases(arguments.only):
            for is_filled in (False, True):
                status.update(f"{case.name}, {'with' if is_filled else 'without'} fills")
                found += compared(case, is_filled=is_filled)
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        Console(width=160, highlight=False).print(table(found))


def cases(only: str = "") -> Iterator[Case]:
    """All settings, or those whose names contain this; each profile is read, or computed, when it is needed."""
    mixed, twice = load_cluster("rtx4090-rtx4080"), load_cluster("rtx4090-rtx4080:2")
    four, eight = load_cluster("rtx4090x4"), load_cluster("h100x8")
    narrow = Workload(batch=32, states=plain_states(parameter=2, gradient=2, optimizer=2), checkpointed=("*",))
    made = [
        ("SD 2.1 on 4090 + 4080", mixed, "sd-2.1", "rtx4090", Workload(batch=32)),
        ("SDXL, narrow, on 4090 + 4080", mixed, "sdxl", "rtx4090", narrow),
        ("SD 2.1 on 2 nodes of 4090 + 4080", twice, "sd-2.1", "rtx4090", Workload(batch=64)),
        ("FLUX.1 adapters on 2 nodes of 4090 + 4080", twice, "flux.1-dev-lora", "rtx4090", ADAPTERS),
        *(
            (
                f"SD 2.1 on 4 nodes of a 4090, {rate:g} Gb/s",
                networked(four, rate),
                "sd-2.1",
                "rtx4090",
                Workload(batch=32),
            )
            for rate in NETWORKS
        ),
        ("FLUX.1 adapters on 4 nodes, 10 Gb/s", networked(four, 10), "flux.1-dev-lora", "rtx4090", ADAPTERS),
        (f"SD 2.1 on 4 RTX 4090{EQUAL}", four, "sd-2.1", "rtx4090", Workload(batch=64)),
        (f"SDXL on 8 H100{EQUAL}", eight, "sdxl", "h100", Workload(batch=256, states=plain_states(ema=4))),
        (f"SD 2.1 on 8 H100{EQUAL}", eight, "sd-2.1", "h100", Workload(batch=256)),
    ]
    for name, cluster, model, device, workload in made:
        if only in name:
            setting = Setting(profile=profiles.load(model, device), cluster=cluster, workload=workload)
            yield Case(name=name.removesuffix(EQUAL), is_equal=name.endswith(EQUAL), setting=setting)


def networked(cluster: Cluster, rate: float) -> Cluster:
    """Its devices one a node, over a network of so many Gb/s."""
    bandwidth = rate * 1e9 / 8 * REACHED
    return replace(
        cluster,
        name=f"{cluster.name}, {rate:g} Gb/s",
        nodes=tuple(range(cluster.num_ranks)),
        inter=replace(cluster.inter, bandwidth=bandwidth),
        inter_reduce=replace(cluster.inter_reduce, bandwidth=bandwidth),
    )


def compared(case: Case, *, is_filled: bool) -> Iterator[Compared]:
    """Candidates of the case's search, simulated in full."""
    setting, filler = case.setting, filler_of(case.setting) if is_filled else None
    frozen = frozen_layers(setting.profile)

    def first(unfilled: Unfilled) -> Mapping[int, Sequence[PlacedFill]]:
        return fill_plan(setting, unfilled, frozen).fills

    for candidate, estimate in drawn(setting, filler, LAYOUTS[is_filled]):
        simulated = propose(setting, candidate.layout(setting), filler)
        is_pipeline = is_filled and simulated.train.num_workers > 1
        yield Compared(
            case=case.name,
            is_equal=case.is_equal,
            is_filled=is_filled,
            is_placed_again=is_pipeline and propose(setting, candidate.layout(setting), first).train != simulated.train,
            layout=f"{name_of(candidate)}, {sizes_of(candidate)}",
            estimated=estimate.iteration,
            simulated=simulated.iteration,
        )


def drawn(setting: Setting, filler: Filler | None, count: int) -> list[tuple[Candidate, Estimate]]:
    """So many of the candidates that a search has judged, evenly over its ranking."""
    judge, is_filled = Judge(setting=setting), filler is not None
    searches = [search(setting, filler=way, judge=judge) for way in dict.fromkeys((filler, None))]
    found = dict.fromkeys(
        candidate
        for one in searches
        for candidate in (*(finalist for finalist, _ in one.finalists), *(judged.candidate for judged in one.judged))
    )
    ranked = [(one, judge.estimates.estimate(one, is_filled=is_filled)) for one in found]
    ranked = sorted((pair for pair in ranked if pair[1].overflow <= 0), key=lambda pair: pair[1].iteration)
    # Layouts that differ in their hosts alone have one plan: the best estimate of it counts.
    best: dict[Layout, tuple[Candidate, Estimate]] = {}
    for candidate, estimate in ranked:
        best.setdefault(candidate.layout(setting), (candidate, estimate))
    return list(best.values())[:: max(1, -(-len(best) // count))]


def table(found: Sequence[Compared]) -> Table:
    """One line for each setting and way, then the sums."""
    made = Table(title="Estimate over simulation, less 1, in percent", title_justify="left", box=None, pad_edge=False)
    for column in ("setting", "fills", "layouts", "median |error|", "least", "most"):
        made.add_column(column, justify="left" if column in ("setting", "fills") else "right")
    groups: list[tuple[str, str, list[Compared]]] = []
    for is_filled in (False, True):
        words = "with" if is_filled else "without"
        again = [one for one in found if one.is_placed_again and is_filled]
        own = [one for one in found if one.is_filled is is_filled and not one.is_placed_again]
        names = dict.fromkeys(one.case for one in own)
        groups += [(name, words, [one for one in own if one.case == name]) for name in names]
        groups.append(("unequal devices or slow links", words, [one for one in own if not one.is_equal]))
        groups.append(("equal devices", words, [one for one in own if one.is_equal]))
        groups.append(("fills that lacked memory and were placed again", words, again))
    for name, words, own in groups:
        if own:
            errors = [100 * one.error for one in own]
            figures = (median(map(abs, errors)), min(errors), max(errors))
            made.add_row(name, words, str(len(own)), *(f"{figure:.2f}" for figure in figures))
    return made


if __name__ == "__main__":
    main()
