"""Distance of searched orders from the optimum, and time: `python -m benchmarks.ordering [--cases N] [--seed N]`."""

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from random import Random

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.ordering.cases import KINDS, SEED, instance, small_cases
from benchmarks.ordering.exact import exact_order
from diffusionpipe.errors import ConfigError
from diffusionpipe.ordering import Goal, Instance, Placing, search
from diffusionpipe.ordering.problem import problem_of
from diffusionpipe.units import Seconds

LARGE = ((8, 16), (8, 64), (16, 128))
LARGE_MEMORY = (0.5, 0.75, 1.0, 2.0)
LIMITS = (
    (Placing.LINEAR, 1.0),
    (Placing.LINEAR, 0.75),
    (Placing.ANY, 2.0),
    (Placing.ANY, 1.0),
    (Placing.ANY, 0.75),
    (Placing.ANY, 0.5),
)
OVERHEAD_RANKS = (4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A small case: what the search and the solver reach."""

    kind: str
    placement: str
    objective: str
    ranks: int
    microbatches: int
    limit: float
    value: float
    optimum: float
    is_proven: bool
    is_certified: bool
    """Whether the search knows that it is the optimum."""
    seconds: Seconds
    """Of the processor, for the search."""
    exact_seconds: Seconds
    """On the clock, as the solver's limit is."""

    @property
    def distance(self) -> float:
        """How much longer the searched order is, relative to the solver's."""
        return self.value / self.optimum - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """A large case: what the search reaches, over its lower bound."""

    kind: str
    ranks: int
    microbatches: int
    memory: float
    placement: str
    makespan: float
    over_bound: float
    family: str
    seconds: Seconds
    """Of the processor."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ordering", description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="small cases")
    parser.add_argument("--seed", type=int, default=SEED, help="of the draw of small cases")
    parser.add_argument("--seconds", type=float, default=15, help="limit of the solver for each")
    parser.add_argument("--large", action="store_true", help="8 and 16 ranks too, against the lower bound")
    parser.add_argument("--overhead", action="store_true", help="over balanced work, by memory and kind of costs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args()
    cases = list(small_cases(arguments.cases, seed=arguments.seed))
    shown = track(cases, console=Console(stderr=True))
    small = [found for kind, case in shown if (found := compared(kind, case, arguments.seconds))]
    sizes = LARGE if arguments.large else ()
    large = [measured(kind, size, memory) for size in sizes for kind in KINDS[::2] for memory in LARGE_MEMORY]
    if arguments.json:
        print(json.dumps({"small": [asdict(x) for x in small], "large": [asdict(x) for x in large]}, indent=1))
        return
    console = Console(width=140, highlight=False)
    console.print(table(small))
    if arguments.large:
        console.print(large_table(large))
    if arguments.overhead:
        console.print(overhead_table())


def compared(kind: str, case: Instance, limit: Seconds) -> Compared | None:
    """The case solved both ways; None if the solver found nothing."""
    started = time.process_time()
    answer = search(case)
    seconds = time.process_time() - started
    ended = time.perf_counter()
    problem = problem_of(case, case.placement)
    try:
        optimum = exact_order(problem, time_limit=limit)
    except ConfigError:
        return None
    assert case.memory_limit is not None
    return Compared(
        kind=kind,
        placement=case.placement,
        objective=case.objective,
        ranks=case.ranks,
        microbatches=case.microbatches,
        limit=case.memory_limit[0],
        value=answer.window if case.objective is Goal.WINDOW else answer.makespan,
        optimum=optimum.value / problem.time_scale,
        is_proven=optimum.is_proven,
        is_certified=answer.optimal,
        seconds=seconds,
        exact_seconds=time.perf_counter() - ended,
    )


def measured(kind: str, size: tuple[int, int], memory: float) -> Large:
    """A large case with the best placement."""
    case = instance(kind, size, placing=Placing.ANY, memory=memory, random=Random(1), has_comm=True)
    started = time.process_time()
    answer = search(case)
    return Large(
        kind=kind,
        ranks=size[0],
        microbatches=size[1],
        memory=memory,
        placement=answer.placement,
        makespan=answer.makespan,
        over_bound=answer.makespan / answer.lower_bound - 1,
        family=answer.family,
        seconds=time.process_time() - started,
    )


def table(found: Iterable[Compared]) -> Table:
    """By placement, objective and kind: the share of proven optima that are reached, and distances."""
    result = Table(title="against proven optima")
    for heading in ("cases", "proven", "reached", "p95", "most", "unproven: best, worst", "CPU s mean", "CPU s most"):
        result.add_column(heading, justify="right")
    found = list(found)
    groups = {"all": found}
    for name in ("placement", "objective", "kind"):
        for one in found:
            groups.setdefault(getattr(one, name), []).append(one)
    for label, group in groups.items():
        proven = sorted(one.distance for one in group if one.is_proven)
        others = [one.distance for one in group if not one.is_proven] or [0.0]
        if proven:
            seconds = [one.seconds for one in group]
            result.add_row(
                f"{label} ({len(group)})",
                str(len(proven)),
                f"{sum(d <= 0 for d in proven) / len(proven):.1%}",
                f"{proven[int(0.95 * (len(proven) - 1))]:.2%}",
                f"{proven[-1]:.2%}",
                f"{min(others):.1%}, {max(others):.1%}",
                f"{sum(seconds) / len(seconds):.2f}",
                f"{max(seconds):.2f}",
            )
    return result


def large_table(found: Iterable[Large]) -> Table:
    """Each large case."""
    result = Table(title="large, best placement, transfers on")
    for heading in ("p", "m", "costs", "memory / p", "placement", "makespan", "over the bound", "from", "CPU s"):
        result.add_column(heading, justify="right")
    for one in found:
        cells = one.ranks, one.microbatches, one.kind, one.memory, one.placement, one.makespan
        result.add_row(*map(str, cells), f"{one.over_bound:.1%}", one.family, f"{one.seconds:.2f}")
    return result


def overhead_table() -> Table:
    """Mean makespan over perfectly balanced work, m = 2 p, with transfers: by memory in units of p, and costs."""
    result = Table(title=f"makespan over m sum(F + I + W) / p, mean over p in {OVERHEAD_RANKS}")
    for heading in ("memory / p", *KINDS[:-1]):
        result.add_column(heading, justify="right")
    for placing, memory in LIMITS:
        row = [f"{memory:g} {placing}"]
        for kind in KINDS[:-1]:
            found = [_overhead(kind, ranks, placing, memory) for ranks in OVERHEAD_RANKS]
            row.append(f"{sum(found) / len(found):.1%}")
        result.add_row(*row)
    return result


def _overhead(kind: str, ranks: int, placing: Placing, memory: float) -> float:
    case = instance(kind, (ranks, 2 * ranks), placing=placing, memory=memory, random=Random(1), has_comm=True)
    work = sum(stage.forward + stage.input_grad + stage.weight_grad for stage in case.stages)
    return search(case).makespan / (case.microbatches * work / ranks) - 1


if __name__ == "__main__":
    main()
