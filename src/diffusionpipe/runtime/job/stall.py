"""Which rank hangs, when a job makes no progress; and the stacks that show where.

    rank 0  waits for rank 1      rank 1  waits for rank 2      rank 2  waits for none: it hangs

A rank that waits for none judges itself once its time without progress is over its limit and all others wait or hang
too; it gives them a short time for that, so that the message can name them. A rank that waits judges only if its own
limit is long over: it follows the waits to their root. If a rank on the way still makes progress, or has time left, the
job is slow, not stuck [1]. If ranks wait for each other in a circle, the one with the least progress is named [3].

>>> stuck = {rank: Moment(rank=rank, phase="step", step=7, waits=waits, still=90.0, limit=60.0)
...          for rank, waits in enumerate([(1,), (2,), None])}
>>> root_cause(stuck, 0).rank                                             # 0 -> 1 -> 2, which waits for none [2]
2
>>> slow = stuck | {2: Moment(rank=2, phase="step", step=7, still=5.0, limit=60.0)}
>>> root_cause(slow, 0) is None
True
>>> circle = stuck | {2: Moment(rank=2, phase="step", step=6, waits=(0,), still=90.0, limit=60.0)}
>>> root_cause(circle, 0).rank                                            # it is still in step 6
2
"""

import faulthandler
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from diffusionpipe.runtime.job.progress import Moment, Progress
from diffusionpipe.units import Seconds

_SHOWN = 3
"""The most waiting ranks that a message names."""


def moment_to_text(moment: Moment) -> str:
    """The moment as JSON text, for the key-value store."""
    return json.dumps(asdict(moment))


def parse_moment(text: str) -> Moment:
    """The moment that `moment_to_text` wrote as JSON.

    Raises:
        ValueError: the text is not JSON.
        KeyError: it has no field `waits`.
        TypeError: its fields are not a moment's.
    """
    found = json.loads(text)
    return Moment(**{**found, "waits": None if found["waits"] is None else tuple(found["waits"])})


def may_judge(mine: Moment, grace: Seconds) -> bool:
    """Whether a rank has to look now for the rank that hangs: its time without progress is over its limit.

    If it waits for other ranks, it must be over by `grace` seconds more. `mine`: the moment of the rank.
    """
    if mine.limit is None or not mine.is_over_limit:
        return False
    # A rank that waits leaves the hanging one the time to judge itself and to name what it does.
    return mine.waits is None or mine.still > mine.limit + grace


def are_settled(moments: Mapping[int, Moment]) -> bool:
    """Whether each rank waits or hangs, so that none of them is still on its way to a wait."""
    return all(moment.waits is not None or moment.is_over_limit for moment in moments.values())


def root_cause(moments: Mapping[int, Moment], rank: int) -> Moment | None:
    """The moment of the rank that hangs, found along the waits from `rank`; None if one on the way makes progress.

    `moments`: by rank. Of ranks that wait for each other in a circle it is the one in the earliest step.
    """
    path: list[int] = []
    while rank not in path and rank in moments:
        path.append(rank)
        moment = moments[rank]
        if not moment.is_over_limit:
            return None  # [1]
        if moment.waits is None:
            return moment  # [2]
        # Wait for several: only one that does not wait itself can be the cause.
        rank = _next(moments, rank)
    circle = path[path.index(rank) :] if rank in path else path
    return min((moments[one] for one in circle), key=lambda moment: (moment.step, moment.rank))  # [3]


def _next(moments: Mapping[int, Moment], rank: int) -> int:
    """The rank to follow among those that `rank` waits for: one that waits for none, longest without progress.

    If none of them is in `moments`, it is `rank` itself.
    """
    awaited = moments[rank].waits or tuple(other for other in moments if other != rank)
    # Ranks without a beat so far are not in `moments`.
    known = [moments[one] for one in awaited if one in moments and one != rank]
    # The rank itself: the loop then ends with it as its own circle.
    if not known:
        return rank
    return min(known, key=lambda moment: (moment.waits is not None, -moment.still, moment.step, moment.rank)).rank


def reason_of(culprit: Moment, moments: Mapping[int, Moment], stacks: Path | None) -> str:
    """The text that follows "rank 1 (host, process 7)" in a message: how long it hangs, where, and who waits for it.

    `culprit`: the moment of that rank. `stacks`: the folder of the stacks; None: there are none.
    """
    still = f"{culprit.still:.0f}" if culprit.still >= 10 else f"{culprit.still:.1f}"
    lines = [f"has made no progress for {still} s: {culprit.place()}"]
    if culprit.waits is not None:
        named = ", ".join(f"rank {rank}" for rank in culprit.waits) or "the other ranks"
        lines[0] += f", waiting for {named}, which wait too"
    waiting = [moment for moment in moments.values() if moment.waits is not None and moment.rank != culprit.rank]
    lines += [f"rank {moment.rank} waits for it: {moment.place()}" for moment in waiting[:_SHOWN]]
    if len(waiting) > _SHOWN:
        lines.append(f"{len(waiting) - _SHOWN} other ranks wait for it too")
    if stacks is not None:
        lines.append(f"The Python stacks of all ranks are in {stacks}/rank_*.stacks.")
    limit = f"{culprit.limit:g} s" if culprit.limit is not None else "none"
    lines.append(f"The limit here was {limit}; run.stuck_after changes it.")
    return "\n".join(lines)


def stacks_file(folder: Path, rank: int) -> Path:
    """The path of the file in `folder` to which a rank writes its Python stacks."""
    return folder / f"rank_{rank}.stacks"


def dump_stacks(progress: Progress) -> None:
    """Write the Python stacks of this rank's threads and data workers into its file in `progress.folder`.

    Without a folder it does nothing. Errors of the file system are ignored.
    """
    if progress.folder is None:
        return
    with suppress(OSError):  # the job ends anyway, and its message says why
        progress.folder.mkdir(parents=True, exist_ok=True)
        with stacks_file(progress.folder, progress.rank).open("w", encoding="utf-8") as file:
            # With 0.0 the look adds nothing to the time without progress.
            file.write(f"Rank {progress.rank}: {progress.look(0.0).place()}\n")
            file.flush()
            # It writes to the descriptor directly, so what Python has buffered must be there before.
            faulthandler.dump_traceback(file, all_threads=True)
            if helpers := progress.helper_stacks():
                file.write(f"\n{helpers}")
