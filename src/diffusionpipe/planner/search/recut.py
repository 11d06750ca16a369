"""Makes candidates with other cuts, with new orders if these depend on the graph of the stages."""

from dataclasses import replace
from functools import lru_cache

from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.schedules.building.branches import GRAPHPIPE, branched

_branched = lru_cache(maxsize=1024)(branched)


def recut(judge: Judge, candidate: Candidate, **sizes: object) -> Candidate:
    """The candidate with other sizes, given as its fields such as `starts` or `microbatches`.

    A candidate of the schedule graphpipe gets orders for its new graph of stages; others keep their orders.
    """
    candidate = replace(candidate, **sizes)  # type: ignore[arg-type]  # fields of a candidate
    if candidate.schedule != GRAPHPIPE:
        return candidate
    edges = frozenset(judge.tables.table.flows(candidate.starts))
    return replace(candidate, orders=_branched(edges, candidate.workers, candidate.microbatches))
