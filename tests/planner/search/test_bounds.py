import pytest
from planner import synthetic

from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search import sharded
from diffusionpipe.planner.search.bounds import may_fit
from diffusionpipe.planner.search.search import search

MEMORIES = (0.3, 0.6, 0.8, 1.0, 1.5, 2, 4)


def setting_of(memory: float) -> Setting:
    """Two devices of so many GB; a copy of the model and its optimizer takes about 1.4."""
    profile = synthetic.chain([1e-3, 3e-3, 2e-3, 1e-3], parameters=[2 * 10**7] * 4, elements=10**6, frozen=1e-4)
    return Setting(profile=profile, cluster=synthetic.cluster(2, memory=memory), workload=synthetic.workload(8))


def test_where_all_devices_together_lack_room_a_search_finds_no_plan():
    rooms = [may_fit(setting_of(memory)) for memory in MEMORIES]
    assert rooms == sorted(rooms)
    assert len(set(rooms)) == 2
    for memory in MEMORIES:
        setting = setting_of(memory)
        for filler in (None, filler_of(setting)):
            assert search(setting, filler=filler).winner is None or may_fit(setting)
        assert best_choice(setting) is None or may_fit(setting)


@pytest.mark.parametrize("memory", MEMORIES)
def test_copies_that_are_left_out_for_their_memory_do_not_fit(memory, monkeypatch):
    setting = setting_of(memory)
    found = sharded.sharded_finalists(setting, None)
    monkeypatch.setattr(sharded, "copies_may_fit", lambda judge, arrangement, microbatches: True)
    everything = sharded.sharded_finalists(setting, None)
    assert [candidate for candidate, _ in found] == [candidate for candidate, _ in everything]
