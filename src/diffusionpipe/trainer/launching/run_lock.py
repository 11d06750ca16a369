"""The lock of a run folder: one job at a time, also across machines that share the folder.

    runs/x/run.lock     host, process, machine and start of the owner; the file's time is the owner's last sign of life

Three things tell whether the owner lives, from the surest to the least sure:

    flock     the kernel frees it with the owner's last process, so on the owner's machine it decides alone
    process   on the same machine, where the file system has no flock
    beat      on another machine: the owner sets the file's time every few seconds. Clocks of machines differ, so only a
              watch over `Timing.stale` seconds without a change counts, and only if the user asks (--take-over)

A launcher holds the lock together with rank 0 (a shared flock), so it stays taken until both have ended.
"""

import fcntl
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import asdict
from errno import EAGAIN, EINVAL, ELOOP, EWOULDBLOCK
from pathlib import Path
from threading import Event, Thread

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.codec import decode
from diffusionpipe.runtime.job.verdict import RankProcess, this_member
from diffusionpipe.trainer.launching.lock_owner import USUAL, Life, Owner, Timing, life_of, refusal
from diffusionpipe.units import Seconds

logger = logging.getLogger(__name__)

NAME = "run.lock"
_PAUSE: Seconds = 0.2
_CONTEST: Seconds = 1.0
"""The time for which a process waits to see whether another one puts its own file in the same place."""


