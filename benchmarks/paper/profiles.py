"""The profiles that are planned with: computed once, kept where `diffusionpipe plan --model` keeps its own."""

import os
from functools import cache

from diffusionpipe.cli.profile_cache import cache_folder
from diffusionpipe.cli.stated_model import StatedModel, computed_profile
from diffusionpipe.costs import Profile

DEVICE = "a100-80"


@cache
def load(name: str, resolution: int | None = None) -> Profile:
    """The profile of a shipped model on an A100 with 80 GB; computed in half a minute where it is not kept."""
    stated = StatedModel(name=name, resolution=resolution)
    return computed_profile(stated, DEVICE, cache_folder(os.environ))[0]
