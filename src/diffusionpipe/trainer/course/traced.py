"""The typical step of those that every rank has timed, gathered from all ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from diffusionpipe.ir import Mesh, Phase, Span, Timeline
from diffusionpipe.runtime.comm.exchange import Form, broadcast, form_of, gather
from diffusionpipe.trainer.setup.session import Session
from diffusionpipe.units import Seconds

Trace: TypeAlias = tuple[tuple[Span, ...], Seconds, tuple[Phase, ...]]
"""A rank's iteration: its spans, how long the iteration took, and the rest of the step."""

_SPANS, _SECONDS, _PHASES = form_of(tuple[Span, ...]), form_of(float), form_of(tuple[Phase, ...])


def _read_trace(data: object) -> Trace:
    if not isinstance(data, list) or len(data) != 3:
        raise ValueError("spans, a time and phases are needed")
    return _SPANS.read(data[0]), _SECONDS.read(data[1]), _PHASES.read(data[2])


_TRACES: Form[Trace] = Form(
    lambda trace: [_SPANS.write(trace[0]), _SECONDS.write(trace[1]), _PHASES.write(trace[2])], _read_trace
)


def measured_timeline(session: Session, traces: Sequence[Trace]) -> Timeline:
    """The traced step with the iteration of median length on rank 0, as all ranks ran it.

    Every rank calls it with its own traces of the same steps. It is one gathering of small objects for a run.
    """
    by_length = sorted(range(len(traces)), key=lambda index: traces[index][1])
    chosen = broadcast(by_length[len(traces) // 2], form_of(int))
    return merged(session.plan.mesh, gather(traces[chosen], _TRACES))


def merged(mesh: Mesh, traces: Sequence[Trace]) -> Timeline:
    """One timeline of the traces of all ranks, in the order of ranks."""
    spans = (replace(span, worker=rank) for rank, (found, _, _) in enumerate(traces) for span in found)
    groups = range(mesh.data_parallel)
    copies = tuple(tuple(mesh.rank(group, worker) for worker in range(mesh.pipeline)) for group in groups)
    return Timeline(
        num_workers=mesh.num_ranks,
        spans=tuple(spans),
        source="measured",
        update=tuple(phase for _, _, phases in traces for phase in phases),
        copies=copies if len(copies) > 1 else (),
    )
