"""A slow link is named, its time counts, and pipelines can be placed beside it."""

from dataclasses import replace

from planner import synthetic

from diffusionpipe.planner.assembly.build import build_train_schedule
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.planner.choosing.explain import compare, slow_links_text
from diffusionpipe.planner.from_profile import plan_from_profile, predicted_timeline
from diffusionpipe.planner.pricing.arrangement import Arrangement, RankLayout, arrangements
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.planner.search.search import search
from diffusionpipe.simulator import simulate


def test_messages_over_a_slow_link_take_longer_and_others_do_not():
    setting = synthetic.slow_pairs((1, 2))
    layout = Layout(batch=8, stages=4, microbatches=4)
    schedule, blocks = build_train_schedule(setting.graph, layout)
    costs = costs_of(schedule, blocks, layout.mesh, setting)
    usual = setting.cluster.intra
    assert costs.link_between(0, 1) == costs.link_between(2, 3) == usual
    assert costs.link_between(1, 2).bandwidth == costs.link_between(2, 1).bandwidth == usual.bandwidth / 20


def test_a_layout_with_given_sizes_is_planned_and_predicted_by_the_link_of_every_pair():
    layout = Layout(batch=8, stages=4, microbatches=4)
    even, uneven = (synthetic.slow_pairs(*slow) for slow in ((), ((1, 2),)))
    plan = plan_from_profile(even.profile, layout, uneven.cluster)
    times = [predicted_timeline(even.profile, plan, one.cluster).makespan for one in (even, uneven)]
    assert times[0] < times[1]
    assert times[0] == predicted_timeline(even.profile, plan, replace(even.cluster, pairs=())).makespan
    costs = costs_of(plan.train, plan.blocks, plan.mesh, uneven)
    assert times[1] == simulate(plan.train, costs).makespan


def test_pipelines_can_stand_so_that_no_message_crosses_a_slow_link():
    cluster = synthetic.slow_pairs((0, 1)).cluster
    found = list(arrangements(cluster))
    assert {one.adjacent for one in found if one.units == 2} == {1, 2}
    links = {
        adjacent: RankLayout(
            arrangement=Arrangement(data_parallel=2, units=2, adjacent=adjacent), cluster=cluster
        ).link(0, 1, 1, 1)
        for adjacent in (1, 2)
    }
    assert links[1].bandwidth == cluster.intra.bandwidth / 20
    assert links[2] == cluster.intra


def test_the_verdict_names_slow_links():
    setting = synthetic.slow_pairs((0, 1), num_ranks=3, num_layers=3)
    assert "Slow links between ranks: 0-1 with " in compare(setting, search(setting, units={3})).verdict
    assert slow_links_text(synthetic.slow_pairs().cluster) == ""
