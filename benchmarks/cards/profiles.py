"""The profiles of the cards, with frozen matrices in bfloat16 or linear layers in a form: computed once, then kept."""

import os
from functools import cache

from diffusionpipe.costs import Profile
from diffusionpipe.costs.forms import Form
from diffusionpipe.workflows.planning.profile_cache import cache_folder
from diffusionpipe.workflows.planning.stated_model import StatedModel, computed_profile


@cache
def load(name: str, device: str, form: Form | None = None, *, is_narrow: bool = False) -> Profile:
    """The profile of a shipped model on a device; computed in half a minute where it is not kept.

    `is_narrow`: trained matrices are kept in bfloat16.
    """
    stated = StatedModel(name=name, has_narrow_store=True, form=form, has_narrow_weights=is_narrow)
    return computed_profile(stated, device, cache_folder(os.environ))[0]
