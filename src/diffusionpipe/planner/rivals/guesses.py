"""Layouts that other systems' planners look at with their own estimates, and the times that their formulas need."""

from dataclasses import dataclass

from diffusionpipe.ir import Sharded
from diffusionpipe.planner.rivals.baselines import zero3_bytes
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.dynamic_program import LinkTime, StageTime
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerEstimate:
    """A layout that another system's planner looks at, and the time that its formula gives it."""

    judge: Judge
    """The judge of the layout; its batch is larger than the asked one if replicas could not share that."""
    candidate: Candidate
    seconds: Seconds
    """Time of an iteration without encoders and update."""
    remark: str = ""
    """A sentence on what the other system would do here and DiffusionPipe cannot."""


def overflow_of(guess: PlannerEstimate) -> Bytes:
    """The bytes that the fullest device lacks for the layout; negative: bytes that are left."""
    judge, candidate = guess.judge, guess.candidate
    if candidate.sharded is Sharded.ALL:
        samples = judge.tables.unit_samples(candidate.arrangement, candidate.microbatches)
        held = zero3_bytes(judge, samples, candidate.microbatches)
        return held - min(judge.tables.ground(candidate.arrangement).memories)
    return judge.footprint.overflow(candidate, judge.footprint.held(candidate))


def times_of(judge: Judge, candidate: Candidate) -> tuple[list[StageTime], list[LinkTime]]:
    """(times of each stage of a candidate, times of each link between neighbours), as planners' formulas need them.

    A stage has (forward, backward, gradient sum) of a micro-batch, a link (forward, back), all in seconds.
    """
    counts, starts = candidate.replicas, candidate.starts
    question = judge.questions.question(
        candidate.arrangement, candidate.microbatches, replicas=tuple(set(counts)), ignores_memory=True
    )
    stages, links, position = list[StageTime](), list[LinkTime](), 0
    for index, (first, count) in enumerate(zip(starts, counts, strict=True)):
        stop = (*starts, judge.tables.num_layers)[index + 1]
        times = question.stage(first, stop, position, count, len(starts) - index)
        assert times, "nothing is refused without a cap and a memory limit"
        forward, backward, reduce, *_ = times
        stages.append((forward, backward, reduce))
        if index:
            ahead, back, *_ = question.link(first, position, counts[index - 1], count)
            links.append((ahead, back))
        position += count
    return stages, links
