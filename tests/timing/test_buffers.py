"""Message buffers beside activations, against a count at every moment; and wrong versions of the rules."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.strategies import schedules
from timing.test_oracle import filled, held_at, taken_and_given_back
from timing.test_sends import dropped_at, explicit, reader_of

from diffusionpipe.ir import RECV_OPS, Action, Edge, Op
from diffusionpipe.ir.flows import backward_op
from diffusionpipe.passes import connect_blocks
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import simulate
from diffusionpipe.timing import buffers


def held_by(schedule, costs):
    """For each worker the activations and messages that it holds from every moment at which they change."""
    timeline, stages = simulate(schedule, costs), schedule.placement.stages
    spans = {span.action: span for span in timeline.spans}
    found = []
    for worker, order in enumerate(schedule.orders):
        timed = [(action, spans[action].start, spans[action].end) for action in order]
        taken, given_back = taken_and_given_back(schedule, costs, timed)
        last_read = {}
        for action, _, end in timed:
            if action.op in (Op.B, Op.I) and (names := gradients_read_here(schedule, action, timed)):
                starts = [start for reader, start, _ in timed if reader in names]
                last_read[action.stage, action.microbatch] = max(starts)
                rows = len(schedule.placement.samples(action.stage, action.microbatch))
                taken.append((end, rows * sum(costs.tensor_bytes[name] for name in set().union(*names.values()))))
                given_back.append((max(starts), taken[-1][1]))
        for slot, message in enumerate(schedule.messages):
            size = len(message.samples) * sum(costs.tensor_bytes[name] for name in message.tensors)
            if schedule.placement.is_frozen(message.source):
                continue
            if stages[message.destination].worker == worker:
                recv = next(i for i, a in enumerate(order) if a.op in RECV_OPS and a.slot == slot)
                computes = [spans[a].end for a in order[:recv] if a.op in {Op.F, Op.B, Op.I, Op.W, Op.ENCODE}]
                taken.append((computes[-1] if computes else 0, size))
                given_back.append((spans[order[reader_of(schedule, slot)]].start, size))
            if stages[message.source].worker == worker and message.is_gradient:
                made = next(
                    spans[a].end
                    for a in order
                    if a.op in (Op.B, Op.I) and (a.stage, a.microbatch) == (message.source, message.microbatch)
                )
                dropped = dropped_at(schedule, slot)
                gone = timeline.makespan if dropped is None else spans[dropped].start
                made = max(made, last_read.get((message.source, message.microbatch), made))  # all stay until then
                if made < gone:
                    taken.append((made, size))
                    given_back.append((gone, size))
        moments = {moment for moment, _ in (*taken, *given_back)}
        found.append({moment: held_at(moment, taken, given_back) for moment in moments})
    return found


def gradients_read_here(schedule, backward, timed):
    """The backwards of the worker that read gradients of this one -> all gradients that it makes."""
    edges = schedule.placement.pipeline_of(backward.stage).edges
    made = {name for edge in edges if edge.consumer == backward.stage for name in edge.gradients}
    return {
        action: made
        for action, _, _ in timed
        if action.op is backward.op
        and action.microbatch == backward.microbatch
        and any((edge.producer, edge.consumer) == (action.stage, backward.stage) and edge.gradients for edge in edges)
    }


def compare(schedule, random):
    schedule, costs = explicit(schedule, random)
    if schedule.has_communication:
        found = buffers.moving_of(schedule, simulate(schedule, costs), costs.tensor_bytes)
        assert [sum(both) for both in found] == [max(held.values(), default=0) for held in held_by(schedule, costs)]


def compare_windows(schedule, random):
    schedule, costs = explicit(schedule, random)
    timeline = simulate(schedule, costs)
    found, all_held = buffers.moving_through(schedule, timeline, costs.tensor_bytes), held_by(schedule, costs)
    for span in timeline.spans:
        held = all_held[span.worker]
        before = [moment for moment in held if moment <= span.start]
        inside = [held[moment] for moment in held if span.start < moment < span.end]
        assert found[span.worker].most(span.start, span.end) == max([held[max(before)] if before else 0, *inside])


def skipping(random):
    """Two stages on each of two workers, with a skip between the stages of the first one."""
    edges = [Edge(producer=s, consumer=s + 1, tensors=(f"hidden{s}",), gradients=(f"hidden{s}",)) for s in range(3)]
    skip = ("hidden5", "hidden6")
    edges.append(Edge(producer=0, consumer=2, tensors=skip, gradients=skip))
    return connect_blocks(REGISTRY["interleaved"](2, 2 * random.randint(1, 3), 2), edges)


def compare_some():
    for seed in range(12):
        compare(filled(Random(seed)), Random(seed))
        compare(skipping(Random(seed)), Random(seed))


def test_what_moves_while_an_action_runs_is_counted_at_every_moment_of_it():
    for seed in range(6):
        compare_windows(filled(Random(seed)), Random(seed))


def test_an_output_for_others_alone_is_held_until_its_last_copy_is_dropped():
    """Of every second stage; with others the activations stay as they are."""
    is_shorter = False
    for seed in range(8):
        schedule, costs = explicit(filled(Random(seed)), Random(seed))
        timeline, placement = simulate(schedule, costs), schedule.placement
        spans = {span.action: span for span in timeline.spans}
        trained = [stage for one in placement.pipelines if Op.ENCODE not in one.ops for stage in one.stages]
        handed = {stage: tuple(costs.tensor_bytes) for stage in trained[::2]}
        plain = buffers.moving_through(schedule, timeline, costs.tensor_bytes)
        found = buffers.moving_through(schedule, timeline, costs.tensor_bytes, handed)
        gone = []  # (worker, from, to, bytes)
        sent = {}
        for slot, message in enumerate(schedule.messages):
            if message.source in handed and not message.is_gradient:
                for name in message.tensors:
                    sent.setdefault((message.source, message.microbatch, name), []).append(dropped_at(schedule, slot))
        for (stage, microbatch, name), drops in sent.items():
            backward = next(
                (a for a in spans if a.op in (Op.B, Op.I) and (a.stage, a.microbatch) == (stage, microbatch)), None
            )
            if backward is None or None in drops:
                continue
            end = spans[backward].end if backward.op is Op.B else spans[backward].start
            rows = len(placement.samples(stage, microbatch))
            gone.append(
                (spans[backward].worker, max(spans[a].start for a in drops), end, rows * costs.tensor_bytes[name])
            )
        for worker, (before, after) in enumerate(zip(plain, found, strict=True)):
            for time in after.times[1:]:
                less = sum(size for own, start, end, size in gone if own == worker and start <= time < end)
                is_shorter |= less > 0
                assert sum(after.held[after.times.index(time)]) == before.most(time, time) - less
    assert is_shorter


@settings(max_examples=30)
@given(schedules(), st.integers(0, 10**9))
def test_activations_and_messages_peak_as_at_some_moment(schedule, seed):
    compare(schedule, Random(seed))


def forgotten(is_forgotten):
    """The buffers without those whose place among all the function names."""
    original = buffers._buffers

    def rest(schedule, timeline, sizes):
        return (one for index, one in enumerate(original(schedule, timeline, sizes)) if not is_forgotten(index))

    return rest


def dropped_when_made(schedule, waits):
    """Every gradient is dropped as soon as it is made."""
    return {
        slot: Action(stage=message.source, op=backward_op(pipeline), microbatch=message.microbatch)
        for slot, message in enumerate(schedule.messages)
        if message.is_gradient and (pipeline := schedule.placement.pipeline_of(message.source))
    }


MUTANTS = {
    "no buffers": ("_buffers", lambda: lambda schedule, timeline, sizes: ()),
    "every second buffer": ("_buffers", lambda: forgotten(lambda index: index % 2)),
    "every fifth buffer": ("_buffers", lambda: forgotten(lambda index: not index % 5)),
    "no gradients handed on": ("_handed_on", lambda: lambda schedule, sizes: ()),
    "kept to the end": ("drops_of", lambda: lambda schedule, waits: {}),
    "dropped when made": ("drops_of", lambda: dropped_when_made),
    "posted at once": ("_posted", lambda: lambda schedule, spans: dict.fromkeys(range(len(schedule.messages)), 0)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_forgotten_buffer_is_noticed(monkeypatch, name):
    part, wrong = MUTANTS[name]
    monkeypatch.setattr(buffers, part, wrong())
    with pytest.raises(AssertionError):
        compare_some()


def test_what_is_not_wrong_is_not_noticed():
    compare_some()
