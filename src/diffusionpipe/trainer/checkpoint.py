"""Checkpoints of a run: written whole or not at all, checked before they are read, for any number of ranks.

runs/x/checkpoints/step-00000200/       __0_0.distcp  __1_0.distcp  .metadata   torch.distributed.checkpoint's
                                        state.json                              step, seed, ...
                                        manifest.json                           size and checksum of each file
runs/x/checkpoints/.step-00000300.writing/     becomes step-00000300 by a rename, when all of it is on the disk
runs/x/checkpoints/.step-00000300.replaced/    an older one of the same step, until the new one is in its place
"""

import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from diffusionpipe.errors import CheckpointError
from diffusionpipe.ir.input_file import read_json
from diffusionpipe.ir.output_file import sync_folder, write_durably
from diffusionpipe.runtime.exchange import form_of
from diffusionpipe.trainer.agreement import agree, rank_in, size_of, together
from diffusionpipe.trainer.manifest import (
    FileRecord,
    Manifest,
    check_files,
    describe_files,
    read_manifest,
    unlisted,
    write_manifest,
)
from diffusionpipe.trainer.tensor_files import read_tensors, write_tensors

logger = logging.getLogger(__name__)

State = dict[str, object]
STATE = "state.json"
AUTO = "auto"
"""`--resume auto`: the newest undamaged checkpoint, or none (see `resuming`)."""
_FOLDER = "checkpoints"
_LEFT = ".step-*"
_NAME = re.compile(r"step-(\d{8,})")
_SHOWN = 200
"""Characters of what was asked for that a message repeats."""
_WRITING, _REPLACED = ".writing", ".replaced"


