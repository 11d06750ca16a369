"""A wrong profile is corrected by what a run of it records: the recordings are those of the simulator."""

from dataclasses import replace
from itertools import combinations

import pytest
from planner.correction.planted import layer_doubled, link_too_fast, setting_of
from planner.correction.recordings import recorded_of, with_layer
from planner.synthetic import chain, cluster, conditioned, unet, with_forward_only, workload

from diffusionpipe.costs import Link, PairLink
from diffusionpipe.costs.files import profile_from_text, profile_to_text
from diffusionpipe.planner import Layout, Setting, build_plan, choose
from diffusionpipe.planner.choosing.suggestion import GAIN, suggest
from diffusionpipe.planner.correction.causes import LoadingTimes
from diffusionpipe.planner.correction.correct import correct, predicted_step
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.search.proposal import pricing_of

LAYOUTS = {
    "pipeline": Layout(batch=16, stages=2, microbatches=4),
    "filled pipeline": Layout(batch=16, stages=2, microbatches=4, encode_chunk=4),
    "split backward": Layout(batch=16, stages=2, microbatches=4, schedule="zb-h1"),
    "copies": Layout(batch=16, stages=1, microbatches=2, data_parallel=2, buckets=3),
}
LONG_WAKING, SHORTER = ((0.001, 0.004), (0.01, 0.02)), ((0.001, 0.001), (0.01, 0.005))
WAKING = ((0.001, 0.0002), (0.01, 0.001))


def plan_of(setting, name):
    filler = filler_of(setting) if name.startswith("filled") else None
    return build_plan(setting.graph, LAYOUTS[name], pricing=pricing_of(setting), filler=filler)


def true_setting():
    true = setting_of(elements=20_000, parameters=200_000)
    return replace(true, profile=replace(true.profile, waking=WAKING, update=1e-8))


def all_wrong(true):
    """Every kind of time wrong at once."""
    profile = with_layer(with_layer(true.profile, "layer1", 1.7), "encode", 0.6)
    profile = replace(profile, update=3e-8, waking=tuple((wait, extra / 2) for wait, extra in WAKING))
    link = replace(true.cluster.intra, bandwidth=true.cluster.intra.bandwidth * 10)
    reduce = replace(true.cluster.intra_reduce, bandwidth=true.cluster.intra_reduce.bandwidth / 3)
    cluster = replace(true.cluster, intra=link, inter=link, intra_reduce=reduce, inter_reduce=reduce)
    return replace(true, profile=profile, cluster=cluster)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_right_prediction_stays_as_it_is(name):
    true = true_setting()
    plan = plan_of(true, name)
    found = correct(true, plan, recorded_of(true, plan))
    assert found.unexplained == pytest.approx(0, abs=1e-3)
    assert found.corrected.step == pytest.approx(found.predicted.step, rel=1e-6)
    assert [factor for _, factor in found.layers] == pytest.approx([1] * 6, rel=2e-3)
    assert all(abs(cause.seconds) < 0.005 * found.measured.step for cause in found.causes)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("has_layers", [True, False], ids=["layers recorded", "stages alone"])
def test_a_wrong_profile_predicts_what_was_recorded_once_it_is_corrected(name, has_layers):
    true = true_setting()
    planted = all_wrong(true)
    plan = plan_of(planted, name)
    found = correct(planted, plan, recorded_of(true, plan, has_layers=has_layers))
    assert abs(found.predicted.step / found.measured.step - 1) > 0.04
    assert found.corrected.step == pytest.approx(found.measured.step, rel=0.005)
    assert abs(found.unexplained) < 0.03


