from pathlib import Path

import pytest
from kit.tiny_runs import recipe_of

from diffusionpipe.ir import Sharded
from diffusionpipe.planner.pricing.given import NOTHING, Given
from diffusionpipe.workflows.planning.recipe_setting import given_of

SIZES = {
    "stages": 2, "microbatches": 4, "schedule": "gpipe", "data_parallel": 2, "sharded": True, "offload_frozen": True,
}  # fmt: skip


def given(**sizes):
    keys = {"plan": "auto", "microbatches": None, "encode_chunk": None} | sizes
    return given_of(recipe_of(Path("models/sd"), Path("data/birds"), Path("runs/birds"), pipeline=keys))


@pytest.mark.parametrize("key", SIZES)
def test_each_size_of_the_recipe_is_asked_of_the_search(key):
    expected = {"offload_frozen": {"encoders": "host"}, "sharded": {"sharded": Sharded.ALL}}.get(key, {key: SIZES[key]})
    assert given(**{key: SIZES[key]}) == Given(**expected)


def test_a_recipe_without_sizes_asks_for_none():
    assert given() == NOTHING
