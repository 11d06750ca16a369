from dataclasses import replace
from random import Random

import pytest
from planner.synthetic import chain, cluster, workload

from benchmarks.cascade.joining import joined_profile
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.assembly.build import build_plan
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.cascades import _divided, _opposed, _replicas
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of, name_of_plan, sizes_of, sizes_of_plan
from diffusionpipe.planner.search.pair_questions import PairPlace
from diffusionpipe.planner.search.search import search
from diffusionpipe.timing.legal import check

FIRST = [3e-3, 5e-3, 2e-3, 4e-3, 3e-3, 6e-3]
SECOND = [4e-3, 2e-3, 5e-3, 3e-3, 3e-3, 2e-3, 4e-3]


def cascade(*, first=FIRST, second=SECOND, parameters=10_000_000, elements=10_000, frozen=1e-3):
    """Two chains that share their encoder."""
    of_name = {"base": first, "large": second}
    return joined_profile(
        {
            name: chain(times, parameters=[parameters] * len(times), elements=elements, frozen=frozen)
            for name, times in of_name.items()
        }
    )


def setting_of(profile, num_ranks=4, batch=16, **changes):
    return Setting(
        profile=profile, cluster=cluster(num_ranks, per_node=2, **changes), workload=workload(batch, encode_chunk=4)
    )


@pytest.fixture(scope="module")
def setting():
    return setting_of(cascade())


@pytest.fixture(scope="module")
def found(setting):
    return search(setting)


def test_every_way_to_run_both_is_simulated_in_full(found):
    names = {name_of(candidate) for candidate, _ in found.finalists}
    assert names == {"opposed", "together", "in turn", "divided", "data parallel", "sharded data parallel"}


@pytest.mark.parametrize("schedule", ["opposed", "together"])
def test_a_given_way_is_the_only_one_that_is_searched(setting, schedule):
    asked = search(replace(setting, given=Given(schedule=schedule, microbatches=4)))
    assert {(name_of(candidate), candidate.counts) for candidate, _ in asked.finalists} == {(schedule, (4, 4))}
    assert {one.candidate.schedule for one in asked.judged} <= {schedule}


def test_a_given_family_or_a_way_in_parts_is_refused(setting):
    for given, why in (
        (Given(schedule="gpipe"), "opposed and together"),
        (Given(schedule="opposed", sharded=Sharded.ALL), "leave out schedule or sharded"),
    ):
        with pytest.raises(ConfigError, match=why):
            choose(replace(setting, given=given))


def test_the_winner_is_the_fastest_of_all(found):
    _, best = found.winner
    assert best.step == min(proposal.step for _, proposal in found.finalists if proposal.overflow <= 0)
    assert best.iteration >= found.bound * (1 - 1e-12)


def test_without_fills_an_estimate_is_the_time_and_memory_of_the_plan(setting, found):
    judge = Judge(setting=setting)
    for candidate, proposal in found.finalists:
        estimate = judge.estimates.estimate(candidate, is_filled=False)
        if candidate.sharded is Sharded.ALL:  # a rank gathers while it encodes, and holds a part of what is estimated
            continue
        assert estimate.iteration == pytest.approx(proposal.iteration, rel=1e-9), name_of(candidate)
        for held, use in zip(judge.footprint.uses(candidate), proposal.memory, strict=True):
            assert held.parameters == use.parameters
            assert held.activations == pytest.approx(use.activations, rel=1e-9)


def test_the_plan_of_every_way_is_legal_and_trains_each_backbone_with_its_micro_batches(setting, found):
    for candidate, _ in found.finalists:
        plan = build_plan(setting.graph, candidate.layout(setting), filler=filler_of(setting))
        for schedule in (plan.train, plan.validate, *plan.sample):
            check(schedule)
        counts = {p.model: len(p.microbatches) for p in plan.train.placement.pipelines if "ENCODE" not in p.ops}
        assert tuple(counts[backbone.name] for backbone in setting.graph.backbones) == candidate.counts
        layers = [name for block in plan.blocks[:-1] for name in block]
        assert sorted(layers) == sorted(setting.graph.backbone_layers)


def test_a_plan_is_called_as_the_candidate_that_it_was_made_of(setting, found):
    for candidate, _ in found.finalists:
        plan = build_plan(setting.graph, candidate.layout(setting))
        assert f"{name_of_plan(plan)}, {sizes_of_plan(plan)}" == f"{name_of(candidate)}, {sizes_of(candidate)}"


