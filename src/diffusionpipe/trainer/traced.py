"""Of the steps that every rank has timed the typical one, gathered from all ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch.distributed as dist

from diffusionpipe.ir import Mesh, Phase, Span, Timeline
from diffusionpipe.trainer.session import Session
from diffusionpipe.units import Seconds

Trace: TypeAlias = tuple[tuple[Span, ...], Seconds, tuple[Phase, ...]]
"""A rank's iteration: what it did when, how long the iteration took, and the rest of the step."""


def measured_timeline(session: Session, traces: Sequence[Trace]) -> Timeline:
    """Of the traced steps the one with the iteration of median length on rank 0, as all ranks ran it.

    Every rank calls it with its own traces of the same steps. It is one gathering of small objects for a run.
    """
    by_length = sorted(range(len(traces)), key=lambda index: traces[index][1])
    chosen = [by_length[len(traces) // 2]]
    dist.broadcast_object_list(chosen, src=0)
    gathered: list[Trace | None] = [None] * session.plan.mesh.num_ranks
    dist.all_gather_object(gathered, traces[chosen[0]])
    return merged(session.plan.mesh, [trace for trace in gathered if trace is not None])


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
