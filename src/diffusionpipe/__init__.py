"""DiffusionPipe: train large diffusion models on several devices by pipeline parallelism.

    import diffusionpipe as dp

The names below are the public library (docs/library.md). Each is loaded at its first use, so that the import takes no
time and `schedule`, `simulate` and `plan` work without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from diffusionpipe.version import __version__

if TYPE_CHECKING:
    from diffusionpipe.library.planning import Choice, plan
    from diffusionpipe.library.schedules import schedule
    from diffusionpipe.library.simulation import simulate
    from diffusionpipe.library.timelines import Timeline

__all__ = ["Choice", "Timeline", "__version__", "plan", "schedule", "simulate"]

_HOMES = {
    "Choice": "planning",
    "Timeline": "timelines",
    "plan": "planning",
    "schedule": "schedules",
    "simulate": "simulation",
}
"""Public name -> its module in `diffusionpipe.library`."""


def __getattr__(name: str) -> object:
    """The public name, from its module.

    Raises AttributeError for any other name.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'diffusionpipe' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"diffusionpipe.library.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