def test_copies_of_each_backbone_on_devices_of_its_own_are_called_so(setting):
    place = PairPlace(
        judge=Judge(setting=setting), arrangement=Arrangement(units=4, data_parallel=1), microbatches=(1, 1)
    )
    for kind in (_divided, _opposed):
        for candidate in kind(place):
            plan = build_plan(setting.graph, candidate.layout(setting))
            assert sizes_of_plan(plan) == sizes_of(candidate)


def test_the_layers_that_are_left_take_at_least_the_work_that_is_left():
    """Layers that gain from large micro-batches beside layers that gain from small ones: sums of each number of
    replicas cross, and the difference of the least sums is above what the rest really takes."""
    draws, profile = Random(0), cascade(parameters=1000)
    sizes = profile.batch_sizes
    odd = {
        name: replace(layer, forward=tuple(draws.uniform(1e-3, 1e-2) * max(n, draws.choice([1, 4, 16])) for n in sizes))
        for name, layer in ((one.name, one) for one in profile.layers)
    }
    crossed = setting_of(replace(profile, layers=tuple(odd[one.name] for one in profile.layers)))
    place = PairPlace(
        judge=Judge(setting=crossed), arrangement=Arrangement(units=4, data_parallel=1), microbatches=(1, 1)
    )
    replicas = _replicas(place)
    assert len(replicas) > 1
    work = place.question(replicas, is_opposed=True).work
    fastest = max(place.ground.speeds)
    for backbone, least in enumerate(work):
        sums = [[r * one / fastest for one in place.work(backbone, r)] for r in replicas]
        for first in range(len(least)):
            for stop in range(first, len(least)):
                assert least[stop] - least[first] <= min(own[stop] - own[first] for own in sums) + 1e-12


def test_opposite_directions_win_where_sums_are_slow_and_micro_batches_are_few():
    equal = cascade(first=[1e-2] * 8, second=[1e-2] * 8, parameters=60_000_000)
    slow = setting_of(equal, num_ranks=4, batch=4, bus_gb=0.5, intra_gb=2.0)
    choice = choose(slow)
    assert choice.candidate.schedule == "opposed"
    verdict = choice.comparison().verdict
    assert verdict.startswith("Use opposed with 4 stages, ")
    assert "Other ways to run both backbones take, times as long: " in verdict
    rows = choice.comparison().ours
    best = {row.name: row.step for row in sorted(rows, key=lambda row: -row.step)}
    assert all(best["opposed"] < step for name, step in best.items() if name != "opposed")
    assert {"together", "in turn", "divided"} <= best.keys()


def test_sizes_name_both_backbones(found):
    texts = {name_of(candidate): sizes_of(candidate) for candidate, _ in found.finalists}
    assert " + " in texts["divided"].split(" stages")[0]
    assert texts["data parallel"].startswith("4 copies")


def test_both_backbones_may_have_their_states_in_parts():
    asked = setting_of(cascade(parameters=1_000_000), num_ranks=4, batch=16)
    found = choose(replace(asked, given=Given(sharded=Sharded.OPTIMIZER)))
    assert found.candidate.sharded is Sharded.OPTIMIZER
    assert found.plan().mesh.owners == found.candidate.arrangement.data_parallel > 1
    assert max(found.candidate.replicas) == 1


@pytest.mark.parametrize("sharded", [Sharded.NONE, Sharded.ALL])
def test_copies_accumulate_where_the_fewest_micro_batches_do_not_fit(sharded):
    """Few large micro-batches look fastest, but of 256 samples each backbone holds 7 GB at once."""
    profile = cascade(parameters=1_000_000, elements=1_000_000)
    tight = setting_of(profile, num_ranks=2, batch=512, memory=2.5)
    best = {
        name_of(candidate): candidate
        for candidate, proposal in search(replace(tight, given=Given(sharded=sharded))).finalists
        if proposal.overflow <= 0
    }
    assert min(best["sharded data parallel" if sharded is Sharded.ALL else "data parallel"].counts) >= 4


def test_what_fits_nowhere_says_what_would():
    with pytest.raises(ConfigError, match=r"No layout fits in memory: the nearest, .*\n.*\nThese changes would fit"):
        choose(setting_of(cascade(parameters=100_000_000), memory=1.5))


def test_three_backbones_are_refused():
    three = joined_profile({name: chain(FIRST) for name in ("small", "middle", "large")})
    with pytest.raises(ConfigError, match="two backbones, not 3: small, middle, large"):
        search(setting_of(three))


def test_a_batch_that_cannot_be_cut_is_refused(setting):
    with pytest.raises(ConfigError, match="a batch of 7 samples cannot be cut over 4 ranks"):
        search(replace(setting, workload=workload(7), given=replace(setting.given, data_parallel=4)))
