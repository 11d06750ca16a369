import json

import pytest
import torch
from kit.tiny_runs import recipe_of, save_pictures, save_stable_diffusion, train_here
from PIL import Image

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.batches.batch import BatchSource, Rows, make_batch
from diffusionpipe.trainer.data.scan.dataset import scan
from diffusionpipe.trainer.data.scan.skipped import FILE, Skipping, count_skipped, read_skipped
from diffusionpipe.trainer.reporting.metrics import read_metrics

PIXELS = TensorSpec(name="pixels", shape=(3, 16, 16))
NOISE = TensorSpec(name="time", shape=())


def damage(path):
    """A JPEG whose header is whole and whose pixels are cut off."""
    picture = Image.effect_noise((64, 64), 80).convert("RGB")
    picture.save(path, format="JPEG")
    path.write_bytes(path.read_bytes()[:900])


@pytest.fixture
def folder(tmp_path):
    data = save_pictures(tmp_path / "data", count=6)
    for name in ("001.png", "004.png"):
        damage(data / name)
    (tmp_path / "run").mkdir()
    return tmp_path


def source(folder, most=100, **changes):
    skipping = Skipping(folder=folder / "run", most=most) if most else None
    return BatchSource(
        dataset=scan(folder / "data", "text"), inputs=(PIXELS, NOISE), seed=3, skipping=skipping, **changes
    )


def rows_of(*positions, step=7):
    return Rows(samples=tuple(position % 6 for position in positions), positions=positions, step=step)


def test_a_damaged_picture_stops_the_run_unless_it_may_be_skipped(folder):
    with pytest.raises(DataError, match=r"001\.png: cannot be decoded"):
        make_batch(source(folder, most=0), rows_of(*range(6)))


def test_a_damaged_picture_is_replaced_alike_on_every_layout(folder):
    made = source(folder)
    whole = make_batch(made, rows_of(*range(12)))
    first = read_skipped(folder / "run")
    for positions in ((0, 1, 2, 3, 4, 5), (11, 10), (6, 7, 8, 9)):
        part = make_batch(made, rows_of(*positions))
        for name, rows in part.items():
            assert torch.equal(rows, whole[name][list(positions)])
    assert read_skipped(folder / "run") == first, "every line once more, and no other"


def test_other_rows_are_not_changed_and_replacements_are_other_samples(folder):
    batch = make_batch(source(folder), rows_of(*range(6)))
    good = make_batch(source(folder, most=0), rows_of(0, 2, 3, 5))
    assert torch.equal(batch["pixels"][[0, 2, 3, 5]], good["pixels"])
    originals = {one.position: (one.skipped, one.instead) for one in read_skipped(folder / "run")}
    assert {position: skipped for position, (skipped, _) in originals.items()}.keys() == {1, 4}
    assert all(skipped != instead for skipped, instead in originals.values())


def test_skipped_pictures_are_listed_and_counted_up_to_a_step(folder):
    for step in (2, 3):
        make_batch(source(folder), rows_of(1, step=step))
    lines = [json.loads(line) for line in (folder / "run" / FILE).read_text().splitlines()]
    assert lines[0]["skipped"] == "001.png"
    assert "truncated" in lines[0]["reason"]
    assert [count_skipped(folder / "run", step) for step in (2, 3, 4)] == [0, 1, 2]


def test_more_skipped_pictures_than_allowed_stop_the_run(folder):
    with pytest.raises(DataError, match=r"2 pictures cannot be decoded, more than data\.max_skipped = 1"):
        make_batch(source(folder, most=1), rows_of(*range(6)))


def test_a_folder_of_damaged_pictures_ends(folder):
    for path in (folder / "data").glob("*.png"):
        damage(path)
    with pytest.raises(DataError, match="in a row"):
        make_batch(source(folder), rows_of(1))


@pytest.mark.slow
def test_a_run_that_may_skip_goes_to_its_end_and_counts_in_its_metrics(folder):
    model = save_stable_diffusion(folder / "model")
    recipe = recipe_of(
        model, folder / "data", folder / "new", data={"on_error": "skip"}, training={"steps": 3}, pipeline={"stages": 1}
    )
    assert train_here(recipe) == 3
    counts = [row["skipped_samples"] for row in read_metrics(folder / "new") if "skipped_samples" in row]
    assert counts == [count_skipped(folder / "new", step) for step in (1, 2, 3)]
    assert counts[-1] == 4, "12 samples of 6 pictures are two epochs, each with both damaged ones"


def test_a_list_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / FILE).symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=rf"{FILE}: Input/output error; remove it"):
        read_skipped(tmp_path)
