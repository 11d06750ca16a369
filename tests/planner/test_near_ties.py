"""Of plans that are about as fast, the leaner one is chosen, then the simpler one."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner import synthetic

from diffusionpipe.costs import Device
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.choosing.best import GAIN
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE, SAVING, Merits, complexity_of, rank, reason_of
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate

MERITS = st.builds(
    Merits,
    step=st.integers(1000, 1030).map(float),
    fullness=st.integers(1, 10).map(lambda tenths: tenths / 10),
    complexity=st.tuples(
        st.integers(1, 2), st.booleans(), st.booleans(), st.booleans(), st.integers(1, 3), st.booleans(), st.booleans()
    ),
)


@given(st.lists(MERITS, min_size=1, max_size=6))
def test_the_choice_is_near_saves_memory_where_any_does_and_is_the_simplest_of_those(plans):
    fastest = min(plans, key=lambda one: one.step)
    near = [one for one in plans if one.is_near(fastest)]
    chosen = min(near, key=lambda one: rank(one, fastest))
    assert chosen.step <= fastest.step * (1 + NEAR_TIE)
    lean = [one for one in near if one.saves(fastest)]
    alike = lean or [one for one in near if not fastest.saves(one)]
    assert chosen in alike
    assert chosen.complexity == min(one.complexity for one in alike)
    equal = [one for one in alike if one.complexity == chosen.complexity]
    assert chosen.fullness == min(one.fullness for one in equal) or not lean
    assert chosen.step == min(one.step for one in equal if one.fullness == chosen.fullness or not lean)
    assert bool(reason_of(chosen, fastest)) == (chosen.saves(fastest) or chosen.complexity != fastest.complexity)


def candidate(units, copies, schedule="1f1b", *, num_blocks=None, sharded=Sharded.NONE):
    blocks = num_blocks or units
    return Candidate(
        arrangement=Arrangement(units=units, data_parallel=copies), schedule=schedule, microbatches=4,
        starts=tuple(range(blocks)), replicas=(1,) * units, sharded=sharded,
    )  # fmt: skip


def test_fewer_devices_copies_fewer_stages_a_chain_and_a_published_order_are_simpler():
    ordered = [
        candidate(2, 1),
        candidate(1, 4),
        candidate(1, 4, sharded=Sharded.ALL),
        candidate(2, 2),
        candidate(4, 1),
        candidate(2, 2, "zb-v", num_blocks=4),
    ]
    assert sorted(ordered, key=complexity_of) == ordered
    assert complexity_of(candidate(2, 2, "chimera-doubling")) > complexity_of(candidate(2, 2))


def drawn(seed):
    draw = Random(seed)
    count = draw.randint(3, 6)
    seconds = [draw.uniform(0.005, 0.03) for _ in range(count)]
    parameters = [draw.randrange(1, 20) * 10**6 for _ in range(count)]
    profile = synthetic.chain(seconds, parameters=parameters, frozen=draw.choice([0.0, 0.004, 0.02]))
    cluster = synthetic.cluster(draw.randint(2, 4), memory=draw.choice([1.2, 80.0]), intra_gb=draw.uniform(0.1, 4))
    return Setting(profile=profile, cluster=cluster, workload=synthetic.workload(draw.choice([8, 12, 24])))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 5 else ()) for seed in range(1, 40)]
)
def test_no_simulated_row_that_fits_is_faster_than_the_choice_near_ties_apart(seed):
    """Of training with a flush; what was taken in place of a faster one is said, but for fills that gain too little."""
    choice = choose(drawn(seed))
    shown = choice.comparison()
    fitting = [row for row in shown.simulated if row.fits]
    fastest = min(fitting, key=lambda row: row.step)
    assert choice.fastest.step <= fastest.step * (1 + GAIN)
    assert shown.winner.step <= fastest.step * (1 + NEAR_TIE)
    assert any(one.text.startswith("A near-tie: ") for one in shown.remarks) == (choice.faster is not None)
    if fastest.step * (1 + GAIN) < shown.winner.step:
        assert choice.faster
        assert choice.faster.step == pytest.approx(fastest.step)


def with_memory(setting, memory):
    devices = (Device(name="example", memory=memory),) * setting.cluster.num_ranks
    return replace(setting, cluster=replace(setting.cluster, devices=devices))


def test_memory_decides_only_where_it_saves_a_tenth_of_the_device():
    """Two copies take about as long as two stages, and twice the memory: stages win on small devices alone."""
    profile = synthetic.chain([0.01] * 6, parameters=[10**8] * 6, frozen=0.0)
    cluster = synthetic.cluster(2, memory=80.0, intra_gb=5.0)
    setting = Setting(profile=profile, cluster=cluster, workload=synthetic.workload(16))
    large = choose(setting)
    assert large.candidate.is_copy
    assert large.faster is None or not large.merits.saves(large.faster.merits)
    total = max(use.total for use in large.proposal.memory)
    small = choose(with_memory(setting, round(total * 1.02)))
    assert not (small.candidate.is_copy and small.candidate.sharded is not Sharded.ALL)
    assert small.merits.fullness <= total / (total * 1.02) - SAVING
    assert large.step < small.step <= large.step * (1 + NEAR_TIE)
    assert small.faster
    assert small.faster.candidate == large.candidate
    assert "of its fullest device's memory in place of" in small.comparison().remarks[0].text
