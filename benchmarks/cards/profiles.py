"""The profiles of the cards, with frozen matrices stored in bfloat16: computed once, then kept."""

import os
from functools import cache

from diffusionpipe.costs import Profile
from diffusionpipe.workflows.profile_cache import cache_folder
from diffusionpipe.workflows.stated_model import StatedModel, computed_profile


@cache
def load(name: str, device: str) -> Profile:
    """The profile of a shipped model on a device; computed in half a minute where it is not kept."""
    stated = StatedModel(name=name, has_narrow_store=True)
    return computed_profile(stated, device, cache_folder(os.environ))[0]
