"""Show a model of which a rank cannot hold a whole copy, only a stage of a pipeline: `make demo-memory`.

    python examples/digits/memory.py

Four real runs of `diffusionpipe`, on this machine and its CPU:

1. the small digits model, two steps: how much memory a rank takes for Python, torch and the job alone;
2. `diffusionpipe plan` of a larger U-Net for two devices with `--memory` MiB each: the plan table says what fits;
3. data parallelism of that U-Net, where each rank has a hard limit of (1) + `--memory` + 10 % of it for the gaps that
   an allocator leaves, set by the operating system (RLIMIT_DATA): it must end with an out-of-memory error;
4. the plan of (2) under the same limit: it must train.

The last lines are the results of these runs. The exit status is 1 if they are not as said here.
"""

import argparse
import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).parent
RECIPE = HERE / "memory.toml"
FOLDER = Path("runs/digits-memory")
MIB = 2**20
CHANNELS = (32, 128, 320)
DATA_PARALLEL = ("pipeline.plan=none", "pipeline.cluster=none", "pipeline.stages=1", "pipeline.data_parallel=2")
GAPS = 1.1
"""Of the memory for training, with what an allocator leaves unused between tensors."""
PERIOD = 0.02
"""Seconds between two looks at the ranks' memory."""
LOOKS = 25
"""Looks after which ranks are searched for again among all processes, which takes as long as many looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run of two ranks ended."""

    status: int
    output: str
    """Of both streams."""
    peaks: tuple[int, ...]
    """The most private memory of each rank, in bytes, as the operating system counts it against its limit."""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether it ended for want of memory."""
        return self.status != 0 and "out of memory" in self.output

    @property
    def losses(self) -> list[float]:
        """The losses in its log."""
        return [float(text) for text in re.findall(r"\bloss=([0-9.]+)", self.output)]


def write_model(folder: Path, channels: Sequence[int] = CHANNELS) -> None:
    """Write the digits model's folder with a larger U-Net; its weights are random at the start of a run."""
    shutil.copytree(HERE / "model", folder)
    file = folder / "unet" / "config.json"
    config = json.loads(file.read_text())
    deeper = len(channels) - 1
    config |= {
        "block_out_channels": list(channels),
        "down_block_types": ["DownBlock2D", *["CrossAttnDownBlock2D"] * deeper],
        "up_block_types": [*["CrossAttnUpBlock2D"] * deeper, "UpBlock2D"],
        "attention_head_dim": 8,
    }
    file.write_text(json.dumps(config, indent=2) + "\n")


def write_cluster(path: Path, memory: int) -> None:
    """Write the description of two CPU ranks with that many bytes each."""
    from diffusionpipe.costs import files
    from diffusionpipe.costs.clusters import load_cluster

    shipped = load_cluster("cpux2")
    devices = tuple(replace(device, memory=memory) for device in shipped.devices)
    files.write_cluster(replace(shipped, name=f"two CPU ranks with {memory / MIB:.0f} MiB each", devices=devices), path)


