"""The memory of this machine that is left for processes of ours."""

from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.machine.free_memory import free_memory
from diffusionpipe.units import Bytes

_RANK: Bytes = 2**28
"""Bytes of a process that has imported torch and has no model yet; half of what was measured."""
_WORKER: Bytes = 2**26
"""Bytes of a data worker; half of what was measured."""


def check_processes(ranks: int, workers: int = 0, free: Bytes | None = None) -> None:
    """Check, before any model is loaded, that a job's Python processes alone fit in memory.

    Args:
        ranks: processes of the job.
        workers: data workers of each.
        free: bytes of memory that are left; None: measured.

    Raises:
        ConfigError: names the needed and the free memory.
    """
    free = free_memory() if free is None else free
    needed = ranks * (_RANK + workers * _WORKER)
    if free is not None and needed > free:
        each = f" with {workers} data workers each" if workers else ""
        raise ConfigError(
            f"{ranks} ranks{each} take at least {needed / 2**30:,.1f} GiB of memory, and {free / 2**30:,.1f} GiB are "
            f"free on this machine; use fewer ranks{' or data.workers' if workers else ''}"
        )
