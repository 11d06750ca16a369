"""Sizes, places and coordinates of patches."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from diffusionpipe.costs import TensorSpec
from diffusionpipe.ir.size import Clip
from diffusionpipe.trainer.data.batches.batch import Augmentation, BatchSource, Rows, make_batch
from diffusionpipe.trainer.data.batches.patch_order import PatchOrder
from diffusionpipe.trainer.data.scan.dataset import Dataset, Sample
from diffusionpipe.trainer.data.sizes.patches import patch_sizes, shares_of

SIDE, LATENTS, UNIT = 16, 8, 2


def order_of(sizes, share_whole=0.5, **others):
    shares = shares_of(share_whole, len(sizes))
    return PatchOrder(sizes=sizes, shares=shares, **{"num_samples": 7, "growth": (), "seed": 0, "run": 4, **others})


@pytest.mark.parametrize(
    ("is_encoded", "expected"), [(False, (0.5, 0.3, 0.2)), (True, (0.5, 0.5))], ids=["pixels", "latents"]
)
def test_the_sizes_of_twenty_thousand_steps_are_within_a_percent_of_their_shares(is_encoded, expected):
    order = order_of(patch_sizes(SIDE, is_encoded=is_encoded))
    counts = Counter(order.size_numbers(range(0, 80_000, 4)))
    assert [counts[number] / 20_000 for number in range(len(expected))] == pytest.approx(expected, abs=0.01)


def test_a_step_has_one_size_and_the_samples_that_it_would_have_without_patches():
    order, plain = order_of(patch_sizes(SIDE, is_encoded=False)), order_of((Clip.square(SIDE),))
    places = [order.at(position) for position in range(400)]
    assert all(len({place.size for place in places[start : start + 4]}) == 1 for start in range(0, 400, 4))
    assert tuple(place.size for place in places) == order.size_numbers(range(400))
    assert [place[1:] for place in places] == [plain.at(position)[1:] for position in range(400)]


def source_of(folder, patch, **others):
    """A source of patches; x and y of a pixel are its levels of red and green."""
    y, x = np.mgrid[0:SIDE, 0:SIDE].astype(np.uint8)
    Image.fromarray(np.stack([x, y, 0 * x], axis=-1)).save(folder / "000.png")
    inputs = (
        TensorSpec(name="pixels", shape=(3, patch, patch)),
        TensorSpec(name="coordinates", shape=(2, patch // UNIT, patch // UNIT)),
        TensorSpec(name="time_ids", shape=(6,)),
    )
    dataset = Dataset(folder=folder, samples=(Sample(name="000.png"),))
    return BatchSource(dataset=dataset, inputs=inputs, seed=3, whole=(SIDE, SIDE), **others)


def rows_of(count):
    return Rows(samples=(0,) * count, positions=tuple(range(count)), step=5)


@pytest.mark.parametrize("patch", [4, 8, 16])
@pytest.mark.parametrize("flip", [False, True])
def test_coordinates_are_those_of_the_whole_picture(tmp_path, patch, flip):
    """Each latent's place is computed from the pixels themselves, which say where they come from."""
    source = source_of(tmp_path, patch, augmentation=Augmentation(flip=flip))
    batch = make_batch(source, rows_of(64), has_levels=True)
    across = batch["pixels"][:, 0, ::UNIT, ::UNIT].double()  # (B, h, w)
    if flip:
        mirrored = across[:, 0, -1] < across[:, 0, 0]
        assert 0 < mirrored.sum() < len(mirrored)
        across[mirrored] = SIDE - 1 - across[mirrored]
    down = batch["pixels"][:, 1, ::UNIT, ::UNIT].double()
    places = torch.stack([across, down], dim=1) / UNIT
    expected = 2 * places / (LATENTS - 1) - 1
    assert torch.allclose(batch["coordinates"].double(), expected, atol=1e-6)
    corners = {tuple(own[:, 0, 0].tolist()) for own in places}
    assert all(value == int(value) for corner in corners for value in corner), "on the grid of latents"
    assert len(corners) == 1 if patch == SIDE else len(corners) > 3


def test_corners_reach_every_place_with_the_same_probability(tmp_path):
    batch = make_batch(source_of(tmp_path, 8), rows_of(4000), has_levels=True)
    places = Counter(map(tuple, batch["pixels"][:, :2, 0, 0].tolist()))
    assert set(places) == {(x, y) for x in range(0, 9, 2) for y in range(0, 9, 2)}
    assert all(100 < count < 230 for count in places.values())


def test_the_numbers_of_a_crop_say_where_the_patch_was_cut(tmp_path):
    batch = make_batch(source_of(tmp_path, 8), rows_of(16), has_levels=True)
    assert torch.equal(batch["time_ids"][:, [3, 2]], batch["pixels"][:, :2, 0, 0].float())
    assert torch.equal(batch["time_ids"][:, 4:], torch.full((16, 2), 8.0))


def test_a_row_s_patch_depends_on_its_position_alone(tmp_path):
    source = source_of(tmp_path, 8)
    everything = make_batch(source, rows_of(6), has_levels=True)
    few = make_batch(source, replace(rows_of(2), positions=(4, 1)), has_levels=True)
    assert all(torch.equal(everything[name][[4, 1]], few[name]) for name in everything)