def train(*overrides: str, limit: int | None = None) -> Outcome:
    """Train the recipe with these changes on two ranks, each with at most `limit` bytes of private memory."""

    def set_limit() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    command = [sys.executable, "-m", "diffusionpipe", "train", str(RECIPE), "--ranks", "2", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with (FOLDER / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            [*command, *overrides], stdout=output, stderr=subprocess.STDOUT, preexec_fn=set_limit, env=environment
        )
        peaks: dict[int, int] = {}
        for look in itertools.count():
            if process.poll() is not None:
                break
            if look % LOOKS == 0:
                ranks = ranks_of(process.pid)
            for rank, folder in ranks.items():
                peaks[rank] = max(private_memory(folder), peaks.get(rank, 0))
            time.sleep(PERIOD)
        output.seek(0)
        text = output.read()
    return Outcome(status=process.returncode, output=text, peaks=tuple(held for _, held in sorted(peaks.items())))


def ranks_of(launcher: int) -> dict[int, Path]:
    """The folders in /proc of the ranks that a launcher has started, by rank."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) != launcher:
                continue
            environment = (path / "environ").read_bytes()
        except (OSError, ValueError):
            continue  # it has ended
        if rank := re.search(rb"(?:^|\0)RANK=(\d+)", environment):
            found[int(rank.group(1))] = path
    return found


def private_memory(folder: Path) -> int:
    """The private memory of a process, in bytes; 0 once it has ended."""
    try:
        held = re.search(r"^VmData:\s+(\d+) kB", (folder / "status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(held.group(1)) * 1024 if held else 0


def plan() -> tuple[int, str]:
    """Plan the recipe for the limited devices; exit status and the table."""
    command = [sys.executable, "-m", "diffusionpipe", "plan", str(RECIPE), "--out", str(FOLDER / "plan.json")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def said(text: str) -> str:
    """The lines of a failed run that say why."""
    lines = [line for line in text.splitlines() if "out of memory" in line]
    return lines[-1] if lines else "\n".join(text.splitlines()[-5:])


def sizes(peaks: Sequence[int]) -> str:
    """The peaks of ranks 0, 1, ... in MiB."""
    return " and ".join(f"{held / MIB:,.0f}" for held in peaks) + " MiB"


def result(name: str, run: Outcome) -> str:
    """A line on how a run ended."""
    if run.status == 0:
        losses = run.losses
        course = f", loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else ""
        return f"  {name:18} trains. Peak memory of the ranks: {sizes(run.peaks)}{course}"
    return f"  {name:18} fails with {sizes(run.peaks)} in use:\n    {said(run.output)}"


def report(base: int, limit: int, copies: Outcome, pipeline: Outcome) -> tuple[str, bool]:
    """What was measured, and whether it is what the demo promises."""
    lines = [
        "",
        f"Measured, two ranks, each limited to {limit / MIB:,.0f} MiB by the operating system (a rank without a large",
        f"model takes {base / MIB:,.0f} of it):",
        result("data parallelism", copies),
        result("pipeline", pipeline),
    ]
    is_shown = copies.is_out_of_memory and pipeline.status == 0
    if is_shown:
        lines += [
            "Data parallelism keeps the whole model, its gradients and the optimizer's state on every rank. The",
            "pipeline keeps a part of them on each. Parameters in parts (sharded data parallelism, ZeRO-3 / FSDP) are",
            "the other way to save memory: they send all weights in every micro-batch, the pipeline only activations.",
            "The table above has the predicted times of both.",
        ]
    else:
        lines.append("That is not what this demo is to show; try another --memory.")
    return "\n".join(lines), is_shown


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Train a model of which a rank can hold only a part.")
    parser.add_argument("--memory", type=int, default=400, help="MiB of each rank for the training (%(default)s)")
    arguments = parser.parse_args(argv)
    if not sys.platform.startswith("linux"):
        print("error: limits of memory are set and read as Linux does it; run this on Linux", file=sys.stderr)
        return 2
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    write_model(FOLDER / "model")
    write_cluster(FOLDER / "cluster.json", arguments.memory * MIB)
    print("1. The memory of a rank without a large model ...", flush=True)
    small = train(f"model.path={HERE / 'model'}", "training.steps=2", f"run.folder={FOLDER / 'small'}", *DATA_PARALLEL)
    if small.status:
        print(small.output, file=sys.stderr)
        return 1
    base = max(small.peaks)
    print(f"   {sizes(small.peaks)}\n2. Layouts for two devices with {arguments.memory} MiB each ...", flush=True)
    status, table = plan()
    print(table, flush=True)
    if status:
        return 1
    limit = base + int(GAPS * arguments.memory * MIB)
    print(f"3. Data parallelism, each rank limited to {limit / MIB:,.0f} MiB ...", flush=True)
    copies = train(*DATA_PARALLEL, f"run.folder={FOLDER / 'data-parallel'}", limit=limit)
    print("4. The plan, under the same limit ...", flush=True)
    pipeline = train(
        f"pipeline.plan={FOLDER / 'plan.json'}", "pipeline.cluster=none", "pipeline.stages=none", limit=limit
    )
    text, is_shown = report(base, limit, copies, pipeline)
    print(text)
    return 0 if is_shown else 1


if __name__ == "__main__":
    sys.exit(main())
