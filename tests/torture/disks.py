"""Full and read-only disks, and a small /dev/shm: each a tmpfs in the mount namespace of this program."""

import re
from functools import partial
from pathlib import Path

from kit.forked_jobs import ForkedCommand
from kit.full_disk import REASONS
from kit.moments import Moment
from kit.tiny_runs import losses_of, save_dit, save_pictures
from torture.cases import Case, Scene, check_plain, finish, go_on, reach, start_forked
from torture.findings import CauseError, LostError
from torture.inputs import saved_steps
from torture.mounts import disk, filled, remounted

README = "README's recipe: batch 64, 512 px, a data worker"
FILLS = (
    ("before the first step", Moment("a step", 1), None),
    ("in a step", Moment("a step", 1, 6), 4),
    ("while tensors are written", Moment("writing tensors", 1, 2), 4),
    ("at the manifest", Moment("the manifest", 0, 2), 4),
    ("while samples are kept", Moment("keeping samples", 0), 4),
    ("while the export is written", Moment("writing the export", 0), 12),
)
"""When the disk is filled, and the step of a checkpoint that must be left."""


def cases() -> list[Case]:
    """All of them."""
    return [
        Case("disks", "full from the start, sharded", partial(_full_at_start, "sharded"), kills=0),
        *(Case("disks", f"full {what}, stages", partial(_fills_up, at, kept), kills=0) for what, at, kept in FILLS),
        Case("disks", "read-only from the start, stages", _read_only, kills=0),
        Case("disks", "read-only when it is resumed, stages", _read_only_resume, kills=0),
        *(Case("/dev/shm", f"{size}, {README}", partial(_small_shm, size), kills=0) for size in ("64m", "64k")),
    ]


def _full_at_start(flavour: str, scene: Scene) -> str:
    folder = scene.inputs.folder / scene.name
    with disk(folder, "40k"):
        with filled(folder):
            status, error = start_forked(scene, flavour).end(60)
            _check_full(status, error)
        remounted(folder, "size=100m")
        return finish(scene, flavour)


def _fills_up(at: Moment, kept: int | None, scene: Scene) -> str:
    folder = scene.inputs.folder / scene.name
    with disk(folder, "100m"):
        job = start_forked(scene, "stages", moment=at)
        try:
            reach(job, at)
            with filled(folder):
                go_on(job)
                status, error = job.end(60)
        finally:
            job.kill_all()
        _check_full(status, error)
        if kept is not None and kept not in saved_steps(folder):
            raise LostError(f"the checkpoint of step {kept} is gone: {saved_steps(folder)}")
        return finish(scene, "stages")


def _check_full(status: int, error: str) -> None:
    check_plain(error)
    if status not in (1, 2) or re.search(REASONS, error) is None:
        raise CauseError(f"status {status}, and no word of a full disk:\n{error[-3000:]}")


def _read_only(scene: Scene) -> str:
    folder = scene.inputs.folder / scene.name
    with disk(folder, "100m", "ro"):
        status, error = start_forked(scene, "stages").end(60)
        _check_read_only(status, error)
        remounted(folder, "rw")
        return finish(scene, "stages")


def _read_only_resume(scene: Scene) -> str:
    folder = scene.inputs.folder / scene.name
    with disk(folder, "100m"):
        at = Moment("a step", 1, 6)
        job = start_forked(scene, "stages", moment=at)
        try:
            reach(job, at)
            job.rank(1).kill()
            go_on(job)
            job.end(60)
        finally:
            job.kill_all()
        remounted(folder, "ro")
        status, error = start_forked(scene, "stages", "--resume", "auto").end(60)
        _check_read_only(status, error)
        remounted(folder, "rw")
        return finish(scene, "stages")


def _check_read_only(status: int, error: str) -> None:
    check_plain(error)
    if status != 2 or "Read-only file system" not in error:
        raise CauseError(f"status {status}, and no word of a read-only disk:\n{error[-2000:]}")


def _small_shm(size: str, scene: Scene) -> str:
    """Trains, or is refused with the remedy; here it trains, because batches do not travel through /dev/shm."""
    data, model = scene.inputs.folder / "large-data", scene.inputs.folder / "model-for-large-data"
    if not data.exists():
        save_pictures(data, count=64, resolution=512)
        save_dit(model, vae_levels=4)  # or attention over 256 x 256 latents takes minutes
    recipe = scene.inputs.recipe(
        scene.name, "workers", model={"path": str(model)},
        data={"train": str(data), "validation": "none", "resolution": 512},
        training={"steps": 2, "batch": 64}, validation={"every": "none"}, sampling={"every": "none"},
        pipeline={"microbatches": 32, "encode_chunk": 2},
    )  # fmt: skip
    with disk(Path("/dev/shm"), size):
        job = ForkedCommand(recipe)
        try:
            status, error = job.end()
        finally:
            job.kill_all()
        left = [path.name for path in Path("/dev/shm").iterdir()]
    check_plain(error)
    if status == 2 and "/dev/shm" in error:
        return "refused with the remedy"
    if status != 0 or sorted(losses_of(job.folder)) != [1, 2]:
        raise CauseError(f"status {status}:\n{error[-2000:]}")
    if left:
        raise CauseError(f"left in /dev/shm: {left}")
    return "trains"
