"""Compare the demo's pipeline with data parallelism: a short run of the same recipe, and both times in plain words.

    python examples/digits/compare.py --pipeline runs/digits

The pipeline's times are those of the demo's own run (its metrics.jsonl). Data parallelism is trained here for `--steps`
steps on as many ranks: same model, data, batch and optimizer, its micro-batches and filling chosen by `plan = "auto"`.
Its run folder is PIPELINE-data-parallel; one of an earlier comparison is deleted first.
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
COUNTED = 20
"""Last steps of a run whose median is compared; the first steps hold things that happen once."""
OVERRIDES = (
    "pipeline.stages=1",
    "pipeline.data_parallel=2",
    "pipeline.sharded=false",
    "pipeline.schedule=none",
    "pipeline.microbatches=none",
    "pipeline.fill=none",
    "data.validation=none",
    "validation.every=none",
    "sampling.every=none",
    "checkpoint.every=none",
    "learning_rate.warmup_steps=5",
)


def seconds_of_a_step(folder: Path) -> float:
    """Return the median time of the last steps of a run.

    Raises:
        OSError: the run has no metrics.jsonl.
        ValueError: the run has no step.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = [row["step_s"] for row in rows if "step_s" in row]
    if not times:
        raise ValueError(f"{folder / 'metrics.jsonl'} has no step; train first")
    return float(median(times[-COUNTED:]))


def train_copies(folder: Path, steps: int, ranks: int) -> int:
    """Train the recipe by data parallelism into the folder; return the exit status."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "diffusionpipe", "train", str(RECIPE), "--ranks", str(ranks), *OVERRIDES]
    return subprocess.run([*command, f"training.steps={steps}", f"run.folder={folder}"], check=False).returncode


def sentence(pipeline: float, copies: float, batch: int) -> str:
    """Return both times and what they mean, in plain words."""
    lines = [
        "",
        "Measured here, two ranks, time of a step (median). The runs came one after the other, so other programs on",
        "this machine may have slowed one of them more:",
        f"  pipeline of two stages   {pipeline * 1e3:7.0f} ms   {batch / pipeline:6.0f} samples/s",
        f"  data parallelism         {copies * 1e3:7.0f} ms   {batch / copies:6.0f} samples/s",
    ]
    waits = (
        "fits one device: copies wait for each other only at the end of a step,",
        "the stages of a pipeline in every micro-batch.",
    )
    if copies < pipeline:
        lines += [
            f"Data parallelism is {pipeline / copies:.2f} times as fast for this model. That is usual for a model that"
        ]
    else:
        lines += [f"The pipeline is {copies / pipeline:.2f} times as fast here. Usual is the opposite for a model that"]
    lines += [
        *waits,
        "A pipeline pays when the model with its gradients and optimizer state does not fit one device, or when the",
        "links are too slow to sum all gradients in every step. `make demo-memory` shows the first;",
        "`diffusionpipe plan` says for your model and machines which is faster.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Compare the demo's pipeline with data parallelism.")
    parser.add_argument(
        "--pipeline", type=Path, default=Path("runs/digits"), help="the demo's run folder (%(default)s)"
    )
    parser.add_argument("--steps", type=int, default=25, help="steps of data parallelism (%(default)s)")
    arguments = parser.parse_args(argv)
    if arguments.steps < 10:
        parser.error(f"--steps {arguments.steps} is too short to measure; use 10 or more")
    folder = arguments.pipeline.with_name(f"{arguments.pipeline.name}-data-parallel")
    try:
        pipeline = seconds_of_a_step(arguments.pipeline)
        print(f"Training {arguments.steps} steps by data parallelism, to compare the times ...", flush=True)
        if status := train_copies(folder, arguments.steps, ranks=2):
            return status
        copies = seconds_of_a_step(folder)
        batch = tomllib.loads(RECIPE.read_text())["training"]["batch"]
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(sentence(pipeline, copies, batch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