@pytest.mark.parametrize("name", LAYOUTS)
def test_recorded_layers_make_other_layouts_right_too(name):
    true = true_setting()
    planted = all_wrong(true)
    plan = plan_of(planted, name)
    found = correct(planted, plan, recorded_of(true, plan))
    assert dict(found.layers)["layer1"] == pytest.approx(1 / 1.7, rel=0.02)
    assert dict(found.layers)["encode"] == pytest.approx(1 / 0.6, rel=0.02)
    other = Layout(batch=16, stages=2, microbatches=8, splits=("layer2",))
    other_plan = build_plan(true.graph, other, pricing=pricing_of(true))
    wanted = predicted_step(true, other_plan).iteration
    if name in ("pipeline", "filled pipeline", "split backward"):  # copies send no messages
        assert predicted_step(found.setting, other_plan).iteration == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize("has_layers", [True, False], ids=["layers recorded", "stages alone"])
@pytest.mark.parametrize("said", [None, 0.7, 1.2], ids=["nothing said", "too short", "too long"])
def test_probes_and_forwards_are_each_corrected_by_what_they_took(said, has_layers):
    """The profile is right in all but its forwards without gradients, or knows none."""
    made = true_setting()
    plain = conditioned(made.profile, 0.5)
    true = replace(made, profile=with_forward_only(plain, 0.9))
    planted = replace(made, profile=plain if said is None else with_forward_only(plain, said))
    layout = Layout(batch=16, stages=2, microbatches=4, splits=("layer2",))
    plan = build_plan(true.graph, layout, pricing=pricing_of(true))
    found = correct(planted, plan, recorded_of(true, plan, has_layers=has_layers))
    assert found.corrected.step == pytest.approx(found.measured.step, rel=1e-3)
    for name in true.graph.backbone_layers:
        assert found.setting.profile.forward_only(name, 4) == pytest.approx(
            true.profile.forward_only(name, 4), rel=0.01
        )
        assert found.setting.profile.forward(name, 4) == pytest.approx(true.profile.forward(name, 4), rel=0.01)


def test_a_layer_whose_probe_alone_was_wrong_is_told_from_the_others():
    made = true_setting()
    plain = with_forward_only(conditioned(made.profile, 0.5), 0.9)

    def with_parts(**parts):
        layers = (
            replace(one, forward_only=tuple(parts.get(one.name, 0.9) * time for time in one.forward))
            for one in plain.layers
        )
        return replace(plain, layers=tuple(layers))

    said, true = with_parts(layer0=0.7), replace(made, profile=with_parts(layer0=0.7, layer1=0.5))
    layout = Layout(batch=16, stages=2, microbatches=4, splits=("layer2",))
    plan = build_plan(true.graph, layout, pricing=pricing_of(true))
    found = correct(replace(made, profile=said), plan, recorded_of(true, plan)).setting.profile
    parts = [found.forward_only(name, 4) / found.forward(name, 4) for name in true.graph.backbone_layers]
    assert parts == pytest.approx([0.7, 0.5, 0.9, 0.9, 0.9], rel=0.01)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("loading", [LoadingTimes(), LoadingTimes(predicted=0.05, measured=0.02)])
def test_causes_add_up_to_what_the_step_took_longer_the_largest_first(name, loading):
    true = true_setting()
    planted = all_wrong(true)
    plan = plan_of(planted, name)
    found = correct(planted, plan, recorded_of(true, plan), loading)
    seconds = [cause.seconds for cause in found.causes]
    assert sum(seconds) == pytest.approx(found.measured.step - found.predicted.step)
    assert seconds == sorted(seconds, key=abs, reverse=True)
    told = sum(cause.seconds for cause in found.causes if cause.name == "loading")
    assert told == pytest.approx((loading.measured or 0) - loading.predicted)


def with_times(profile, factor, *names):
    layers = tuple(
        replace(one, **{name: tuple(factor * time for time in getattr(one, name)) for name in names})
        for one in profile.layers
    )
    return replace(profile, layers=layers)


