"""Batches of several sizes: two sizes in one step have each the conditions of a batch of that size alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from diffusionpipe.costs import TensorSpec
from diffusionpipe.ir.size import Clip
from diffusionpipe.runtime.compute.runs import runs_of
from diffusionpipe.trainer.data.batches.batch import Augmentation, BatchSource, Rows, make_batch
from diffusionpipe.trainer.data.batches.loader import StepLoader, fixed_batches
from diffusionpipe.trainer.data.batches.sized import HeldSizes, fixed_rows, sized
from diffusionpipe.trainer.data.scan.dataset import Dataset, Sample
from diffusionpipe.trainer.data.sizes.order import SizeOrder
from diffusionpipe.trainer.data.sizes.sizes import SizeRules, assign

WIDE, HIGH = Clip(width=16, height=8), Clip(width=8, height=16)
FOUND = ((40, 20), (20, 40), (32, 16), (16, 32), (30, 20), (20, 30))


def inputs_of(size):
    latents = (4, size.height // 2, size.width // 2)
    return (
        TensorSpec(name="pixels", shape=(3, size.height, size.width)),
        TensorSpec(name="time_ids", shape=(6,)),
        TensorSpec(name="noise", shape=latents),
        TensorSpec(name="time", shape=()),
    )


@pytest.fixture
def source(tmp_path):
    random = np.random.default_rng(0)
    for number, (width, height) in enumerate(FOUND):
        picture = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(picture).save(tmp_path / f"{number}.png")
    samples = tuple(Sample(name=f"{number}.png", text="a", size=size) for number, size in enumerate(FOUND))
    dataset = Dataset(folder=tmp_path, samples=samples)
    return BatchSource(dataset=dataset, inputs=inputs_of(WIDE), seed=5, augmentation=Augmentation(random_crop=True))


def loader_of(source, positions):
    order = SizeOrder(assignment=assign(FOUND, SizeRules(areas=((WIDE, HIGH),)), 2), seed=5, run=2)
    sizes = sized(source, order, {WIDE: inputs_of(WIDE), HIGH: inputs_of(HIGH)})
    return StepLoader(
        source=source,
        batch=8,
        positions=positions,
        first_step=0,
        num_steps=3,
        workers=0,
        sizes=sizes,
        group=tuple(range(8)),
    )


def test_each_sample_has_the_conditions_of_a_batch_of_its_size_alone(source):
    loader = loader_of(source, tuple(range(8)))
    for step in range(3):
        sizes, runs = runs_of(loader.load(step))
        assert len(sizes) == 8
        assert set(sizes) == {0, 1}
        position = 0
        for run in runs:
            for row in range(len(run["pixels"])):
                size = (WIDE, HIGH)[sizes[position]]
                place = loader.sizes.order.at(8 * step + position)
                own = replace(source, inputs=inputs_of(size))
                alone = make_batch(own, Rows(samples=(place.sample,), positions=(position,), step=step))
                assert all(torch.equal(run[name][row : row + 1], alone[name]) for name in alone)
                assert run["time_ids"][row].tolist()[4:] == [size.height, size.width]
                position += 1
        assert position == 8


def test_a_rank_loads_its_rows_alone_and_is_given_the_sizes_of_all(source):
    whole, part = loader_of(source, tuple(range(8))).load(1), loader_of(source, (3, 4, 5)).load(1)
    (sizes, runs), (known, own) = runs_of(whole), runs_of(part)
    assert known == sizes
    rows = [run["noise"][row] for run in runs for row in range(len(run["noise"]))]
    found = [run["noise"][row] for run in own for row in range(len(run["noise"]))]
    assert all(torch.equal(one, other) for one, other in zip(found, rows[3:6], strict=True))


def test_validation_has_every_row_once_in_micro_batches_of_one_size(source):
    numbers = (0, 1, 0, 1, 0, 1)
    held = HeldSizes(numbers=numbers, sources=tuple(replace(source, inputs=inputs_of(size)) for size in (WIDE, HIGH)))
    fixed = fixed_rows(12, times=2, batch=8, cell=4, held=held)
    assert sorted(row for row, counts in zip(fixed.rows, fixed.counts, strict=True) if counts) == list(range(12))
    for start in range(0, len(fixed.rows), 4):
        assert len({numbers[row // 2] for row in fixed.rows[start : start + 4]}) == 1
    group = tuple(range(8))
    settings = {"batch": 8, "times": (0.2, 0.6)}
    batches = list(fixed_batches(source, fixed, **settings, positions=group, held=held, group=group))
    plain = {}
    for size, own in enumerate(held.sources):
        for batch in fixed_batches(own, fixed_rows(12, times=2, batch=8), **settings, positions=group):
            plain[size] = [*plain.get(size, ()), *batch["noise"]]
    position = 0
    for batch in batches:
        for run in runs_of(batch)[1]:
            for noise in run["noise"]:
                row = fixed.rows[position]
                assert torch.equal(noise, plain[numbers[row // 2]][row])
                position += 1
    assert position == len(fixed.rows)
