"""Several stages on a worker, two directions and searched orders among the planner's candidates."""

import pytest
from planner import synthetic

from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.placed import ordered, placed
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.planner.search.search import search
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.schedules.traits import is_chain
from diffusionpipe.timing.legal import check

PLACED = [name for name in sorted(REGISTRY) if not is_chain(name)]
UNEVEN = [0.012, 0.008, 0.011, 0.007, 0.015, 0.006, 0.010, 0.009] * 2


def setting_of(*, ranks=4, batch=32, memory=80.0, frozen=1e-4, given=None, **cluster):
    """A model whose frozen part is too small to fill what a pipeline leaves idle, and too large for one device."""
    return Setting(
        profile=synthetic.chain(UNEVEN, parameters=[10**9] * 16, elements=10**6, frozen=frozen),
        cluster=synthetic.cluster(ranks, memory=memory, **cluster),
        workload=synthetic.workload(batch),
        given=given or Given(),
    )


def at(setting, microbatches):
    judge = Judge(setting=setting)
    arrangement = Arrangement(data_parallel=1, units=setting.cluster.num_ranks)
    return judge, {one.schedule: one for one in placed(judge, arrangement, microbatches)}


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("intra_gb", [200.0, 2.0])
def test_the_full_simulation_confirms_the_estimate_of_every_family(name, intra_gb):
    setting = setting_of(intra_gb=intra_gb)
    judge, candidates = at(setting, 8)
    candidate = candidates[name]
    estimate = judge.estimates.estimate(candidate, is_filled=False)
    proposal = propose(setting, candidate.layout(setting))
    assert proposal.step == pytest.approx(estimate.iteration, rel=1e-9)
    for found, use in zip(estimate.held, proposal.memory, strict=True):
        assert found == pytest.approx(use.total, rel=0.1)


def test_no_family_has_more_stages_than_the_model_has_layers():
    _, candidates = at(setting_of(ranks=12), 24)
    assert 0 < len(candidates) < len(PLACED)
    assert max(len(candidate.starts) for candidate in candidates.values()) <= len(UNEVEN)


@pytest.mark.parametrize("name", [*PLACED, "zb-h1"])
def test_a_family_may_be_given(name):
    found = search(setting_of(given=Given(schedule=name), memory=160.0))  # room for the copies of two directions
    assert found.winner is not None
    assert {candidate.schedule for candidate, _ in found.finalists} == {name}
    check(found.winner[1].train)


@pytest.mark.parametrize("memory", [80.0, 67.0])
def test_a_searched_order_is_no_slower_than_any_family_on_its_cuts(memory):
    setting = setting_of(memory=memory)
    judge, candidates = at(setting, 8)
    starts = {len(one.starts): one.starts for one in candidates.values()}
    chain = Candidate(
        arrangement=candidates["zb-v"].arrangement,
        schedule="1f1b",
        microbatches=8,
        starts=tuple(range(0, 16, 4)),
        replicas=(1,) * 4,
    )
    known = [chain, *candidates.values()]
    found = {one.schedule: judge.estimates.estimate(one, is_filled=True) for one in ordered(judge, known, seconds=0.5)}
    assert set(found) == {"search-linear", "search-v", "search-loop"}
    assert all(estimate.overflow <= 0 for estimate in found.values())
    best = min(estimate.pipeline for estimate in found.values())
    for one in candidates.values():
        estimate = judge.estimates.estimate(one, is_filled=True)
        if estimate.overflow <= 0 and len(one.starts) == 8 and one.starts == starts[8]:
            assert best <= estimate.pipeline * 1.002, one.schedule


def test_the_same_orders_and_cuts_are_looked_for_once(monkeypatch):
    searched = Judge(setting=setting_of())
    arrangement = Arrangement(units=4, data_parallel=1)
    known = list(placed(searched, arrangement, 4))[:1]
    first = list(ordered(searched, known, seconds=0.05))
    monkeypatch.setattr("diffusionpipe.planner.search.judge.search", None)
    monkeypatch.setattr("diffusionpipe.planner.search.judge.stage_starts", None)
    assert first
    assert list(ordered(searched, known, seconds=0.05)) == first


@pytest.mark.parametrize("is_filled", [False, True])
def test_where_little_can_be_filled_the_order_of_the_plan_is_better_than_any_chain(is_filled):
    setting = setting_of()
    filler = filler_of(setting) if is_filled else None
    winner = search(setting, filler=filler, units=[4]).winner
    assert winner is not None
    assert not is_chain(winner[0].schedule) if winner[0].orders is None else True
    for name in REGISTRY:
        if is_chain(name):
            given = search(setting_of(given=Given(schedule=name)), filler=filler, units=[4]).winner
            assert given is None or winner[1].step <= given[1].step, name


def test_where_encoders_fill_every_wait_nothing_else_is_looked_at():
    setting = setting_of(frozen=0.05)
    found = search(setting, filler=filler_of(setting), units=[4])
    assert found.winner is not None
    assert is_chain(found.winner[0].schedule)
    assert found.winner[1].timeline.bubble < 0.02


def test_the_plan_of_a_choice_has_the_orders_that_were_chosen():
    setting = setting_of()
    chosen = choose(setting)
    plan = chosen.plan()
    check(plan.train)
    assert plan.train.orders == chosen.proposal.train.orders
