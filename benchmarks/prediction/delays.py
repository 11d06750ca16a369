"""How long a thread was ready to run and had no core: what other programs on the machine take from a measurement."""

from pathlib import Path

from diffusionpipe.units import Seconds


def delay() -> Seconds:
    """Time that this thread has waited for a core so far (Linux; 0 where the kernel does not say)."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0
