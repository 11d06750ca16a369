"""`python -m diffusionpipe` is the command `diffusionpipe`."""

import os
import sys

from diffusionpipe.runtime.job.parent_death import end_with_parent
from diffusionpipe.runtime.machine.error_file import LAUNCHED


def _end_with_launcher(launcher: str) -> None:
    """End this process with its launcher: a rank's imports take seconds, in which its launcher may end."""
    if launcher.isdecimal() and not end_with_parent(int(launcher)):
        sys.exit(f"error: the launcher (process {launcher}) has ended; this rank stops too")


if __name__ == "__main__":
    _end_with_launcher(os.environ.get(LAUNCHED, ""))
    try:
        from diffusionpipe.cli import main
    except KeyboardInterrupt:  # the command's own word on it is not loaded yet
        sys.exit(130)
    main()
