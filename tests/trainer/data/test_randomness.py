from math import erf, sqrt

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.trainer.data.randomness import normal, permutation, uniform

GOLDEN_NORMAL = [[0.011831528507173061, -2.093890428543091], [-0.18015825748443604, 1.8749030828475952]]
GOLDEN_UNIFORM = [0.0688406229019165, 0.4725518226623535, 0.24559319019317627]
GOLDEN_ORDER = [7, 5, 2, 1, 6, 0, 3, 4]

KEY = {"seed": 7, "purpose": "noise", "step": 3}


@given(st.integers(0, 8), st.integers(0, 2**40), st.integers(-3, 2**40))
def test_drawing_in_two_parts_equals_drawing_at_once(cut, seed, step):
    whole = normal(seed=seed, purpose="noise", step=step, positions=range(8), shape=(2, 3))
    parts = [
        normal(seed=seed, purpose="noise", step=step, positions=p, shape=(2, 3)) for p in (range(cut), range(cut, 8))
    ]
    assert torch.equal(whole, torch.cat(parts))


def test_the_order_of_positions_moves_rows_and_changes_nothing_else():
    forward = uniform(**KEY, positions=[0, 1, 2], shape=(4,))
    backward = uniform(**KEY, positions=[2, 1, 0], shape=(4,))
    assert torch.equal(forward, backward.flip(0))


def test_every_part_of_the_key_changes_the_numbers():
    keys = [KEY, KEY | {"seed": 8}, KEY | {"purpose": "time"}, KEY | {"step": 4}]
    rows = [row for key in keys for row in uniform(**key, positions=[0, 1, 12], shape=(2,)).tolist()]
    assert len({tuple(row) for row in rows}) == 12


def test_shapes_and_dtypes_are_as_documented():
    assert normal(**KEY, positions=[], shape=(4, 2)).shape == (0, 4, 2)
    assert uniform(**KEY, positions=[5]).shape == (1,)
    assert normal(**KEY, positions=[1], shape=()).dtype == uniform(**KEY, positions=[1]).dtype == torch.float32
    assert permutation(seed=0, epoch=0, size=5).dtype == np.int64


def test_the_global_generators_are_neither_read_nor_moved():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    normal(**KEY, positions=range(4), shape=(3,))
    permutation(seed=0, epoch=0, size=5)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert (numpy_state == np.random.get_state()[1]).all()


def test_normal_numbers_over_positions_follow_the_normal_distribution():
    values = np.sort(normal(**KEY, positions=range(2000), shape=(5,)).flatten().numpy())
    expected = np.array([(1 + erf(value / sqrt(2))) / 2 for value in values])
    distance = np.abs(expected - (np.arange(len(values)) + 0.5) / len(values)).max()
    assert distance < 1.63 / sqrt(len(values))  # Kolmogorov-Smirnov, 1 %


def test_uniform_numbers_over_steps_fill_the_unit_interval_evenly():
    values = torch.cat([uniform(**KEY | {"step": step}, positions=range(4)) for step in range(2500)])
    counts = torch.histc(values, bins=20, min=0, max=1)
    assert values.min() >= 0
    assert values.max() < 1
    assert ((counts - 500) ** 2 / 500).sum() < 36.2  # chi-squared of 19 degrees of freedom, 1 %


def test_neighbouring_positions_are_uncorrelated():
    rows = normal(**KEY, positions=range(64), shape=(4096,)).double()
    correlation = torch.corrcoef(rows) - torch.eye(64)
    assert correlation.abs().max() < 5 / sqrt(4096)


def test_a_permutation_holds_each_index_once_and_epochs_differ():
    first, second = (permutation(seed=1, epoch=epoch, size=100) for epoch in (0, 1))
    assert sorted(first.tolist()) == list(range(100))
    assert first.tolist() != second.tolist()


def test_golden_values_have_not_changed():
    drawn = normal(seed=0, purpose="noise", step=0, positions=[0, 1], shape=(2,)).tolist()
    assert drawn == GOLDEN_NORMAL
    assert uniform(seed=0, purpose="time", step=0, positions=[0, 1, 2]).tolist() == GOLDEN_UNIFORM
    assert permutation(seed=0, epoch=0, size=8).tolist() == GOLDEN_ORDER
