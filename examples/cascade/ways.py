"""Compare ways to train the cascade on two ranks: a few steps of each, measured one after the other, and back.

    python examples/cascade/ways.py --run runs/cascade

    opposed            base runs from rank 0 to rank 1, super from rank 1 to rank 0, both at once
    together           both run from rank 0 to rank 1, at once
    one after another  base as a pipeline (1F1B), then super
    data parallelism   each rank trains both models whole, on half the batch

All have the models, data, batch and optimizer of the recipe, and fill waits with the frozen layers. Every way is
trained `--rounds` times for `--steps` steps; the median of all its steps but the first three of each round is printed.
The run folders are RUN-compare-NAME; those of an earlier comparison are deleted first.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import median

RECIPE = Path(__file__).parent / "recipe.toml"
WAYS = {
    "opposed": ("pipeline.schedule=opposed",),
    "together": ("pipeline.schedule=together",),
    "one after another": ("pipeline.schedule=1f1b",),
    "data parallelism": (
        "pipeline.schedule=none",
        "pipeline.stages=1",
        "pipeline.data_parallel=2",
        "pipeline.microbatches=1",
    ),
}
SHORT = (
    "data.validation=none",
    "validation.every=none",
    "sampling.every=none",
    "checkpoint.every=none",
    "learning_rate.warmup_steps=2",
)
NOISY = 1.1
"""Rounds of one way that differ by more than this factor were disturbed."""
SKIPPED = 3
"""First steps of a round, which hold things that happen once."""


def times_of(folder: Path) -> list[float]:
    """Return the seconds of the iterations of a run, without its first steps.

    Raises:
        OSError: the run has no metrics.jsonl.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [float(row["iteration_s"]) for row in rows if "iteration_s" in row][SKIPPED:]


def train(way: str, folder: Path, options: argparse.Namespace) -> int:
    """Train some steps in one way; return the exit status."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "diffusionpipe", "train", str(options.recipe), "--ranks", "2"]
    settings = [*WAYS[way], *SHORT, f"training.steps={options.steps}", f"run.folder={folder}", *options.set]
    return subprocess.run([*command, *settings], check=False, stdout=subprocess.DEVNULL).returncode


def report(rounds: dict[str, list[list[float]]], batch: int) -> str:
    """Return the times of an iteration in plain words."""
    times = {way: median(seconds for one in measured for seconds in one) for way, measured in rounds.items()}
    medians = [[median(one) for one in measured] for measured in rounds.values()]
    spread = max(max(of_way) / min(of_way) for of_way in medians)
    first = times["opposed"]
    lines = ["", "Time of an iteration on two ranks, median, measured here one after the other:"]
    lines += [
        f"  {way:<18} {seconds * 1e3:7.0f} ms   {batch / seconds:6.0f} samples/s   {seconds / first:.2f} x"
        for way, seconds in times.items()
    ]
    fastest = min(times, key=times.__getitem__)
    lines += ["", f"The fastest way here is {fastest}."]
    if fastest == "data parallelism":
        lines += [
            "These models are small: each rank holds both, and copies wait for each other only at the end of a step.",
            "Pipelines pay when a model does not fit one device, or when the sum of all gradients takes long.",
        ]
    if spread > NOISY:
        lines += [
            f"Rounds of the same way differ by up to {spread - 1:.0%}: other programs use these cores, so the order of",
            "the ways says little. Measure again on an idle machine, or with more --rounds.",
        ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Compare ways to train the cascade on two ranks.")
    parser.add_argument("--run", type=Path, default=Path("runs/cascade"), help="the demo's run folder (%(default)s)")
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="recipe (%(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="steps of a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each way (%(default)s)")
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the recipe, key=value")
    options = parser.parse_args(argv)
    if options.steps < SKIPPED + 5:
        parser.error(f"--steps {options.steps} is too short to measure; use {SKIPPED + 5} or more")
    measured: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    try:
        for number in range(options.rounds):
            for way in list(WAYS) if number % 2 == 0 else list(reversed(WAYS)):
                folder = options.run.with_name(f"{options.run.name}-compare-{way.replace(' ', '-')}")
                print(f"Training {options.steps} steps: {way} ...", flush=True)
                if status := train(way, folder, options):
                    return status
                measured[way].append(times_of(folder))
        batch = tomllib.loads(options.recipe.read_text())["training"]["batch"]
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(measured, batch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
