"""Timelines as traces for https://ui.perfetto.dev and chrome://tracing.

The trace event format (JSON object form): every rank is a process with the threads compute, communication, reduction
and update, an arrow leads from each send to its receive, and a counter shows the bytes held in activations. Perfetto
colours slices by their name without digits, so equal operations look equal; chrome://tracing reads `cname`.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from diffusionpipe.files.output_file import write_atomically
from diffusionpipe.ir import COMPUTE_OPS, MESSAGE_OPS, RECV_OPS, Op, Phase, Schedule, Span, Timeline
from diffusionpipe.units import Seconds
from diffusionpipe.viz.palette import OP_NAMES, components

Event = dict[str, object]

_COMPUTE, _COMMUNICATION, _REDUCTION, _UPDATE = "compute", "communication", "reduction", "update"
_LANES_PER_KIND = 1000  # numbers of threads: lanes of one kind stay together
_COLOURS = {
    Op.F: "thread_state_runnable",
    Op.B: "thread_state_iowait",
    Op.I: "thread_state_iowait",
    Op.W: "thread_state_uninterruptible",
    Op.ENCODE: "good",
    Op.REDUCE_GRAD: "bad",
    Op.UNSHARD: "terrible",
    Op.STEP: "grey",
}


def perfetto(timeline: Timeline, path: Path, *, schedule: Schedule | None = None) -> None:
    """Write the timeline as a trace file for ui.perfetto.dev.

    With `schedule`, messages carry the names of their tensors, and fills their component.

    Raises:
        ConfigError: the file cannot be written.
    """
    names = components((timeline,), schedule)
    events = [
        *_metadata(timeline),
        *_slices(timeline, names, schedule),
        *_update_slices(timeline),
        *_counters(timeline),
    ]
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": timeline.source}}
    write_atomically(path, json.dumps(trace, ensure_ascii=False) + "\n")


def _microseconds(time: Seconds) -> float:
    return round(time * 1e6, 3)


def _metadata(timeline: Timeline) -> Iterator[Event]:
    for worker in range(timeline.num_workers):
        yield {"ph": "M", "pid": worker, "name": "process_name", "args": {"name": f"rank {worker}"}}
        yield {"ph": "M", "pid": worker, "name": "process_sort_index", "args": {"sort_index": worker}}


def _slices(timeline: Timeline, names: dict[int, str], schedule: Schedule | None) -> Iterator[Event]:
    copy_of_rank = {rank: copy for copy, ranks in enumerate(timeline.copies) for rank in ranks}
    for worker in range(timeline.num_workers):
        spans = [span for span in timeline.spans if span.worker == worker]
        for index, kind in enumerate((_COMPUTE, _COMMUNICATION, _REDUCTION, _UPDATE)):
            for lane, chosen in enumerate(_lanes([span for span in spans if _kind(span) == kind])):
                thread = index * _LANES_PER_KIND + lane + 1
                yield from _thread(worker, thread, f"{kind} {lane + 1}" if lane else kind)
                for span in chosen:
                    yield _slice(span, thread, names, schedule)
                    if span.action.op in MESSAGE_OPS:
                        yield _arrow(span, thread, copy_of_rank.get(worker, 0))


def _update_slices(timeline: Timeline) -> Iterator[Event]:
    """The trace events of the update that follows a flush; without a flush the update is an action, op STEP."""
    thread = 3 * _LANES_PER_KIND + 1
    for worker in sorted({phase.worker for phase in timeline.update}):
        yield from _thread(worker, thread, _UPDATE)
        for phase in timeline.update:
            if phase.worker == worker:
                yield _phase(phase, thread)


def _phase(phase: Phase, thread: int) -> Event:
    return {
        "ph": "X",
        "pid": phase.worker,
        "tid": thread,
        "ts": _microseconds(phase.start),
        "dur": _microseconds(phase.end - phase.start),
        "name": phase.name,
        "cat": _UPDATE,
    }


def _thread(worker: int, thread: int, name: str) -> Iterator[Event]:
    yield {"ph": "M", "pid": worker, "tid": thread, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", "pid": worker, "tid": thread, "name": "thread_sort_index", "args": {"sort_index": thread}}


def _kind(span: Span) -> str:
    op = span.action.op
    if op in COMPUTE_OPS or op is Op.ENCODE:
        return _COMPUTE
    if op is Op.STEP:
        return _UPDATE
    return _COMMUNICATION if op in MESSAGE_OPS else _REDUCTION


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """The spans divided into as few rows as possible, so that none overlap in a row: a thread cannot show overlaps."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        lane = next((lane for lane in lanes if lane[-1].end <= span.start), None)  # the first row that is free by then
        if lane is None:
            lanes.append([span])
        else:
            lane.append(span)
    return lanes


def _slice(span: Span, thread: int, names: dict[int, str], schedule: Schedule | None) -> Event:
    action = span.action
    arguments: Event = {"action": str(action), "stage": action.stage}
    name = OP_NAMES.get(action.op, action.op.value.lower().replace("_", " "))
    if action.microbatch is not None:
        arguments["microbatch"] = action.microbatch
        name = f"{name} {action.microbatch}"
    if action.op is Op.ENCODE and action.slot is not None:
        name = f"encode {names[action.slot]}"
    if schedule and action.slot is not None:
        arguments |= _details(action.op, action.slot, schedule)
    event: Event = {
        "ph": "X",
        "pid": span.worker,
        "tid": thread,
        "ts": _microseconds(span.start),
        "dur": _microseconds(span.end - span.start),
        "name": name,
        "cat": _kind(span),
        "args": arguments,
    }
    colour = _COLOURS.get(action.op)
    return event | {"cname": colour} if colour else event


def _details(op: Op, slot: int, schedule: Schedule) -> Event:
    if op is Op.ENCODE:
        fill = schedule.fills[slot]
        return {"component": fill.component, "layers": str(fill.layers), "samples": str(fill.samples)}
    message = schedule.messages[slot]
    return {
        "from stage": message.source,
        "to stage": message.destination,
        "samples": str(message.samples),
        "tensors": ", ".join(message.tensors),
    }


def _arrow(span: Span, thread: int, copy: int) -> Event:
    is_receive = span.action.op in RECV_OPS
    middle = _microseconds((span.start + span.end) / 2)  # an arrow binds to the slice around its time
    event: Event = {
        "pid": span.worker,
        "tid": thread,
        "ts": middle,
        "id": f"{copy}.{span.action.slot}" if copy else span.action.slot,
        "name": "message",
        "cat": "message",
    }
    return event | ({"ph": "f", "bp": "e"} if is_receive else {"ph": "s"})


def _counters(timeline: Timeline) -> Iterator[Event]:
    for sample in timeline.memory:
        yield {
            "ph": "C",
            "pid": sample.worker,
            "ts": _microseconds(sample.time),
            "name": "activations held",
            "args": {"bytes": sample.held},
        }
