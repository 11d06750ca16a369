"""Checkpoints of a run: written whole or not at all, checked before they are read, for any number of ranks.

runs/x/checkpoints/step-00000200/       rank-0.safetensors  rank-1.safetensors  ...
                                        tensors.json      where each tensor lies
                                        state.json        step, seed, ...
                                        manifest.json     size and checksum of each file
runs/x/checkpoints/.step-00000300.writing/     becomes step-00000300 by a rename, when all of it is on the disk
runs/x/checkpoints/.step-00000300.replaced/    an older one of the same step, until the new one is in its place
"""

import errno
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from diffusionpipe.errors import CheckpointError
from diffusionpipe.files.input_file import read_json
from diffusionpipe.files.output_file import sync, write_durably
from diffusionpipe.runtime.comm.exchange import collect, rows_of
from diffusionpipe.runtime.job.agreement import agree, rank_in, size_of, together
from diffusionpipe.trainer.checkpoints.checkpoint_folder import (
    FOLDER,
    latest,
    order_of,
    resolve,
    saved_checkpoints,
    sequence_of,
)
from diffusionpipe.trainer.checkpoints.manifest import (
    FileRecord,
    Manifest,
    check_files,
    describe_files,
    read_manifest,
    unlisted,
    write_manifest,
)
from diffusionpipe.trainer.checkpoints.tensor_files import INDEX, TensorWriting, read_tensors
from diffusionpipe.units import Bytes, Seconds

logger = logging.getLogger(__name__)

State = dict[str, object]
STATE = "state.json"
AUTO = "auto"
"""`--resume auto`: the newest undamaged checkpoint, or none (see `resuming`)."""
_LEFT = ".step-*"
_WRITING, _REPLACED = ".writing", ".replaced"


