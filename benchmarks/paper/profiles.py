"""The profiles that are planned with: computed once, kept where `diffusionpipe plan --model` keeps its own."""

import os
from functools import cache

from diffusionpipe.costs import Profile
from diffusionpipe.workflows.planning.profile_cache import cache_folder
from diffusionpipe.workflows.planning.stated_model import StatedModel, computed_profile

DEVICE = "a100-80"


@cache
def load(name: str, resolution: int | None = None) -> Profile:
    """The profile of a shipped model on an A100 with 80 GB; computed in half a minute where it is not kept."""
    stated = StatedModel(name=name, resolution=resolution)
    return computed_profile(stated, DEVICE, cache_folder(os.environ))[0]
