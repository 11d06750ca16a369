import pytest
from planner import synthetic

from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.given import Given, check_given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.nearest import least_overflow
from diffusionpipe.planner.search.search import search

PROFILE = synthetic.chain([0.01] * 8, parameters=[10**5] * 8, frozen=0.01)


def setting_of(given, *, memory=80.0):
    return Setting(
        profile=PROFILE,
        cluster=synthetic.cluster(4, memory=memory),
        workload=synthetic.workload(16),
        given=given,
    )


@pytest.mark.parametrize(
    "given",
    [
        Given(stages=2),
        Given(stages=4, microbatches=2),
        Given(data_parallel=1),
        Given(data_parallel=4),
        Given(schedule="gpipe", data_parallel=2),
        Given(stages=2, microbatches=8, schedule="1f1b", data_parallel=2),
        Given(stages=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_filled", [False, True], ids=["encoded first", "filled"])
def test_every_finalist_keeps_to_what_is_given(given, is_filled):
    setting = setting_of(given)
    found = search(setting, filler=filler_of(setting) if is_filled else None)
    assert found.winner is not None
    for candidate in [*(one for one, _ in found.finalists), *(one.candidate for one in found.judged)]:
        layout = candidate.layout(setting)
        assert layout.stages == (given.stages or layout.stages)
        assert layout.microbatches == (given.microbatches or layout.microbatches)
        assert layout.schedule == (given.schedule or layout.schedule)
        assert layout.data_parallel == (given.data_parallel or layout.data_parallel)
        assert layout.mesh.num_ranks == 4
        if given.stages:
            assert set(layout.replicas) == {1}


def test_what_is_given_is_never_faster_than_what_is_free():
    free = search(setting_of(Given())).winner[1].step
    assert all(search(setting_of(g)).winner[1].step >= free for g in (Given(stages=4), Given(schedule="gpipe")))


def test_the_layout_that_misses_the_memory_by_least_keeps_to_it_too():
    candidate, proposal = least_overflow(setting_of(Given(data_parallel=2, microbatches=4), memory=1e-6))
    assert proposal.overflow > 0
    assert (candidate.arrangement.data_parallel, candidate.microbatches) == (2, 4)


def test_more_micro_batches_than_a_search_looks_at_may_be_given():
    setting = Setting(
        profile=PROFILE,
        cluster=synthetic.cluster(1),
        workload=synthetic.workload(256),
        given=Given(microbatches=256),
    )
    assert search(setting).winner[0].microbatches == 256


@pytest.mark.parametrize(
    ("given", "batch", "ranks", "message"),
    [
        (Given(stages=3), 12, 4, "4 ranks cannot form pipelines of 3 stages; start a multiple of 3 ranks"),
        (Given(data_parallel=3), 12, 4, "of 3 data-parallel copies; start a multiple of 3"),
        (Given(stages=2, data_parallel=4), 12, 4, "2 stages and 4 data-parallel copies; start 8 ranks"),
        (Given(data_parallel=4), 6, 4, "6 samples cannot be cut over 4 ranks; use a multiple of 4, e.g. 8"),
        (Given(microbatches=4), 6, 2, "cut into 4 micro-batches over 2 ranks; use a multiple of 4, e.g. 8"),
        (Given(schedule="1f1"), 8, 2, "no schedule '1f1'; did you mean '1f1b'"),
        (Given(schedule="nonsense"), 8, 2, "choose one of "),
    ],
)
def test_what_no_search_could_find_is_refused_with_what_would_do(given, batch, ranks, message):
    with pytest.raises(ConfigError, match=message):
        check_given(given, batch=batch, num_ranks=ranks)


def test_a_family_that_can_do_none_of_the_sizes_is_refused_with_its_reason():
    with pytest.raises(ConfigError, match=r"'chimera' cannot be planned for 3 ranks and a batch of 27: .*even"):
        check_given(Given(schedule="chimera", data_parallel=1), batch=27, num_ranks=3)
    check_given(Given(schedule="chimera"), batch=32, num_ranks=4)


def test_sizes_that_fit_are_accepted():
    check_given(Given(stages=2, microbatches=4, data_parallel=2, schedule="gpipe"), batch=8, num_ranks=4)
    check_given(Given(), batch=3, num_ranks=4)
