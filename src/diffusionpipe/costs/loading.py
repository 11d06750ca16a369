"""The time by which data workers lengthen a step where they share cores with ranks: an estimate and its spread.

Of n ranks on a machine with C cores, each with w workers, C - n cores are left to the workers. The work that does not
fit there, S seconds of processor time for a step, lands on the m = min(C, n) cores of the ranks, at any time of a step:

    least     it first fills the time in which ranks wait, on any core, and the rest is shared by all cores
    most      whatever lands on computing ranks delays one pipeline after the other, and nothing overlaps
    usual     the mean of two cases: workers of several ranks run beside each other, so that their delays are one delay;
              or they run in turn. Copies meet once a step, so theirs overlap in both

A rank that waits loses nothing: only the part 1 - bubble of the work delays a step in the last two. The seconds of
workers are themselves measured with a spread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The least, usual and largest value of a time that is not known exactly, in seconds."""

    least: Seconds
    usual: Seconds
    most: Seconds


NOTHING = Spread(least=0.0, usual=0.0, most=0.0)


def exactly(seconds: Seconds) -> Spread:
    """The spread of a time that is known exactly: all three values are `seconds`."""
    return Spread(least=seconds, usual=seconds, most=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDataWorkers:
    """The cores and data workers of a job's ranks, and the processor time of their batches; tuples are by rank."""

    machines: tuple[str, ...]
    """The name of each rank's machine, by rank."""
    cores: tuple[int, ...]
    """Cores that each rank may use, by rank."""
    batches: tuple[Spread, ...]
    """Processor time of each rank's part of a batch, by rank."""
    workers: int
    """Data workers of each rank; 0: the rank makes its batches itself, before its steps."""


def added_by(workers: JobDataWorkers, *, iteration: Seconds, bubble: float, copies: int) -> Spread:
    """The time by which data workers lengthen a step, on the machine where it is longest; 0 without data workers.

    Args:
        workers: the data workers of the whole job.
        iteration: the seconds of the schedule alone.
        bubble: the part of the iteration in which ranks wait, 0 to 1.
        copies: the number of data-parallel copies of the pipeline.
    """
    if not workers.workers:
        return NOTHING
    ranks = [
        [rank for rank, machine in enumerate(workers.machines) if machine == name]
        for name in dict.fromkeys(workers.machines)
    ]
    found = [_on_machine(workers, own, iteration, bubble, copies) for own in ranks]
    return Spread(
        least=max(one.least for one in found),
        usual=max(one.usual for one in found),
        most=max(one.most for one in found),
    )


def _on_machine(
    workers: JobDataWorkers, ranks: Sequence[int], iteration: Seconds, bubble: float, copies: int
) -> Spread:
    num_cores = max(workers.cores[rank] for rank in ranks)
    left = max(0, num_cores - len(ranks))
    part = max(0.0, 1 - left / (workers.workers * len(ranks)))  # the others have a core of their own
    shared = min(num_cores, len(ranks))

    def landing(of: Callable[[Spread], Seconds]) -> Seconds:
        return part * sum(of(workers.batches[rank]) for rank in ranks)

    # The waits of ranks take it first, whichever rank waits; the rest delays all cores alike.
    least = max(0.0, landing(lambda batch: batch.least) / shared - bubble * iteration)
    in_turn = (1 - bubble) / min(copies, shared)
    usual = landing(lambda batch: batch.usual) * (in_turn + (1 - bubble) / shared) / 2
    # Workers that need longer than a whole step fill all waits, so that the least is above what overlaps with them.
    usual = max(least, usual)
    return Spread(least=least, usual=usual, most=max(usual, in_turn * landing(lambda batch: batch.most)))
