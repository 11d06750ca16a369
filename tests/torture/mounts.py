"""Small and read-only disks: tmpfs in a mount namespace of this process, where the machine allows one."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class NotAllowedError(Exception):
    """This machine does not allow the case."""


_INSIDE = "TORTURE_NAMESPACE"


def in_own_namespace() -> None:
    """Start this program again in a mount namespace of its own, unless it is in one or none is allowed."""
    if _INSIDE in os.environ or shutil.which("unshare") is None:
        return
    for options in (["-m"], ["-rm"]):
        unshare = ["unshare", *options]
        if subprocess.run([*unshare, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0:
            os.environ[_INSIDE] = "1"
            os.execvp("unshare", [*unshare, sys.executable, "-m", "torture", *sys.argv[1:]])


@contextmanager
def disk(folder: Path, size: str, *options: str) -> Iterator[Path]:
    """A tmpfs of this size at the folder.

    Raises:
        NotAllowedError: this machine does not allow it.
    """
    if _INSIDE not in os.environ:
        raise NotAllowedError("mounting needs root or a user namespace")
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        raise NotAllowedError(done.stderr.strip())
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remounted(folder: Path, options: str) -> None:
    """Change the size of a disk, or whether it can be written."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """No byte is free on the disk of the folder while the block runs."""
    file = folder / ".fills"
    with file.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(b"x" * 4096)
    try:
        yield
    finally:
        file.unlink()
