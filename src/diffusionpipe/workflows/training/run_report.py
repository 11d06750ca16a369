"""A run's report on itself: at its start its facts and expected times, at its end the parts of its median step."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Protocol

from diffusionpipe.runtime.machine.error_file import is_shortage
from diffusionpipe.units import Seconds
from diffusionpipe.workflows.training.expectation import Expectation, expectation_of
from diffusionpipe.workflows.training.expected_step import keep_expected
from diffusionpipe.workflows.training.run_facts import RunFacts, facts_of

if TYPE_CHECKING:
    from diffusionpipe.ir.data_survey import Line
    from diffusionpipe.planner.correction.correct import IterationTimes
    from diffusionpipe.trainer.recipe import Recipe
    from diffusionpipe.trainer.setup.start import Start
    from diffusionpipe.workflows.training.run_check import RunCheck

PARTS_OF_STEP = ("iteration", "update", "data")


class RunWords(Protocol):
    """Shows the words of a run to its user."""

    def data(self, lines: "Sequence[Line]") -> None:
        """Show the facts about the data, some of which are warnings."""

    def begin(self, facts: RunFacts, expected: Expectation) -> None:
        """Show the facts about a run that begins, and its expected times and memory."""

    def end(
        self,
        measured: Mapping[str, Seconds],
        expected: Expectation,
        peak: float | None,
        corrected: "IterationTimes | None",
    ) -> None:
        """Show the parts of the median step by name, the prediction, and rank 0's peak of memory in GiB.

        `corrected`: the prediction after the check of the first steps, None without one.
        """


class RunReport:
    """Passes the facts about a run, its data and its median step to a `RunWords`, which shows them on rank 0.

    Mutable: it keeps the facts of the start.
    """

    def __init__(self, words: RunWords, rank: int = 0, check: "RunCheck | None" = None) -> None:
        """`words`: shows the report. `rank`: this process's. `check`: corrects the prediction; None for no check."""
        self._words, self._rank, self._check = words, rank, check
        self._start: Start | None = None
        self._expected: Expectation | None = None
        self.recipe: Recipe | None = None
        """The recipe that the run trains by; None until it is settled."""

    def settle(self, recipe: "Recipe") -> None:
        """Store the recipe with which the run continues; an earlier start may have set other values."""
        self.recipe = recipe

    def data(self, lines: "Sequence[Line]") -> None:
        """Show the facts about the data by `words`."""
        self._words.data(lines)

    def start(self, start: "Start") -> None:
        """Show the facts and the expectation of the run on rank 0, and write the expectation into the run's folder.

        Every rank calls it.
        """
        self._start = start
        if self._check is not None:
            self._check.begin(start)
        if self._rank:
            return
        self._expected = expectation_of(start)
        keep_expected(self._expected, start.recipe.run.folder)
        self._words.begin(facts_of(start), self._expected)

    def explain(self, error: BaseException) -> None:
        """Add to an error of too little memory a note with the predicted peak of this rank; other errors stay as is."""
        if self._start is None or not is_shortage(error):
            return
        expected, mesh = expectation_of(self._start), self._start.plan.mesh
        size = expected.memory[mesh.place(self._rank)[1]] / 2**30
        rest = "" if expected.has_activations else " without activations and messages, which were not measured"
        error.add_note(f"The plan predicts a peak of {size:.2f} GiB for this rank{rest}.")

    def end(self) -> None:
        """Show the parts of this process's median step beside the prediction; nothing without measured steps."""
        from diffusionpipe.trainer.reporting.metrics import read_metrics

        if self._start is None or self._expected is None:
            return
        rows = read_metrics(self._start.recipe.run.folder)
        # Rows of an earlier start may be of other machines.
        measured = median_step(rows, after=self._start.step)
        if not measured:
            return
        # Not every row has it, so the last one that does.
        peak = next((row["memory_peak_gib"] for row in reversed(rows) if "memory_peak_gib" in row), None)
        found = self._check.correction if self._check is not None else None
        self._words.end(measured, self._expected, peak, found.corrected if found is not None else None)


def median_step(rows: Sequence[Mapping[str, float | None]], *, after: int) -> dict[str, Seconds]:
    """The median seconds of a step and its parts, by name, over the steps after `after`, without the first.

    {} if there are no such steps. `rows`: the lines of metrics.jsonl.
    """
    steps = [row for row in rows if row.get("iteration_s") is not None and (row["step"] or 0) > after]
    # The first step is longer: memory is allocated, and kernels are chosen.
    steps = steps[1:] or steps
    names = ("step", *PARTS_OF_STEP) if steps else ()
    return {name: median(row[f"{name}_s"] or 0.0 for row in steps) for name in names}