@pytest.mark.parametrize(
    ("cause", "wrong"),
    [
        ("forwards", lambda one: replace(one, profile=with_times(one.profile, 0.5, "forward"))),
        ("backwards", lambda one: replace(one, profile=with_times(one.profile, 0.5, "input_grad", "weight_grad"))),
        ("encoding", lambda one: replace(one, profile=with_layer(one.profile, "encode", 0.2))),
        ("update", lambda one: replace(one, profile=replace(one.profile, update=1e-10))),
        (
            "starts after waits",
            lambda one: replace(one, profile=replace(one.profile, waking=((0.001, 0.001), (0.01, 0.005)))),
        ),
    ],
)
def test_what_was_planted_too_short_is_the_largest_cause(cause, wrong):
    true = true_setting()
    true = replace(true, profile=replace(true.profile, waking=LONG_WAKING, update=1e-7))
    planted = wrong(true)
    plan = plan_of(planted, "pipeline")
    first, *_ = correct(planted, plan, recorded_of(true, plan)).causes
    assert first.name == cause
    assert first.seconds > 0


@pytest.mark.parametrize("make", [layer_doubled, link_too_fast])
def test_the_suggestion_is_a_layout_that_is_truly_faster(make):
    true, planted = make()
    present = choose(planted).plan()
    found = correct(planted, present, recorded_of(true, present))
    assert found.corrected.step == pytest.approx(found.measured.step, rel=0.03)
    suggestion = suggest(found.setting, found.corrected.step, fill=None)
    assert suggestion is not None
    measured = predicted_step(true, suggestion.plan).step
    assert measured == pytest.approx(suggestion.step, rel=0.03)
    assert found.measured.step > measured * (1 + GAIN)


def test_nothing_is_suggested_where_the_present_layout_is_the_best():
    true = setting_of()
    present = choose(true).plan()
    found = correct(true, present, recorded_of(true, present))
    assert suggest(found.setting, found.corrected.step, fill=None) is None


def test_a_corrected_profile_is_a_profile_file_that_says_where_it_comes_from():
    true = true_setting()
    plan = plan_of(true, "pipeline")
    profile = correct(true, plan, recorded_of(true, plan)).setting.profile
    named = replace(profile, origin="corrected by steps 6 to 20")
    assert profile_from_text(profile_to_text(named)) == named


def test_each_pairs_own_messages_correct_its_link_and_pairs_without_any_follow_those():
    """Three ranks in a chain: the link of 1 and 2 is slower than was measured; no message goes from 0 to 2."""
    layout = Layout(batch=16, stages=3, microbatches=4)
    profile = chain([0.004] * 3, elements=200_000)

    def setting(*rates):
        pairs = tuple(
            PairLink(first=one, second=other, latency=1e-5, bandwidth=rate)
            for (one, other), rate in zip(combinations(range(3), 2), rates, strict=True)
        )
        usual = replace(cluster(3), intra=Link(1e-5, 1e9), inter=Link(1e-5, 1e9), pairs=pairs)
        return Setting(profile=profile, cluster=usual, workload=workload(16))

    predicted, true = setting(1e9, 1e9, 1e9), setting(1e9, 1e9, 2e8)
    plan = build_plan(profile.graph, layout, pricing=pricing_of(predicted))
    found = correct(predicted, plan, recorded_of(true, plan))
    near, _, far = found.setting.cluster.pairs
    assert near.bandwidth == pytest.approx(1e9, rel=0.1)
    assert far.bandwidth == pytest.approx(2e8, rel=0.1)
    assert found.corrected.iteration == pytest.approx(found.measured.iteration, rel=1e-3)


def test_messages_that_wait_for_others_on_their_queue_do_not_make_a_link_slow():
    true = Setting(profile=unet(), cluster=cluster(16, per_node=8), workload=workload(64))
    layout = Layout(batch=64, stages=16, microbatches=16, encode_chunk=8)
    plan = build_plan(true.graph, layout, pricing=pricing_of(true), filler=filler_of(true))
    found = correct(true, plan, recorded_of(true, plan))
    for name in ("intra", "inter"):
        link, wanted = getattr(found.setting.cluster, name), getattr(true.cluster, name)
        assert (link.latency, link.bandwidth) == pytest.approx((wanted.latency, wanted.bandwidth), rel=1e-3)
    assert found.setting.cluster.inter_reduce == true.cluster.inter_reduce
    assert found.unexplained == pytest.approx(0, abs=1e-3)