class RunLock:
    """The lock of a run folder that this process holds, with a thread that shows signs of life and notices its loss."""

    def __init__(
        self, path: Path, descriptor: int, *, beats: bool, timing: Timing, on_loss: Callable[[str], None] | None
    ) -> None:
        self._path, self._descriptor, self._beats, self._on_loss = path, descriptor, beats, on_loss
        self._ended = Event()
        self._thread = Thread(target=self._watch, args=(timing.beat,), name="run lock", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether another job has put its own lock file in the place of this one."""
        try:
            # A file that is gone belongs to no other job.
            return self._path.exists() and not _is_current(self._descriptor, self._path)
        except OSError:
            return False  # a network file system that is away for a moment

    def share(self) -> None:
        """Makes the lock shared, so that the launched rank 0 can hold it too.

        Raises:
            ConfigError: another job has taken the lock meanwhile.
        """
        # The kernel may give an exclusive flock up before it gives the shared one, and another job may take it between.
        if _lock(self._descriptor, fcntl.LOCK_SH) is True:
            raise ConfigError(f"another job has taken {self._path} just now; choose another run.folder")

    def release(self) -> None:
        """Gives the lock back; its file is removed if this process is the owner."""
        self._ended.set()
        self._thread.join()
        try:
            # A rank that has joined leaves the file to its launcher.
            if self._beats and _is_current(self._descriptor, self._path):
                self._path.unlink()
        except OSError:
            pass  # an empty or old file is no hindrance: the flock is free
        os.close(self._descriptor)

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def _watch(self, interval: Seconds) -> None:
        has_warned = False
        while not self._ended.wait(interval):
            if self.is_lost:
                if self._on_loss is not None:
                    self._on_loss(f"another job has taken over {self._path.parent} (see {self._path}); this one ends.")
                return
            if self._beats:
                try:
                    os.utime(self._descriptor)
                except OSError as error:
                    if not has_warned:
                        logger.warning("lock=%s beat=False reason=%s", self._path, error)
                    has_warned = True


def acquire(
    folder: Path,
    *,
    take_over: bool = False,
    on_loss: Callable[[str], None] | None = None,
    timing: Timing = USUAL,
) -> RunLock:
    """Takes the lock of a run folder, which is made if it is missing; nothing else in it is touched.

    It waits up to 15 s for the ranks of a launcher that was killed.

    Args:
        folder: the run folder.
        take_over: whether to take it from an owner on another machine that gives no sign of life.
        on_loss: called in a thread when another job has taken the lock over.
        timing: how often signs of life are given and how long others are awaited; only tests change it.

    Raises:
        ConfigError: another job uses the folder, or it cannot be written.
    """
    me, path = this_member(0), folder / NAME
    deadline = time.monotonic() + timing.ending
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = None
        while descriptor is None:
            found, life, seen = _try(path, me, is_late=time.monotonic() > deadline)
            if isinstance(found, int):
                descriptor = found
            elif life is Life.ELSEWHERE and take_over:
                _watch_owner(path, found, seen, timing)
                descriptor = _replace(path, me)
                logger.warning('lock=%s taken_from="%s" reason=no_sign_of_life', path, found)
            elif life is not Life.ENDING or time.monotonic() > deadline:
                raise ConfigError(refusal(folder, found, life, age=time.time() - seen, take_over=take_over))
            else:
                time.sleep(_PAUSE)
    except OSError as error:
        raise ConfigError(f"run.folder: {folder} cannot be used: {error}") from error
    return RunLock(path, descriptor, beats=True, timing=timing, on_loss=on_loss)


def is_held(folder: Path) -> bool:
    """Whether a job uses the run folder, as far as can be seen without waiting; it may be this process's own job."""
    try:
        descriptor = _open(folder / NAME)
    except OSError:
        return False
    try:
        is_locked = _lock(descriptor, fcntl.LOCK_EX)
        return life_of(_read(descriptor), this_member(0), is_locked=is_locked) not in {Life.NONE, Life.GONE}
    finally:
        os.close(descriptor)


def join(folder: Path, launcher: int, *, on_loss: Callable[[str], None]) -> RunLock | None:
    """Takes a share in the lock that a rank's launcher holds on a run folder; None if the launcher holds none.

    `launcher`: the launcher's process id. `on_loss` is called in a thread when another job has taken the lock over.
    """
    try:
        descriptor = _open(folder / NAME)
    except OSError:
        return None
    owner = _read(descriptor)
    # A launcher that holds no lock, or the lock of another machine's process with the same number.
    if owner is None or owner.pid != launcher or owner.machine != this_member(0).machine:
        os.close(descriptor)
        return None
    _lock(descriptor, fcntl.LOCK_SH)
    return RunLock(folder / NAME, descriptor, beats=False, timing=USUAL, on_loss=on_loss)


def _try(path: Path, me: RankProcess, *, is_late: bool) -> tuple[int | Owner | None, Life, float]:
    """Try to get the lock; returns (its descriptor or else its owner, the owner's life, last sign of life).

    The last sign of life is in seconds since the epoch. `me`: the process that wants the lock. `is_late`: whether a
    lock file that does not name its owner yet will never name it.
    """
    descriptor = _open(path, os.O_CREAT)
    is_kept = False
    try:
        is_locked = _lock(descriptor, fcntl.LOCK_EX)
        owner, seen = _read(descriptor), os.fstat(descriptor).st_mtime
        life = life_of(owner, me, is_locked=is_locked)
        if not _is_current(descriptor, path) or (life is Life.ALIVE and owner is None and not is_late):
            return owner, Life.ENDING, seen  # just given back, or just taken
        if life not in {Life.NONE, Life.GONE}:
            return owner, life, seen
        if owner is not None:
            logger.info('lock=%s taken_from="%s" reason=process_is_gone', path, owner)
        if is_locked is None:  # without flock two jobs may come here at once
            return _replace(path, me, is_contested=True), life, seen
        _write(descriptor, me)
        is_kept = True
        return descriptor, life, seen
    finally:
        if not is_kept:
            os.close(descriptor)


def _watch_owner(path: Path, owner: Owner | None, seen: float, timing: Timing) -> None:
    """Wait for a sign of life of an owner on another machine; returns if there was none or the lock was given back.

    `seen`: the time of its last sign, in seconds since the epoch.

    Raises:
        ConfigError: there was a sign of life.
    """
    age = time.time() - seen
    # Where the file's time is old already, a few beats confirm it. Clocks may differ, so they are awaited all the same.
    wait = 3 * timing.beat if age > timing.stale else timing.stale
    logger.warning('lock=%s owner="%s" waiting_for_a_sign_of_life_s=%.0f', path, owner, wait)
    end = time.monotonic() + wait
    while time.monotonic() < end:
        time.sleep(min(_PAUSE, wait / 4))
        try:
            if path.stat().st_mtime != seen:
                raise ConfigError(refusal(path.parent, owner, Life.ALIVE, age=0, take_over=True))
        except FileNotFoundError:  # the owner has given the lock back
            return


def _replace(path: Path, me: RankProcess, *, is_contested: bool = False) -> int:
    """Put a new locked file that names `me` as owner in the place of the lock file; returns its descriptor.

    `is_contested`: whether two jobs may do this at the same time, as they can without flock. The later one then has
    the lock.

    Raises:
        ConfigError: the other job was later.
    """
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    # Locked before it has its place, so that no job finds it free.
    _lock(descriptor, fcntl.LOCK_EX)
    _write(descriptor, me)
    temporary.replace(path)
    if is_contested:
        time.sleep(_CONTEST)  # the later of two jobs has its file in place by now
        if not _is_current(descriptor, path):
            os.close(descriptor)
            raise ConfigError(f"another job has taken {path} just now; choose another run.folder")
    return descriptor


def _open(path: Path, more: int = 0) -> int:
    """Open the lock file and return its descriptor; `more`: further flags for `os.open`.

    A link is refused: its target would be overwritten.

    Raises:
        OSError: it is a link or not a regular file, or cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | more, 0o644)
    except OSError as error:
        if error.errno == ELOOP:
            raise OSError(ELOOP, "it is a link; remove it", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(EINVAL, "it is not a regular file; remove it", str(path))
    return descriptor


def _lock(descriptor: int, kind: int) -> bool | None:
    """Try to get the flock of an open file; returns whether another process holds it, None without flocks.

    `kind`: fcntl.LOCK_EX or fcntl.LOCK_SH.
    """
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in {EAGAIN, EWOULDBLOCK} else None
    return False


def _is_current(descriptor: int, path: Path) -> bool:
    """Whether the file that is open as `descriptor` is still the one at `path`."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    ours = os.fstat(descriptor)
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _read(descriptor: int) -> Owner | None:
    """The owner that an open lock file names; None if it names none."""
    problems: list[str] = []
    try:
        found = decode(Owner, json.loads(os.pread(descriptor, 4096, 0)), "", problems)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, Owner) and not problems else None


def _write(descriptor: int, me: RankProcess) -> None:
    owner = Owner(host=me.host, pid=me.pid, machine=me.machine, started=time.time())
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, (json.dumps(asdict(owner)) + "\n").encode(), 0)
