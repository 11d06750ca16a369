"""Ranks can share a model exactly where the search finds a place for them, and bounds of these places hold."""

from dataclasses import replace
from itertools import combinations, product
from random import Random

import pytest
from planner import synthetic

from diffusionpipe.ir import Sharded
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.given import NOTHING, Given
from diffusionpipe.planner.pricing.owning import owned
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search import places
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.placed import placed
from diffusionpipe.planner.search.places import is_cuttable, least_passage, least_time, places_of
from diffusionpipe.planner.search.search import search
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.schedules.traits import holds_blocks_once, is_chain


@pytest.mark.parametrize("given", [NOTHING, Given(stages=3), Given(microbatches=2), Given(schedule="interleaved")])
def test_ranks_can_be_used_where_there_is_a_place_for_them(given):
    for num_ranks, batch, num_layers in product((1, 3, 5, 6, 9, 40), (4, 6), (2, 3, 8)):
        setting = Setting(
            profile=synthetic.chain([0.01] * num_layers, parameters=[10**5] * num_layers),
            cluster=synthetic.cluster(num_ranks),
            workload=synthetic.workload(batch),
            given=given,
        )
        has_place = any(True for _ in places_of(Judge(setting=setting)))
        assert is_cuttable(given, batch=batch, num_ranks=num_ranks, num_layers=num_layers) == has_place


def makespan(orders, durations):
    """The end of F, I and W, by (op, micro-batch), of two workers whose messages take no time; None: a circle."""
    ends, places, clocks = {}, [0, 0], [0.0, 0.0]
    while any(places[worker] < len(orders[worker]) for worker in (0, 1)):
        moved = False
        for worker in (0, 1):
            while places[worker] < len(orders[worker]):
                op, number = orders[worker][places[worker]]
                needs = {(1, "F"): (0, "F"), (0, "I"): (1, "I")}.get((worker, op))
                if needs and (*needs, number) not in ends:
                    break
                start = max(clocks[worker], ends[(*needs, number)] if needs else 0.0)
                clocks[worker] = ends[worker, op, number] = start + durations[worker]["FIW".index(op)]
                places[worker], moved = places[worker] + 1, True
        if not moved:
            return None
    return max(clocks)


def orders_of(num_microbatches):
    """All orders of a worker with one stage."""
    own = [[(op, number) for op in "FIW"] for number in range(num_microbatches)]
    if num_microbatches == 1:
        return [own[0]]
    found = []
    for taken in combinations(range(6), 3):
        rows = [iter(own[0]), iter(own[1])]
        found.append([next(rows[0] if place in taken else rows[1]) for place in range(6)])
    return found


@pytest.mark.parametrize("microbatches", [1, 2])
def test_no_order_of_two_workers_passes_all_layers_in_less_than_the_bound(microbatches):
    random, close = Random(35), []
    for _ in range(12):
        profile = synthetic.chain([random.choice((1, 2, 3)) * 1e-2 for _ in range(3)])
        layers = tuple(
            replace(layer, weight_grad=tuple(random.choice((0.5, 1, 2)) * time for time in layer.weight_grad))
            for layer in profile.layers
        )
        profile = replace(profile, layers=layers)
        setting = Setting(profile=profile, cluster=synthetic.cluster(2), workload=synthetic.workload(2))
        judge, arrangement = Judge(setting=setting), Arrangement(units=2, data_parallel=1)
        sums = judge.tables.table.sums(2 / microbatches, microbatches)
        least = min(
            time
            for cut in (1, 2)
            for orders in product(orders_of(microbatches), repeat=2)
            if (time := makespan(orders, [sums.times(0, cut), sums.times(cut, 3)])) is not None
        )
        bound = least_passage(judge, arrangement, microbatches, in_turn=microbatches)
        assert bound <= least * (1 + 1e-12)
        close.append(bound / least)
    assert max(close) > (1 - 1e-12 if microbatches == 1 else 0.75)  # the way of one micro-batch alone is all there is


@pytest.mark.parametrize("copies", [1, 2])
def test_no_family_is_faster_than_the_passage_of_its_micro_batches(copies):
    random, near = Random(copies), 0
    for units, microbatches in product((2, 4), (2, 4, 8)):
        profile = synthetic.chain(
            [random.uniform(1, 4) * 1e-3 for _ in range(9)], parameters=[10**7] * 9, elements=10**4, frozen=1e-3
        )
        setting = Setting(
            profile=profile, cluster=synthetic.cluster(2 * units), workload=synthetic.workload(2 * microbatches)
        )
        setting = owned(setting, 2) if copies > 1 else setting
        judge, arrangement = Judge(setting=setting), Arrangement(units=units, data_parallel=2)
        chains = [
            Candidate(
                arrangement=arrangement, schedule=name, microbatches=microbatches, starts=starts, replicas=(1,) * units,
                sharded=setting.sharded,
            )
            for name in sorted(REGISTRY)
            if is_chain(name) and setting.allows_family(name)
            for starts in (tuple(range(units)), (0, *range(10 - units, 9)))
        ]  # fmt: skip
        for candidate in [*chains, *placed(judge, arrangement, microbatches)]:
            in_turn = microbatches if holds_blocks_once(candidate.schedule) else -(-microbatches // 2)
            bound = least_passage(judge, arrangement, microbatches, in_turn=in_turn)
            for is_filled in (True, False):
                found = judge.estimates.estimate(candidate, is_filled=is_filled).iteration
                assert max(bound, least_time(judge, arrangement, microbatches)) <= found * (1 + 1e-9), candidate
                near += found < 1.3 * bound
    assert near > 5


def test_searches_with_states_in_parts_find_as_fast_plans_without_the_passage(monkeypatch):
    given = replace(NOTHING, sharded=Sharded.OPTIMIZER)
    profile = synthetic.chain(
        [1e-3, 3e-3, 2e-3, 1e-3, 2e-3, 2e-3, 3e-3, 1e-3], parameters=[2 * 10**7] * 8, elements=10**5, frozen=2e-3
    )
    setting = Setting(
        profile=profile, cluster=synthetic.cluster(8, per_node=2), workload=synthetic.workload(16), given=given
    )
    steps = {}
    for is_bounded in (True, False):
        if not is_bounded:
            monkeypatch.setattr(places, "least_passage", lambda *place, in_turn: 0.0)
        for copies in (2, 4):
            own = owned(setting, copies)
            found = search(own, filler=filler_of(own)).winner
            steps.setdefault(copies, set()).add(found[1].step)
    assert all(len(found) == 1 for found in steps.values()), steps
