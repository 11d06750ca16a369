"""`make memory`: what ranks hold in a third step beside what is predicted, for every schedule, and a table."""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from random import Random
from statistics import median

from kit.kept_results import results_kept
from live_memory.runs import LEAST_HELD, MODELS, Case, Held, held_by

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.versions import Versions
from diffusionpipe.schedules import REGISTRY

LEAST, MOST = 0.85, 1.05
"""Every case lies between these."""
LEAST_MEDIAN, MOST_MEDIAN = 0.97, 1.02
"""The medians of whole and of split backwards lie between these."""


def cases() -> list[Case]:
    """All that the targets try; a schedule that cannot do a number of ranks is left out when it is run."""
    weights = [("1f1b", versions) for versions in Versions if versions is not Versions.FLUSHED]
    kinds = [*((schedule, Versions.FLUSHED) for schedule in REGISTRY), *weights]
    return [
        Case(model=model, schedule=schedule, ranks=ranks, is_recomputed=is_recomputed, versions=versions)
        for model, (schedule, versions), ranks, is_recomputed in product(MODELS, kinds, (2, 3, 4), (False, True))
    ]


def drawn(seed: int, share: float) -> list[Case]:
    """A random share of the cases."""
    every = cases()
    return Random(seed).sample(every, round(share * len(every)))


def line(case: Case, held: Held) -> str:
    """A row of the table."""
    kind = "split" if held.is_split else "whole"
    return f"{case!s:56}{kind:7}{held.counted / 1e6:10.2f}{held.predicted / 1e6:10.2f}{held.ratio:8.3f}"


def tried(case: Case) -> Held | None:
    """The case run; None where the schedule cannot do these sizes."""
    try:
        return held_by(case)
    except ConfigError:
        return None


def all_held(asked: Sequence[Case], jobs: int, keep: Path | None) -> Iterator[tuple[Case, Held]]:
    """Each case that can be run and what it held, some of them run at the same time.

    `keep`: a file with a line for each case that is done. It is read first, and what it has is not run again.
    """
    lines = [json.loads(text) for text in keep.read_text().splitlines()] if keep and keep.exists() else []
    done = {line["case"]: Held(**line["held"]) if line["held"] else None for line in lines}
    yield from ((case, held) for case in asked if (held := done.get(str(case))))
    left = [case for case in asked if str(case) not in done]
    started = time.monotonic()
    with results_kept(), ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        for count, (case, held) in enumerate(zip(left, pool.map(tried, left), strict=True), 1):
            if keep:
                with keep.open("a") as file:
                    print(json.dumps({"case": str(case), "held": held and asdict(held)}), file=file)
            if held:
                yield case, held
            if count % 20 == 0:
                minutes = (time.monotonic() - started) / count * (len(left) - count) / 60
                print(f"{count} of {len(left)} cases, about {minutes:.0f} min left", file=sys.stderr, flush=True)


def problems_of(found: Sequence[tuple[Case, Held]], *, with_medians: bool) -> list[str]:
    """A line for each limit that does not hold; prints the figures of each kind of backward."""
    problems = []
    for is_split, word in ((False, "whole"), (True, "split")):
        ratios = [held.ratio for _, held in found if held.is_split == is_split]
        if ratios:
            middle = median(ratios)
            print(f"{word} backwards: {len(ratios)} cases, {min(ratios):.3f} to {max(ratios):.3f}, median {middle:.3f}")
            if with_medians and not LEAST_MEDIAN <= middle <= MOST_MEDIAN:
                problems.append(f"median of {word} backwards outside {LEAST_MEDIAN} to {MOST_MEDIAN}: {middle:.3f}")
    few = [line(case, held) for case, held in found if held.counted < LEAST_HELD]
    print("\n".join([f"less than {LEAST_HELD / 1e6:.0f} MB: {len(few)}", *few]))
    outside = [line(case, held) for case, held in found if not LEAST <= held.ratio <= MOST]
    print(f"outside {LEAST} to {MOST}: {len(outside)}")
    return problems + outside


def main() -> None:
    parser = argparse.ArgumentParser(prog="make memory", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of all cases, drawn by the seed")
    parser.add_argument("--only", default="", help="cases whose names hold this text")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run cases")
    parser.add_argument("--keep", type=Path, help="a file in which cases that are done stay; with it a run continues")
    asked = parser.parse_args()
    print(f"{'case':56}{'backward':7}{'MB held':>9}{'predicted':>10}{'ratio':>8}", flush=True)
    found = []
    cases_asked = [case for case in drawn(asked.seed, asked.share) if asked.only in str(case)]
    for case, held in all_held(cases_asked, asked.jobs, asked.keep):
        found.append((case, held))
        print(line(case, held), flush=True)
    problems = problems_of(found, with_medians=not asked.only)
    for problem in problems:
        print(problem)
    sys.exit(bool(problems) or not found)


if __name__ == "__main__":
    main()
