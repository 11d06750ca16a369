"""Real runs of `diffusionpipe doctor` with two rank processes, on one machine or on two of tests/kit/nodes.py."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kit.nodes import Node, may_have_nodes, two_nodes

LIMIT = 60.0
"""Seconds that doctor may take."""
PLANTED = Path(__file__).parent / "planted"
SHARE = "runs"
"""The folder of the runs, in that of a case."""
OUT = "doctor.json"
_TORCHRUN = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d")


class NotAllowedError(Exception):
    """This machine does not allow the case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a run of doctor has shown."""

    status: int | None
    """Exit status; None: it had not ended in time."""
    output: str
    findings: tuple[Mapping[str, str], ...]
    """Of its JSON."""
    seconds: float

    def lines(self, *statuses: str) -> list[str]:
        """Its lines with one of these beginnings."""
        return [line for line in self.output.splitlines() if re.match(rf"({'|'.join(statuses)})\s", line)]


def options_of(folder: Path) -> tuple[str, ...]:
    """Of every run; the folder of the runs is made."""
    (folder / SHARE).mkdir(exist_ok=True)
    return ("doctor", "--folder", str(folder / SHARE), "--out", str(folder / OUT))


def environ(added: Mapping[str, str]) -> dict[str, str]:
    """Of the processes; what is planted in Python is on its path."""
    path = os.pathsep.join(filter(None, (str(PLANTED), os.environ.get("PYTHONPATH", ""))))
    return os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "1000", "PYTHONPATH": path} | dict(added)


def on_one_machine(
    folder: Path, *options: str, before: Sequence[str] = (), added: Mapping[str, str] | None = None
) -> Seen:
    """Run `doctor --ranks 2`. `before`: words before the command. `added`: to the environment."""
    command = [*before, sys.executable, "-m", "diffusionpipe", *options_of(folder), "--ranks", "2", *options]
    return ended(folder, [started(command, added or {})])


@contextmanager
def machines(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Two machines.

    Raises:
        NotAllowedError: this one allows no network namespaces.
    """
    if not may_have_nodes():
        raise NotAllowedError("network namespaces are not allowed")
    with two_nodes(folder) as nodes:
        yield nodes


def on_two_machines(
    folder: Path, nodes: Sequence[Node], *options: str, added: Sequence[Mapping[str, str]] = ({}, {})
) -> Seen:
    """Run doctor by docs/gpu.md's command of torchrun, with one rank on each."""
    command = [sys.executable, *_TORCHRUN, "--rdzv-endpoint", "node-0:29500", "-m", "diffusionpipe"]
    command += [*options_of(folder), "--device", "cpu", *options]
    return ended(folder, [started(node.command(*command), values) for node, values in zip(nodes, added, strict=True)])


def as_tasks(folder: Path, before: Sequence[Sequence[str]], added: Mapping[str, str]) -> Seen:
    """Run two ranks as Slurm does, without launcher or torchrun; `before`: words before each command."""
    command = [sys.executable, "-m", "diffusionpipe", *options_of(folder), "--device", "cpu"]
    job = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500"} | dict(added)
    return ended(folder, [started([*words, *command], job | {"RANK": str(rank)}) for rank, words in enumerate(before)])


def started(command: Sequence[str], added: Mapping[str, str]) -> "subprocess.Popen[str]":
    """A process, whose outputs are read together."""
    return subprocess.Popen(
        command, env=environ(added), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def ended(folder: Path, processes: Sequence["subprocess.Popen[str]"]) -> Seen:
    """What the first process has shown. The others are let go: torchrun may wait for minutes for one that has left."""
    begun = time.monotonic()
    status: int | None = None
    try:
        output = processes[0].communicate(timeout=LIMIT)[0]
        status = processes[0].returncode
    except subprocess.TimeoutExpired:
        processes[0].terminate()
        output = processes[0].communicate()[0]
    seconds = time.monotonic() - begun
    for process in processes[1:]:
        process.terminate()
        output += "".join(f"other: {line}\n" for line in process.communicate()[0].splitlines())
    file = folder / OUT
    findings = json.loads(file.read_text())["findings"] if file.exists() else []
    return Seen(status=status, output=output, findings=tuple(findings), seconds=seconds)
