"""`make gradients`: random layer graphs under random legal orders, against one process, and a table."""

import argparse
import sys
import time
from collections import Counter

import torch
from gradients.comparison import TOLERANCE, Case, compare, features, random_case

NUM_CASES = 600


class Report:
    """What has happened so far."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self.refused = 0
        self.largest: dict[str, float] = {}
        self.failures: list[str] = []

    def add(self, number: int, case: Case) -> None:
        """Run a case and count it."""
        found = {name for name, holds in features(case).items() if holds}
        try:
            result = compare(case)
            error, text = result.error, f"{result.error:.3g} in {result.worst}"
        except RuntimeError as problem:  # autograd notices some overwritten memory itself
            error, text = float("inf"), str(problem)
        self.refused += case.num_refused
        self.counts.setdefault(case.source, Counter()).update(["cases", *found])
        self.largest[case.source] = max(self.largest.get(case.source, 0.0), error)
        if not error <= TOLERANCE:
            schedule = case.layout.orders
            assert schedule is not None
            self.failures.append(f"case {number}, {case.source} ({schedule.name}), {', '.join(sorted(found))}: {text}")
            print(self.failures[-1], flush=True)

    @property
    def totals(self) -> Counter[str]:
        """Over all sources."""
        return sum(self.counts.values(), Counter())

    def table(self) -> str:
        """Features in rows, sources of orders in columns."""
        rows = ["cases", *sorted(set(self.totals) - {"cases"})]
        lines = ["".join([f"{'':24}", *(f"{source:>18}" for source in self.counts), f"{'all':>8}"])]
        for row in rows:
            cells = [f"{counts[row]:18}" for counts in self.counts.values()]
            lines.append("".join([f"{row:24}", *cells, f"{self.totals[row]:8}"]))
        errors = [f"{error:18.1e}" for error in self.largest.values()]
        lines.append("".join([f"{'largest error':24}", *errors, f"{max(self.largest.values()):8.0e}"]))
        return "\n".join(lines)


def run(seed: int, cases: range) -> Report:
    """These cases of a seed."""
    report = Report()
    for number in cases:
        report.add(number, random_case(seed, number))
    return report


def main() -> int:
    """The exit status: 1 if a gradient differs."""
    parser = argparse.ArgumentParser(prog="make gradients", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=NUM_CASES)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    report = run(arguments.seed, range(arguments.first, arguments.first + arguments.cases))
    print(report.table())
    num_cases, num_views = (report.totals[row] for row in ("cases", "hands on a view"))
    print(
        f"seed {arguments.seed}: {len(report.failures)} of {num_cases} cases differ from one process by more than "
        f"{TOLERANCE:g} of all gradients; {num_views} hand a view of a received tensor to another stage of their rank; "
        f"{report.refused} layouts were refused and drawn again; {time.monotonic() - started:.0f} s"
    )
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
