"""What ranks the candidates against what simulates them: `python -m benchmarks.planner.estimates [--json] [--only TEXT]`.

A search ranks thousands of candidates by an estimate and simulates a few of them in full. Each setting here is searched;
then candidates that came near, drawn evenly over the ranking, are simulated too.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.cards import profiles
from diffusionpipe.costs import Cluster, Workload
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.planner.assembly.layout import Filler
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate, Estimate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.planner.search.search import search
from diffusionpipe.units import Seconds

NETWORKS = (1.0, 2.5, 10.0)
"""Gb/s of links between nodes of one RTX 4090."""
REACHED = 0.8
"""Of a network's rate, as in the shipped clusters."""
LAYOUTS = {False: 40, True: 24}
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
    mixed, four, eight = load_cluster("rtx4090-rtx4080"), load_cluster("rtx4090x4"), load_cluster("h100x8")
    made: list[tuple[str, bool, Cluster, str, str, Workload]] = [
        ("SD 2.1 on 4090 + 4080", False, mixed, "sd-2.1", "rtx4090", Workload(batch=32)),
        (
            "SDXL on 4090 + 4080",
            False,
            mixed,
            "sdxl",
            "rtx4090",
            Workload(batch=32, optimizer_bytes=2, checkpointed=("*",), gradient_bytes=2, parameter_bytes=2),
        ),
        (
            "SD 2.1 on 2 nodes of 4090 + 4080",
            False,
            load_cluster("rtx4090-rtx4080:2"),
            "sd-2.1",
            "rtx4090",
            Workload(batch=64),
        ),
        (
            "FLUX.1 adapters on 2 nodes of 4090 + 4080",
            False,
            load_cluster("rtx4090-rtx4080:2"),
            "flux.1-dev-lora",
            "rtx4090",
            Workload(batch=32, checkpointed=("*",)),
        ),
        *(
            (f"SD 2.1 at {rate:g} Gb/s", False, networked(four, rate), "sd-2.1", "rtx4090", Workload(batch=32))
            for rate in NETWORKS
        ),
        ("SD 2.1 on four RTX 4090", True, four, "sd-2.1", "rtx4090", Workload(batch=64)),
        ("SDXL on eight H100", True, eight, "sdxl", "h100", Workload(batch=256, ema_bytes=4)),
        ("SD 2.1 on eight H100", True, eight, "sd-2.1", "h100", Workload(batch=256)),
    ]
    for name, is_equal, cluster, model, device, workload in made:
        if only in name:
            yield Case(
                name=name,
                is_equal=is_equal,
                setting=Setting(profile=profiles.load(model, device), cluster=cluster, workload=workload),
            )


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
    for candidate, estimate in drawn(setting, filler, LAYOUTS[is_filled]):
        yield Compared(
            case=case.name,
            is_equal=case.is_equal,
            is_filled=is_filled,
            layout=f"{name_of(candidate)} {candidate.arrangement.data_parallel}x{candidate.replicas} M={candidate.microbatches}",
            estimated=estimate.iteration,
            simulated=propose(setting, candidate.layout(setting), filler).iteration,
        )


def drawn(setting: Setting, filler: Filler | None, count: int) -> list[tuple[Candidate, Estimate]]:
    """So many of the candidates that a search has judged, evenly over its ranking."""
    judge = Judge(setting=setting)
    found = search(setting, filler=filler, judge=judge)
    finalists = [(one, judge.estimates.estimate(one, is_filled=filler is not None)) for one, _ in found.finalists]
    ranked = [*finalists, *((one.candidate, one.estimate) for one in found.judged)]
    ranked = [pair for pair in ranked if pair[0].divides(setting.workload.batch)]
    return ranked[:: max(1, -(-len(ranked) // count))]


def table(found: Sequence[Compared]) -> Table:
    """One line for each setting and way, then the sums."""
    made = Table(title="Estimate over simulation, less 1, in percent", title_justify="left", box=None, pad_edge=False)
    for column in ("setting", "fills", "layouts", "median |error|", "least", "most"):
        made.add_column(column, justify="left" if column in ("setting", "fills") else "right")
    groups: list[tuple[str, str, list[Compared]]] = []
    for is_filled in (False, True):
        words = "with" if is_filled else "without"
        own = [one for one in found if one.is_filled is is_filled]
        names = dict.fromkeys(one.case for one in own)
        groups += [(name, words, [one for one in own if one.case == name]) for name in names]
        groups.append(("unequal devices or slow links", words, [one for one in own if not one.is_equal]))
        groups.append(("equal devices", words, [one for one in own if one.is_equal]))
    for name, words, own in groups:
        if own:
            errors = [100 * one.error for one in own]
            figures = (median(map(abs, errors)), min(errors), max(errors))
            made.add_row(name, words, str(len(own)), *(f"{figure:.2f}" for figure in figures))
    return made


if __name__ == "__main__":
    main()
