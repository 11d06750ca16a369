"""`python -m searches.rising`: random small settings planned for rising sizes of memory.

The fastest step must never rise with memory: a layout that fits in some memory fits in more, so a step that rises shows
that a search has missed a layout.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

from searches.enumeration import fullest, layouts_of
from searches.settings import drawn, with_heavy_encoders, with_memory

from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.nearest import least_overflow
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.units import Bytes, Seconds

ALLOWED = 2e-3
"""A step may rise by this part: orders of messages differ."""
AMPLE: Bytes = 10**12
NUM_SAMPLED = 24
"""Layouts whose memory says between which sizes some fit and others do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The fastest plan for one size of memory."""

    memory: Bytes
    step: Seconds
    """inf: nothing fits."""
    sizes: str
    least: Seconds
    """The fastest step with less memory; inf: nothing fitted."""

    @property
    def rise(self) -> float:
        """The step over that with less memory, less 1; 0 where it does not rise."""
        return max(0.0, self.step / self.least - 1) if self.least < inf else 0.0

    def __str__(self) -> str:
        """A row of a table."""
        return f"{self.memory / 2**30:7.3f} GiB  {self.step * 1000:9.2f} ms  {self.sizes}"


def planned(setting: Setting, sizes: Sequence[Bytes]) -> Iterator[Planned]:
    """The fastest plan for each size of memory, given from least to most."""
    least = inf
    for memory in sizes:
        choice = best_choice(with_memory(setting, memory))
        step, text = (choice.fastest.step, choice.fastest.sizes) if choice else (inf, "nothing fits")
        yield Planned(memory=memory, step=step, sizes=text, least=least)
        least = min(least, step)


def sizes_of(setting: Setting, random: Random, count: int) -> list[Bytes]:
    """So many sizes from one in which nothing fits to one in which all does, from least to most.

    Half of them are in equal ratios, the others are what single layouts hold.
    """
    layouts = list(layouts_of(setting))
    sample = random.sample(layouts, min(NUM_SAMPLED, len(layouts)))
    held = sorted(fullest(propose(setting, one.layout)) for one in sample)
    nearest = least_overflow(with_memory(setting, AMPLE))
    assert nearest, "a setting whose batch can be cut has a layout"
    least, most = 0.8 * min(held[0], fullest(nearest[1])), 1.05 * held[-1]
    half = count // 2
    found = {round(least * (most / least) ** (number / half)) for number in range(half + 1)}
    found |= set(random.sample(held, min(count - len(found), len(held))))
    return sorted(found)


def setting_of(seed: int, number: int) -> Setting:
    """Case `number` of a seed; every third has heavy encoders."""
    one = drawn(seed, number)
    return with_heavy_encoders(one, seed, number) if number % 3 == 2 else one.setting


def rises(seed: int, number: int, count: int) -> list[str]:
    """A line for each of `count` sizes of memory at which the fastest step of a case is longer than with less."""
    setting = setting_of(seed, number)
    found = planned(setting, sizes_of(setting, Random(f"{seed} {number} sizes"), count))
    return [f"case {number}: {one} ({one.rise:.2%} more than with less memory)" for one in found if one.rise > ALLOWED]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m searches.rising", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--sizes", type=int, default=10, help="sizes of memory of a case")
    options = parser.parse_args(arguments)
    num_rises = num_settings = 0
    for number in range(options.first, options.first + options.cases):
        lines = rises(options.seed, number, options.sizes)
        print(*lines, sep="\n", end="\n" * bool(lines), flush=True)
        num_rises += len(lines)
        num_settings += bool(lines)
    print(f"{num_settings} of {options.cases} settings rise with memory, {num_rises} times")
    return int(num_rises > 0)


if __name__ == "__main__":
    sys.exit(main())
