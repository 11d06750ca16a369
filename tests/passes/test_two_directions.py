"""Two trained pipelines over the same blocks and workers: every pass, and all of them together."""

from dataclasses import replace
from itertools import combinations
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.strategies import FROZEN_BLOCK, costs_of, edges, lookaheads, sized, streams
from passes.kept import assert_computes_kept

from diffusionpipe.ir import Action, Edge, Op, Range
from diffusionpipe.ir.flows import flows
from diffusionpipe.ir.ranges import tiles
from diffusionpipe.passes import (
    PlacedFill,
    communicate,
    connect,
    insert_encoding,
    insert_fills,
    prologue,
    reduce_gradients,
    replicate,
)
from diffusionpipe.planner.assembly.buckets import subdivide
from diffusionpipe.schedules.families.bitpipe import bitpipe
from diffusionpipe.schedules.families.chimera import chimera, chimera_doubling
from diffusionpipe.schedules.families.dualpipe import dualpipe
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing.legal import check

families = st.sampled_from([chimera, chimera_doubling, bitpipe, dualpipe])


@st.composite
def connected(draw):
    """A model's edges in both directions, uneven micro-batches, and maybe buckets and replicas."""
    num_workers = draw(st.sampled_from([2, 4]))
    counts = [draw(st.integers(1, 2)) for _ in range(num_workers)]
    parts = draw(st.integers(1, 2))
    schedule = subdivide(sized(draw(families), num_workers, draw(st.integers(2, 7)), lcm(*counts)), parts)
    down, up = schedule.placement.pipelines
    for number, pipeline in enumerate((down, up)):
        own = [
            replace(edge, producer=pipeline.stages[edge.producer], consumer=pipeline.stages[edge.consumer])
            for edge in draw(edges(len(down.stages)))
        ]
        sizes = [size * draw(st.integers(1, 3)) for size in pipeline.microbatches]
        schedule = connect(schedule, own, microbatches=sizes, model="unet", pipeline=number)
    return replicate(schedule, [counts[stage.worker] for stage in schedule.placement.stages])


def rows_of_the_batch(schedule):
    """Block -> the rows of the batch that its copies train."""
    found = {}
    for pipeline in schedule.placement.pipelines:
        if Op.F in pipeline.ops:
            for stage in pipeline.stages:
                rows = found.setdefault(schedule.placement.stages[stage].weights, [])
                rows += [schedule.placement.rows(stage, k) for k in range(len(pipeline.microbatches))]
    return found


@given(connected())
def test_the_copies_of_a_block_train_every_row_of_the_batch_once(schedule):
    check(schedule)
    batch = Range(0, schedule.placement.num_samples)
    for rows in rows_of_the_batch(schedule).values():
        assert tiles(rows, batch)


def test_new_sizes_of_one_direction_move_the_samples_of_the_next():
    schedule = chimera(2, 4, 2)
    down, up = schedule.placement.pipelines
    longer = connect(schedule, down.edges, microbatches=[3, 4]).placement.pipelines
    assert [(p.first_sample, p.microbatches) for p in longer] == [(0, (3, 4)), (7, (2, 2))]
    shorter = connect(schedule, down.edges, microbatches=[1, 1]).placement.pipelines
    assert [(p.first_sample, p.microbatches) for p in shorter] == [(0, (1, 1)), (2, (2, 2))]
    last = connect(schedule, up.edges, microbatches=[5, 5], pipeline=1).placement.pipelines
    assert [(p.first_sample, p.microbatches) for p in last] == [(0, (2, 2)), (4, (5, 5))]


def test_pipelines_that_read_the_same_samples_stay_where_they_are():
    """As two backbones do that are trained on one batch."""
    schedule = chimera(2, 2, 2)
    down, up = schedule.placement.pipelines
    together = (down, replace(up, first_sample=0))
    schedule = replace(schedule, placement=replace(schedule.placement, pipelines=together))
    assert connect(schedule, down.edges, microbatches=[4]).placement.pipelines[1].first_sample == 0


def test_each_direction_has_the_models_skips_between_its_own_stages():
    schedule = chimera(4, 4)
    skip = [Edge(producer=k, consumer=k + 1) for k in range(3)] + [Edge(producer=0, consumer=3, tensors=("skip",))]
    for number, pipeline in enumerate(schedule.placement.pipelines):
        first = pipeline.stages[0]
        own = [replace(e, producer=first + e.producer, consumer=first + e.consumer, gradients=()) for e in skip]
        schedule = connect(schedule, own, pipeline=number)
    messages = communicate(schedule, simulate(schedule, uniform_costs(schedule))).messages
    skips = {(m.source, m.destination) for m in messages if m.tensors == ("skip",)}
    assert skips == {(0, 3), (4, 7)}


@given(st.data(), lookaheads, streams)
def test_all_passes_together_are_legal_and_change_no_compute(data, lookahead, stream):
    schedule = data.draw(connected())
    num_blocks = 1 + max(stage.weights for stage in schedule.placement.stages)
    outputs = dict.fromkeys(range(num_blocks), ("text",))
    schedule = insert_encoding(schedule, block=FROZEN_BLOCK, outputs=outputs, num_layers=3, max_chunk=4)
    schedule = reduce_gradients(schedule, data.draw(st.booleans()))
    check(schedule, streams=stream)
    messages = communicate(schedule, simulate(schedule, data.draw(costs_of(schedule))), lookahead=lookahead)
    check(messages, streams=stream)
    assert_computes_kept(messages, schedule)


