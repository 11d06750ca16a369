"""`make planted`: each known fault in a copy of the source, and a table of the tests that notice it."""

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from planted.faults import FOLDER, ROOT, SOURCE, Fault, all_faults, misfits
from planted.trial import Outcome, broken_tests, compiled_copy, strangers, try_fault

LIMIT_S = 300.0
UNUSABLE = 2
"""The exit status where the faults do not fit the source, or their tests fail without a fault."""


def row(fault: Fault, outcome: Outcome) -> str:
    """One line of the table, then the fault in words."""
    by = outcome.failed[0] if outcome.failed else f"NOT noticed{outcome.problem and f' ({outcome.problem})'}"
    kind = "drawn" if fault.drawn else "made"
    half = "quick" if fault.quick else "slow"
    reason = f"\n{'':9}known: {fault.unnoticed}" if fault.unnoticed else ""
    return f"{outcome.cpu_s:6.1f} s {fault.module}, {kind}, {half}: {fault.wrong}\n{'':9}{by}{reason}"


def is_surprise(fault: Fault, outcome: Outcome) -> bool:
    """Whether a fault that must be noticed is not."""
    return not outcome.is_noticed and not fault.unnoticed


def summary(faults: Sequence[Fault], outcomes: Sequence[Outcome], cpu_s: float) -> str:
    """Counts of all faults."""
    noticed = [fault for fault, outcome in zip(faults, outcomes, strict=True) if outcome.is_noticed]
    return (
        f"{len(noticed)} of {len(faults)} faults in {len({fault.module for fault in faults})} modules are noticed, "
        f"{sum(fault.quick for fault in noticed)} by tests that make test runs; "
        f"{sum(fault.drawn for fault in faults)} are drawn; "
        f"{cpu_s + sum(outcome.cpu_s for outcome in outcomes):.0f} CPU s, {cpu_s:.0f} of them without a fault"
    )


def run(
    faults: Sequence[Fault],
    *,
    processes: int = 2,
    limit_s: float = LIMIT_S,
    source: Path = SOURCE,
    root: Path = ROOT,
    say: Callable[[str], None] = print,
) -> int:
    """Try all faults and say how it went; the exit status: 1 if one is not noticed, 2 if faults or tests are bad."""
    if found := misfits(faults, source, root):
        say("\n".join(found))
        return UNUSABLE
    with compiled_copy(source) as whole, ThreadPoolExecutor(processes) as pool:
        if found := strangers(whole):
            say("\n".join(f"the copy is not what is imported: {origin}" for origin in found))
            return UNUSABLE
        say(f"{len(faults)} faults; first their tests run without any")
        broken, cpu_s = broken_tests(faults, whole, limit_s=limit_s * max(1, len(faults)), root=root)
        if broken:
            say("\n".join(f"without a fault: {name}" for name in broken))
            return UNUSABLE
        trials = [pool.submit(try_fault, fault, whole, limit_s=limit_s, root=root) for fault in faults]
        for fault, trial in zip(faults, trials, strict=True):
            say(row(fault, trial.result()))
        outcomes = [trial.result() for trial in trials]
    say(summary(faults, outcomes, cpu_s))
    return int(any(map(is_surprise, faults, outcomes)))


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="make planted", description=__doc__)
    parser.add_argument("--only", default="", help="faults with this text in the module, the sentence or the tests")
    parser.add_argument("--processes", type=int, default=2, help="faults that are tried at the same time")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that the tests of a fault may take")
    parser.add_argument("--faults", type=Path, default=FOLDER, help="the folder of the faults' files")
    arguments = parser.parse_args()
    faults = [f for f in all_faults(arguments.faults) if arguments.only in "\n".join((f.module, f.wrong, *f.tests))]
    if not faults:
        parser.error(f"no fault has the text {arguments.only!r} in its module, its sentence or its tests")
    return run(faults, processes=arguments.processes, limit_s=arguments.limit, say=lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main())
