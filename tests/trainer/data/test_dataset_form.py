import json
from dataclasses import fields
from pathlib import Path

import pytest

from diffusionpipe.trainer.data.scan.dataset import Dataset, Sample, SourcePart
from diffusionpipe.trainer.data.scan.dataset_form import DATASETS

SAMPLES = (
    Sample(name="a\udcff.png", text="a \x00 café"),
    Sample(name="b/c.png", label=3),
    Sample(name="d.png", text="", others=("a b",), condition="edges/d.png", source=1, place=(0, 512, 9)),
)
PARTS = (SourcePart(name="n", folder=Path("f"), count=3, repeats=2, files=("a.tar",), split="s", image="i"),)


def sent(value):
    return DATASETS.read(json.loads(json.dumps(DATASETS.write(value))))


def test_samples_arrive_as_they_were_scanned():
    train = Dataset(folder=Path("x"), samples=SAMPLES, contents="1f", rate=23.976, growth=((8, 1),), parts=PARTS)
    held_out = Dataset(folder=Path("/y"), samples=())
    assert sent((train, held_out)) == (train, held_out)
    assert sent((train, None)) == (train, None)
    assert {field.name for field in fields(Dataset)} == {"folder", "samples", "contents", "rate", "growth", "parts"}, (
        "let the form hold the new fields too"
    )


@pytest.mark.parametrize("column", [[1, "b", "c"], ["a", "b"], "abc", [["a"], "b", "c"]])
def test_other_columns_are_refused(column):
    data = DATASETS.write((Dataset(folder=Path("x"), samples=SAMPLES), None))
    data[0][5]["name"] = column
    with pytest.raises(ValueError, match=r"column|argument"):
        DATASETS.read(data)
    rows = [["x", "1f", "fast", [], [], {}], ["x", "1f", None, [[1]], [], {}], ["x", "1f", None, 3, [], {}]]
    rows += [["x", "1f", None, [], 3, {}], ["x", "1f", None, [], [["a", "b", 1]], {}]]
    bad = [[row, None] for row in rows]
    for other in (3, [1], [None, None], [["x", {}], None], *bad):
        with pytest.raises(ValueError, match=r"needed|columns|number|sources"):
            DATASETS.read(other)
