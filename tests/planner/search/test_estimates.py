"""The quick estimate is the simulation of the plan, but for frozen work in its waits."""

from dataclasses import replace
from random import Random

import pytest
from planner import synthetic

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Edge, Sharded
from diffusionpipe.planner.assembly.build import build_train_schedule
from diffusionpipe.planner.assembly.queued import in_queues
from diffusionpipe.planner.assembly.structure import connected, reduced
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.arrangement import Arrangement, arrangements
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import block_costs, costs_of
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.constants import BREADTH_FIRST, CHAIN, DEPTH_FIRST, LOW_MEMORY_SCHEDULE
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.schedules.traits import holds_one, is_breadth_first, is_chain, is_depth_first
from diffusionpipe.simulator import simulate

WAKING = ((1e-3, 1e-4), (1e-2, 2e-3))


def setting_of(*, per_node=8, waking=WAKING, overhead=2e-4, batch=64, share=None, **workload):
    """Layers with skips on devices of different speeds, which wake slowly and copy what they send."""
    cluster = synthetic.cluster(8, per_node=per_node, intra_gb=20, speeds=[1.0, 0.8] * 4)
    profile = synthetic.with_casts(synthetic.unet(), seconds=1e-4, num_bytes=100)
    if share is not None:
        profile = synthetic.with_forward_only(synthetic.conditioned(profile, share), 0.8)
    links = {name: replace(getattr(cluster, name), overhead=overhead) for name in ("intra", "inter")}
    return Setting(
        profile=replace(profile, waking=waking),
        cluster=replace(cluster, **links),
        workload=synthetic.workload(batch, **workload),
    )


def random_candidate(setting, random):
    """Any candidate, whether it is good or not; None where the family cannot do its sizes."""
    num_layers = len(setting.table.names)
    arrangement = random.choice(list(arrangements(setting.cluster)))
    rows, units = setting.workload.batch // arrangement.data_parallel, arrangement.units
    microbatches = random.choice([count for count in (1, 2, 4, 8) if rows % count == 0])
    replicas = (1,) * units
    if units > 1 and random.random() < 0.3:
        replicas = random.choice([(units - 1, 1), (1, units - 1)])
    family = random.choice([n for n in REGISTRY if is_chain(n)] if max(replicas) > 1 else list(REGISTRY))
    is_sharded = units == 1 and random.random() < 0.7
    try:
        blocks = 1 if is_sharded else len(REGISTRY[family](len(replicas), microbatches).placement.workers())
    except ConfigError:
        return None
    starts = (0, *sorted(random.sample(range(2, num_layers - 2, 3), blocks - 1))) if blocks < 19 else ()
    candidate = Candidate(
        arrangement=arrangement,
        schedule=random.choice((DEPTH_FIRST, BREADTH_FIRST)) if is_sharded else family,
        microbatches=microbatches,
        starts=starts,
        replicas=replicas,
        buckets=random.choice((4, 15)) if is_sharded else random.choice((1, 2)),
        sharded=Sharded.ALL if is_sharded else Sharded.NONE,
    )
    return candidate if starts and candidate.divides(setting.workload.batch) else None


def unfrozen(setting, candidate):
    """The candidate's schedule as its plan has it, without frozen work, and what it costs."""
    layout = candidate.layout(setting)
    _, blocks = build_train_schedule(setting.graph, layout)
    graph, edges = setting.graph, []
    for (producer, consumer), names in sorted(graph.flows(blocks[:-1]).items()):
        gradients = tuple(name for name in names if graph.tensor(name).needs_gradient)
        edges.append(Edge(producer=producer, consumer=consumer, tensors=names, gradients=gradients))
    schedule = reduced(connected(layout.generated(), edges, layout.division), layout.division)
    costs = costs_of(schedule, blocks, layout.mesh, setting)
    return in_queues(schedule, costs), costs


@pytest.mark.parametrize(("seed", "share"), [*((seed, None) for seed in range(8)), (8, 0.5), (9, 0.25), (10, 1.0)])
def test_every_action_ends_when_the_simulator_says_so_with_messages_in_queues(seed, share):
    random = Random(seed)
    setting = setting_of(per_node=random.choice((4, 8)), checkpointed=random.choice([(), ("*attn*",)]), share=share)
    judge, count = Judge(setting=setting), 0
    while count < 3:
        candidate = random_candidate(setting, random)
        if candidate is None:
            continue
        count += 1
        schedule, costs = unfrozen(setting, candidate)
        timeline, times = simulate(schedule, costs), judge.estimates.timed(candidate)
        assert times.makespan == pytest.approx(timeline.makespan, rel=1e-9), candidate
        expected = sorted(s.end for s in timeline.spans if s.action.slot is None)
        found = sorted(times.ends[event] for events in times.graph.events for event in events)
        assert found == pytest.approx(expected, rel=1e-9), candidate


