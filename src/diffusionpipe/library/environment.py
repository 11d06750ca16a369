"""The environment variables of torchrun; no other module of the library reads the environment."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffusionpipe.runtime.job.membership import Membership


def place_in_job() -> "Membership | None":
    """The rank of this process and the size of its job, by torchrun's variables; None if torchrun did not start it.

    Raises:
        ConfigError: some of torchrun's variables are missing.
    """
    from diffusionpipe.runtime.job.membership import membership

    return membership(os.environ) if "RANK" in os.environ or "WORLD_SIZE" in os.environ else None
