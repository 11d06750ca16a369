import random
from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.pricing.given import Given, is_possible
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.timing.legal import check


def setting_of(profile=None, *, given=None, ranks=2, batch=8, memory=80.0):
    return Setting(
        profile=profile or synthetic.chain([0.01] * 6, parameters=[10**5] * 6, frozen=0.02),
        cluster=synthetic.cluster(ranks, memory=memory, intra_gb=1e-3),
        workload=synthetic.workload(batch),
        given=given or Given(),
    )


def test_the_better_of_both_ways_to_encode_is_chosen():
    pipeline = setting_of(given=Given(stages=2))
    both, first, filled = choose(pipeline), choose(pipeline, fill=False), choose(pipeline, fill=True)
    assert filled.step < first.step
    assert both.step == filled.step
    assert both.filler is not None
    assert both.sizes.endswith(", filled")


def test_where_filling_gains_nothing_each_batch_is_encoded_first():
    alone = setting_of(ranks=1)
    assert choose(alone, fill=True).filler is not None
    assert choose(alone).filler is None


def test_a_model_without_frozen_layers_is_never_filled():
    profile = synthetic.chain([0.01] * 6)
    everything = tuple(replace(parameter, is_trainable=True) for parameter in profile.graph.parameters)
    trained = replace(profile, graph=replace(profile.graph, parameters=everything))
    assert not trained.graph.frozen_layers
    assert choose(setting_of(trained), fill=True).filler is None


@pytest.mark.parametrize("fill", [False, True])
def test_the_plan_is_that_of_the_choice(fill):
    choice = choose(setting_of(given=Given(stages=2)), fill=fill)
    plan = choice.plan(sample_batch=6)
    check(plan.train)
    assert plan.train == choice.proposal.train
    assert (plan.prologue is not None) == fill
    assert sum(plan.sample[0].placement.pipelines[0].microbatches) == 6
    assert choice.comparison().verdict.startswith("Use ")


def test_the_same_question_gives_the_same_plan():
    assert choose(setting_of()).plan() == choose(setting_of()).plan()


def test_what_fits_nowhere_is_refused_by_how_much_and_with_what_would_fit():
    with pytest.raises(ConfigError, match=r"(?s) more than worker 0 has\..*These changes would fit \(") as caught:
        choose(setting_of(memory=1e-6))
    assert "let the search choose" not in str(caught.value)
    with pytest.raises(ConfigError, match="no fixed sizes: let the search choose them"):
        choose(setting_of(memory=6e-3, given=Given(data_parallel=2, sharded=Sharded.NONE)))


def test_sizes_that_cannot_be_are_refused_before_the_search():
    with pytest.raises(ConfigError, match="2 ranks cannot form pipelines of 3 stages"):
        choose(setting_of(given=Given(stages=3)))


def test_given_sizes_that_cost_time_are_said_to():
    slow = choose(Setting(
        profile=synthetic.chain([0.01] * 6), cluster=synthetic.cluster(2), workload=synthetic.workload(8),
        given=Given(stages=2, microbatches=1),
    ))  # fmt: skip
    assert "would be" in slow.comparison().verdict
    assert "with other sizes than given" in slow.comparison().verdict


@pytest.mark.parametrize("seed", range(30))
def test_what_is_given_is_kept_to(seed):
    """Whatever near-ties, estimates or fills would rather have."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 4])
    given = Given(
        stages=rng.choice([None, None, 2]),
        microbatches=rng.choice([None, 1, 2, 4]),
        schedule=rng.choice([None, None, None, "gpipe", "zb-h1"]),
        sharded=rng.choice([None, Sharded.NONE, Sharded.ALL]),
    )
    own = setting_of(given=given, ranks=ranks, batch=16)
    cluster = synthetic.cluster(ranks, intra_gb=rng.choice([1e-2, 1, 300]))
    if not is_possible(given, batch=16, num_ranks=ranks):
        pytest.skip("sizes that are refused")
    chosen = choose(replace(own, cluster=cluster), fill=rng.choice([None, False])).candidate
    assert given.stages in (None, chosen.arrangement.units)
    assert given.microbatches in (None, chosen.microbatches)
    assert given.schedule in (None, chosen.schedule)
    assert given.sharded in (None, chosen.sharded)
