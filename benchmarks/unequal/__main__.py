"""Simulates steps of unequal tokens beside steps of one size: `python -m benchmarks.unequal [--json] [--quick]`."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from random import Random
from statistics import fmean

from rich.console import Console
from rich.table import Table

from diffusionpipe.costs import StageCosts
from diffusionpipe.ir.cells import Cell
from diffusionpipe.planner.unequal.steps import Prices, best_step

BATCH = 32
TOKENS = (4096, 2304, 1024)
"""Tokens of pictures of 1024, 768 and 512 pixels."""
SHARES = (1, 2, 3)
"""The pictures of each size, in six."""
CASES = ((2, 1, 0), (4, 1, 0), (4, 1, 500), (4, 2, 500), (4, 2, 2000), (8, 1, 500), (8, 2, 2000))
"""(stages, largest pictures that a micro-batch has room for, time of a call in tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The figures of a case; times are in proportion to tokens."""

    stages: int
    room: int
    call: int
    slower: int
    """Steps that are slower by tokens than as one step for each of their sizes."""
    apart: float
    """Time of the same samples in one step for each size of a step, in times by tokens."""
    regrouped: float
    """Time of the same samples in steps of one size and as many samples, in times by tokens."""
    equal: float
    """The same with micro-batches of as many samples as the largest pictures have room for."""
    predicted: float
    """The mean of the first 32 steps, in means of all."""
    peak: float
    """The most that a stage holds, in parts of its limit."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unequal", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures instead of a table")
    parser.add_argument("--quick", action="store_true", help="a smoke test: one case, few steps")
    arguments = parser.parse_args()
    cases, steps = (CASES[:1], 10) if arguments.quick else (CASES, 200)
    found = [figures(*case, steps) for case in cases]
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return
    table = Table("stages", "room", "call", "slower", "apart", "regrouped", "equal", "32 steps", "peak")
    for one in found:
        ratios = (one.apart, one.regrouped, one.equal, one.predicted, one.peak)
        table.add_row(str(one.stages), str(one.room), str(one.call), str(one.slower), *(f"{r:.3f}" for r in ratios))
    Console(width=120, highlight=False).print(table)


def figures(stages: int, room: int, call: int, steps: int) -> Found:
    """The figures of `steps` drawn steps on that many stages."""
    prices = prices_of(stages, room, call)
    drawn = list(drawn_counts(steps))
    found = [best_step(counts, prices) for counts in drawn]
    times = [step.time for step in found]
    apart = [sum(best_step(own, prices).time for own in alone(counts)) for counts in drawn]
    shares = [sum(counts) / BATCH for counts in zip(*drawn, strict=True)]
    full = [best_step(own, prices).time for own in alone([BATCH] * len(TOKENS))]
    equal = [(BATCH / room + stages - 1) * prices.price(size, room) for size in range(len(TOKENS))]
    return Found(
        stages=stages,
        room=room,
        call=call,
        slower=sum(own > other for own, other in zip(times, apart, strict=True)),
        apart=sum(apart) / sum(times),
        regrouped=sum(s * t for s, t in zip(shares, full, strict=True)) / sum(times),
        equal=sum(s * t for s, t in zip(shares, equal, strict=True)) / sum(times),
        predicted=fmean(times[:32]) / fmean(times),
        peak=max(peak / limit for step in found for peak, limit in zip(step.peaks, prices.limits, strict=True)),
    )


def prices_of(stages: int, room: int, call: int) -> Prices:
    """Times in proportion to tokens, and a time for each call."""

    def costs(cell: Cell) -> tuple[StageCosts, ...]:
        work = TOKENS[cell.size] * cell.samples
        return (StageCosts(forward=call + work, backward=2 * (call + work), activation=work),) * stages

    limits = tuple((stages - stage) * room * max(TOKENS) for stage in range(stages))
    return Prices(stages=costs, num_stages=stages, limits=limits)


def drawn_counts(steps: int) -> Iterator[tuple[int, ...]]:
    """The samples of each size, step after step."""
    draw = Random(0)
    for _ in range(steps):
        sizes = draw.choices(range(len(TOKENS)), SHARES, k=BATCH)
        yield tuple(map(sizes.count, range(len(TOKENS))))


def alone(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The counts of each size alone, where it has any."""
    for size, count in enumerate(counts):
        if count:
            yield tuple(count if own == size else 0 for own in range(len(counts)))


if __name__ == "__main__":
    main()
