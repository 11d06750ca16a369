"""Measures speed beside torch.distributed.pipelining: `python -m benchmarks.throughput [--json] [--quick]`."""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console

from benchmarks.machine import machine
from benchmarks.throughput import emulated, overhead, real
from benchmarks.throughput.ratios import Ratio
from benchmarks.throughput.tables import Figures, show


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How often everything is measured, and how large the model is."""

    size: real.Size
    real_rounds: int
    emulated_rounds: tuple[tuple[int, int], ...]
    """(ranks, rounds)."""
    overhead_rounds: int


FULL = Effort(
    size=real.Size(num_layers=11, width=512),
    real_rounds=12,
    emulated_rounds=((2, 25), (4, 15), (8, 9)),
    overhead_rounds=60,
)
QUICK = Effort(size=real.Size(num_layers=2, width=128), real_rounds=3, emulated_rounds=((2, 3),), overhead_rounds=5)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.throughput", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures by name instead of tables")
    parser.add_argument("--quick", action="store_true", help="a smoke test: small model, 2 ranks, few rounds")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    console = Console(stderr=True)
    figures: Figures = {}
    with console.status("starting") as status:
        for part, found in measure(QUICK if arguments.quick else FULL):
            figures |= found
            status.update(f"done: {part}")
    if arguments.json:
        print(json.dumps({"machine": machine(), "figures": as_plain(figures)}, indent=2))
    else:
        show(figures, machine())


def measure(effort: Effort) -> Iterator[tuple[str, Figures]]:
    """The figures of one part after the other."""
    yield "real compute", _real(real.measure(effort.real_rounds, effort.size))
    for num_ranks, num_rounds in effort.emulated_rounds:
        yield f"waits on {num_ranks} ranks", _emulated(emulated.measure(num_ranks, num_rounds))
    yield "Python time", _overhead(overhead.measure(effort.overhead_rounds))


def _real(found: real.RealCompute) -> Figures:
    figures: Figures = {f"real/samples per s/{name}": rate for name, rate in found.samples_per_second.items()}
    figures |= {f"real/CPU s/{name}": seconds for name, seconds in found.cpu_seconds.items()}
    figures |= {f"real/ours over torch/ours {name}": ratio for name, ratio in found.ours_over_torch.items()}
    figures["model/parameters in millions"] = found.num_parameters / 1e6
    figures["model/largest relative gradient error"] = found.gradient_error
    return figures


def _emulated(cases: list[emulated.EmulatedCase]) -> Figures:
    figures: Figures = {}
    for case in cases:
        name = f"{case.schedule} p={case.num_ranks} m={case.num_microbatches}"
        figures[f"emulated/torch/{name}"] = case.torch
        figures[f"emulated/ours/{name}"] = case.ours
        figures[f"emulated/ours over torch/{name}"] = case.ours_over_torch
    return figures


def _overhead(found: overhead.Overhead) -> Figures:
    return {
        "overhead/us per action/ours": found.ours * 1e6,
        "overhead/us per action/torch Schedule1F1B": found.torch_loop * 1e6,
        "overhead/us per action/torch runtime": found.torch_runtime * 1e6,
        "overhead/ours over it/torch Schedule1F1B": found.ours_over_loop,
        "overhead/ours over it/torch runtime": found.ours_over_runtime,
    }


def as_plain(figures: Figures) -> dict[str, object]:
    """The figures as JSON knows them."""
    return {
        name: {"median": value.median, "low": value.low, "high": value.high} if isinstance(value, Ratio) else value
        for name, value in figures.items()
    }


if __name__ == "__main__":
    main()
