"""The origin of every input and every gradient of a stage: the schedule read from one worker's side.

Rows are counted within the stage's own part of a micro-batch, so that they index its tensors.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from diffusionpipe.ir import Action, Edge, Op, Placement, Range, Schedule
from diffusionpipe.ir.flows import backward_op
from diffusionpipe.timing.sends import Waits, waits_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePart:
    """Rows of one tensor that one other stage provides: which rows, of which stage, in which message if any."""

    peer: int
    """The number of the other stage, which the rows come from."""
    rows: Range
    """The rows of this stage's tensor."""
    peer_rows: Range
    """The same samples, as rows of the other stage's tensor."""
    message: int | None
    """The message that brings them; None when the other stage is on this worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The tensors that one stage exchanges in one micro-batch: inputs, gradients, and the messages that bring them."""

    stage: int
    microbatch: int
    num_rows: int
    batch_rows: Range
    """The rows of the micro-batch's samples in the batch."""
    inputs: dict[str, tuple[MessagePart, ...]]
    """Tensor -> its parts, which cover all rows."""
    with_gradient: frozenset[str]
    """Inputs whose gradient flows back."""
    gradients: dict[str, tuple[MessagePart, ...]]
    """Output tensor -> parts of its gradient in edge order, to be added up."""
    read: frozenset[str]
    """Outputs that another stage reads."""
    arrivals: tuple[int, ...]
    """Messages that F waits for, frozen outputs included."""
    gradient_arrivals: tuple[int, ...]
    """Messages that B (or I) waits for."""
    num_reads: int
    """How often outputs are read: sends and local consumers."""
    num_gradient_reads: int
    """How often input gradients are read: sends and local producers."""

    @property
    def local_producers(self) -> tuple[int, ...]:
        """The stages on this worker whose outputs this stage reads, sorted."""
        return _local_peers(self.inputs)

    @property
    def local_consumers(self) -> tuple[int, ...]:
        """The stages on this worker that read this stage's outputs and give their gradients back, sorted."""
        return _local_peers(self.gradients)


def _local_peers(parts: dict[str, tuple[MessagePart, ...]]) -> tuple[int, ...]:
    return tuple(sorted({p.peer for ps in parts.values() for p in ps if p.message is None}))


def routes_of(schedule: Schedule, worker: int) -> dict[tuple[int, int], Route]:
    """(stage, micro-batch) -> its route, for every trained stage on `worker`."""
    placement = schedule.placement
    arrival, waits = _messages_by_edge(schedule), waits_of(schedule)
    edges = [edge for edge in _edges(placement) if not placement.is_frozen(edge.producer)]
    routes = {}
    for pipeline in placement.pipelines:
        # Frozen stages write to the store. They have no slots and need no routes.
        if Op.ENCODE in pipeline.ops:
            continue
        for stage in pipeline.stages:
            if placement.stages[stage].worker == worker:
                touching = [edge for edge in edges if stage in (edge.producer, edge.consumer)]
                for microbatch in pipeline.numbers:
                    route = _route(placement, touching, arrival, waits, stage, microbatch)
                    routes[stage, microbatch] = route
    return routes


_Arrival = dict[tuple[int, int, int, bool], int]


def _messages_by_edge(schedule: Schedule) -> _Arrival:
    return {
        (m.source, m.destination, m.microbatch, m.is_gradient): k
        for k, m in enumerate(schedule.messages)
        # Messages of frozen outputs go through the store; `waits_of` finds them.
        if not schedule.placement.is_frozen(m.source)
    }


