"""Kept results: no layout or system that trains the same is faster than the planner's choice, near-ties apart."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cards.cells import CACHED, OURS, STORED, SYSTEMS, TUNED
from benchmarks.choices import checked
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE
from diffusionpipe.workflows.planning.profile_cache import cache_folder
from diffusionpipe.workflows.planning.stated_model import StatedModel, computed_profile
from diffusionpipe.workflows.planning.stated_setting import stated_setting

RESULTS = Path(__file__).parents[2] / "benchmarks"
ROUNDING = 0.005
"""Speeds have three digits."""
GAP = re.compile(r" {2,}")


@dataclass(frozen=True)
class Speed:
    """A system's samples a second in a cell, and whether its layout fits."""

    samples: float
    fits: bool

    @classmethod
    def of(cls, word: str) -> "Speed":
        """The speed that a table shows."""
        return cls(samples=float(word.rstrip("*")), fits=not word.endswith("*"))


def lines_below(text: str, title: str) -> list[str]:
    """The lines of the table with this title, from its head to the next empty line."""
    after = text.partition(title)[2].split("\n\n")[0]
    return [line for line in after.splitlines()[1:] if line.strip()]


def speeds_of(line: str, systems: tuple[str, ...], first: int) -> dict[str, Speed]:
    """System -> its speed; `first`: the number of columns before the systems' own. Systems without a layout are left
    out."""
    words = GAP.split(line.strip())[first:]
    return {name: Speed.of(word) for name, word in zip(systems, words, strict=False) if word != "-"}


def cards() -> list[tuple[str, dict[str, Speed]]]:
    """(machine and model, system -> speed) of each cell of benchmarks/cards."""
    text = (RESULTS / "cards/results/speed.txt").read_text(encoding="utf-8")
    found: dict[str, dict[str, Speed]] = {}
    tuned = tuple(name for name in TUNED if name != CACHED)
    for title, systems, first in (
        ("Samples a second, each at its own best sizes", SYSTEMS, 5),
        ("Samples a second of data parallelism as people tune it", (OURS, *tuned), 3),
    ):
        for line in lines_below(text, title):
            if re.match(r"\d x |RTX", line):
                cell = ", ".join(GAP.split(line)[:2])
                found.setdefault(cell, {}).update(speeds_of(line, systems, first))
    return list(found.items())


CARDS = cards()


def test_every_cell_of_the_cards_is_read_with_all_its_systems():
    assert len(CARDS) == 20
    assert all(set(speeds) >= set(SYSTEMS) for _, speeds in CARDS)


@pytest.mark.parametrize(("cell", "speeds"), CARDS, ids=[cell for cell, _ in CARDS])
def test_nothing_that_trains_the_same_and_fits_is_faster_than_the_choice(cell, speeds):
    fitting = {name: one.samples for name, one in speeds.items() if one.fits}
    assert all(speed <= fitting[OURS] * (1 + NEAR_TIE + ROUNDING) for speed in fitting.values()), cell


def test_on_stored_bases_no_other_system_that_fits_is_faster_than_the_choice_on_the_same_base():
    lines = lines_below((RESULTS / "cards/results/bases.txt").read_text(encoding="utf-8"), "Samples a second of data")
    found = [
        speeds_of(line, (OURS, *TUNED, *STORED), 3) for line in lines if re.match(r"(\d x |RTX).* +\d+\*? *", line)
    ]
    assert len(found) == 5
    for speeds in found:
        for base in ("int8 base", "nf4 base"):
            own = speeds[f"{OURS}, {base}"].samples
            others = [one.samples for name, one in speeds.items() if name.endswith(base) and one.fits]
            assert max(others) <= own * (1 + NEAR_TIE + ROUNDING)


@dataclass(frozen=True)
class Fit:
    """A row of benchmarks/fits that fits: the state, samples of a step, and its seconds."""

    state: str
    batch: int
    step: float


ROW = re.compile(
    r"(?P<model>\S.*?) {2,}(?P<trained>\S.*?) {2,}(?P<number>\d) x (?P<cards>.*?) {2,}(?P<state>.*?) {2,}.*? {2,}"
    r"(?P<batch>\d+) +\d+% +[\d.]+ (?P<rest>.*)"
)


def fits() -> dict[tuple[str, str, str, int], Fit]:
    """(model, what is trained, cards, their number) -> the last row of all tables that has them, if it fits."""
    found = dict[tuple[str, str, str, int], Fit]()
    for name in ("fits", "widths", "clips"):
        is_timed = False
        for line in (RESULTS / f"fits/results/{name}.txt").read_text(encoding="utf-8").splitlines():
            is_timed = line.endswith("CPU s") if line.startswith("model ") else is_timed
            if (row := ROW.match(line)) and not re.search(r" - ?", f"{row['rest']} "):
                step = row["rest"].split()[-2 if is_timed else -1]
                key = row["model"], row["trained"], row["cards"], int(row["number"])
                found[key] = Fit(state=row["state"], batch=int(row["batch"]), step=float(step))
    return found


def test_twice_as_many_cards_take_twice_the_samples_in_about_the_same_time():
    """Two groups of the layout on half of the cards are one of the layouts; their sums of gradients take little."""
    rows, compared = fits(), 0
    for (model, trained, cards, number), few in rows.items():
        many = rows.get((model, trained, cards, 2 * number))
        if many and (many.state, many.batch) == (few.state, 2 * few.batch):
            compared += 1
            assert many.step <= few.step * (1 + NEAR_TIE), (model, trained, cards, 2 * number)
    assert compared > 50


def choice_of(step: float, finalists: Sequence[tuple[float, int]], *, faster: float | None = None) -> Any:
    """A choice with this step, beside simulated layouts as (step, bytes that they lack)."""
    proposals = [(None, SimpleNamespace(step=one, overflow=overflow)) for one, overflow in finalists]
    return SimpleNamespace(
        step=step,
        sizes="",
        fastest=SimpleNamespace(step=faster or step),
        search=SimpleNamespace(finalists=proposals),
    )


def test_cells_are_made_of_choices_that_no_simulated_layout_beats_near_ties_apart():
    near = choice_of(1.0, [(0.99, 0), (0.5, 1)])
    assert checked(near) is near
    for beaten in (choice_of(1.0, [(0.98, 0)]), choice_of(1.0, [], faster=0.98)):
        with pytest.raises(AssertionError, match=r"another layout 0\.98 s"):
            checked(beaten)


@pytest.mark.timeout(1800)
def test_no_row_of_sdxl_on_eight_h100_with_256_samples_is_faster_than_the_choice():
    """The rows are those of `plan --model sdxl --cluster h100x8 --batch 256`, other systems among them."""
    profile, _ = computed_profile(StatedModel(name="sdxl", has_narrow_store=True), "h100", cache_folder(os.environ))
    setting = stated_setting(profile, load_cluster("h100x8"), 256, checkpoint=(), has_ema=False, optimizer="AdamW")
    choice = checked(choose(setting))
    found = choice.comparison()
    fitting = [row for row in (*found.simulated, *found.others) if row.fits]
    assert len(found.others) >= 4
    assert choice.step <= min(row.step for row in fitting) * (1 + NEAR_TIE)
