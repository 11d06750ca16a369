"""The environment variables of torchrun; no other module of the library reads the environment."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.runtime.job.membership import Membership


def place_in_job() -> "Membership | None":
    """The rank and the job that torchrun has given this process; None if it did not start it.

    Raises:
        ConfigError: some of its variables are missing.
    """
    from diffusionpipe.runtime.job.membership import membership

    return membership(os.environ) if "RANK" in os.environ or "WORLD_SIZE" in os.environ else None
