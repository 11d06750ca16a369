"""Each planner chooses by its published formula, and the simulator times what it chooses."""

from dataclasses import replace

import pytest
from planner import synthetic
from planner.rivals.vgg16 import MINIBATCH, vgg16_profile
from planner.search.formulas import pivot_latency, planning_bound

from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.baselines import data_parallel, zero3
from diffusionpipe.planner.rivals.planners import PLANNERS, choices_of, times_of
from diffusionpipe.planner.rivals.simulated import simulated
from diffusionpipe.planner.search.judge import Judge


def setting_of(times, *, batch=24, ranks=4, memory=80.0, gigabytes=1.0, parameters=10**6):
    """A chain whose stages a planner cuts and replicates; the last layer has nearly all parameters."""
    counts = [100] * (len(times) - 1) + [parameters]
    profile = synthetic.chain(times, parameters=counts, elements=100, frozen=0.001)
    cluster = synthetic.cluster(ranks, memory=memory, intra_gb=gigabytes)
    return Setting(profile=profile, cluster=cluster, workload=synthetic.workload(batch))


UNEVEN = setting_of([0.09, 0.01, 0.01, 0.01], parameters=10**9)
"""Three devices for the first layer, one for the others: the gradients of the last would take longer than its work."""


def test_a_batch_of_vgg16_is_cut_as_pipedreams_own_optimizer_cuts_it():
    setting = Setting(
        profile=vgg16_profile(), cluster=synthetic.cluster(4, intra_gb=1.0), workload=synthetic.workload(2 * MINIBATCH)
    )
    chosen = choices_of(PLANNERS["pipedream"], setting)[0]
    assert chosen.candidate.replicas == (3, 1)
    assert chosen.candidate.microbatches == 2
    assert chosen.seconds == pytest.approx(2 * 0.20552, abs=2e-5)
    (rival,) = simulated(["pipedream"], setting)
    assert rival.scale == pytest.approx(128 / 129)  # three replicas share 129 samples
    assert rival.pipeline > rival.formula  # a batch ends with an empty pipeline, and its gradients are summed


@pytest.mark.parametrize(
    ("name", "formula"), [("dapple", pivot_latency), ("spp", planning_bound)], ids=["dapple", "spp"]
)
def test_the_predicted_time_is_the_formula_and_no_other_layout_has_a_shorter_one(name, formula):
    chosen = choices_of(PLANNERS[name], UNEVEN)[0]
    judge = Judge(setting=UNEVEN)
    stages, links = times_of(judge, chosen.candidate)
    assert chosen.seconds == pytest.approx(formula(chosen.candidate.microbatches, stages, links))
    for other in PLANNERS[name].guesses(judge):
        assert chosen.seconds <= other.seconds


def test_gpipes_clock_ticks_once_for_each_microbatch_and_stage():
    profile = synthetic.chain([0.01] * 4, parameters=[100] * 4, frozen=0.001)
    setting = Setting(profile=profile, cluster=synthetic.cluster(2), workload=synthetic.workload(8))
    judge = Judge(setting=setting)
    chosen = choices_of(PLANNERS["gpipe"], setting)[0]
    assert (chosen.candidate.starts, chosen.candidate.microbatches) == ((0, 2), 8)
    slowest = max(forward + backward for forward, backward, _ in times_of(judge, chosen.candidate)[0])
    assert chosen.seconds == pytest.approx((8 + 2 - 1) * slowest)


@pytest.mark.parametrize("name", ["pipedream", "spp", "dapple"])
def test_stages_with_unequal_replicas_are_chosen_and_simulated(name):
    (rival,) = simulated([name], UNEVEN)
    assert rival.candidate.replicas == (3, 1)
    assert rival.proposal.overflow <= 0
    assert rival.step == pytest.approx(rival.scale * rival.proposal.timeline.makespan + rival.proposal.update)
    assert rival.plan().train == rival.proposal.train


@pytest.mark.parametrize(
    ("name", "system"),
    [("ddp", lambda judge: data_parallel(judge, is_overlapped=True)), ("zero3", zero3)],
    ids=["ddp", "zero3"],
)
def test_copies_take_as_long_by_the_simulator_as_by_their_sum_over_layers(name, system):
    profile = synthetic.chain([0.01] * 6, parameters=[10**7] * 6, elements=100, frozen=0.002)
    cluster = synthetic.cluster(4, intra_gb=4.0)
    setting = Setting(profile=profile, cluster=cluster, workload=synthetic.workload(16))
    (rival,) = simulated([name], setting)
    predicted = system(Judge(setting=setting))
    assert rival.formula == pytest.approx(predicted.step - predicted.frozen)
    assert rival.step == pytest.approx(predicted.step, rel=0.02)
    assert rival.encoding <= predicted.frozen * (1 + 1e-9)  # the first gather may run beside the encoders


@pytest.fixture
def tight():
    """Two of four equal layers fit on a device, or a part of each; a whole copy does not. Links are fast."""
    profile = synthetic.chain([0.03] * 4, parameters=[10**8] * 4, elements=100, frozen=0.001)
    cluster = synthetic.cluster(4, memory=4, intra_gb=1000.0)
    return Setting(profile=profile, cluster=cluster, workload=synthetic.workload(24))


def test_a_layout_that_fits_is_chosen_before_a_faster_one_that_does_not(tight):
    roomy = replace(tight, cluster=synthetic.cluster(4, memory=40, intra_gb=1000.0))
    fast, fitting = (simulated(["dapple"], setting)[0] for setting in (roomy, tight))
    assert fast.sizes.startswith("4 copies")
    assert fitting.sizes.startswith("2 stages")
    assert fitting.formula > fast.formula
    assert fitting.proposal.overflow <= 0


def test_a_system_without_sizes_for_a_batch_is_left_out():
    setting = setting_of([0.01] * 4, batch=9, ranks=2)
    assert {rival.planner.title for rival in simulated(["ddp", "zero3", "spp"], setting)} == {"SPP"}


def test_the_fastest_comes_first_and_what_does_not_fit_last(tight):
    rivals = simulated(list(PLANNERS), tight)
    assert len(rivals) == len(PLANNERS)
    keys = [(rival.proposal.overflow > 0, rival.step) for rival in rivals]
    assert keys == sorted(keys)
    # PipeDream's partition knows no memory: over fast links it is copies for every number of micro-batches.
    assert {rival.planner.title for rival in rivals if rival.proposal.overflow > 0} == {"DDP", "PipeDream"}
