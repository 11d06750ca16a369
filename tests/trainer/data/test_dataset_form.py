import json
from dataclasses import fields
from pathlib import Path

import pytest

from diffusionpipe.trainer.data.dataset import Dataset, Sample
from diffusionpipe.trainer.data.dataset_form import DATASETS

SAMPLES = (
    Sample(name="a\udcff.png", text="a \x00 café"),
    Sample(name="b/c.png", label=3),
    Sample(name="d.png", text="", condition="edges/d.png"),
)


def sent(value):
    return DATASETS.read(json.loads(json.dumps(DATASETS.write(value))))


def test_samples_arrive_as_they_were_scanned():
    train = Dataset(folder=Path("x"), samples=SAMPLES, contents="1f", rate=23.976, growth=((8, 1),))
    held_out = Dataset(folder=Path("/y"), samples=())
    assert sent((train, held_out)) == (train, held_out)
    assert sent((train, None)) == (train, None)
    assert {field.name for field in fields(Dataset)} == {"folder", "samples", "contents", "rate", "growth"}, (
        "let the form hold the new fields too"
    )


@pytest.mark.parametrize("column", [[1, "b", "c"], ["a", "b"], "abc", [["a"], "b", "c"]])
def test_other_columns_are_refused(column):
    data = DATASETS.write((Dataset(folder=Path("x"), samples=SAMPLES), None))
    data[0][4]["name"] = column
    with pytest.raises(ValueError, match=r"column|argument"):
        DATASETS.read(data)
    bad = ([["x", "1f", "fast", [], {}], None], [["x", "1f", None, [[1]], {}], None], [["x", "1f", None, 3, {}], None])
    for other in (3, [1], [None, None], [["x", {}], None], *bad):
        with pytest.raises(ValueError, match=r"needed|columns|number"):
            DATASETS.read(other)
