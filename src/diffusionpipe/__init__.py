"""DiffusionPipe: train large diffusion models on several devices by pipeline parallelism.

    import diffusionpipe as dp

The names below are the public library (docs/library.md). Each is loaded at its first use, so that the import takes no
time and `schedule`, `simulate` and `plan` work without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from diffusionpipe.version import __version__

if TYPE_CHECKING:
    from diffusionpipe.errors import ConfigError, DiffusionPipeError, ScheduleError
    from diffusionpipe.library.layers import layer
    from diffusionpipe.library.models import Model, pipeline
    from diffusionpipe.library.planning import Choice, plan
    from diffusionpipe.library.profiles import profile
    from diffusionpipe.library.running import Run, run
    from diffusionpipe.library.schedules import schedule
    from diffusionpipe.library.simulation import simulate
    from diffusionpipe.library.timelines import Timeline
    from diffusionpipe.library.training import train

__all__ = [
    "Choice",
    "ConfigError",
    "DiffusionPipeError",
    "Model",
    "Run",
    "ScheduleError",
    "Timeline",
    "__version__",
    "layer",
    "pipeline",
    "plan",
    "profile",
    "run",
    "schedule",
    "simulate",
    "train",
]

_HOMES = {
    "Choice": "library.planning",
    "ConfigError": "errors",
    "DiffusionPipeError": "errors",
    "Model": "library.models",
    "Run": "library.running",
    "ScheduleError": "errors",
    "Timeline": "library.timelines",
    "layer": "library.layers",
    "pipeline": "library.models",
    "plan": "library.planning",
    "profile": "library.profiles",
    "run": "library.running",
    "schedule": "library.schedules",
    "simulate": "library.simulation",
    "train": "library.training",
}
"""Public name -> its module."""


def __getattr__(name: str) -> object:
    """The public name, from its module.

    Raises AttributeError for any other name, ConfigError where a package that it needs is not installed.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'diffusionpipe' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        return getattr(import_module(f"diffusionpipe.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        from diffusionpipe.errors import ConfigError

        lacking = (error.name or "").partition(".")[0]
        if lacking in ("", "diffusionpipe"):
            raise
        raise ConfigError(
            f"dp.{name} needs {lacking}, which cannot be imported; install it (pip install {lacking})"
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
