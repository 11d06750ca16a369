"""A run's judgement of its prediction after its first steps: a table on a terminal, lines elsewhere."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.units import Seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from diffusionpipe.ir.recorded import Recorded
    from diffusionpipe.planner.correction.causes import Cause
    from diffusionpipe.planner.correction.correct import Correction

logger = logging.getLogger(__name__)

LAYERS = 3
"""The most layers that are named as slower or faster than most."""
CLEAR = 1.2
"""The factor between measured and predicted time above which a stage is named; of a layer, relative to the median."""
LEAST_SHOWN: Seconds = 5e-5
"""A cause of fewer seconds is not named: it prints as 0.0 ms."""

Numbers = Mapping[int, int]
"""Stage of the placement -> the stage's number as users know it, from the description of the run."""


class ConsoleReport:
    """Shows the check of a run's prediction: as a table on a terminal, else as lines in the log."""

    def __init__(self, console: "Console") -> None:
        self._console = console

    def corrected(self, found: "Correction", profile: Path, stages: Numbers) -> None:
        """Shows the predicted, measured and corrected times of the checked steps, and the causes of the difference.

        `profile`: the path of the corrected profile; `stages`: the number of each stage as users see it.
        """
        if self._console.is_terminal:
            self._console.print(check_table(found, profile, stages))
            return
        for line in check_lines(found, profile, stages):
            logger.info("%s", line)

    def not_judged(self, steps: tuple[int, int], why: str) -> None:
        """Shows why the steps `steps`, first and last, judge nothing."""
        if self._console.is_terminal:
            self._console.print(f"Prediction after step {steps[1]}: not judged: {why}", highlight=False)
        else:
            logger.info('checked_steps=%d-%d prediction="not judged: %s"', *steps, why)


def check_lines(found: "Correction", profile: Path, stages: Numbers) -> Iterator[str]:
    """Lines for the log: the predicted, measured and corrected step, the causes, other programs, the profile's path."""
    first, last = found.recorded.steps
    yield (
        f"checked_steps={first}-{last} predicted_step_s={found.predicted.step:.4f} "
        f"measured_step_s={found.measured.step:.4f} corrected_step_s={found.corrected.step:.4f}"
    )
    yield f'off="{causes_text(found.causes)}"'
    if places := _places(found, stages):
        yield f'most_off="{"; ".join(places)}"'
    yield f'other_programs="{others_text(found.recorded)}"'
    yield f"corrected_profile={profile}"


def check_table(found: "Correction", profile: Path, stages: Numbers) -> "Table":
    """The predicted, measured and corrected times, and the causes of the difference, as a table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    first, last = found.recorded.steps
    table = Table(box=None, pad_edge=False, caption_justify="left", title_justify="left", caption_style="")
    table.title = f"Prediction after step {last}"
    for number, heading in enumerate((f"steps {first} to {last}", "predicted", "measured", "off", "corrected")):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    times = (
        ("step", found.predicted.step, found.measured.step, found.corrected.step),
        ("iteration", found.predicted.iteration, found.measured.iteration, found.corrected.iteration),
    )
    for name, predicted, measured, corrected in times:
        off = _signed(measured - predicted)
        table.add_row(name, _milliseconds(predicted), _milliseconds(measured), off, _milliseconds(corrected))
    for cause in found.causes:
        if abs(cause.seconds) >= LEAST_SHOWN:
            table.add_row(f"  {cause.name}", "", "", _signed(cause.seconds), "")
    words = [
        *(f"most off: {place}" for place in _places(found, stages)),
        f"other programs: {others_text(found.recorded)}",
        f"corrected profile: {profile}",
    ]
    table.caption = Text("\n".join(words))
    return table


def causes_text(causes: Sequence["Cause"]) -> str:
    """The causes in milliseconds of the step, in their order: "forwards 12.0 ms longer, loading 4.0 ms longer".

    "as predicted" where none takes 0.05 ms.
    """
    words = [
        f"{cause.name} {_milliseconds(abs(cause.seconds))} {'longer' if cause.seconds > 0 else 'shorter'}"
        for cause in causes
        if abs(cause.seconds) >= LEAST_SHOWN
    ]
    return ", ".join(words) or "as predicted"


def others_text(recorded: "Recorded") -> str:
    """The part of the cores that other programs used, in percent, and how many steps were left out; or "unknown"."""
    if recorded.others is None:
        return "unknown"
    first, last = recorded.steps
    left_out = f", {recorded.num_disturbed} of {last - first + 1} steps left out" if recorded.num_disturbed else ""
    return f"{100 * recorded.others:.0f} % of the cores{left_out}"


def _places(found: "Correction", stages: Numbers) -> list[str]:
    """Phrases on the stage whose compute differs most from its prediction, and on layers slower or faster than most.

    Only factors above `CLEAR` count, and at most `LAYERS` layers are named; the list may be empty.
    """
    from diffusionpipe.planner.correction.causes import NAMES

    words = []
    # Ratios need times above 0 on both sides.
    if known := [one for one in found.stages if one.predicted > 0 and one.measured > 0]:
        worst = max(known, key=lambda one: max(one.measured / one.predicted, one.predicted / one.measured))
        if max(worst.measured / worst.predicted, worst.predicted / worst.measured) > CLEAR:
            where = f" of stage {stages[worst.stage]}" if len(set(stages.values())) > 1 else ""
            words.append(
                f"{NAMES[worst.op]}{where} took {_milliseconds(worst.measured)} a micro-batch instead of "
                f"{_milliseconds(worst.predicted)}"
            )
    factors = sorted(factor for _, factor in found.layers)
    # A factor that all layers have is the machine; a layer is off only beside the others.
    usual = factors[len(factors) // 2]
    apart = [(name, factor) for name, factor in found.layers if max(factor / usual, usual / factor) > CLEAR]
    apart.sort(key=lambda pair: -max(pair[1] / usual, usual / pair[1]))
    return [*words, *(f"{name} took {factor:.2f} times as long" for name, factor in apart[:LAYERS])]


def _milliseconds(seconds: Seconds) -> str:
    return f"{seconds * 1000:.1f} ms"


def _signed(seconds: Seconds) -> str:
    """The milliseconds with their sign; a time that rounds to nothing is +0.0 ms."""
    # Adding 0.0 turns -0.0 into 0.0.
    return f"{round(seconds * 1000, 1) + 0.0:+.1f} ms"
