"""Schedules, families of models and trackers that other packages offer by entry points.

Names that are ours always win. Nothing of a package is imported before its name is asked for.
"""

from enum import StrEnum
from importlib.metadata import EntryPoint, entry_points

from diffusionpipe.errors import ConfigError
from diffusionpipe.hidden_packages import reveal


class Kind(StrEnum):
    """A kind of object that other packages offer; the value is the name of its group of entry points."""

    SCHEDULE = "diffusionpipe.schedules"
    """A function (ranks, microbatches) -> rows of actions, or a `Schedule`."""
    FAMILY = "diffusionpipe.families"
    """A `models.base.family.Family`, named as the pipeline's class in model_index.json."""
    TRACKER = "diffusionpipe.trackers"
    """A function: `trainer.reporting.tracker.TrackerConfig` -> `Tracker`."""


def offered(kind: Kind) -> tuple[str, ...]:
    """The names of this kind that installed packages offer by entry points, in alphabetical order."""
    return tuple(sorted({one.name for one in entry_points(group=kind)}))


def load(kind: Kind, name: str) -> object | None:
    """The imported object of this kind that a package offers under this name; None if no package does.

    Raises:
        ConfigError: it cannot be imported, or two packages offer the name.
    """
    found = {one.value: one for one in entry_points(group=kind, name=name)}
    if not found:
        return None
    word = kind.name.lower()
    if len(found) > 1:
        sources = " and ".join(sorted(_source(one) for one in found.values()))
        raise ConfigError(f"the {word} {name!r} is offered by {sources}; remove one of these packages")
    (only,) = found.values()
    reveal()
    try:
        loaded: object = only.load()
    except Exception as error:  # whatever a package raises when it is imported
        raise ConfigError(
            f"the {word} {name!r} of {_source(only)} cannot be imported ({type(error).__name__}: {error}); repair or "
            "remove that package"
        ) from error
    return loaded


def _source(one: EntryPoint) -> str:
    return f"{one.dist.name} ({one.value})" if one.dist is not None else one.value
