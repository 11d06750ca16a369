"""`python -m searches.memory_sizes`: real models planned for 45 sizes of memory.

The fastest step must never rise with memory. SD 2.1 on eight A100s and SDXL on four RTX 4090, from the golden profiles.
"""

import argparse
import sys
from dataclasses import dataclass

from golden.plans import FOLDER, unpacked
from searches.rising import planned

from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import profile_from_text
from diffusionpipe.holding import Workload
from diffusionpipe.planner.choosing.rows import GIB
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.units import Bytes

ROUNDING = 1e-9
FILLED_ALIKE = 0.02
"""The part by which a step may rise where frozen work fills all waits of many layouts by the estimate.

Their estimates are equal then, only their fills say which is faster, and not all are simulated.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model on a cluster, and the memory of each device, from least to most."""

    profile: str
    cluster: str
    batch: int
    least: Bytes
    most: Bytes
    allowed: float = ROUNDING
    """The part of a step by which it may be longer than with less memory."""


QUESTIONS = {
    "sd-2.1": Question(profile="sd-2.1-a100-80", cluster="a100-80x8", batch=64, least=10 * GIB, most=80 * GIB),
    "sdxl": Question(
        profile="sdxl-rtx4090",
        cluster="rtx4090x4",
        batch=16,
        least=18 * GIB,
        most=96 * GIB,
        allowed=FILLED_ALIKE,
    ),
}


def sizes(question: Question, count: int) -> list[Bytes]:
    """So many sizes between both ends, in equal ratios: little memory matters more than much."""
    ratio = (question.most / question.least) ** (1 / (count - 1))
    return [round(question.least * ratio**number) for number in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m searches.memory_sizes", description=__doc__)
    parser.add_argument("--only", choices=QUESTIONS)
    parser.add_argument("--sizes", type=int, default=45)
    options = parser.parse_args()
    problems = 0
    for name in [options.only] if options.only else QUESTIONS:
        problems += rises(name, options.sizes)
    print(f"{problems} times slower with more memory than is allowed")
    return int(problems > 0)


def setting_of(name: str) -> Setting:
    """The setting of a question, with the memory of its cluster."""
    question = QUESTIONS[name]
    profile = profile_from_text(unpacked(FOLDER / "profiles" / f"{question.profile}.json.xz"))
    return Setting(profile=profile, cluster=load_cluster(question.cluster), workload=Workload(batch=question.batch))


def rises(name: str, count: int) -> int:
    """How often the fastest step is longer than with less memory, by more than is allowed; prints a row a size."""
    question, found = QUESTIONS[name], 0
    for one in planned(setting_of(name), sizes(question, count)):
        print(f"{name}  {one}", flush=True)
        if one.rise > ROUNDING:
            print(f"slower by {one.rise:.2%} than with less memory")
        found += one.rise > question.allowed
    return found


if __name__ == "__main__":
    sys.exit(main())