def save(
    run_folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: State,
    *,
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes this rank's tensors with those of all others, keeps the last `keep` checkpoints, returns the new folder.

    Every rank of the group calls it, with the same step and state (JSON values); names may repeat between ranks and
    then stand for equal values. Older checkpoints go only after the new one is in place. Whatever fails before that
    leaves no trace; a rank that dies leaves a hidden folder, which `clean` removes at the next start, and the
    collective's own error on its peers.

    Raises:
        CheckpointError: on all ranks, if any could not write; it names the last good checkpoint.
    """
    assert keep >= 1, "the recipe checks this"
    started = time.perf_counter()
    is_first = rank_in(group) == 0
    final = run_folder / _FOLDER / f"step-{step:08d}"
    temporary = final.with_name(f".{final.name}{_WRITING}")
    try:
        together(lambda: _make_empty(temporary) if is_first else None, group)
        names = write_tensors(temporary, tensors, group)
        records = agree(lambda: describe_files(temporary, names), group, form=form_of(tuple[FileRecord, ...]))
        files = tuple(record for of_rank in records for record in of_rank)
        together(lambda: _publish(temporary, final, state, files) if is_first else None, group)
    except CheckpointError as error:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        last = latest(run_folder)
        remains = f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
        raise CheckpointError(f"the checkpoint of step {step} could not be written: {error}\n{remains}") from error
    if is_first:
        prune(run_folder, keep)
        size = sum(record.size for record in files)
        logger.info("checkpoint=%s size_bytes=%d save_s=%.2f", final, size, time.perf_counter() - started)
    return final


def load(path: Path, tensors: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None) -> State:
    """Verifies the checkpoint together with all ranks, fills this rank's tensors in place, returns the state.

    Every rank of the group calls it; the ranks that saved need not be as many. Nothing is changed unless the files of
    all ranks are good and each rank finds all its names.

    Raises:
        CheckpointError: on all ranks, for a damaged checkpoint or one of another model.
    """
    verify_together(path, group)
    return together(lambda: read(path, tensors), group)


def read(path: Path, tensors: Mapping[str, Tensor]) -> State:
    """Fills the tensors in place and returns the state; for one process, which has called `verify` before.

    Raises:
        CheckpointError: a name is missing, or has another shape or type in the checkpoint.
    """
    read_tensors(path, tensors)
    return read_state(path)


def read_state(path: Path) -> State:
    """The state that was saved with the tensors.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        state = read_json(path / STATE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{STATE} of {path.name} cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{STATE} of {path.name} cannot be read: it is not a JSON object")
    return state


def verify(path: Path) -> None:
    """Compares size and checksum of each file with the manifest; reads the whole checkpoint.

    Raises:
        CheckpointError: a file is missing, cut, altered or not in the manifest; it names the file and the previous good
            checkpoint.
    """
    problems = _problems(path, 0, 1)
    if problems:
        raise CheckpointError(_refusal(path, problems, previous_good(path)))


def verify_together(path: Path, group: dist.ProcessGroup | None = None) -> None:
    """`verify` for all ranks of the group, each of which reads its share of the files.

    Raises:
        CheckpointError: on all ranks, as in `verify`.
    """
    problems = problems_together(path, group)
    if problems:
        found = agree(lambda: str(previous_good(path) or "") if rank_in(group) == 0 else "", group)[0]
        good = Path(found) if found else None
        raise CheckpointError(_refusal(path, problems, good))


def problems_together(path: Path, group: dist.ProcessGroup | None = None) -> list[str]:
    """What is wrong with the checkpoint, found by all ranks of the group, each of which reads its share of the files.

    Raises:
        CheckpointError: on all ranks, where a rank may not read the files at all.
    """
    by_rank = agree(lambda: _problems(path, rank_in(group), size_of(group)), group)
    return list(dict.fromkeys(problem for of_rank in by_rank for problem in of_rank))


def saved_checkpoints(run_folder: Path) -> tuple[Path, ...]:
    """The run's checkpoints in the order in which they were written.

    One whose manifest cannot be read stands last: it is found first and refused by name, not silently passed over.
    """
    folder = run_folder / _FOLDER
    if not folder.is_dir():
        return ()
    return tuple(sorted((path for path in folder.iterdir() if _is_checkpoint(path)), key=_order))


def latest(run_folder: Path) -> Path | None:
    """The checkpoint that was written last, or None."""
    return next(reversed(saved_checkpoints(run_folder)), None)


def num_written(run_folder: Path) -> int:
    """How many checkpoints the run has written, as far as those that are there tell; it only grows."""
    return max((_sequence(path) or 0 for path in saved_checkpoints(run_folder)), default=0)


def previous_good(path: Path) -> Path | None:
    """The newest undamaged checkpoint of the same run that was written before this one, or None."""
    siblings = saved_checkpoints(path.parent.parent)
    others = [other for other in siblings if other != path and (_order(other) < _order(path))]
    return next((other for other in reversed(others) if not _problems(other, 0, 1)), None)


def resolve(run_folder: Path, wanted: str | int | Path) -> Path:
    """The checkpoint meant by "latest", a step, or a path (to a checkpoint, or to a run whose latest is meant).

    Raises:
        CheckpointError: there is none; it lists what is there.
    """
    if wanted == "latest":
        return _latest_or_refuse(run_folder)
    if str(wanted).isdecimal():
        path = run_folder / _FOLDER / f"step-{str(wanted).lstrip('0').zfill(8)}"
        if not os.path.isdir(path):
            raise CheckpointError(
                f"{run_folder} has no checkpoint of step {str(wanted)[:_SHOWN]}; {_listing(run_folder)}"
            )
        return path
    path = Path(str(wanted))
    if not os.path.exists(path):  # False also for what can be no path
        raise CheckpointError(f"{str(path)[:_SHOWN]} does not exist; {_listing(run_folder)}")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file, but a checkpoint is a folder; {_listing(run_folder)}")
    if _is_checkpoint(path.absolute()):
        return path
    return _latest_or_refuse(path.parent if path.name == _FOLDER else path)


def clean(run_folder: Path) -> tuple[str, ...]:
    """Removes what an interrupted save has left and returns its names; one process calls it, when no other saves.

    A checkpoint that was being replaced when the process died returns to its place.
    """
    left = sorted((run_folder / _FOLDER).glob(_LEFT))
    for path in left:
        final = path.with_name(path.name.removeprefix(".").removesuffix(_REPLACED))
        if path.name.endswith(_REPLACED) and not final.exists():
            path.rename(final)
        elif path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
        logger.warning("leftover=%s reason=interrupted_save", path)
    return tuple(path.name for path in left)


def is_interrupted(run_folder: Path) -> bool:
    """Whether an interrupted save has left something for `clean`."""
    return any((run_folder / _FOLDER).glob(_LEFT))


def problem_of_folder(folder: Path, resume: str | None) -> str | None:
    """Why a run that resumes or not cannot use its folder; None where it can."""
    try:
        if resume is not None:
            if resume != AUTO:
                resolve(folder, resume)
        elif latest(folder) is not None:
            return (
                f"{folder} holds the checkpoints of an earlier run; continue with --resume latest (or "
                "auto), choose another run.folder, or delete the folder"
            )
    except (CheckpointError, OSError) as error:
        return str(error)
    return None


def _make_empty(folder: Path) -> None:
    """Makes the folder, in place of what an earlier attempt may have left."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _publish(temporary: Path, final: Path, state: State, files: tuple[FileRecord, ...]) -> None:
    """Completes the folder, makes it durable and gives it its name."""
    write_durably(temporary / STATE, (json.dumps(state, indent=1) + "\n").encode())
    others = [path for path in saved_checkpoints(final.parent.parent) if path != final]
    manifest = Manifest(
        step=int(final.name.removeprefix("step-")),
        sequence=1 + max((order for path in others if (order := _sequence(path)) is not None), default=0),
        files=(*files, *describe_files(temporary, [STATE])),
    )
    write_manifest(temporary, manifest)
    replaced = final.with_name(f".{final.name}{_REPLACED}")
    if final.exists():
        final.rename(replaced)
    try:
        temporary.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def prune(run_folder: Path, keep: int) -> None:
    """Deletes all but the last checkpoints, which are safe; so a failure is only reported. One rank calls it."""
    for path in saved_checkpoints(run_folder)[:-keep]:
        try:
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("checkpoint=%s kept=True reason=%s", path, error)


def _is_checkpoint(path: Path) -> bool:
    """Whether the path has the name and kind of a checkpoint."""
    return _NAME.fullmatch(path.name) is not None and path.is_dir()


def _sequence(path: Path) -> int | None:
    """The checkpoint's place in the order of writing, None if its manifest cannot be read."""
    try:
        return read_manifest(path).sequence
    except CheckpointError:
        return None


def _order(path: Path) -> tuple[bool, int, str]:
    """Sorts by the order of writing, unreadable ones last by step."""
    sequence = _sequence(path)
    return (sequence is None, sequence or 0, path.name)


def _problems(path: Path, share: int, num_shares: int) -> list[str]:
    """What is wrong with the checkpoint, as far as this share of its files shows."""
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    by_size = sorted(manifest.files, key=lambda record: (-record.size, record.name))
    try:
        return unlisted(path, manifest) + check_files(path, by_size[share::num_shares])
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return [f"the disk cannot read it: {error}"]


def _refusal(path: Path, problems: list[str], good: Path | None) -> str:
    """The message about a damaged checkpoint."""
    step = good.name.removeprefix("step-").lstrip("0") or "0" if good else ""
    offer = (
        f"the previous good checkpoint is {good}; resume with --resume {step}" if good else "no earlier good one exists"
    )
    return f"{path} is damaged: {'; '.join(problems)}\n{offer}"


def _latest_or_refuse(run_folder: Path) -> Path:
    """The run's latest checkpoint.

    Raises:
        CheckpointError: it has none.
    """
    path = latest(run_folder)
    if path is None:
        raise CheckpointError(f"{run_folder} has no checkpoint; {_listing(run_folder)}")
    return path


def _listing(run_folder: Path) -> str:
    """What could have been meant: the run's checkpoints, or else what lies in the folder."""
    names = [path.name for path in saved_checkpoints(run_folder)]
    if names:
        return f"{run_folder} has {', '.join(names)}"
    if not run_folder.is_dir():
        return f"{run_folder} is not a folder"
    inside = sorted(path.name for path in run_folder.iterdir())
    return f"{run_folder} contains {', '.join(inside[:10]) or 'nothing'}{', ...' if len(inside) > 10 else ''}"
