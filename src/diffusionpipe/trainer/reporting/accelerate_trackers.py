"""Trackers through accelerate's classes (`accelerate.tracking`), without an Accelerator.

Accelerate's classes start each program, give it numbers and end it. The other differences between the programs are
here: how the program's own run is named, how a resumed run finds it again, and how it gets pictures.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from diffusionpipe.trainer.recipe import TrackerName
from diffusionpipe.trainer.reporting.tracker import LoggedImage, TrackerConfig

_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


class AccelerateTracker:
    """A tracker that records a run through one of accelerate's classes, such as W&B or MLflow."""

    def __init__(self, name: TrackerName, opening: TrackerConfig) -> None:
        """Start the program of this name, or raise the program's own error."""
        from accelerate import tracking

        _be_alone()
        self._name = name
        self._is_resumed = opening.resume_step is not None
        self._tracker: Any = tracking.LOGGER_TYPE_TO_CLASS[str(name)](**_arguments(name, opening))
        self._tracker.start()
        if name is TrackerName.COMET:
            self._tracker.tracker.set_name(opening.name)
        if name is TrackerName.CLEARML and self._is_resumed:  # it would count steps on from its last one
            self._tracker.tracker.set_initial_iteration(0)

    @property
    def identity(self) -> str | None:
        """The id by which the program finds its own run again; None if the run's name is enough, or it cannot."""
        run = self._tracker.tracker
        match self._name:
            case TrackerName.WANDB | TrackerName.SWANLAB | TrackerName.CLEARML:
                return str(run.id)
            case TrackerName.MLFLOW:
                return str(run.info.run_id)
            case TrackerName.COMET:
                return str(run.get_key())
            case TrackerName.AIM:
                return str(run.hash)
            case _:
                return None

    def describe(self, recipe: str, values: Mapping[str, object]) -> None:
        """Records `values`, the recipe's values by key, as the program's configuration; the text is not recorded."""
        if self._name is TrackerName.TRACKIO:  # was told at the start; later changes are not kept
            return
        if self._name is TrackerName.MLFLOW and self._is_resumed:  # parameters of its runs cannot change
            return
        self._tracker.store_init_configuration(dict(values))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records all numbers of a step in one call."""
        self._tracker.log(dict(values), step=step)

    def pictures(self, step: int, shown: Sequence[LoggedImage]) -> None:
        """Records each picture as "samples/" and its file's name, with its caption where the program has room."""
        run = self._tracker.tracker
        for one in shown:
            tag = f"samples/{one.name}"
            match self._name:
                case TrackerName.WANDB | TrackerName.SWANLAB | TrackerName.TRACKIO:
                    picture = _captioned(self._name, one)
                    # Trackio takes one picture, the others a list.
                    several = picture if self._name is TrackerName.TRACKIO else [picture]
                    self._tracker.log({tag: several}, step=step)
                case TrackerName.AIM:
                    from PIL import Image

                    self._tracker.log_images({tag: (Image.fromarray(one.picture), one.caption)}, step=step)
                case TrackerName.CLEARML:
                    self._tracker.log_images({tag: one.picture}, step=step)
                case TrackerName.MLFLOW:
                    self._tracker.log_artifact(str(one.path), artifact_path=f"samples/{one.path.parent.name}")
                case TrackerName.COMET:
                    run.log_image(one.picture, name=tag, step=step)
                case TrackerName.DVCLIVE:
                    run.log_image(f"{one.path.parent.name}/{one.path.name}", one.picture)

    def close(self) -> None:
        """Ends the run in the tracker's program."""
        self._tracker.finish()


def _arguments(name: TrackerName, opening: TrackerConfig) -> dict[str, object]:
    """The arguments for the constructor of accelerate's class; some are passed to the program's own start function."""
    folder, identity = str(opening.folder), opening.identity
    goes_on: dict[str, object] = {} if identity is None else {"id": identity, "resume": "allow"}
    match name:
        case TrackerName.WANDB:
            return {"run_name": opening.project, "name": opening.name, "dir": folder, **goes_on}
        case TrackerName.SWANLAB:
            return {
                "run_name": opening.project,
                "name": opening.name,
                "log_dir": f"{folder}/swanlog",
                **goes_on,
            }
        case TrackerName.TRACKIO:
            resume = "never" if opening.resume_step is None else "allow"
            config = dict(opening.values)
            return {"run_name": opening.project, "name": opening.name, "resume": resume, "config": config}
        case TrackerName.MLFLOW:
            return {"experiment_name": opening.project, "run_name": opening.name, "run_id": identity}
        case TrackerName.COMET:
            return {"run_name": opening.project, "experiment_key": identity}
        case TrackerName.AIM:
            return {
                "run_name": opening.name,
                "logging_dir": folder,
                "experiment": opening.project,
                "run_hash": identity,
            }
        case TrackerName.CLEARML:
            return {
                "run_name": opening.name,
                "project_name": opening.project,
                "task_name": opening.name,
                "continue_last_task": identity or False,
                "auto_connect_frameworks": False,
            }
        case TrackerName.DVCLIVE:
            is_resumed = opening.resume_step is not None
            return {"dir": f"{folder}/dvclive", "resume": is_resumed, "report": None, "save_dvc_exp": False}
        case _:
            raise AssertionError(f"{name} is not one of accelerate's")


def _captioned(name: TrackerName, one: LoggedImage) -> object:
    """The picture with its caption as an object of the program's own class `Image`."""
    from importlib import import_module

    return import_module(str(name)).Image(one.picture, caption=one.caption)


def _be_alone() -> None:
    """Makes accelerate's `PartialState`, which its trackers need, as if this process had no other ranks.

    It would read the variables of torchrun, and might then choose a device, set the number of threads or open a process
    group; all three are this job's own to decide. So these variables are hidden meanwhile. Only rank 0 records.
    """
    from accelerate import PartialState

    hidden = {name: os.environ.pop(name) for name in _LAUNCHERS if name in os.environ}
    try:
        PartialState(cpu=True)
    finally:
        os.environ.update(hidden)
