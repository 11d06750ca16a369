"""Two machines on one: network, host name and mounts of their own, joined by a cable. No root is needed.

node-0 (10.77.0.1)  veth ───────── veth  node-1 (10.77.0.2)        each: own lo, /etc/hosts, and what is mounted over
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kit.forked import Forked

NAMES = ("node-0", "node-1")
_OF_EACH = ("--net", "--uts", "--mount")
_WAITS = ("sh", "-c", "echo here; cat")
"""Holds a node's namespaces until its standard input ends."""


@cache
def may_have_nodes() -> bool:
    """Whether this machine allows such namespaces and cables."""
    if any(shutil.which(tool) is None for tool in ("unshare", "nsenter", "ip")):
        return False
    cable = "ip link add here type veth peer name there && mount -t tmpfs none /mnt && hostname other"
    done = subprocess.run(["unshare", "--user", "--map-root-user", *_OF_EACH, "sh", "-c", cable], capture_output=True)
    return done.returncode == 0


@dataclass(frozen=True)
class Node:
    """One machine."""

    process: "subprocess.Popen[str]"

    def command(self, *command: str) -> list[str]:
        """The command, run on this machine."""
        inside = ["nsenter", f"--target={self.process.pid}", "--user", *_OF_EACH, "--preserve-credentials"]
        return [*inside, f"--wd={os.getcwd()}", *command]

    def run(self, script: str) -> None:
        """Run a script of the shell that must succeed."""
        subprocess.run(self.command("sh", "-ec", script), check=True, capture_output=True, text=True)

    def start(self, words: Sequence[str], environ: Mapping[str, str]) -> Forked:
        """Start `python WORDS`, whose outputs are read together."""
        return Forked(words, environ, is_merged=True, beside=self.process.pid)

    def hide(self, folder: Path) -> None:
        """Put an empty disk of the node's own in the place of a folder."""
        self.run(f"mount -t tmpfs none '{folder}'")


@contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Two machines that share all disks; `folder` holds their /etc/hosts."""
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"10.77.0.{i + 1} {name}\n" for i, name in enumerate(NAMES)))
    first = _held(["unshare", "--user", "--map-root-user", *_OF_EACH, *_WAITS])
    try:
        join = ["nsenter", f"--target={first.process.pid}", "--user", "--preserve-credentials"]
        second = _held([*join, "unshare", *_OF_EACH, *_WAITS])
        try:
            first.run(f"ip link add eth0 type veth peer name eth0 netns {second.process.pid}")
            for number, node in enumerate((first, second)):
                node.run(
                    f"hostname {NAMES[number]}; mount --bind '{hosts}' /etc/hosts; ip link set lo up; "
                    f"ip addr add 10.77.0.{number + 1}/24 dev eth0; ip link set eth0 up"
                )
            yield first, second
        finally:
            _ended(second)
    finally:
        _ended(first)


def _held(command: Sequence[str]) -> Node:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return Node(process)


def _ended(node: Node) -> None:
    node.process.communicate()  # closes its standard input
