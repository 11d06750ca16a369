"""`make doctor-faults`: ten faults in real runs of `diffusionpipe doctor`, healthy runs, and a table of both."""

import argparse
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from doctor_faults.faults import FAULTS, Fault
from doctor_faults.runs import LIMIT, NotAllowedError, Seen, machines, on_one_machine, on_two_machines

SHOWN = 4000
"""Characters of an output that are printed if something is wrong."""


def examined(fault: Fault, folder: Path) -> tuple[str, Seen | None]:
    """ "found", "skipped: ..." or what is wrong, and the run."""
    try:
        seen = fault.run(folder)
    except NotAllowedError as error:
        return f"skipped: {error}", None
    problems = fault.problems(seen)
    if seen.seconds > LIMIT:
        problems.append(f"it took more than {LIMIT:.0f} s")
    return "; ".join(problems) or "found", seen


def healthy_on_one(folder: Path) -> Seen:
    """Two ranks of one machine."""
    return on_one_machine(folder, "--device", "cpu")


def healthy_on_two(folder: Path) -> Seen:
    """Two machines that share all disks."""
    with machines(folder) as nodes:
        return on_two_machines(folder, nodes)


def health(run: Callable[[Path], Seen], folder: Path) -> tuple[str, Seen | None]:
    """ "healthy", "skipped: ..." or what is wrong, and the run."""
    try:
        seen = run(folder)
    except NotAllowedError as error:
        return f"skipped: {error}", None
    wrong = seen.lines("fail", "warn") + [f"JSON: {one['name']}" for one in seen.findings if one["status"] != "ok"]
    if seen.status != 0 or not seen.lines("ok"):
        wrong.append(f"its exit status is {seen.status}")
    return "; ".join(wrong) or "healthy", seen


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a fault is not found, or a healthy machine has one."""
    parser = argparse.ArgumentParser(prog="make doctor-faults", description=__doc__)
    parser.add_argument("--healthy", type=int, default=20, help="so many runs on a healthy machine")
    parser.add_argument("--only", action="append", default=[], help="faults with this word, also several times")
    parser.add_argument("--list", action="store_true", help="print the faults and end")
    options = parser.parse_args(arguments)
    chosen = [
        one for one in FAULTS if not options.only or any(word in f"{one.name}, {one.how}" for word in options.only)
    ]
    if options.list:
        print("\n".join(f"{one.name:24} {one.how}" for one in chosen))
        return 0
    failed = 0
    for one in chosen:
        with tempfile.TemporaryDirectory() as folder:
            result, seen = examined(one, Path(folder))
        failed += _told(f"{one.name:24} {one.how:42}", result, seen, one.line(seen) if seen else "")
    counts = {"healthy": 0, "skipped": 0}
    for number in range(options.healthy):
        run, where = ((healthy_on_one, "one machine"), (healthy_on_two, "two machines"))[number % 2]
        with tempfile.TemporaryDirectory() as folder:
            result, seen = health(run, Path(folder))
        failed += _told(f"{f'healthy run {number + 1}':24} {where:42}", result, seen, "")
        counts["healthy"] += result == "healthy"
        counts["skipped"] += result.startswith("skipped")
    print(f"{counts['healthy']} of {options.healthy} healthy runs without a finding, {counts['skipped']} skipped")
    print(f"{failed} of {len(chosen) + options.healthy} cases wrong; Python {platform.python_version()}")
    return 1 if failed else 0


def _told(what: str, result: str, seen: Seen | None, line: str) -> bool:
    """Print one row; whether it is wrong."""
    seconds = f"{seen.seconds:4.0f} s" if seen is not None else "      "
    is_right = result in ("found", "healthy") or result.startswith("skipped")
    print(f"{what} {'yes' if is_right and seen else result if seen is None else 'NO'} {seconds}  {line}", flush=True)
    if not is_right:
        print(f"    wrong: {result}", flush=True)
        print("".join(f"    | {text}\n" for text in (seen.output[-SHOWN:] if seen else "").splitlines()), flush=True)
    return not is_right
