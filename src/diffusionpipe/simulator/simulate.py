"""Schedule x costs -> Timeline."""

from collections import defaultdict
from dataclasses import dataclass

from diffusionpipe.costs import Costs
from diffusionpipe.costs.waking import wake_time
from diffusionpipe.errors import ScheduleError
from diffusionpipe.ir import Action, MemorySample, Op, Schedule, Span, Timeline
from diffusionpipe.ir.execution import Execution, Streams, execute
from diffusionpipe.ir.flows import Flow
from diffusionpipe.units import Bytes, Seconds


def simulate(schedule: Schedule, costs: Costs, *, streams: Streams = Streams.DIRECTION) -> Timeline:
    """When every action starts and ends, and the activation memory of every worker over time.

    Without explicit messages an edge between workers takes the time of its tensors on the link, beside all others.
    With them every transfer waits for its streams and for both its ends, as `ir.execution` describes; the span of a
    SEND and of its RECV is that of the transfer. A gradient reduction starts when it is issued on all replicas and
    runs beside the rest; so does the gathering of a sharded block, for which its compute waits. Times stay exact where
    the costs are integers or Fractions and links have no bandwidth.

    Raises:
        ScheduleError: the schedule gets stuck, or the costs belong to another one.
    """
    placement = schedule.placement
    if len(costs.stages) != len(placement.stages) or len(costs.fills) != len(schedule.fills):
        have = f"{len(costs.stages)} stages and {len(costs.fills)} fills"
        want = f"{len(placement.stages)} stages and {len(schedule.fills)} fills"
        raise ScheduleError([f"the costs are for {have}, but the schedule has {want}; make costs for this schedule"])
    execution = execute(schedule, _Durations(schedule=schedule, costs=costs), streams=streams)
    if execution.blocked:
        raise ScheduleError([f"deadlock: {line}" for line in execution.blocked])
    return Timeline(
        num_workers=schedule.num_workers,
        spans=_spans(schedule, execution),
        memory=_memory(schedule, costs, execution),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Durations:
    schedule: Schedule
    costs: Costs

    def compute(self, action: Action) -> Seconds:
        return self.costs.seconds(action)

    def waking(self, idle: Seconds, busy: Seconds) -> Seconds:
        return wake_time(self.costs.waking, idle, busy)

    def message(self, slot: int) -> Seconds:
        message = self.schedule.messages[slot]
        return self._transfer(message.source, message.destination, message.tensors, len(message.samples))

    def flow(self, flow: Flow) -> Seconds:
        return self._transfer(flow.source, flow.destination, flow.tensors, len(flow.samples))

    def reduce(self, stage: int) -> Seconds:
        return self.costs.reduces[stage] if self.costs.reduces else 0

    def unshard(self, stage: int) -> Seconds:
        return self.costs.unshards[stage] if self.costs.unshards else 0

    def _transfer(self, source: int, destination: int, tensors: tuple[str, ...], num_samples: int) -> Seconds:
        stages = self.schedule.placement.stages
        num_bytes = num_samples * sum(self.costs.tensor_bytes.get(name, 0) for name in tensors)
        return self.costs.link_between(stages[source].worker, stages[destination].worker).transfer(num_bytes)


def _spans(schedule: Schedule, execution: Execution) -> tuple[Span, ...]:
    spans = []
    for worker, order in enumerate(schedule.orders):
        for action, start, end in zip(order, execution.starts[worker], execution.ends[worker], strict=True):
            assert start is not None, action
            assert end is not None, action
            spans.append(Span(worker=worker, action=action, start=start, end=end))
    return tuple(spans)


def _memory(schedule: Schedule, costs: Costs, execution: Execution) -> tuple[MemorySample, ...]:
    """One sample at each moment at which what a worker holds changes."""
    frees = {stage: _last_op(pipeline.ops) for pipeline in schedule.placement.pipelines for stage in pipeline.stages}
    samples = []
    for worker, order in enumerate(schedule.orders):
        changes: dict[Seconds, Bytes] = defaultdict(int)
        for action, start, end in zip(order, execution.starts[worker], execution.ends[worker], strict=True):
            assert start is not None, action
            assert end is not None, action
            cost = costs.stages[action.stage]
            if action.op is Op.F:
                changes[start] += cost.activation
            if action.op is Op.I:
                changes[end] -= cost.activation - cost.kept_after_input_grad
            if action.op is frees[action.stage]:
                changes[end] -= cost.kept_after_input_grad if action.op is Op.W else cost.activation
        # What ends at a moment is released before what starts then is held: both stand in one sum.
        held = 0
        for time in sorted(changes):
            held += changes[time]
            samples.append(MemorySample(worker=worker, time=time, held=held))
    return tuple(samples)


def _last_op(ops: frozenset[Op]) -> Op:
    return Op.B if Op.B in ops else Op.W if Op.W in ops else Op.F


def activations_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each worker the most micro-batches, counted stage by stage, that it holds activations of at a time.

    Held from F to the end of B, or of W where the backward is split; for a single F where there is no backward.
    """
    frees = {stage: _last_op(pipeline.ops) for pipeline in schedule.placement.pipelines for stage in pipeline.stages}
    peaks = []
    for order in schedule.orders:
        held = peak = 0
        for action in order:
            held += action.op is Op.F
            peak = max(peak, held)
            held -= action.op is frees[action.stage]
        peaks.append(peak)
    return tuple(peaks)
