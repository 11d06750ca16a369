"""Files that a command writes: whole or not at all, onto the target of links, and checked before long work.

A regular file, or none yet, is replaced by renaming a finished draft. A rename onto anything else would destroy it: as
root, `--out /dev/null` would make the machine's device a regular file. So a link is followed and its target replaced,
and a device or a FIFO is written in place.
"""

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from diffusionpipe.errors import ConfigError

_PROBE = b"\0" * 4096
"""A block that a folder must have room for before long work begins."""
_MAX_LINKS = 40


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a whole file (a text as UTF-8): a regular file holds either its old content or all of the new one.

    That also holds after a crash. Links are followed; a device or FIFO is written in place.

    Raises:
        ConfigError: the file cannot be written; an old regular file is untouched.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        place = _place(path)
        if place is None:
            _write_in_place(path, data)
        else:
            _replace(place, data)
    except OSError as error:
        raise _refusal(path, error) from error


def check_outputs(paths: Iterable[Path | None]) -> None:
    """Check before long work that these files can be written, without changing or leaving any; None is skipped.

    Raises:
        ConfigError: one of them cannot.
    """
    for path in paths:
        if path is not None:
            _check(path)


def check_folder(folder: Path) -> None:
    """Check that files can be written below `folder`, which need not exist yet; no file is left.

    Raises:
        OSError: they cannot: the file system is read-only or full, a file or a broken link has the name of a folder.
    """
    existing = folder
    # A link to nothing ends the climb too: no folder could be made in its place.
    while not existing.is_symlink() and not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if existing.is_symlink() and not existing.exists():
        raise FileNotFoundError(errno.ENOENT, f"{existing} is a link to {os.readlink(existing)}, which does not exist")
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{existing} is a file")
    _probe(existing / "probe")


def reason_of(error: OSError) -> str:
    """The system's words for the error, without its number and paths."""
    return error.strerror or str(error) or type(error).__name__


def _refusal(path: Path, error: OSError) -> ConfigError:
    if isinstance(error, IsADirectoryError):
        return ConfigError(f"cannot write {path}: it is a folder; give the name of a file")
    return ConfigError(
        f"cannot write {path}: {reason_of(error)}; check that the folder exists, is writable and has free space"
    )


def _check(path: Path) -> None:
    try:
        place = _place(path)
        if place is not None:
            _probe(place)
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _refusal(path, error) from error


def _place(path: Path) -> Path | None:
    """The path of the regular file, present or to be made, to which `path` leads through links.

    None: it is a device, a FIFO or an open file, and must be written in place.

    Links in /proc name open files (/dev/stdout is one): another process continues to write to the file that they name.

    Raises:
        OSError: it is a folder, or cannot be looked at.
    """
    place = path
    for _ in range(_MAX_LINKS):
        folder = Path(os.path.realpath(place.parent))
        if folder.is_relative_to("/proc"):
            return None
        # Only the folder is resolved: the last part may be a link whose target is yet to be made.
        place = folder / place.name
        if not place.is_symlink():
            break
        place = folder / os.readlink(place)
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:
        return place
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return place if stat.S_ISREG(mode) else None


def draft_of(place: Path) -> Path:
    """The path of a hidden draft in the same folder as a file or folder `place`; each call gives another name.

    Process ids of two machines that share a folder may be equal, so the name has random digits. It is short, because a
    file's name has at most 255 bytes.
    """
    return place.with_name(f".{place.name[:40]}.{token_hex(8)}.tmp")


def _probe(place: Path) -> None:
    """Try to write a small file into the folder of `place`, and remove it.

    Raises:
        OSError: it cannot be written.
    """
    draft = draft_of(place)
    try:
        write_durably(draft, _PROBE)
    finally:
        with suppress(OSError):
            draft.unlink()


def _replace(place: Path, data: bytes) -> None:
    draft = draft_of(place)
    try:
        write_durably(draft, data)
        # The draft was made with the permissions of a new file; the replaced file keeps its own.
        if place.exists():
            draft.chmod(stat.S_IMODE(place.stat().st_mode))
        draft.replace(place)
    except BaseException:  # Ctrl-C leaves no draft either
        with suppress(OSError):
            draft.unlink()
        raise
    sync(place.parent)  # the rename itself


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk. A file of this name is replaced, a link is not followed.

    Raises:
        OSError: the file cannot be written.
    """
    path.unlink(missing_ok=True)
    # Mode x follows no link that another process puts here meanwhile.
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_in_place(path: Path, data: bytes) -> None:
    """Write the data into an existing device or FIFO.

    It opens without O_CREAT, which would make a regular file if the device has just been removed.
    """
    descriptor = os.open(path, os.O_WRONLY)
    with open(descriptor, "wb") as file:
        file.write(data)