@pytest.mark.parametrize("seed", range(10))
def test_with_the_frozen_work_before_the_pipeline_the_estimate_is_the_time_of_the_plan(seed):
    """On devices of several speeds, over links that take long for the encoders' messages, whatever the layout."""
    random = Random(seed)
    setting = setting_of(
        per_node=random.choice((2, 4)),
        waking=random.choice(((), WAKING)),
        share=random.choice((None, 0.5)),
        checkpointed=random.choice([(), ("*attn*",)]),
        encode_chunk=random.choice((3, 16)),
    )
    inter = replace(setting.cluster.inter, bandwidth=random.choice((1e8, 1e9)))
    setting = replace(setting, cluster=replace(setting.cluster, inter=inter))
    judge, count = Judge(setting=setting), 0
    while count < 3:
        candidate = random_candidate(setting, random)
        if candidate is None:
            continue
        count += 1
        estimate = judge.estimates.estimate(candidate, is_filled=False)
        plan = propose(setting, candidate.layout(setting))
        assert estimate.iteration == pytest.approx(plan.iteration, rel=1e-9), candidate
        least = judge.estimates.estimate(candidate, is_filled=False, is_hopeless=lambda least: True)
        assert least.iteration <= estimate.iteration * (1 + 1e-9) or setting.profile.waking


@pytest.mark.parametrize("left_out", [{"waking": ()}, {"overhead": 0.0}])
def test_waking_and_occupancy_count(left_out):
    candidate = Candidate(
        arrangement=Arrangement(data_parallel=1, units=8),
        schedule=CHAIN,
        microbatches=4,
        starts=tuple(range(0, 48, 6)),
        replicas=(1,) * 8,
    )
    judges = (Judge(setting=setting_of(**options)) for options in ({}, left_out))
    whole, part = (judge.estimates.timed(candidate).makespan for judge in judges)
    assert part < whole * 0.995


@pytest.mark.parametrize("buckets", [4, 48])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_full_simulation_confirms_the_estimate_of_sharded_copies(microbatches, buckets):
    setting = setting_of()
    candidate = Candidate(
        arrangement=Arrangement(data_parallel=8, units=1),
        schedule=DEPTH_FIRST,
        microbatches=microbatches,
        starts=(0,),
        replicas=(1,),
        buckets=buckets,
        sharded=Sharded.ALL,
    )
    estimates, layout = Judge(setting=setting).estimates, candidate.layout(setting)
    before, filled = (estimates.estimate(candidate, is_filled=is_filled).iteration for is_filled in (False, True))
    assert propose(setting, layout).iteration == pytest.approx(before, rel=1e-9)
    assert propose(setting, layout, filler_of(setting)).iteration >= filled * (1 - 1e-9)


def test_a_stage_costs_the_sum_of_its_layers_and_the_table_agrees():
    setting = setting_of(checkpointed=("*attn*",))
    profile, table = setting.profile, setting.table
    for first, stop in ((0, 5), (7, 30), (20, 21), (0, len(table.names))):
        names = table.names[first:stop]
        casts = {
            name: setting.workload.cast_time(profile.layer(name)) / (1 if name in table.checkpointed else 4)
            for name in names
        }
        forward = {name: profile.forward(name, 3) + casts[name] for name in names}
        again = sum(forward[name] for name in names if name in table.checkpointed)
        costs = block_costs(setting, names, 3, microbatches=4, speed=0.5)
        assert costs.forward == pytest.approx(2 * sum(forward.values()), rel=1e-12)
        assert costs.weight_grad == pytest.approx(2 * sum(profile.weight_grad(n, 3) for n in names), rel=1e-12)
        input_grad = again + sum(profile.input_grad(name, 3) for name in names)
        assert costs.input_grad == pytest.approx(2 * input_grad, rel=1e-12)
        assert costs.backward == pytest.approx(costs.input_grad + costs.weight_grad, rel=1e-12)


def test_the_search_names_families_that_are_fit_for_what_it_uses_them_for():
    assert is_chain(CHAIN)
    assert is_depth_first(DEPTH_FIRST)
    assert is_breadth_first(BREADTH_FIRST)
    assert holds_one(LOW_MEMORY_SCHEDULE)


def test_search_and_fills_count_the_start_of_a_fill_where_layers_were_measured(monkeypatch):
    monkeypatch.setattr("diffusionpipe.planner.pricing.setting.FILL_START", 0.01)
    computed = setting_of(waking=(), overhead=0.0, batch=256)
    computed, measured = (
        replace(computed, profile=replace(computed.profile, source=source)) for source in ("analytic", "measured")
    )
    candidate = Candidate(
        arrangement=Arrangement(data_parallel=8, units=1), schedule=CHAIN, microbatches=1, starts=(0,), replicas=(1,)
    )
    layout = candidate.layout(computed)
    chunks = sum(-(-32 // size) for _, size in layout.encode_chunks)
    one, other = (Judge(setting=s).estimates.estimate(candidate, is_filled=False) for s in (computed, measured))
    assert other.frozen - one.frozen == pytest.approx(0.01 * chunks / 0.8)  # on the slower device
    counts = [len(propose(s, layout, filler_of(s)).train.fills) for s in (computed, measured)]
    assert counts[1] <= counts[0]
