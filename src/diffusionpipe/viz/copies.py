"""Timelines of several copies of a pipeline: which of them a picture shows."""

from diffusionpipe.ir import Timeline

MOST_ROWS = 16
"""The most ranks that are all shown; of more ranks, only those in three copies are shown."""


def shown_copies(timeline: Timeline) -> dict[str, tuple[int, ...]]:
    """The ranks to draw, by the name of their copy of the pipeline: {"": all} for a few ranks.

    Of more ranks than fit only the "fastest", the "median" and the "slowest" copy are shown: by the time in which the
    copy's busiest rank computes, because copies that wait for each other's gradients all end at the same time.
    """
    copies = timeline.copies
    if timeline.num_workers <= MOST_ROWS or len(copies) <= 3:
        return {"": tuple(range(timeline.num_workers))}
    busy = [timeline.busy(rank) for rank in range(timeline.num_workers)]
    ranked = sorted(copies, key=lambda ranks: max(busy[rank] for rank in ranks))
    return {"fastest": ranked[0], "median": ranked[len(ranked) // 2], "slowest": ranked[-1]}
