"""Ranks can share a model exactly where the search finds a place for them."""

from itertools import product

import pytest
from planner import synthetic

from diffusionpipe.planner.pricing.given import NOTHING, Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.places import is_cuttable, places_of


@pytest.mark.parametrize("given", [NOTHING, Given(stages=3), Given(microbatches=2), Given(schedule="interleaved")])
def test_ranks_can_be_used_where_there_is_a_place_for_them(given):
    for num_ranks, batch, num_layers in product((1, 3, 5, 6, 9, 40), (4, 6), (2, 3, 8)):
        setting = Setting(
            profile=synthetic.chain([0.01] * num_layers, parameters=[10**5] * num_layers),
            cluster=synthetic.cluster(num_ranks),
            workload=synthetic.workload(batch),
            given=given,
        )
        has_place = any(True for _ in places_of(Judge(setting=setting)))
        assert is_cuttable(given, batch=batch, num_ranks=num_ranks, num_layers=num_layers) == has_place
