"""Runs what only a GPU can show, each command with a limit of its own, and writes one JSON: `make gpu`.

The worst news comes first. A command that hangs costs its limit and no more.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from time import perf_counter

import torch

from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One command."""

    name: str
    shows: str
    command: tuple[str, ...]
    """Behind the Python interpreter."""
    limit: Seconds
    expected: Seconds
    """Estimated: none of these has run on a GPU yet."""


MEASUREMENTS = (
    Measurement(
        name="doctor",
        shows="versions, driver, NCCL, links, a small pipeline and a checkpoint",
        command=("-m", "diffusionpipe", "doctor", "--device", "cuda", "--out", "{out}/doctor.json"),
        limit=180,
        expected=60,
    ),
    Measurement(
        name="tests",
        shows="times, memory, host sums, offloaded weights, dtypes, losses and repeats of runs on one GPU",
        command=("-m", "pytest", "tests", "-q", "-m", "gpu", "--timeout", "120"),
        limit=540,
        expected=180,
    ),
    Measurement(
        name="profile",
        shows="times and memory of the layers of a model on this GPU",
        command=(
            *("-m", "diffusionpipe", "profile", "examples/digits/recipe.toml"),
            *("--device", "cuda", "--out", "{out}/profile.json"),
        ),
        limit=540,
        expected=120,
    ),
    Measurement(
        name="cluster",
        shows="latency and bandwidth between the GPUs of this machine; with one GPU it is refused",
        command=("-m", "diffusionpipe", "cluster", "--device", "cuda", "--out", "{out}/cluster.json"),
        limit=300,
        expected=60,
    ),
)


BY_HAND = (
    Measurement(
        name="two nodes",
        shows="NCCL between machines; start it on both, see docs/gpu.md",
        command=(
            *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "8", "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", "node-0:29500", "-m", "diffusionpipe", "doctor", "--folder", "/data/runs"),
        ),
        limit=180,
        expected=60,
    ),
    Measurement(
        name="Slurm",
        shows="a GPU for each task; start it in docs/gpu.md's batch script, in the place of train",
        command=("-m", "diffusionpipe", "doctor", "--folder", "/data/runs"),
        limit=180,
        expected=60,
    ),
    Measurement(
        name="container",
        shows="GPUs, /dev/shm and locked pages in docs/gpu.md's container, started as its page says",
        command=("-m", "diffusionpipe", "doctor", "--folder", "/data"),
        limit=180,
        expected=60,
    ),
)
"""What needs more than one machine, or another one: `make gpu` lists it and does not run it."""


def lines_of(measurements: Sequence[Measurement], out: Path) -> list[str]:
    """What would run."""
    lines = []
    for one in measurements:
        lines.append(f"{one.name}: {one.shows}")
        lines.append(f"    python {' '.join(part.format(out=out) for part in one.command)}")
        lines.append(f"    limit {one.limit:.0f} s, expected {one.expected:.0f} s; not run on a GPU yet")
    return lines


def run(measurements: Sequence[Measurement], out: Path) -> list[dict[str, object]]:
    """Run them all; a failure of one does not stop the next."""
    found = []
    for one in measurements:
        print(f"{one.name}: {one.shows}", flush=True)
        started = perf_counter()
        command = [sys.executable, *(part.format(out=out) for part in one.command)]
        with (out / f"{one.name}.log").open("w", encoding="utf-8") as log:
            try:
                status = str(
                    subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=one.limit).returncode
                )
            except subprocess.TimeoutExpired:
                status = f"over its limit of {one.limit:.0f} s"
        seconds = perf_counter() - started
        print(f"    exit status {status} after {seconds:.0f} s; {out / one.name}.log", flush=True)
        found.append({"name": one.name, "status": status, "seconds": round(seconds, 1)})
    return found


def main() -> None:
    """List or run."""
    parser = argparse.ArgumentParser(prog="python -m gpu", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the commands, their limits and expected times")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="where logs and results go")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(lines_of(MEASUREMENTS, arguments.out)))
        print("\nNot run by `make gpu`, because it takes other machines:\n")
        print("\n".join(lines_of(BY_HAND, arguments.out)))
        return
    if not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device here; `make gpu LIST=1` prints what would run")
    arguments.out.mkdir(parents=True, exist_ok=True)
    properties = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    results = {
        "date": date.today().isoformat(),
        "card": properties.name,
        "driver": driver.stdout.split("\n")[0],
        "torch": torch.__version__,
        "measurements": run(MEASUREMENTS, arguments.out),
    }
    (arguments.out / "gpu.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
