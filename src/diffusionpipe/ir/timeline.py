"""When every action started and ended: simulated and measured timelines are this one type."""

from dataclasses import dataclass

from diffusionpipe.ir.action import COMPUTE_OPS, Action, Op
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action of one worker in time."""

    worker: int
    action: Action
    start: Seconds
    end: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """Bytes that a worker holds in activations from `time` until its next sample."""

    worker: int
    time: Seconds
    held: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a worker's step after its iteration: clipping, the optimizer's step, the average."""

    worker: int
    name: str
    start: Seconds
    end: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One iteration. Time 0 is its start; spans of a worker are in the order of its actions.

    A timeline of one pipeline has its workers, a timeline of several copies has all ranks in their place.
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

    @property
    def makespan(self) -> Seconds:
        """The time from 0 to the last end, in seconds."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def step(self) -> Seconds:
        """The time from 0 to the end of the update, as far as it is known, in seconds."""
        return max((phase.end for phase in self.update), default=self.makespan)

    def busy(self, worker: int) -> Seconds:
        """Time that the worker computes: F, B, I, W, T and ENCODE."""
        return sum(
            span.end - span.start
            for span in self.spans
            if span.worker == worker and (span.action.op in COMPUTE_OPS or span.action.op is Op.ENCODE)
        )

    @property
    def bubble(self) -> float:
        """The idle part of all workers' time: 1 - busy / (workers x makespan)."""
        if not self.makespan:
            return 0.0
        busy = sum(self.busy(worker) for worker in range(self.num_workers))
        return 1.0 - busy / (self.num_workers * self.makespan)

    def window(self, worker: int) -> Seconds:
        """The time from the worker's first start to its last end, in seconds."""
        spans = [span for span in self.spans if span.worker == worker]
        return max((s.end for s in spans), default=0.0) - min((s.start for s in spans), default=0.0)

    def peak_memory(self, worker: int) -> Bytes:
        """The most that the worker holds in activations."""
        return max((sample.held for sample in self.memory if sample.worker == worker), default=0)