class Saving:
    """The writing of one checkpoint by one rank, in steps that may be far apart in time.

    The steps of all ranks of the group, in this order: `plan`, `write`, `collect`, `publish` (first rank only). They
    take `plan` and `collect` together, through messages; a rank takes `write` and `publish` by itself, and another
    thread may do it. After an error in any step `give_up` leaves no trace.
    """

    def __init__(
        self,
        run_folder: Path,
        step: int,
        state: State,
        group: dist.ProcessGroup | None = None,
        published: Callable[[Path], None] | None = None,
    ) -> None:
        """Takes the step and the values of state.json, the same on all ranks; writes nothing yet.

        `published`: a function that the first rank calls with the checkpoint's folder, when it is complete.
        """
        self.path = run_folder / FOLDER / f"step-{step:08d}"
        """The folder that the checkpoint will have."""
        self._run_folder, self._step, self._state, self._group = run_folder, step, state, group
        self._is_first, self._published = rank_in(group) == 0, published
        self._temporary = self.path.with_name(f".{self.path.name}{_WRITING}")
        self._writing = TensorWriting(self._temporary, group)
        self._parts: list[Callable[[], tuple[FileRecord, ...]]] = []
        self._size: Bytes = 0

    def plan(self, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Makes the hidden folder, agrees on each tensor's writer, and returns the names of the tensors for this rank.

        A name may be held by several ranks, which then hold equal values; one of them writes it.

        Raises:
            CheckpointError: on all ranks; the folder cannot be made, or ranks hold different tensors under one name.
        """
        together(lambda: _make_empty(self._temporary) if self._is_first else None, self._group)
        return self._writing.plan(tensors)

    def write(
        self, copies: Mapping[str, Tensor] | None = None, between: Callable[[], None] | None = None
    ) -> tuple[FileRecord, ...]:
        """Writes this rank's tensors to its file, reads it again, and returns its record; () without tensors.

        `copies`: copies of the tensors in host memory, by name, to write in place of the tensors themselves. `between`:
        called after each piece of the file.

        Raises:
            OSError: not all tensors could be written.
        """
        return describe_files(self._temporary, self._writing.write(copies, between))

    def collect(self, part: tuple[FileRecord, ...]) -> None:
        """Sends the first rank the record of the file that this rank has written (`part`).

        Every rank calls it.
        """
        self._parts = collect(part, rows_of(FileRecord), self._group)

    def publish(self) -> None:
        """Writes the index, the state and the manifest, and renames the hidden folder to the checkpoint's name.

        First rank only.

        Raises:
            CheckpointError: a rank reports other files than its own.
            OSError: a file cannot be written.
        """
        # Read here, in the thread of the first rank that publishes: the main thread trains.
        parts = [read() for read in self._parts]
        self._writing.finish(parts)
        files = (*(record for part in parts for record in part), *describe_files(self._temporary, [INDEX]))
        self._size = sum(record.size for record in files)
        _publish(self._temporary, self.path, self._state, files)
        if self._published is not None:
            self._published(self.path)

    def give_up(self, error: CheckpointError) -> CheckpointError:
        """Removes the hidden folder, and returns `error` with the step and the last good checkpoint added.

        All ranks call it.
        """
        if self._is_first:
            shutil.rmtree(self._temporary, ignore_errors=True)
        last = latest(self._run_folder)
        remains = f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
        return CheckpointError(f"the checkpoint of step {self._step} could not be written: {error}\n{remains}")

    def report(self, standstill: Seconds, seconds: Seconds) -> None:
        """Logs on the first rank the checkpoint's path and size, the seconds that training waited, and all seconds."""
        if self._is_first:
            logger.info(
                "checkpoint=%s size_bytes=%d standstill_s=%.2f save_s=%.2f", self.path, self._size, standstill, seconds
            )


def save(
    run_folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: State,
    *,
    keep: int,
    group: dist.ProcessGroup | None = None,
    published: Callable[[Path], None] | None = None,
) -> Path:
    """Saves a checkpoint of all ranks' tensors, keeps the last `keep` checkpoints, and returns the new folder.

    Every rank of the group calls it, with its own tensors and the same step and state (JSON values); a name that
    several ranks hold has equal values there. The first rank calls `published` with the new folder. Older checkpoints
    are removed only after that. A failure before the new one is in place leaves no trace; a rank that dies leaves a
    hidden folder, which `clean` removes at the next start, and the collective's own error on its peers.

    Raises:
        CheckpointError: on all ranks, if any could not write; it names the last good checkpoint.
    """
    assert keep >= 1, "the recipe checks this"
    started = time.perf_counter()
    is_first = rank_in(group) == 0
    saving = Saving(run_folder, step, state, group, published)
    try:
        saving.plan(tensors)
        saving.collect(together(saving.write, group))
        together(lambda: saving.publish() if is_first else None, group)
    except CheckpointError as error:
        raise saving.give_up(error) from error
    if is_first:
        prune(run_folder, keep)
    seconds = time.perf_counter() - started
    saving.report(seconds, seconds)
    return saving.path


def load(path: Path, tensors: Mapping[str, Tensor]) -> State:
    """Verifies a checkpoint with all ranks, fills this rank's tensors in place, and returns the values of state.json.

    Every rank calls it; more or fewer ranks may have written the checkpoint. A rank's tensors change only if all files
    are good and the rank finds all its names.

    Raises:
        CheckpointError: on all ranks, for a damaged checkpoint or one of another model.
    """
    verify_together(path)
    return together(lambda: read(path, tensors))


def read(path: Path, tensors: Mapping[str, Tensor]) -> State:
    """Fills the tensors in place from a checkpoint, by name, and returns the values of state.json.

    One process calls it alone, after `verify`.

    Raises:
        CheckpointError: a name is missing, has another shape or type in the checkpoint, or a file cannot be read.
    """
    read_tensors(path, tensors)
    return read_state(path)


def read_state(path: Path) -> State:
    """The JSON object in the checkpoint's state.json: step, seed and other values that were saved beside the tensors.

    Raises:
        CheckpointError: the file cannot be read, or holds something else.
    """
    try:
        state = read_json(path / STATE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{STATE} of {path.name} cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{STATE} of {path.name} cannot be read: it is not a JSON object")
    return state


def verify(path: Path) -> None:
    """Refuses a damaged checkpoint: reads all of it and compares size and checksum of each file with the manifest.

    Raises:
        CheckpointError: a file is missing, cut, altered or not in the manifest; it names the file and the previous good
            checkpoint.
    """
    problems = _problems(path, 0, 1)
    if problems:
        raise CheckpointError(_refusal(path, problems, previous_good(path)))


def verify_together(path: Path, group: dist.ProcessGroup | None = None) -> None:
    """Refuses a damaged checkpoint, which all ranks of the group read together.

    Every rank calls it and compares its share of the files with the manifest.

    Raises:
        CheckpointError: on all ranks; a file is missing, cut, altered or not in the manifest.
    """
    problems = problems_together(path, group)
    if problems:
        found = agree(lambda: str(previous_good(path) or "") if rank_in(group) == 0 else "", group)[0]
        good = Path(found) if found else None
        raise CheckpointError(_refusal(path, problems, good))


def problems_together(path: Path, group: dist.ProcessGroup | None = None) -> list[str]:
    """A sentence for each fault of the checkpoint, [] if it is good.

    Every rank calls it and reads its share of the files.

    Raises:
        CheckpointError: on all ranks, where a rank may not read the files at all.
    """
    by_rank = agree(lambda: _problems(path, rank_in(group), size_of(group)), group)
    return list(dict.fromkeys(problem for of_rank in by_rank for problem in of_rank))


def previous_good(path: Path) -> Path | None:
    """The newest undamaged checkpoint of the same run that was written before the one at `path`; None if there is none.

    It reads all files of the checkpoints that it tries.
    """
    siblings = saved_checkpoints(path.parent.parent)
    others = [other for other in siblings if other != path and (order_of(other) < order_of(path))]
    return next((other for other in reversed(others) if not _problems(other, 0, 1)), None)


def clean(run_folder: Path) -> tuple[str, ...]:
    """Removes the hidden folders and files that an interrupted save has left, and returns their names.

    One process calls it, while no other saves. A checkpoint that was being replaced when the process died gets its name
    back.
    """
    left = sorted((run_folder / FOLDER).glob(_LEFT))
    for path in left:
        final = path.with_name(path.name.removeprefix(".").removesuffix(_REPLACED))
        # The process died between the two renames of `_publish`, so the older checkpoint of this step still counts.
        if path.name.endswith(_REPLACED) and not final.exists():
            path.rename(final)
        elif path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
        logger.warning("leftover=%s reason=interrupted_save", path)
    return tuple(path.name for path in left)


def is_interrupted(run_folder: Path) -> bool:
    """Whether an interrupted save has left a hidden folder or file that `clean` would remove."""
    return any((run_folder / FOLDER).glob(_LEFT))


def problem_of_folder(folder: Path, resume: str | None) -> str | None:
    """Why a run with this `--resume` cannot use the folder; None where it can.

    Without `--resume` (None) the folder must hold no checkpoint; with it the named checkpoint must exist.
    """
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
    """Makes an empty folder; removes what an earlier attempt has left in its place."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _publish(temporary: Path, final: Path, state: State, files: tuple[FileRecord, ...]) -> None:
    """Writes state.json and the manifest into the hidden folder `temporary`, and renames it durably to `final`.

    `files`: the records of the files that are in the folder already. An older checkpoint of the same step is replaced.
    """
    write_durably(temporary / STATE, (json.dumps(state, indent=1) + "\n").encode())
    # The folder of this step is replaced, so its number does not count.
    others = [path for path in saved_checkpoints(final.parent.parent) if path != final]
    manifest = Manifest(
        step=int(final.name.removeprefix("step-")),
        sequence=1 + max((order for path in others if (order := sequence_of(path)) is not None), default=0),
        files=(*files, *describe_files(temporary, [STATE])),
    )
    write_manifest(temporary, manifest)
    replaced = final.with_name(f".{final.name}{_REPLACED}")
    # A folder cannot be renamed onto one that has files.
    if final.exists():
        final.rename(replaced)
    try:
        temporary.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    sync(final.parent)  # the names; a checkpoint that is not there after a power cut must not have been reported
    shutil.rmtree(replaced, ignore_errors=True)


def prune(run_folder: Path, keep: int) -> None:
    """Deletes all of a run's checkpoints but the `keep` that were written last.

    A folder that cannot be removed only gives a warning.

    One rank calls it.
    """
    for path in saved_checkpoints(run_folder)[:-keep]:
        try:
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("checkpoint=%s kept=True reason=%s", path, error)


def _problems(path: Path, share: int, num_shares: int) -> list[str]:
    """A sentence for each fault of a checkpoint that one share of its files shows; [] if none.

    `share`: the index of the share among `num_shares`.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    # The largest first, dealt out in turn: ranks read about equally much.
    by_size = sorted(manifest.files, key=lambda record: (-record.size, record.name))
    try:
        return unlisted(path, manifest) + check_files(path, by_size[share::num_shares])
    except OSError as error:
        if error.errno != errno.EIO:  # of other errors, e.g. missing rights, the checkpoint is not the cause
            raise
        return [f"the disk cannot read it: {error}"]


def _refusal(path: Path, problems: list[str], good: Path | None) -> str:
    """The message that the checkpoint at `path` is damaged, with its faults and how to resume from `good`."""
    step = good.name.removeprefix("step-").lstrip("0") or "0" if good else ""
    offer = (
        f"the previous good checkpoint is {good}; resume with --resume {step}" if good else "no earlier good one exists"
    )
    return f"{path} is damaged: {'; '.join(problems)}\n{offer}"
