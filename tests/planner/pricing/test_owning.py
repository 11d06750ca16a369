"""The optimizer's states in parts over whole copies, as plans count, price and choose them."""

from dataclasses import replace
from random import Random

import pytest
from planner import synthetic

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.owning import owned, settings_with_owners
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.proposal import propose

COUNT = 200_000_000
"""Parameters of each of eight layers: 0.8 GB, 1.6 GB of states."""


def setting_of(*, memory, forward=(5e-3,) * 8, batch=32, ranks=4, intra_gb=200, elements=10**5, given=None) -> Setting:
    return Setting(
        profile=synthetic.chain(forward, parameters=[COUNT] * 8, elements=elements, frozen=1e-3),
        cluster=synthetic.cluster(ranks, memory=memory, intra_gb=intra_gb),
        workload=synthetic.workload(batch),
        given=given or Given(),
    )


def uneven(given, memory=20.0) -> Setting:
    """One layer has most of the work, so stages wait; activations take memory, and links are slow."""
    forward = (40e-3, *[1e-3] * 7)
    return setting_of(memory=memory, forward=forward, batch=64, intra_gb=10, elements=25 * 10**6, given=given)


def test_states_in_parts_are_chosen_where_whole_copies_do_not_fit_and_gathered_weights_take_longer():
    found = choose(uneven(Given(stages=1)))
    assert found.candidate.sharded is Sharded.OPTIMIZER
    assert found.plan().mesh.owners == 4
    assert "optimizer states in parts" in found.sizes
    assert "every device holds all parameters and gradients (11.92 GiB)" in found.comparison().verdict
    sharded = best_choice(uneven(Given(stages=1, sharded=Sharded.ALL)))
    assert found.step < sharded.step / 1.5
    assert best_choice(uneven(Given(stages=1, sharded=Sharded.NONE))) is None


def test_whole_copies_that_fit_are_simpler():
    found = choose(setting_of(memory=80.0))
    assert found.candidate.sharded is Sharded.NONE


def test_memory_is_parameters_gradients_and_a_part_of_the_states_also_as_it_is_estimated():
    whole, divided = setting_of(memory=80.0), owned(setting_of(memory=80.0), 4)
    found = best_choice(setting_of(memory=80.0, given=Given(sharded=Sharded.OPTIMIZER)))
    layout = found.candidate.layout(divided)
    own = propose(divided, layout).memory[0]
    plain = propose(whole, replace(layout, sharded=Sharded.NONE)).memory[0]
    assert (own.parameters, own.gradients) == (plain.parameters, plain.gradients) == (8 * 4 * COUNT,) * 2
    assert own.optimizer == plain.optimizer / 4 == 2 * 8 * COUNT * 4 / 4
    assert own.total == plain.total - 3 * plain.optimizer / 4
    assert Judge(setting=divided).footprint.uses(found.candidate)[0].optimizer == own.optimizer


def test_gradients_go_to_their_owners_and_parameters_come_from_them_once_in_a_step():
    setting = owned(setting_of(memory=80.0), 4)
    found = best_choice(setting_of(memory=80.0, given=Given(sharded=Sharded.OPTIMIZER)))
    costs, rate = found.proposal.costs, setting.cluster.intra_reduce
    for times in (costs.reduces, costs.unshards):
        moved = sum(times) - rate.latency * sum(time > 0 for time in times)
        assert moved == pytest.approx(8 * COUNT * 4 / rate.bandwidth, rel=1e-6)


def test_a_recipe_that_asks_for_states_in_parts_gets_them_in_every_layout():
    for stages in (1, 2):
        found = choose(setting_of(memory=80.0, given=Given(sharded=Sharded.OPTIMIZER, stages=stages)))
        assert found.plan().mesh.owners == 4 // stages
        assert all(one.sharded is Sharded.OPTIMIZER for one, _ in found.search.finalists)


def test_other_systems_keep_their_own_memory():
    given = Given(sharded=Sharded.OPTIMIZER)
    own, plain = (choose(setting_of(memory=80.0, given=one)).comparison().others for one in (given, Given()))
    assert [(row.name, row.step, row.memory) for row in own] == [(row.name, row.step, row.memory) for row in plain]


def test_small_states_are_not_looked_at_and_given_ones_are():
    heavy, light = setting_of(memory=80.0), setting_of(memory=800.0)
    assert [one.owners for one in settings_with_owners(heavy)] == [4, 2]
    assert not list(settings_with_owners(light))
    asked = replace(light, given=Given(sharded=Sharded.OPTIMIZER))
    assert [one.owners for one in settings_with_owners(asked)] == [4, 2]
    assert not list(settings_with_owners(replace(heavy, given=Given(sharded=Sharded.NONE))))


@pytest.mark.parametrize(
    ("given", "ranks", "message"),
    [
        ({}, 1, "one rank cannot shard its parameters; start more ranks"),
        ({"stages": 4}, 4, "set data_parallel to 2 or more"),
        ({"schedule": "chimera"}, 4, "'chimera' has copies of its blocks on several workers"),
    ],
)
def test_what_cannot_be_divided_is_refused(given, ranks, message):
    with pytest.raises(ConfigError, match=message):
        choose(setting_of(memory=80.0, ranks=ranks, given=Given(sharded=Sharded.OPTIMIZER, **given)))


def test_nothing_fits_by_the_memory_of_states_in_parts():
    with pytest.raises(ConfigError, match="more than worker 0 has"):
        choose(setting_of(memory=4.0, given=Given(sharded=Sharded.OPTIMIZER)))


@pytest.mark.parametrize("seed", range(8))
def test_the_largest_parameter_is_whole_at_one_copy_also_as_it_is_estimated(seed):
    random = Random(seed)
    counts = [random.choice((1, 5, 20, 60)) * 10**6 for _ in range(random.randint(4, 7))]
    whole = Setting(
        profile=synthetic.chain([1e-3] * len(counts), parameters=counts, frozen=1e-3),
        cluster=synthetic.cluster(4),
        workload=synthetic.workload(16),
    )
    setting = owned(whole, 2)
    candidate = Candidate(
        arrangement=Arrangement(data_parallel=2, units=2),
        schedule="1f1b",
        microbatches=4,
        starts=(0, random.randrange(1, len(counts))),
        replicas=(1, 1),
        sharded=Sharded.OPTIMIZER,
    )
    estimated = Judge(setting=setting).footprint.uses(candidate)
    exact = propose(setting, candidate.layout(setting)).memory
    spans = (slice(0, candidate.starts[1]), slice(candidate.starts[1], None))
    for quick, use, own in zip(estimated, exact, (counts[span] for span in spans), strict=True):
        states = 8 * max(sum(own) // 2, max(own))
        assert quick.optimizer == states <= use.optimizer
        if 2 * max(own) >= sum(own):
            assert use.optimizer == states