@given(connected(), st.booleans())
def test_both_directions_read_the_frozen_rows_of_their_own_samples(schedule, is_ahead):
    num_samples = schedule.placement.num_samples
    outputs = {0: ("noisy", "text"), 1: ("text",)}
    if is_ahead:
        fill = PlacedFill(position=1, component="vae", layers=Range(0, 3), samples=Range(0, num_samples))
        encoded = insert_fills(schedule, {0: [fill]}, block=FROZEN_BLOCK, outputs=outputs)
    else:
        encoded = insert_encoding(schedule, block=FROZEN_BLOCK, outputs=outputs, num_layers=3, max_chunk=4)
    check(encoded)
    read = {}
    for flow in flows(encoded):
        if flow.is_frozen:
            rows = encoded.placement.rows(flow.destination, flow.consumer.microbatch)
            assert rows.intersection(flow.samples) == flow.samples
            block = encoded.placement.stages[flow.destination].weights
            for name in flow.tensors:
                read.setdefault((block, name), []).append(flow.samples)
    assert read.keys() == {(0, "noisy"), (0, "text"), (1, "text")}
    for ranges in read.values():
        assert tiles(ranges, Range(0, num_samples))


@given(connected(), lookaheads, streams)
def test_the_prologue_of_two_directions_brings_every_row_to_both(schedule, lookahead, stream):
    num_samples = schedule.placement.num_samples
    outputs = dict.fromkeys(range(2), ("text",))
    fill = PlacedFill(position=1, component="vae", layers=Range(0, 3), samples=Range(0, num_samples))
    filled = insert_fills(schedule, {1: [fill]}, block=FROZEN_BLOCK, outputs=outputs)
    filled = communicate(filled, simulate(filled, uniform_costs(filled)), lookahead=lookahead)
    check(filled, streams=stream)
    first = prologue(filled)
    check(first, streams=stream)
    assert [p.first_sample for p in first.placement.pipelines[:2]] == [
        p.first_sample for p in schedule.placement.pipelines
    ]


def reductions(schedule):
    """For each worker the blocks in the order in which it reduces them."""
    stages = schedule.placement.stages
    return [[stages[a.stage].weights for a in order if a.op is Op.REDUCE_GRAD] for order in schedule.orders]


@given(connected(), st.booleans())
def test_workers_reduce_the_blocks_that_they_share_in_one_order(schedule, is_data_parallel):
    reduced = reduce_gradients(schedule, is_data_parallel)
    check(reduced)
    assert tuple(tuple(a for a in order if a.op is not Op.REDUCE_GRAD) for order in reduced.orders) == schedule.orders
    found = reductions(reduced)
    for one, other in combinations(found, 2):
        common = set(one) & set(other)
        assert [b for b in one if b in common] == [b for b in other if b in common]
    for worker, blocks in enumerate(found):
        held = {stage.weights for stage in schedule.placement.stages if stage.worker == worker}
        assert sorted(blocks) == sorted(held)


@given(families, st.integers(2, 8), st.integers(2, 20))
def test_a_reduction_starts_as_soon_as_every_copy_has_its_gradients(family, num_workers, num_microbatches):
    """For uniform costs: what stands before it in a worker's order never makes it wait."""
    schedule = reduce_gradients(sized(family, num_workers, num_microbatches), is_data_parallel=False)
    spans = simulate(schedule, uniform_costs(schedule)).spans
    stages = schedule.placement.stages
    done = {}
    for span in spans:
        if span.action.op in (Op.B, Op.W):
            block = stages[span.action.stage].weights
            done[block] = max(done.get(block, 0), span.end)
    for span in spans:
        if span.action.op is Op.REDUCE_GRAD:
            assert span.start == done[stages[span.action.stage].weights]


def test_an_odd_number_of_micro_batches_would_let_the_middle_workers_wait_for_each_other():
    schedule = chimera(4, 5)
    last = {}  # worker -> its blocks in the order in which it is done with them
    for worker in (1, 2):
        backwards = [schedule.placement.stages[a.stage].weights for a in schedule.orders[worker] if a.op is Op.B]
        last[worker] = sorted(set(backwards), key=lambda block: len(backwards) - backwards[::-1].index(block))
    assert last[1] != last[2]
    found = reductions(reduce_gradients(schedule, is_data_parallel=False))
    assert found[1] == found[2]


@pytest.mark.parametrize("family", [chimera, bitpipe])
@pytest.mark.parametrize("num_workers", [4, 6, 8])
def test_all_workers_start_a_reduction_before_their_last_backward(family, num_workers):
    """The papers' eager synchronisation, which they leave out on the middle two workers."""
    schedule = reduce_gradients(family(num_workers, num_workers), is_data_parallel=False)
    for order in schedule.orders:
        ops = [action.op for action in order]
        assert ops.index(Op.REDUCE_GRAD) < len(ops) - 1 - ops[::-1].index(Op.B)


def test_replicas_of_both_directions_reduce_with_all_holders_of_their_block():
    schedule = replicate(chimera(2, 2, 2), [2, 1, 1, 2])
    check(reduce_gradients(schedule, is_data_parallel=False))
    assert [stage.weights for stage in schedule.placement.stages] == [0, 0, 1, 0, 1, 1]
    assert [stage.worker for stage in schedule.placement.stages] == [0, 1, 2, 2, 0, 1]
    assert schedule.orders[1][0] == Action(stage=1, op=Op.F, microbatch=0)
