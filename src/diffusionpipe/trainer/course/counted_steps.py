"""Which of the first steps of a run may judge its prediction.

    other programs used cores that the ranks needed    disturbed: does not count
    a rank waited for a core all the same              the ranks and data workers of this job share cores: such a step
                                                       counts if most are such, because the next ones will be too

Where too few are undisturbed, nothing is judged: a correction by disturbed steps predicts the other programs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi, sqrt
from statistics import median

from diffusionpipe.runtime.machine.machine_use import CoreUse
from diffusionpipe.units import Seconds

COUNTED = 15
"""The number of steps that one round records."""
ENOUGH = 8
"""The number of steps that must count for a judgement: more than half of the first `COUNTED`."""
MOST_ROUNDS = 3
"""The largest number of rounds of `COUNTED` steps, until enough steps count."""
LATE = 0.03
"""The largest part of a calm step in which a rank waited for a core."""
DISTURBED = 0.05
"""The part of all cores by which other programs must exceed the part that the ranks leave free to disturb a step."""
PRECISE = 0.01
"""The largest standard error of the median iteration, relative to it, with which no more steps are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The measurements of one recorded step over all ranks, by which it counts or not."""

    without_core: float
    """The largest part of the step, over the ranks, in which a rank was ready to run and had no core."""
    iteration: Seconds
    """The seconds of the step's iteration on the slowest rank."""
    use: CoreUse | None = None
    """Use of the cores by other programs; None where it cannot be read."""

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs surely used over 5 % of the cores beyond those that the ranks leave free."""
        return self.use is not None and self.use.others - self.use.doubt - self.use.room > DISTURBED


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The recorded steps that may judge the prediction, the number of disturbed ones, and why more steps are needed."""

    steps: tuple[int, ...]
    """The positions of the steps that count, from 0, in order; () if too few are undisturbed."""
    num_disturbed: int
    """The number of recorded steps that other programs disturbed."""
    others: float | None
    """The part of the cores that other programs used, the median over the steps that count, or over all steps if none
    counts; None where it is unknown."""
    why_more: str
    """The reason, in words, to record further steps if there are any; "" if these steps are enough."""


def representative_steps(notes: Sequence[Note]) -> Counted:
    """The steps that may judge the prediction, with the number of disturbed steps and the reason to record more.

    Calm steps count, or all undisturbed ones where too few of them are calm.

    Too few are fewer than `ENOUGH`, or fewer than half. With fewer than `ENOUGH` undisturbed steps none counts.
    """
    undisturbed = [index for index, note in enumerate(notes) if not note.is_disturbed]
    calm = [index for index in undisturbed if notes[index].without_core <= LATE]
    # Where most steps waited for a core, waiting is usual on this machine, and calm steps alone would predict too
    # little.
    are_many = len(calm) >= ENOUGH and 2 * len(calm) >= len(undisturbed)
    num_disturbed, why_more = len(notes) - len(undisturbed), ""
    if len(undisturbed) < ENOUGH:
        steps, why_more = [], f"{used_text(_others(notes) or 0.0)}, too much in {num_disturbed} of {len(notes)} steps"
    elif not are_many:
        late = len(undisturbed) - len(calm)
        why_more = f"ranks and data workers of this run waited for a core in {late} of {len(notes)} steps"
        steps = undisturbed
    else:
        steps, error = calm, error_of_median([notes[index].iteration for index in calm])
        if error > PRECISE:
            why_more = f"steps vary: the median of {len(calm)} is known within {error:.1%} only"
    others = _others([notes[index] for index in steps] or notes)
    return Counted(steps=tuple(steps), num_disturbed=num_disturbed, others=others, why_more=why_more)


def used_text(others: float) -> str:
    """The words "other programs used N % of the cores"; `others` is the part, from 0 to 1."""
    return f"other programs used {100 * others:.0f} % of the cores"


def _others(notes: Sequence[Note]) -> float | None:
    shares = [note.use.others for note in notes if note.use is not None]
    return median(shares) if shares else None


def error_of_median(values: Sequence[float]) -> float:
    """The standard error of the values' median divided by the median.

    The scatter is 1.4826 times the median deviation.
    """
    middle = median(values)
    scatter = 1.4826 * median(abs(value - middle) for value in values)  # of a normal distribution: its deviation
    # The median of n values of a normal distribution has the standard error sqrt(pi / 2) * deviation / sqrt(n).
    return sqrt(pi / 2) * scatter / sqrt(len(values)) / middle
