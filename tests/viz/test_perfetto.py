import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

from diffusionpipe.ir import (
    Action,
    Fill,
    MemorySample,
    Message,
    Op,
    Phase,
    Pipeline,
    Placement,
    Range,
    Schedule,
    Span,
    Stage,
    Timeline,
)
from diffusionpipe.viz import perfetto


def example():
    stages = (Stage(worker=0, weights=0), Stage(worker=1, weights=1), Stage(worker=0, weights=2))
    pipelines = (
        Pipeline(stages=(0, 1), microbatches=(2, 2), ops=frozenset({Op.F, Op.B})),
        Pipeline(stages=(2,), microbatches=(4,), ops=frozenset({Op.ENCODE})),
    )
    messages = tuple(
        Message(source=0, destination=1, microbatch=m, samples=Range(0, 2), tensors=("hidden",)) for m in range(2)
    )
    fills = (Fill(stage=2, component="vae", layers=Range(0, 3), samples=Range(0, 4)),)
    timed = [
        (0, Action(stage=2, op=Op.ENCODE, slot=0), 0, 2),
        (0, Action(stage=0, op=Op.F, microbatch=0), 2, 3),
        (0, Action(stage=0, op=Op.SEND_F, microbatch=0, slot=0), 3, 6),
        (0, Action(stage=0, op=Op.SEND_F, microbatch=1, slot=1), 4, 7),
        (1, Action(stage=1, op=Op.RECV_F, microbatch=0, slot=0), 3, 6),
        (1, Action(stage=1, op=Op.RECV_F, microbatch=1, slot=1), 4, 7),
        (1, Action(stage=1, op=Op.B, microbatch=0), 7, 9),
        (1, Action(stage=1, op=Op.REDUCE_GRAD), 9, 10),
    ]
    spans = tuple(Span(worker=w, action=a, start=start, end=end) for w, a, start, end in timed)
    orders = tuple(tuple(a for w, a, _, _ in timed if w == worker) for worker in range(2))
    placement = Placement(stages=stages, pipelines=pipelines)
    schedule = Schedule(name="mine", placement=placement, orders=orders, messages=messages, fills=fills)
    memory = (MemorySample(worker=0, time=2, held=1024), MemorySample(worker=0, time=9, held=0))
    return schedule, Timeline(num_workers=2, spans=spans, memory=memory, source="measured")


def trace_of(tmp_path, **options):
    schedule, timeline = example()
    path = tmp_path / "trace.json"
    perfetto(timeline, path, **({"schedule": schedule} | options))
    return json.loads(path.read_text())


def events(trace, phase):
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_every_action_is_one_slice_of_its_rank_in_microseconds(tmp_path):
    _, timeline = example()
    slices = events(trace_of(tmp_path), "X")
    found = sorted((e["pid"], e["args"]["action"], e["ts"], e["ts"] + e["dur"]) for e in slices)
    assert found == sorted((s.worker, str(s.action), s.start * 1e6, s.end * 1e6) for s in timeline.spans)


def test_no_thread_has_two_slices_at_a_time(tmp_path):
    threads = defaultdict(list)
    for event in events(trace_of(tmp_path), "X"):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 2 + 4 + 1  # compute, two overlapping transfers on each rank, one reduction
    for slices in threads.values():
        slices.sort()
        assert all(first[1] <= second[0] for first, second in pairwise(slices))


def test_ranks_and_threads_have_names(tmp_path):
    metadata = events(trace_of(tmp_path), "M")
    ranks = {e["pid"]: e["args"]["name"] for e in metadata if e["name"] == "process_name"}
    assert ranks == {0: "rank 0", 1: "rank 1"}
    threads = {(e["pid"], e["args"]["name"]) for e in metadata if e["name"] == "thread_name"}
    assert threads == {
        (0, "compute"),
        (0, "communication"),
        (0, "communication 2"),
        (1, "compute"),
        (1, "communication"),
        (1, "communication 2"),
        (1, "reduction"),
    }


def test_an_arrow_leads_from_each_send_to_its_receive_within_their_slices(tmp_path):
    trace = trace_of(tmp_path)
    starts = {e["id"]: e for e in events(trace, "s")}
    ends = {e["id"]: e for e in events(trace, "f")}
    assert set(starts) == set(ends) == {0, 1}
    assert all((starts[i]["pid"], ends[i]["pid"]) == (0, 1) for i in starts)
    for arrow in (*starts.values(), *ends.values()):
        around = [e for e in events(trace, "X") if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"])]
        assert any(e["ts"] <= arrow["ts"] <= e["ts"] + e["dur"] for e in around)


def test_messages_carry_their_tensors_and_fills_their_component(tmp_path):
    slices = {e["args"]["action"]: e for e in events(trace_of(tmp_path), "X")}
    assert slices["0SEND_F1>1"]["args"]["tensors"] == "hidden"
    assert slices["2ENCODE#0"]["name"] == "encode vae"
    assert slices["1B0"]["name"] == "backward 0"


def test_without_a_schedule_the_trace_is_drawn_without_details(tmp_path):
    slices = {e["args"]["action"]: e for e in events(trace_of(tmp_path, schedule=None), "X")}
    assert slices["2ENCODE#0"]["name"] == "encode frozen"
    assert "tensors" not in slices["0SEND_F1>1"]["args"]


def test_memory_is_a_counter(tmp_path):
    counters = [(e["ts"], e["args"]["bytes"]) for e in events(trace_of(tmp_path), "C")]
    assert counters == [(2e6, 1024), (9e6, 0)]


def test_the_update_is_on_a_thread_of_its_own_and_arrows_stay_within_their_copy(tmp_path):
    schedule, timeline = example()
    other = tuple(replace(span, worker=span.worker + 2) for span in timeline.spans)
    update = tuple(Phase(worker=rank, name="optimizer", start=10, end=11) for rank in range(4))
    both = replace(
        timeline, num_workers=4, spans=timeline.spans + other, update=update, copies=((0, 1), (2, 3)), memory=()
    )
    perfetto(both, tmp_path / "trace.json", schedule=schedule)
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert [(e["pid"], e["ts"], e["dur"]) for e in events(trace, "X") if e["name"] == "optimizer"] == [
        (rank, 10e6, 1e6) for rank in range(4)
    ]
    ends = {e["id"]: e["pid"] for e in events(trace, "f")}
    assert [(e["pid"], ends[e["id"]]) for e in events(trace, "s")] == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_without_a_flush_an_update_is_an_action_on_that_thread(tmp_path):
    _, timeline = example()
    step = Span(worker=1, action=Action(stage=1, op=Op.STEP), start=10, end=11)
    perfetto(replace(timeline, spans=(*timeline.spans, step)), tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    (drawn,) = (e for e in events(trace, "X") if e["cat"] == "update")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}
    assert names[drawn["pid"], drawn["tid"]] == "update"
    assert drawn["pid"] == 1
