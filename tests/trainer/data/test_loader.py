import multiprocessing
import os
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.batches.batch import Augmentation, BatchSource
from diffusionpipe.trainer.data.batches.loader import StepLoader, fixed_batches, num_fixed_rows
from diffusionpipe.trainer.data.batches.sized import fixed_rows
from diffusionpipe.trainer.data.decoding.images import load_pixels
from diffusionpipe.trainer.data.scan.dataset import Dataset, Sample

INPUTS = (
    TensorSpec(name="pixels", shape=(3, 8, 8)),
    TensorSpec(name="input_ids", shape=(6,), dtype="int64"),
    TensorSpec(name="labels", shape=(), dtype="int64"),
    TensorSpec(name="noise", shape=(4, 2, 2)),
    TensorSpec(name="time", shape=()),
)


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import CLIPTokenizer

    letters = {f"{c}</w>": i for i, c in enumerate("nr012345")}
    special = {"<|startoftext|>": 8, "<|endoftext|>": 9}
    return CLIPTokenizer(vocab=letters | special, merges=[], pad_token="<|endoftext|>")


@pytest.fixture
def source(tmp_path, tokenizer):
    random = np.random.default_rng(0)
    for number in range(6):
        Image.fromarray(random.integers(0, 256, (8, 10, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    samples = tuple(Sample(name=f"{n}.png", text=f"n r {n}", label=n) for n in range(6))
    return BatchSource(
        dataset=Dataset(folder=tmp_path, samples=samples),
        inputs=INPUTS,
        seed=1,
        tokenizers={"input_ids": tokenizer},
        null_label=6,
        augmentation=Augmentation(random_crop=True, flip=True, condition_dropout=0.2),
    )


@pytest.fixture
def pictures(source):
    """Without a tokenizer, so that workers start faster."""
    return replace(source, inputs=INPUTS[:1], tokenizers={})


def load(source, *, positions=range(8), first_step=0, num_steps=3, workers=0):
    loader = StepLoader(
        source=source,
        batch=8,
        positions=tuple(positions),
        first_step=first_step,
        num_steps=num_steps,
        workers=workers,
    )
    return list(loader)


def assert_equal(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert list(a) == list(b)
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_union_over_ranks_is_the_batch_of_one_process(source):
    whole = load(source)
    parts = [load(source, positions=p) for p in ((0, 1, 2), (), (3, 7), (6, 4, 5))]
    order = torch.tensor([0, 1, 2, 3, 7, 6, 4, 5]).argsort()
    for step, batch in enumerate(whole):
        for name, rows in batch.items():
            assert torch.equal(rows, torch.cat([part[step][name] for part in parts])[order])


def test_resuming_at_a_step_equals_going_on(source):
    assert_equal(load(source, num_steps=5)[3:], load(source, first_step=3, num_steps=2))


def test_the_number_of_workers_changes_nothing(source):
    assert_equal(load(source, num_steps=5), load(source, num_steps=5, workers=2))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_rank_that_encodes_no_rows_gets_empty_batches(pictures, workers):
    drawn = replace(pictures, inputs=(INPUTS[0], *INPUTS[3:]))  # numbers that are drawn are arrays without strides
    for batch in load(drawn, positions=(), num_steps=2, workers=workers):
        assert {name: tuple(value.shape) for name, value in batch.items()} == {
            "pixels": (0, 3, 8, 8),
            "noise": (0, 4, 2, 2),
            "time": (0,),
        }


def test_the_batches_of_two_steps_differ(source):
    first, second = load(source, num_steps=2)
    assert not torch.equal(first["noise"], second["noise"])
    assert not torch.equal(first["time"], second["time"])


def test_a_whole_epoch_holds_each_sample_once_by_name(source):
    loader = StepLoader(source=source, batch=3, positions=(0, 1, 2), first_step=0, num_steps=2, workers=0)
    assert sorted(sample.name for step in (0, 1) for sample in loader.samples(step)) == [f"{n}.png" for n in range(6)]
    assert len(loader) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_picture_that_breaks_while_training_ends_it_by_name_and_step(pictures, workers):
    path = pictures.dataset.path(2)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"^step 0: .*2\.png: cannot be decoded") as caught:
        load(pictures, workers=workers)
    assert "Traceback" not in str(caught.value)


def test_workers_leave_signals_to_the_parent_from_their_first_instant(pictures):
    """As a terminal or torch's agent sends them to a whole process group, also while a worker imports torch."""
    loader = StepLoader(source=pictures, batch=8, positions=(0,), first_step=0, num_steps=20, workers=1)
    before, signalled = set(_children()), set()

    def send():
        while not ended.wait(0.002):
            for child in set(_children()) - before - signalled:
                signalled.add(child)
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    os.kill(child, number)

    ended, batches = threading.Event(), iter(loader)
    sender = threading.Thread(target=send)
    sender.start()
    next(batches)
    ended.set()
    sender.join()
    assert signalled
    for child in signalled:
        os.kill(child, signal.SIGTERM)
    assert len(list(batches)) == 19


def test_loading_does_not_move_the_global_generator(source):
    state = torch.get_rng_state()
    load(source, num_steps=2)
    assert torch.equal(state, torch.get_rng_state())


def test_positions_outside_the_batch_are_refused(source):
    with pytest.raises(ValueError, match="lie outside a batch of 8"):
        load(source, positions=(0, 8))


def test_validation_takes_each_sample_at_each_time_once(source):
    fixed = fixed_rows(6, times=3, batch=4)
    batches = list(fixed_batches(source, fixed, batch=4, positions=(0, 1, 2, 3), times=(0.1, 0.5, 0.9)))
    assert num_fixed_rows(source, times=(0.1, 0.5, 0.9), num_samples=2) == 6
    assert num_fixed_rows(source, times=(0.1,), num_samples=100) == 6
    assert torch.cat([b["labels"] for b in batches]).tolist() == [0, 0, 0, 1, 1, 1, 0, 0]
    assert torch.cat([b["time"] for b in batches]).tolist() == pytest.approx([0.1, 0.5, 0.9] * 2 + [0.1, 0.5])


def test_validation_is_not_augmented_and_the_same_in_every_layout(source):
    settings = {"fixed": fixed_rows(12, times=2, batch=4), "batch": 4, "times": (0.2, 0.7)}
    whole = list(fixed_batches(source, positions=(0, 1, 2, 3), **settings))
    parts = [list(fixed_batches(source, positions=p, **settings)) for p in ((0, 1), (2, 3))]
    for batch, first, second in zip(whole, *parts, strict=True):
        assert all(torch.equal(rows, torch.cat([first[name], second[name]])) for name, rows in batch.items())
    pixels = torch.cat([batch["pixels"] for batch in whole])
    expected = [load_pixels(source.dataset.path(n // 2), resolution=8) for n in range(12)]
    assert torch.equal(pixels, torch.stack(expected))
    assert torch.cat([batch["labels"] for batch in whole]).tolist() == [n // 2 for n in range(12)]


def _children():
    return [child.pid for child in multiprocessing.active_children()]
