"""The training data of a run in a page: the facts that were printed before step 1, and the sizes of training."""

from __future__ import annotations

from pathlib import Path

from diffusionpipe.errors import FileFormatError
from diffusionpipe.ir.data_survey import Survey
from diffusionpipe.ir.files import SURVEY, read_file
from diffusionpipe.trainer.course.documents import SURVEY_FILE
from diffusionpipe.workflows.report.figures import Json, absent, count, number, percent


def data_of(folder: Path) -> Json:
    """The page's part about a run's data: "lines", its facts, and "sizes", a row for each size of samples.

    Without the file of these facts it is the reason. Of the facts about sizes only the first, which sums them up, is
    there: the others say the same as the rows.
    """
    path = folder / SURVEY_FILE
    if not path.exists():
        return absent(
            f"there is no {SURVEY_FILE}: the run has not read its data yet, or it began with a version that did not "
            "keep these facts; `diffusionpipe data RECIPE` shows them"
        )
    try:
        survey = read_file(path, SURVEY)
    except FileFormatError as error:
        return absent(str(error).splitlines()[0].replace(str(path), path.name))
    every = [*survey.lines, *survey.further]
    repeated = [line for line in every if line.name == "sizes"][1:] if survey.sizes else []
    lines = [{"name": line.name, "text": line.text, "warns": line.is_warning} for line in every if line not in repeated]
    return {"lines": lines, "sizes": _rows(survey)}


def _rows(survey: Survey) -> list[Json]:
    """The page's row for each size of samples, the size with the most visits first.

    It has the size, its number of samples, its share of visits, and how much is cut away or enlarged.
    """
    whole = sum(one.visits for one in survey.sizes)
    rows: list[tuple[int, Json]] = []
    for place, one in enumerate(survey.sizes):
        key = f"sizes[{place}]"
        rows.append(
            (
                one.visits,
                {
                    "size": one.size,
                    "samples": count(one.samples, SURVEY_FILE, f"{key}.samples"),
                    "share": percent(one.visits / whole, SURVEY_FILE, f"{key}.visits / sum(visits)") if whole else None,
                    "cut": None if one.cut is None else percent(one.cut, SURVEY_FILE, f"{key}.cut"),
                    "enlarged": None
                    if one.enlarged is None
                    else number(one.enlarged, SURVEY_FILE, f"{key}.enlarged", digits=3),
                },
            )
        )
    return [row for _, row in sorted(rows, key=lambda row: -row[0])]
