"""The profiles of the cards, with frozen matrices in bfloat16 or linear layers in a form: computed once, then kept."""

import os
from functools import cache

from diffusionpipe.costs import Profile
from diffusionpipe.costs.forms import Form
from diffusionpipe.workflows.profile_cache import cache_folder
from diffusionpipe.workflows.stated_model import StatedModel, computed_profile


@cache
def load(name: str, device: str, form: Form | None = None) -> Profile:
    """The profile of a shipped model on a device; computed in half a minute where it is not kept."""
    stated = StatedModel(name=name, has_narrow_store=True, form=form)
    return computed_profile(stated, device, cache_folder(os.environ))[0]
