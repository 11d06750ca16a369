"""`make searches`: random small settings, searched and enumerated, and a table of what was found."""

import argparse
import resource
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from math import isinf
from statistics import median

from searches.judging import Verdict, judged
from searches.settings import drawn


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m searches", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=600)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    verdicts = []
    numbers = range(options.first, options.first + options.cases)
    for verdict in verdicts_of(options.seed, numbers, options.processes):
        verdicts.append(verdict)
        for problem in verdict.problems:
            print(f"case {verdict.number}: {problem}", flush=True)
    print(summary(verdicts))
    return int(any(verdict.problems for verdict in verdicts))


def verdicts_of(seed: int, numbers: range, processes: int) -> Iterator[Verdict]:
    """The verdict of each case."""
    case = partial(_case, seed)
    if processes == 1:
        yield from map(case, numbers)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(case, numbers)


def _case(seed: int, number: int) -> Verdict:
    return judged(drawn(seed, number), number, seed)


def _parts(verdicts: list[Verdict]) -> list[float]:
    return [one.bound / one.step for one in verdicts if not one.drawn.is_frozen and not isinf(one.step)]


def _seconds() -> float:
    """Of this process and of those that it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def summary(verdicts: list[Verdict]) -> str:
    """Counts of each kind, and figures over all."""
    kinds = {
        "settings": verdicts,
        "with frozen work": [one for one in verdicts if one.drawn.is_frozen],
        "with links of at most 10 Gb/s": [one for one in verdicts if one.drawn.is_slow],
        "with unequal devices": [one for one in verdicts if one.drawn.is_unequal],
        "with memory that at most half of the layouts fit": [one for one in verdicts if one.drawn.is_tight],
        "in which fewer devices are faster": [one for one in verdicts if one.num_fewer],
        "in which nothing fits": [one for one in verdicts if isinf(one.best)],
    }
    lines = [f"{len(own):6}  {name:50} {sum(bool(one.problems) for one in own)} wrong" for name, own in kinds.items()]
    reached = [one.step / one.best for one in verdicts if not isinf(one.best)]
    parts = _parts(verdicts)
    lines += [
        (
            f"layouts {sum(one.num_layouts for one in verdicts)}, of which "
            f"{sum(one.num_simulated for one in verdicts)} simulations were needed"
        ),
        f"search over enumeration: median {median(reached):.4f}, worst {max(reached):.4f}" if reached else "",
        f"bound over reached, without frozen work: median {median(parts):.3f}" if parts else "",
        f"{_seconds():.0f} s of processor time",
    ]
    return "\n".join(filter(None, lines))


if __name__ == "__main__":
    sys.exit(main())