def _route(
    placement: Placement,
    edges: Sequence[Edge],
    arrival: _Arrival,
    waits: Waits,
    stage: int,
    microbatch: int,
) -> Route:
    pipeline = placement.pipeline_of(stage)
    own = placement.samples(stage, microbatch)
    batch_rows = placement.rows(stage, microbatch)

    def part(peer: int, *, is_gradient: bool) -> MessagePart | None:
        if microbatch not in placement.pipeline_of(peer).numbers:
            # A micro-batch that is not probed has no estimate; its reader finds zeros in the store.
            return None
        theirs = placement.samples(peer, microbatch)
        # A replica has some of the micro-batch's samples, so two stages exchange those that both have.
        common = own.intersection(theirs)
        if not len(common):
            return None
        return MessagePart(
            peer=peer,
            rows=common.shifted(-own.start),
            peer_rows=common.shifted(-theirs.start),
            message=arrival.get((peer, stage, microbatch, is_gradient)),
        )

    inputs: defaultdict[str, list[MessagePart]] = defaultdict(list)
    gradients: defaultdict[str, list[MessagePart]] = defaultdict(list)
    with_gradient: set[str] = set()
    read: set[str] = set()
    num_reads = num_gradient_reads = 0
    for edge in edges:
        if edge.consumer == stage and (source := part(edge.producer, is_gradient=False)) is not None:
            for name in edge.tensors:
                inputs[name].append(source)
            with_gradient.update(edge.gradients)
            # The gradients of an edge go in one message or are taken by one local producer, so they count as one read.
            num_gradient_reads += bool(edge.gradients)
        if edge.producer == stage and (reader := part(edge.consumer, is_gradient=True)) is not None:
            num_reads += 1
            read.update(edge.tensors)
            for name in edge.gradients:
                gradients[name].append(reader)
    backward = backward_op(pipeline)
    return Route(
        stage=stage,
        microbatch=microbatch,
        num_rows=len(own),
        batch_rows=batch_rows,
        inputs={name: tuple(parts) for name, parts in inputs.items()},
        with_gradient=frozenset(with_gradient),
        gradients={name: tuple(parts) for name, parts in gradients.items()},
        arrivals=tuple(waits.get(Action(stage=stage, op=Op.F, microbatch=microbatch), ())),
        gradient_arrivals=tuple(
            waits.get(Action(stage=stage, op=backward, microbatch=microbatch), ()) if backward else ()
        ),
        read=frozenset(read),
        num_reads=num_reads,
        num_gradient_reads=num_gradient_reads,
    )


def extents_of(schedule: Schedule, worker: int, raw_inputs: Sequence[str]) -> dict[str, Range]:
    """Name -> the rows of the batch that `worker` keeps, of raw inputs and of frozen layers' tensors.

    These are rows that its stages' pipelines read, its encoded share of the raw inputs, and tensors that it only passes
    on.
    """
    placement = schedule.placement
    extents: dict[str, Range] = {}
    for stage_id, stage in enumerate(placement.stages):
        if stage.worker == worker and placement.is_frozen(stage_id):
            # Micro-batch 0 of frozen work is the whole batch; the share of the stage is a part of it.
            rows = placement.rows(stage_id, 0)
            extents.update(dict.fromkeys(raw_inputs, rows))
            for edge in _edges(placement):
                if edge.producer == stage_id:
                    extents.update({name: rows for name in edge.tensors if name not in extents})
    for edge in _edges(placement):
        if placement.is_frozen(edge.producer) and placement.stages[edge.consumer].worker == worker:
            for name in edge.tensors:
                # One buffer for both: the rows that the worker encodes itself and all rows that its stages read.
                extents[name] = fed_rows(placement, edge.consumer, extents.get(name))
    return extents


def fed_rows(placement: Placement, stage: int, others: Range | None) -> Range:
    """The smallest range that holds all rows of the stage's pipeline and the rows `others`; None: no others."""
    pipeline = placement.pipeline_of(stage)
    own = Range(pipeline.first_sample, pipeline.first_sample + pipeline.num_samples)
    return own if others is None else Range(min(own.start, others.start), max(own.stop, others.stop))


def _edges(placement: Placement) -> list[Edge]:
    return [edge for pipeline in placement.pipelines for edge in pipeline.edges]
