"""`make memory`: what ranks hold in a third step beside what is predicted, for every schedule, and a table."""

import argparse
import sys
from itertools import product
from random import Random
from statistics import median

from live_memory.runs import MODELS, Case, Held, held_by

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.versions import Versions
from diffusionpipe.schedules import REGISTRY

LEAST, MOST = 0.85, 1.05
"""Every case lies between these, and the median of each kind between 0.97 and 1.02."""


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="make memory", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of all cases, drawn by the seed")
    parser.add_argument("--only", default="", help="cases whose names hold this text")
    asked = parser.parse_args()
    found: list[tuple[Case, Held]] = []
    print(f"{'case':56}{'backward':7}{'MB held':>9}{'predicted':>10}{'ratio':>8}")
    for case in drawn(asked.seed, asked.share):
        if asked.only not in str(case):
            continue
        try:
            held = held_by(case)
        except ConfigError:  # the schedule cannot do these sizes
            continue
        found.append((case, held))
        print(line(case, held), flush=True)
    for is_split, word in ((False, "whole"), (True, "split")):
        ratios = [held.ratio for _, held in found if held.is_split == is_split]
        if ratios:
            print(
                f"{word} backwards: {len(ratios)} cases, {min(ratios):.3f} to {max(ratios):.3f}, "
                f"median {median(ratios):.3f}"
            )
    outside = [(case, held) for case, held in found if not LEAST <= held.ratio <= MOST]
    print(f"outside {LEAST} to {MOST}: {len(outside)}")
    for case, held in outside:
        print(line(case, held))
    sys.exit(bool(outside) or not found)


if __name__ == "__main__":
    main()
