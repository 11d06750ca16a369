"""A slow link is named, its time counts, and pipelines can be placed beside it."""

from dataclasses import replace
from itertools import combinations

from planner import synthetic

from diffusionpipe.costs import PairLink
from diffusionpipe.planner.assembly.build import build_train_schedule
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.planner.explain import _slow_links, compare
from diffusionpipe.planner.pricing.arrangement import Arrangement, Ground, arrangements
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.planner.search.search import search


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
    assert _slow_links(setting_of()) == ""
