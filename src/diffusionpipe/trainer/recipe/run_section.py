"""[run] of a recipe: where results go, and who records them besides."""

import json
from enum import StrEnum
from math import inf
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, ValidatorFunctionWrapHandler, WrapValidator

from diffusionpipe.plugins import Kind, offered
from diffusionpipe.trainer.recipe.section import Choice, Maybe, Place, Positive, Section, Several, texts_for_text

PLAN = "plan.json"
"""The name of the file in the run folder that holds the run's plan."""


class TrackerName(StrEnum):
    """The programs that can record runs, by their names in a recipe."""

    AUTO = "auto"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    MLFLOW = "mlflow"
    COMET = "comet_ml"
    AIM = "aim"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


def _limit_or_word(value: object) -> object:
    """The value of `run.stuck_after`, a limit in seconds or "auto", and None for "none".

    Pydantic calls it before its own checks, which would have a sentence for each kind of value.

    Raises:
        ValueError: the value is none of these.
    """
    if value == "none":
        return None
    is_limit = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < inf
    if value != "auto" and value is not None and not is_limit:
        raise ValueError(f': expected seconds above 0, "auto" or "none"; got {json.dumps(value, default=str)}')
    return value


def _empty_for_none(value: object) -> object:
    return () if value == "none" else texts_for_text(value)


def _or_offered(value: object, known: ValidatorFunctionWrapHandler) -> object:
    """The value, if a package offers a tracker of this name; else the result of `known`, which validates our names."""
    return value if isinstance(value, str) and value in offered(Kind.TRACKER) else known(value)


_Tracker = Annotated[Choice[TrackerName], WrapValidator(_or_offered), PlainSerializer(str)]


class RunSection(Section):
    """[run]: where results go, and who records them besides."""

    folder: Place
    """Folder of metrics, checkpoints, samples and the export. If the file leaves it out: runs/<name of the file>."""
    trackers: Annotated[Several[_Tracker], BeforeValidator(_empty_for_none)] = (TrackerName.AUTO,)
    """Programs that also record metrics and pictures, e.g. `["tensorboard", "wandb"]`; `"auto"`: TensorBoard if it is
    installed; `"none"`: none. Also names that packages offer."""
    project: Annotated[str, Field(min_length=1)] = "diffusionpipe"
    """The project (in MLflow and Aim: the experiment) under which trackers file the run."""
    name: Maybe[Annotated[str, Field(min_length=1)]] = None
    """Name of the run in the trackers; `"none"`: the name of its folder."""
    stuck_after: Annotated[Literal["auto"] | Positive | None, BeforeValidator(_limit_or_word)] = "auto"
    """Seconds without progress within a step after which the run ends as stuck; ten times as many elsewhere. `"auto"`:
    20 median steps, at least 60 s; `"none"`: never."""
    patience: Annotated[float, Field(ge=3, le=3600)] = 8.0
    """Seconds without an answer after which a rank counts as gone, and all ranks end; on its own machine a dead process
    is noticed within a second. Raise it where ranks are paused, e.g. by live migration."""
