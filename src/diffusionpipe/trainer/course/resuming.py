"""The checkpoint from which a run continues, verified before anything long starts.

--resume latest, 200, PATH   this checkpoint, or an error --resume auto                the newest undamaged checkpoint,
or none: right for the first start and every restart
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from diffusionpipe.runtime.job.agreement import agree, rank_in, together
from diffusionpipe.trainer.checkpoints.checkpoint import AUTO, problems_together, verify_together
from diffusionpipe.trainer.checkpoints.checkpoint_folder import resolve, saved_checkpoints

logger = logging.getLogger(__name__)

DAMAGED = ".damaged"
"""The ending of the names of damaged checkpoints that were skipped: they are kept, but no longer count."""


@dataclass(frozen=True, slots=True)
class _Damaged:
    """The path of a damaged checkpoint, and a sentence for each of its faults."""

    path: Path
    problems: Sequence[str]


def resume_of_attempt(resume: str | None, attempt: int) -> str | None:
    """The `--resume` of a job that torchrun has restarted `attempt` times: "auto" where the user has named none."""
    return AUTO if resume is None and attempt > 0 else resume


def checkpoint_of(run_folder: Path, resume: str | None, group: dist.ProcessGroup | None = None) -> Path | None:
    """The verified checkpoint from which the run continues; None to start at step 0.

    None is the answer without `resume`, and where "auto" finds no undamaged one. Every rank of the group calls it.

    Raises:
        CheckpointError: on all ranks; the wanted checkpoint does not exist or is damaged.
    """
    if resume is None:
        return None
    if resume == AUTO:
        return newest_good(run_folder, group)
    # Rank 0 resolves "latest", so that all ranks read one checkpoint.
    path = Path(agree(lambda: str(resolve(run_folder, resume)) if rank_in(group) == 0 else "", group)[0])
    verify_together(path, group)
    return path


def newest_good(run_folder: Path, group: dist.ProcessGroup | None = None) -> Path | None:
    """The newest checkpoint that is not damaged, or None.

    Every rank of the group calls it and reads its share of the files.

    Newer checkpoints, which are damaged, get another name. So they are not read again, and do not count in
    `checkpoint.keep`.
    """
    is_first = rank_in(group) == 0
    found = agree(lambda: [str(path) for path in saved_checkpoints(run_folder)] if is_first else [], group)[0]
    good, skipped = None, []
    for path in map(Path, reversed(found)):
        problems = problems_together(path, group)
        if not problems:
            good = path
            break
        skipped.append(_Damaged(path, problems))
    # Renamed only now: while ranks read a checkpoint, it keeps its name.
    together(lambda: _set_aside(skipped, good) if is_first else None, group)
    return good


def _set_aside(skipped: Sequence[_Damaged], good: Path | None) -> None:
    """Renames the damaged checkpoints, and logs for each the steps that have to be done again.

    `good`: the checkpoint from which the run continues; None where it begins.
    """
    for one in skipped:
        kept = _free_name(one.path)
        one.path.rename(kept)
        logger.warning(
            'skipped=%s reason="%s" kept_as=%s continues_from=%s lost_steps=%d',
            one.path,
            "; ".join(one.problems),
            kept.name,
            good.name if good is not None else "the_start",
            max(0, _step(one.path) - (_step(good) if good is not None else 0)),
        )


def _free_name(path: Path) -> Path:
    """The path to which a damaged checkpoint is renamed, which does not exist yet."""
    number, kept = 1, path.with_name(path.name + DAMAGED)
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}{DAMAGED}-{number}")
    return kept


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))
