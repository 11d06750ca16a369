"""Stages on branches as candidates of the search: two towers with a join, written layer by layer in turn."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.branch_order import in_branch_order, part_in_a_row, unbranched
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of_plan, sizes_of, sizes_of_plan
from diffusionpipe.planner.search.recut import recut
from diffusionpipe.planner.search.search import Search, search
from diffusionpipe.schedules.building.branches import depths


def towers_setting(*, crossing: bool = False, times: Sequence[int] = (1, 1, 1, 1), **given: object) -> Setting:
    """Towers of two layers each, a join and a layer after it, times in milliseconds; the join and the last take one.

    Crossing: the second layer on the right also reads what the first on the left writes.
    """
    sketch = synthetic.Sketch(inputs=("left", "right"))
    hidden = {side: sketch.tensor(side, 100) for side in sketch.inputs}
    left = iter(times)

    def layer(name, reads, writes):
        sketch.tensor(writes, 100, grad=True, dtype="float32")
        sketch.layer(name, "unet", reads, [writes], seconds=next(left, 1) * 1e-3, parameters=1000)

    for i in range(2):
        for side in sketch.inputs:
            reads = [hidden[side], "left0"] if crossing and (side, i) == ("right", 1) else [hidden[side]]
            layer(f"{side}.{i}", reads, f"{side}{i}")
            hidden[side] = f"{side}{i}"
    layer("join", list(hidden.values()), "both")
    layer("last", ["both"], "loss")
    return Setting(
        profile=sketch.profile(overhead=0.0),
        cluster=synthetic.cluster(3),
        workload=synthetic.workload(8),
        given=Given(stages=3, microbatches=4, **given),
    )


def fastest(found: Search, schedule: str) -> float:
    pairs = [(c.schedule, p.step) for c, p in found.finalists]
    return min(
        step for name, step in [*pairs, *((j.candidate.schedule, j.score) for j in found.judged)] if name == schedule
    )


def test_towers_beside_each_other_beat_the_chain_of_the_layers_as_written_by_a_fifth():
    setting = towers_setting()
    beside = search(in_branch_order(setting))
    chain = search(replace(setting, may_branch=False, given=replace(setting.given, schedule="1f1b")))
    assert 1.19 < chain.winner[1].step / fastest(beside, "graphpipe") < 1.21
    choice, plain = best_choice(setting), best_choice(replace(setting, may_branch=False))
    assert choice.step < plain.step


def test_each_tower_is_a_stage_and_two_stages_are_in_a_row():
    found = search(in_branch_order(towers_setting(schedule="graphpipe")))
    candidate, proposal = found.winner
    assert candidate.schedule == "graphpipe"
    assert proposal.blocks[:3] == (("left.0", "left.1"), ("right.0", "right.1"), ("join", "last"))
    assert sizes_of(candidate) == "3 stages (2 in a row), 4 micro-batches"
    plan = best_choice(found.judge.setting).plan()
    assert (name_of_plan(plan), sizes_of_plan(plan)) == ("graphpipe", sizes_of(candidate))


def test_no_bound_says_more_than_a_plan_with_branches_takes():
    found = search(in_branch_order(towers_setting()))
    assert found.bound <= found.winner[1].step
    assert part_in_a_row(towers_setting()) == pytest.approx(4 / 6)


def test_orders_follow_the_stages_when_cuts_move():
    setting = in_branch_order(towers_setting(schedule="graphpipe"))
    judge = Judge(setting=setting)
    candidate, _ = search(setting).winner
    for starts in ((0, 2, 4), (0, 1, 4), (0, 2, 5)):
        moved = recut(judge, candidate, starts=starts)
        edges = {(e.producer, e.consumer) for p in moved.orders.placement.pipelines for e in p.edges}
        warm_ups = [[str(action)[1] for action in order].index("B") for order in moved.orders.orders]
        assert warm_ups == list(depths(edges, 3))


def test_a_crossing_that_costs_nothing_is_waited_for():
    setting = in_branch_order(towers_setting(crossing=True, schedule="graphpipe"))
    assert unbranched(setting) == ""
    found = search(setting)
    assert set(found.winner[1].blocks[0]) == {"left.0", "right.0"}
    assert found.winner[1].step < 1.01 * search(towers_setting(crossing=True, schedule="1f1b")).winner[1].step


def test_a_crossing_that_costs_time_leaves_a_chain_and_the_plan_says_so():
    setting = towers_setting(crossing=True, times=(1, 5, 5, 1))
    assert in_branch_order(setting) is setting
    assert unbranched(setting) == (
        "The model's branches are not series-parallel, so it is planned as a chain: right.1 depends on right.0 and on "
        "left.0, and left.1 on left.0 alone."
    )
    choice = best_choice(setting)
    assert unbranched(setting) in [remark.text for remark in choice.comparison().remarks]
    assert "graphpipe" not in {candidate.schedule for candidate, _ in choice.search.finalists}


def test_a_chain_and_a_given_schedule_have_no_branches():
    setting = Setting(profile=synthetic.chain([1e-3] * 6), cluster=synthetic.cluster(3), workload=synthetic.workload(8))
    assert in_branch_order(setting) is setting
    assert unbranched(setting) == ""
    given = in_branch_order(towers_setting(schedule="gpipe"))
    assert {candidate.schedule for candidate, _ in search(given).finalists} == {"gpipe"}
