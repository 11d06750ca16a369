"""The trackers of a run, which record its numbers and pictures besides its folder: TensorBoard, W&B, trackio, ...

In metrics.jsonl "loss", "step_s" and "validation_loss"; in every tracker "train/loss", "speed/step_s" and
"validation/loss". A picture is "samples/000-a-blue-tit", with its prompt; the resolved recipe is there as well.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from diffusionpipe.errors import ConfigError, RecipeError
from diffusionpipe.files.input_file import read_json
from diffusionpipe.files.output_file import write_atomically
from diffusionpipe.plugins import Kind, load
from diffusionpipe.trainer.recipe import SECTIONS, Recipe, RunSection, TrackerName, recipe_to_toml
from diffusionpipe.trainer.reporting.tracker import LoggedImage, Tracker, TrackerConfig

logger = logging.getLogger(__name__)

_IDENTITIES = "trackers.json"
_OURS = frozenset(TrackerName)
_SPEED = ("step_s", "data_s", "iteration_s", "update_s", "samples_per_s", "bubble")
_VALIDATION = "validation_"


class Trackers:
    """All trackers of a run as one tracker.

    A tracker that fails is left out from then on, with a warning: it must not end the training.
    """

    def __init__(self, trackers: Mapping[str, Tracker] | None = None) -> None:
        self._trackers = dict(trackers or {})

    def describe(self, recipe: str, values: Mapping[str, object]) -> None:
        """Records the recipe in every tracker: its text, and the values of its keys."""
        self._each(lambda tracker: tracker.describe(recipe, values))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records numbers in every tracker; `values` have the keys of metrics.jsonl, and get the tags of `tag_of`."""
        tagged = {tag_of(key): value for key, value in values.items()}
        self._each(lambda tracker: tracker.scalars(step, tagged))

    def pictures(self, step: int, shown: Sequence[LoggedImage]) -> None:
        """Records the pictures that were drawn after a step in every tracker."""
        self._each(lambda tracker: tracker.pictures(step, shown))

    def close(self) -> None:
        """Closes all trackers, after which nothing is recorded."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in tuple(self._trackers.items()):
            try:
                act(tracker)
            except Exception as error:  # services and their clients fail in ways of their own
                del self._trackers[name]
                logger.warning(
                    'tracker=%s recording=False reason="%s: %s"; training continues, and metrics.jsonl is complete',
                    name,
                    type(error).__name__,
                    error,
                )


def tag_of(key: str) -> str:
    """The trackers' name for a number of metrics.jsonl: its group and its key.

    >>> tag_of("loss"), tag_of("step_s"), tag_of("validation_loss_t0.1")
    ('train/loss', 'speed/step_s', 'validation/loss_t0.1')
    """
    if key.startswith(_VALIDATION):
        return f"validation/{key.removeprefix(_VALIDATION)}"
    return f"{'speed' if key in _SPEED else 'train'}/{key}"


def problems_of_trackers(run: RunSection) -> Iterator[str]:
    """A sentence for each tracker that the recipe's section [run] names and that is not installed."""
    for name in run.trackers:
        if name in _OURS and name is not TrackerName.AUTO and not _is_installed(name):
            yield f"run.trackers: {name} is not installed; run pip install {name}, or remove it from run.trackers"


def open_trackers(recipe: Recipe, resume_step: int | None) -> Trackers:
    """Starts the trackers that a recipe names, records the recipe in each, and returns them.

    `resume_step`: the last step that a resumed run has done, else None. A resumed run continues the trackers' own runs
    where they can.

    Raises:
        RecipeError: a tracker is not installed.
        ConfigError: a tracker does not start, e.g. without a login, or trackers.json is damaged.
    """
    if problems := list(problems_of_trackers(recipe.run)):
        raise RecipeError("\n".join(problems))
    folder, values = recipe.run.folder, flat_values(recipe)
    known = _read_identities(folder) if resume_step is not None else {}
    opened: dict[str, Tracker] = {}
    identities: dict[str, str] = {}
    for name in _wanted(recipe.run.trackers):
        opening = TrackerConfig(
            folder=folder,
            project=recipe.run.project,
            name=recipe.run.name or folder.resolve().name,
            values=values,
            resume_step=resume_step,
            identity=known.get(name),
        )
        try:
            opened[name], identity = _open(name, opening)
        except Exception as error:
            Trackers(opened).close()  # the ones that have started end their runs
            raise ConfigError(
                f"run.trackers: {name} did not start: {type(error).__name__}: {error}\n"
                f"set up {name} (login, server, its own environment variables), or remove it from run.trackers"
            ) from error
        if identity is not None:
            identities[name] = identity
    if identities:
        write_atomically(folder / _IDENTITIES, json.dumps(identities, indent=2) + "\n")
    trackers = Trackers(opened)
    trackers.describe(recipe_to_toml(recipe), values)
    return trackers


def flat_values(recipe: Recipe) -> dict[str, object]:
    """The recipe's values by "section.key": texts, numbers and bools as they are, others as JSON, None as "none"."""
    values: dict[str, object] = {}
    for name in SECTIONS:
        for key, value in getattr(recipe, name).model_dump(mode="json").items():
            is_plain = isinstance(value, str | int | float)
            values[f"{name}.{key}"] = value if is_plain else "none" if value is None else json.dumps(value)
    return values


def _wanted(names: Sequence[TrackerName]) -> list[TrackerName]:
    """The names of the trackers to open, each once: "auto" becomes TensorBoard if it is installed, else nothing."""
    wanted = [TrackerName.TENSORBOARD if name is TrackerName.AUTO else name for name in names]
    if TrackerName.AUTO in names and not _is_installed(TrackerName.TENSORBOARD):
        logger.info("tensorboard=False reason=not_installed")
        wanted = [name for name in wanted if name is not TrackerName.TENSORBOARD]
    return list(dict.fromkeys(wanted))


def _is_installed(name: TrackerName) -> bool:
    """Whether the tracker's package, which has the same name, is installed."""
    return find_spec(str(name)) is not None


def _open(name: TrackerName, opening: TrackerConfig) -> tuple[Tracker, str | None]:
    """Start a tracker; returns it, and the id by which a resumed run finds the tracker's own run (None without)."""
    if name not in _OURS:
        make = load(Kind.TRACKER, name)
        if not callable(make):
            raise TypeError(f"the package offers a {type(make).__name__}, not a function that returns a tracker")
        made: Tracker = make(opening)
        return made, None
    if name is TrackerName.TENSORBOARD:
        from diffusionpipe.trainer.reporting.tensorboard import TensorBoard

        return TensorBoard(opening.folder / "tensorboard", opening.resume_step), None
    from diffusionpipe.trainer.reporting.accelerate_trackers import AccelerateTracker

    tracker = AccelerateTracker(name, opening)
    return tracker, tracker.identity


def _read_identities(folder: Path) -> dict[str, str]:
    """The ids of the trackers' own runs from a run folder, by the tracker's name; {} where none are written.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / _IDENTITIES
    try:
        found = read_json(path)
        if not isinstance(found, dict) or not all(isinstance(identity, str) for identity in found.values()):
            raise ValueError("it must hold an object of texts")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {error}; remove it, and the trackers record the rest as runs of their own"
        ) from error
    return found
