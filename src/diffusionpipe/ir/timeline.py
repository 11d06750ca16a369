"""When every action started and ended: simulated and measured timelines are this one type."""

from dataclasses import dataclass

from diffusionpipe.ir.action import COMPUTE_OPS, Action, Op
from diffusionpipe.ir.schedule import Schedule
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The start and the end of one action of one worker, in seconds from the start of the iteration."""

    worker: int
    action: Action
    start: Seconds
    end: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """The bytes of activations that a worker holds from `time` until its next sample."""

    worker: int
    time: Seconds
    held: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The start and the end of a part of a worker's update: clipping, the optimizer's step, the average; in seconds."""

    worker: int
    name: str
    start: Seconds
    end: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The start and end of every action of one iteration, and the memory over time; time 0 is the iteration's start.

    The spans of a worker are in the order of its actions. A timeline of one pipeline has its workers; of several copies
    it has all ranks as workers.
    """

    num_workers: int
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...] = ()
    source: str = "simulated"
    """The source of the times: "simulated" or "measured"."""
    update: tuple[Phase, ...] = ()
    """The rest of the step, if it is known."""
    copies: tuple[tuple[int, ...], ...] = ()
    """The ranks of each copy of the pipeline, in the order of its workers; () for one pipeline."""
    schedules: tuple[Schedule, ...] = ()
    """The schedule of each copy where steps are cut into micro-batches of their own; () where all run the plan's."""

    @property
    def makespan(self) -> Seconds:
        """The time from 0 to the end of the last action, in seconds; 0 without actions."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def step(self) -> Seconds:
        """The time from 0 to the end of the update, in seconds; the makespan if no update is in the timeline."""
        return max((phase.end for phase in self.update), default=self.makespan)

    def busy(self, worker: int) -> Seconds:
        """The seconds in which the worker computes: the sum of its F, B, I, W and ENCODE actions."""
        return sum(
            span.end - span.start
            for span in self.spans
            if span.worker == worker and (span.action.op in COMPUTE_OPS or span.action.op is Op.ENCODE)
        )

    @property
    def bubble(self) -> float:
        """The idle part of all workers' time, 1 - busy / (workers x makespan); 0 for an empty timeline."""
        if not self.makespan:
            return 0.0
        busy = sum(self.busy(worker) for worker in range(self.num_workers))
        return 1.0 - busy / (self.num_workers * self.makespan)

    def window(self, worker: int) -> Seconds:
        """The time from the worker's first start to its last end, in seconds; 0 if it does nothing."""
        spans = [span for span in self.spans if span.worker == worker]
        return max((s.end for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)

    def peak_memory(self, worker: int) -> Bytes:
        """The most bytes of activations that the worker holds at once; 0 where the timeline has no memory of it."""
        return max((sample.held for sample in self.memory if sample.worker == worker), default=0)
