from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.batches.batch import (
    Augmentation,
    BatchSource,
    Rows,
    level_tables,
    make_batch,
    sample_indices,
    token_ids,
)
from diffusionpipe.trainer.data.decoding.images import load_pixels
from diffusionpipe.trainer.data.randomness import normal, uniform
from diffusionpipe.trainer.data.scan.dataset import Dataset, Sample

INPUTS = (
    TensorSpec(name="pixels", shape=(3, 8, 8)),
    TensorSpec(name="input_ids", shape=(5,), dtype="int64"),
    TensorSpec(name="labels", shape=(), dtype="int64"),
    TensorSpec(name="posterior_noise", shape=(4, 2, 2)),
    TensorSpec(name="noise", shape=(4, 2, 2), dtype="float64"),
    TensorSpec(name="time", shape=()),
)


def letters(texts, *, padding, max_length, truncation):
    assert (padding, truncation) == ("max_length", True)
    return {"input_ids": [([ord(c) for c in text] + [0] * max_length)[:max_length] for text in texts]}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    random = np.random.default_rng(0)
    for number in range(6):
        Image.fromarray(random.integers(0, 256, (8, 12, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    samples = tuple(Sample(name=f"{number}.png", text=f"nr {number}", label=number) for number in range(6))
    return Dataset(folder=folder, samples=samples)


def source(dataset, *, inputs=INPUTS, **augmentation):
    return BatchSource(
        dataset=dataset,
        inputs=inputs,
        seed=3,
        tokenizers={"input_ids": letters},
        null_label=10,
        augmentation=Augmentation(**augmentation),
    )


ROWS = Rows(samples=(4, 1, 4), positions=(0, 5, 6), step=2)


def test_a_batch_has_exactly_the_inputs_in_their_shapes_and_dtypes(dataset):
    batch = make_batch(source(dataset), ROWS)
    assert list(batch) == [spec.name for spec in INPUTS]
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        spec.name: ((3, *spec.shape), getattr(torch, spec.dtype)) for spec in INPUTS
    }


def test_each_row_is_its_own_sample(dataset):
    batch = make_batch(source(dataset), ROWS)
    for row, sample in enumerate(ROWS.samples):
        assert torch.equal(batch["pixels"][row], load_pixels(dataset.path(sample), resolution=8))
        assert batch["input_ids"][row].tolist() == [*map(ord, f"nr {sample}"), 0]
        assert batch["labels"][row] == sample


def test_draws_are_those_of_the_documented_keys(dataset):
    batch = make_batch(source(dataset), ROWS)
    key = {"seed": 3, "step": 2, "positions": (0, 5, 6)}
    assert torch.equal(batch["noise"], normal(**key, purpose="noise", shape=(4, 2, 2)).double())
    assert torch.equal(batch["posterior_noise"], normal(**key, purpose="posterior_noise", shape=(4, 2, 2)))
    assert torch.equal(batch["time"], uniform(**key, purpose="time"))


def test_offset_noise_adds_a_number_of_the_deviation_to_each_channel(dataset):
    spec = TensorSpec(name="base/noise", shape=(4, 2, 2, 2), dtype="float64")  # of clips
    rows = Rows(samples=(1,) * 2000, positions=tuple(range(2000)), step=0)
    plain = make_batch(source(dataset, inputs=(spec,)), rows)["base/noise"]
    offset = make_batch(source(dataset, inputs=(spec,), offset_noise=0.5), rows)["base/noise"] - plain
    assert (offset - offset[:, :, :1, :1, :1]).abs().max() < 1e-6, "it is the same for all places of a channel"
    means = offset[:, :, 0, 0, 0]  # (2000, 4)
    assert (means.std(0) - 0.5).abs().max() < 0.03
    assert (means.mean(0)).abs().max() < 0.04
    assert (torch.corrcoef(means.T) - torch.eye(4)).abs().max() < 0.08
    # The mean of a channel's noise has the variance of eight numbers and that of the offset.
    variance = (plain + offset).mean((2, 3, 4)).var(0)
    assert (variance - (1 / 8 + 0.5**2)).abs().max() < 0.04


def test_offset_noise_is_keyed_by_the_position_and_changes_no_other_input(dataset):
    plain, offset = make_batch(source(dataset), ROWS), make_batch(source(dataset, offset_noise=0.1), ROWS)
    assert {name for name in plain if not torch.equal(plain[name], offset[name])} == {"noise"}
    row = make_batch(source(dataset, offset_noise=0.1), Rows(samples=(1,), positions=(5,), step=2))
    assert torch.equal(row["noise"][0], offset["noise"][1])


def test_neighbours_share_the_number_of_their_times_wherever_they_are_made(dataset):
    rows = Rows(samples=(0,) * 6, positions=tuple(range(6)), step=2)
    times = make_batch(source(dataset, time_pairs=True), rows)["time"]
    drawn = uniform(seed=3, purpose="time", step=2, positions=(0, 2, 4))
    assert torch.equal(times[::2], drawn / 2)
    assert torch.equal(times[1::2], drawn / 2 + 0.5)
    alone = make_batch(source(dataset, time_pairs=True), Rows(samples=(0,), positions=(3,), step=2))["time"]
    assert torch.equal(alone, times[3:4])


def test_given_times_replace_the_drawn_ones(dataset):
    rows = Rows(samples=(0, 1), positions=(0, 1), step=0, times=(0.25, 0.5))
    assert make_batch(source(dataset), rows)["time"].tolist() == [0.25, 0.5]


def test_a_purpose_in_front_changes_every_draw(dataset):
    plain = make_batch(source(dataset), ROWS)
    other = make_batch(source(dataset), Rows(samples=(4, 1, 4), positions=(0, 5, 6), step=2, purpose="validation."))
    assert torch.equal(plain["pixels"], other["pixels"])
    assert not any(torch.equal(plain[name], other[name]) for name in ("noise", "posterior_noise", "time"))


def test_dropout_empties_caption_and_label_of_the_same_samples_at_about_its_rate(dataset):
    rows = Rows(samples=(1,) * 1000, positions=tuple(range(1000)), step=0)
    inputs = tuple(spec for spec in INPUTS if spec.name in ("input_ids", "labels"))
    batch = make_batch(source(dataset, inputs=inputs, condition_dropout=0.3), rows)
    dropped = batch["labels"] == 10
    assert torch.equal(dropped, (batch["input_ids"] == 0).all(1))
    assert 250 < dropped.sum() < 350
    assert (batch["labels"][~dropped] == 1).all()


@pytest.mark.parametrize(("share", "dropped"), [(0.0, 0), (1.0, 50)])
def test_no_dropout_keeps_all_and_full_dropout_none(dataset, share, dropped):
    rows = Rows(samples=(2,) * 50, positions=tuple(range(50)), step=0)
    labels = make_batch(source(dataset, inputs=(INPUTS[2],), condition_dropout=share), rows)["labels"]
    assert (labels == 10).sum() == dropped


def test_flips_and_crops_follow_the_position_and_both_ways_occur(dataset):
    rows = Rows(samples=(2,) * 40, positions=tuple(range(40)), step=0)
    pixels = make_batch(source(dataset, inputs=(INPUTS[0],), flip=True, random_crop=True), rows)["pixels"]
    path = dataset.path(2)
    possible = [
        load_pixels(path, resolution=8, crop=((left + 0.5) / 5, 0.5), flip=flip)
        for left in range(5)
        for flip in (False, True)
    ]
    seen = {next(i for i, p in enumerate(possible) if torch.equal(p, row)) for row in pixels}
    assert len(seen) >= 8


@given(size=st.integers(1, 9), batch=st.integers(1, 20), step=st.integers(0, 30), seed=st.integers(0, 99))
def test_every_epoch_holds_each_sample_once(size, batch, step, seed):
    steps = range(step + size + 1)
    order = [i for k in steps for i in sample_indices(size, seed=seed, batch=batch, step=k, positions=range(batch))]
    for epoch in range(len(order) // size):
        assert sorted(order[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_positions_pick_from_the_global_batch():
    whole = sample_indices(7, seed=0, batch=10, step=4, positions=range(10))
    assert sample_indices(7, seed=0, batch=10, step=4, positions=(9, 2)) == (whole[9], whole[2])


def test_a_rank_without_positions_gets_empty_tensors(dataset):
    batch = make_batch(source(dataset), Rows(samples=(), positions=(), step=0))
    assert {name: tuple(t.shape) for name, t in batch.items()} == {s.name: (0, *s.shape) for s in INPUTS}


def test_texts_are_cut_and_padded_to_the_length():
    assert token_ids(letters, ["ab", "abcdef"], 3).tolist() == [[97, 98, 0], [97, 98, 99]]


def test_what_a_source_lacks_is_reported_at_once(dataset):
    with pytest.raises(DataError) as caught:
        BatchSource(dataset=dataset, inputs=(*INPUTS, TensorSpec(name="depth", shape=())), seed=0)
    for part in ("'depth', which no data set provides", "no tokenizer is given", "null label is not given"):
        assert part in str(caught.value)


def test_labels_beyond_the_models_classes_are_refused(dataset):
    with pytest.raises(DataError, match=r"2 pictures have no label below 4.* 4\.png has 4"):
        BatchSource(dataset=dataset, inputs=(INPUTS[2],), seed=0, null_label=4)


def _write_picture(path, width, height, orientation=None):
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.fromarray(values).save(path, exif=exif)


SIZES = TensorSpec(name="time_ids", shape=(6,))


def test_sizes_are_those_of_the_picture_as_seen_and_of_its_cut(tmp_path):
    _write_picture(tmp_path / "wide.jpg", 48, 16)
    _write_picture(tmp_path / "turned.jpg", 16, 32, orientation=6)
    samples = (Sample(name="wide.jpg"), Sample(name="turned.jpg"))
    made = source(Dataset(folder=tmp_path, samples=samples), inputs=(INPUTS[0], SIZES))
    batch = make_batch(made, Rows(samples=(0, 1), positions=(0, 1), step=0))
    # 48 x 16 becomes 24 x 8 and is cut at half of the 17 places; 32 x 16, upright, becomes 16 x 8: half of 9.
    assert batch["time_ids"].tolist() == [[16, 48, 0, 8, 8, 8], [16, 32, 0, 4, 8, 8]]


def test_sizes_agree_with_the_pixels_also_when_cut_and_mirrored_at_random(dataset):
    rows = Rows(samples=(2,) * 30, positions=tuple(range(30)), step=0)
    batch = make_batch(source(dataset, inputs=(INPUTS[0], SIZES), flip=True, random_crop=True), rows)
    whole = torch.from_numpy(np.asarray(Image.open(dataset.path(2)), dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)
    for pixels, (*_, left, _, _) in zip(batch["pixels"], batch["time_ids"].int().tolist(), strict=True):
        views = [view[..., left : left + 8] for view in (whole, whole.flip(-1))]
        assert any(torch.allclose(pixels, view, atol=1e-6) for view in views)
    assert len({tuple(row) for row in batch["time_ids"].tolist()}) > 3


def test_a_condition_is_cut_and_mirrored_like_its_picture(tmp_path):
    _write_picture(tmp_path / "a.png", 12, 8)
    _write_picture(tmp_path / "b.png", 12, 8)
    samples = (Sample(name="a.png", condition="b.png"), Sample(name="b.png", condition="a.png"))
    condition = TensorSpec(name="condition", shape=(3, 8, 8))
    made = source(Dataset(folder=tmp_path, samples=samples), inputs=(INPUTS[0], condition), flip=True, random_crop=True)
    rows = Rows(samples=(0,) * 9, positions=tuple(range(9)), step=0)
    others = Rows(samples=(1,) * 9, positions=tuple(range(9)), step=0)
    assert torch.equal(make_batch(made, rows)["condition"], (make_batch(made, others)["pixels"] + 1) / 2)


def test_every_text_encoder_gets_its_own_tokens_of_the_same_dropped_captions(dataset):
    inputs = tuple(TensorSpec(name=f"input_ids{n}", shape=(5,), dtype="int64") for n in ("", "_2", "_3"))

    def shifted(by):
        return lambda texts, **options: {
            "input_ids": [[i + by for i in row] for row in letters(texts, **options)["input_ids"]]
        }

    made = BatchSource(
        dataset=dataset,
        inputs=inputs,
        seed=0,
        tokenizers={spec.name: shifted(by) for by, spec in enumerate(inputs)},
        augmentation=Augmentation(condition_dropout=0.5),
    )
    batch = make_batch(made, Rows(samples=(3,) * 40, positions=tuple(range(40)), step=0))
    assert 5 < (batch["input_ids"] == 0).all(1).sum() < 35
    for by, spec in enumerate(inputs):
        assert torch.equal(batch[spec.name], batch["input_ids"] + by)


def test_training_is_told_that_there_is_no_guidance(dataset):
    batch = make_batch(source(dataset, inputs=(TensorSpec(name="guidance", shape=()),)), ROWS)
    assert batch["guidance"].tolist() == [1, 1, 1]
    told = replace(source(dataset, inputs=(TensorSpec(name="guidance", shape=()),)), guidance=3.5)
    assert make_batch(told, ROWS)["guidance"].tolist() == [3.5, 3.5, 3.5]


def test_a_model_of_clips_is_told_any_rate_of_pictures_which_are_one_frame(dataset):
    batch = make_batch(source(dataset, inputs=(TensorSpec(name="frame_rate", shape=()),)), ROWS)
    assert batch["frame_rate"].tolist() == [1, 1, 1]


def test_tokenizers_and_conditions_that_are_missing_are_named(dataset):
    inputs = (TensorSpec(name="input_ids_2", shape=(5,), dtype="int64"), TensorSpec(name="condition", shape=(3, 8, 8)))
    with pytest.raises(DataError) as caught:
        source(dataset, inputs=inputs)
    for part in (
        "captions as 'input_ids_2', but no tokenizer",
        '6 pictures have no "conditioning_image"',
        "e.g. 0.png",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_levels_of_pictures_stand_for_the_same_bits(dataset, dtype):
    samples = tuple(replace(sample, condition=sample.name) for sample in dataset.samples)
    inputs = tuple(TensorSpec(name=name, shape=(3, 8, 8), dtype=dtype) for name in ("pixels", "super/condition"))
    made = source(replace(dataset, samples=samples), inputs=inputs, random_crop=True, flip=True)
    levels, values = make_batch(made, ROWS, has_levels=True), make_batch(made, ROWS)
    tables = level_tables(inputs, torch.device("cpu"))
    for name, value in values.items():
        assert levels[name].dtype == torch.uint8
        assert torch.equal(tables[name][levels[name].int()], value)
        assert value.dtype == getattr(torch, dtype)
