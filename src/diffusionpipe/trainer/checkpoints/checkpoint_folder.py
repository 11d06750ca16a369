"""The checkpoints that a run folder holds, and the one that a name means."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from diffusionpipe.errors import CheckpointError
from diffusionpipe.trainer.checkpoints.manifest import read_manifest

FOLDER = "checkpoints"
"""The name of the folder of checkpoints in the run folder."""
_NAME = re.compile(r"step-(\d{8,})")
_SHOWN = 200
"""The number of characters of a wanted checkpoint's name that a message repeats."""


def saved_checkpoints(run_folder: Path) -> tuple[Path, ...]:
    """The run's checkpoints in the order in which they were written.

    A checkpoint whose manifest cannot be read comes last. So `latest` finds it, and it is refused by its name.
    """
    folder = run_folder / FOLDER
    if not folder.is_dir():
        return ()
    return tuple(sorted((path for path in folder.iterdir() if _is_checkpoint(path)), key=order_of))


def latest(run_folder: Path) -> Path | None:
    """The checkpoint that was written last, None where the run has none.

    A checkpoint whose manifest cannot be read counts as written last.
    """
    return next(reversed(saved_checkpoints(run_folder)), None)


@dataclass(frozen=True, slots=True)
class KeptCheckpoints:
    """The steps of the checkpoints that a failed run leaves on the disk, and the advice how to resume from them."""

    steps: tuple[int, ...]
    """The steps of the checkpoints, in the order of writing."""

    def remedy(self, *, may_be_ruined: bool = False) -> str:
        """A sentence that names the last checkpoint and how to resume.

        `may_be_ruined`: the last checkpoint may hold useless weights, so the sentence offers the one before, too.
        """
        if not self.steps:
            return "No checkpoint was saved. Start again."
        earlier = f", or from an earlier one with --resume {self.steps[-2]}" if len(self.steps) > 1 else ""
        way = f"Resume with --resume latest{earlier if may_be_ruined else ''}."
        return f"The checkpoint of step {self.steps[-1]} is kept. {way}"


def kept_of(run_folder: Path) -> KeptCheckpoints:
    """The steps of all checkpoints in a run's folder; no steps where the disk cannot be read."""
    try:
        paths = saved_checkpoints(run_folder)
    except OSError:  # the disk may be the reason for the failure
        paths = ()
    return KeptCheckpoints(tuple(int(path.name.removeprefix("step-")) for path in paths))


def num_written(run_folder: Path) -> int:
    """How many checkpoints the run has written, deleted ones included: the largest number in the manifests, or 0."""
    return max((sequence_of(path) or 0 for path in saved_checkpoints(run_folder)), default=0)


def resolve(run_folder: Path, wanted: str | int | Path) -> Path:
    """The folder of the checkpoint that `wanted` names: "latest", a step, or a path.

    A path may lead to a checkpoint, to a run or to its folder of checkpoints; the last two mean the latest.

    Digits are always a step, never a path.

    Raises:
        CheckpointError: there is none, or the path is a file; it lists what is there.
    """
    if wanted == "latest":
        return _latest_or_refuse(run_folder)
    if str(wanted).isdecimal():
        path = run_folder / FOLDER / f"step-{str(wanted).lstrip('0').zfill(8)}"  # "0200" is step 200
        if not os.path.isdir(path):
            raise CheckpointError(
                f"{run_folder} has no checkpoint of step {str(wanted)[:_SHOWN]}; {_listing(run_folder)}"
            )
        return path
    if not str(wanted):
        raise CheckpointError(f"the name of the checkpoint is empty; {_listing(run_folder)}")
    path = Path(str(wanted))
    if not os.path.exists(path):  # False also for what can be no path
        raise CheckpointError(f"{str(path)[:_SHOWN]} does not exist; {_listing(run_folder)}")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file, but a checkpoint is a folder; {_listing(run_folder)}")
    if _is_checkpoint(path.absolute()):
        return path
    return _latest_or_refuse(path.parent if path.name == FOLDER else path)


def _is_checkpoint(path: Path) -> bool:
    """Whether the path is a folder with the name of a checkpoint."""
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def sequence_of(path: Path) -> int | None:
    """The checkpoint's number in the order of writing, counted from 1; None if its manifest cannot be read."""
    try:
        return read_manifest(path).sequence
    except CheckpointError:
        return None


def order_of(path: Path) -> tuple[bool, int, str]:
    """The key that sorts checkpoints by the order of writing; those with an unreadable manifest come last, by step."""
    sequence = sequence_of(path)
    return (sequence is None, sequence or 0, path.name)


def _latest_or_refuse(run_folder: Path) -> Path:
    """The folder of the checkpoint that the run has written last.

    Raises:
        CheckpointError: it has none.
    """
    path = latest(run_folder)
    if path is None:
        raise CheckpointError(f"{run_folder} has no checkpoint; {_listing(run_folder)}")
    return path


def _listing(run_folder: Path) -> str:
    """Words that list the run's checkpoints, or else the first ten names in its folder, for a message."""
    names = [path.name for path in saved_checkpoints(run_folder)]
    if names:
        return f"{run_folder} has {', '.join(names)}"
    if not run_folder.is_dir():
        return f"{run_folder} is not a folder"
    inside = sorted(path.name for path in run_folder.iterdir())
    return f"{run_folder} contains {', '.join(inside[:10]) or 'nothing'}{', ...' if len(inside) > 10 else ''}"
