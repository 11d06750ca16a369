"""A slow link is named, its time counts, and pipelines can be placed beside it."""

from dataclasses import replace
from itertools import combinations

from planner import synthetic
from tiny_runs import recipe_of

from diffusionpipe.cli.text.planned import make_plan
from diffusionpipe.costs import PairLink
from diffusionpipe.planner.assembly.build import build_train_schedule
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.planner.explain import compare, slow_links_text
from diffusionpipe.planner.from_profile import plan_from_profile, predicted_timeline
from diffusionpipe.planner.pricing.arrangement import Arrangement, Ground, arrangements
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.planner.search.search import search
from diffusionpipe.simulator import simulate


def setting_of(*slow, num_ranks=4, num_layers=8):
    cluster = synthetic.cluster(num_ranks)
    usual = cluster.intra
    pairs = tuple(
        PairLink(
            first=pair[0],
            second=pair[1],
            latency=usual.latency,
            bandwidth=usual.bandwidth / (20 if pair in slow else 1),
        )
        for pair in combinations(range(num_ranks), 2)
    )
    return Setting(
        profile=synthetic.chain([1e-3] * num_layers),
        cluster=replace(cluster, pairs=pairs),
        workload=synthetic.workload(8),
    )


def test_messages_over_a_slow_link_take_longer_and_others_do_not():
    setting = setting_of((1, 2))
    layout = Layout(batch=8, stages=4, microbatches=4)
    schedule, blocks = build_train_schedule(setting.graph, layout)
    costs = costs_of(schedule, blocks, layout.mesh, setting)
    usual = setting.cluster.intra
    assert costs.link_between(0, 1) == costs.link_between(2, 3) == usual
    assert costs.link_between(1, 2).bandwidth == costs.link_between(2, 1).bandwidth == usual.bandwidth / 20


def test_a_layout_with_given_sizes_is_planned_and_predicted_by_the_link_of_every_pair():
    layout = Layout(batch=8, stages=4, microbatches=4)
    even, uneven = (setting_of(*slow) for slow in ((), ((1, 2),)))
    plan = plan_from_profile(even.profile, layout, uneven.cluster)
    times = [predicted_timeline(even.profile, plan, one.cluster).makespan for one in (even, uneven)]
    assert times[0] < times[1]
    assert times[0] == predicted_timeline(even.profile, plan, replace(even.cluster, pairs=())).makespan
    costs = costs_of(plan.train, plan.blocks, plan.mesh, uneven)
    assert times[1] == simulate(plan.train, costs).makespan


def test_a_run_with_given_sizes_names_slow_links(tmp_path, caplog):
    setting = setting_of((1, 2))
    sizes = {"stages": 4, "microbatches": 4, "schedule": "1f1b", "fill": True}
    recipe = recipe_of(tmp_path, tmp_path, tmp_path / "run", training={"batch": 8}, pipeline=sizes)
    plan = make_plan(setting.graph, recipe, 4, setting.profile, setting.cluster)
    assert plan.mesh.num_ranks == 4
    assert "Slow links between ranks: 1-2 with " in caplog.text


def test_pipelines_can_stand_so_that_no_message_crosses_a_slow_link():
    cluster = setting_of((0, 1)).cluster
    found = list(arrangements(cluster))
    assert {one.adjacent for one in found if one.units == 2} == {1, 2}
    links = {
        adjacent: Ground(arrangement=Arrangement(data_parallel=2, units=2, adjacent=adjacent), cluster=cluster).link(
            0, 1, 1, 1
        )
        for adjacent in (1, 2)
    }
    assert links[1].bandwidth == cluster.intra.bandwidth / 20
    assert links[2] == cluster.intra


def test_the_verdict_names_slow_links():
    setting = setting_of((0, 1), num_ranks=3, num_layers=3)
    assert "Slow links between ranks: 0-1 with " in compare(setting, search(setting, units={3})).verdict
    assert slow_links_text(setting_of().cluster) == ""
