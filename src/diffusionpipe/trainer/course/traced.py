"""The timeline of a typical step: of all steps that the ranks have timed, the one of median length."""

from time import perf_counter

import torch.distributed as dist

from diffusionpipe.ir import Timeline
from diffusionpipe.runtime.comm.exchange import broadcast, form_of, gather
from diffusionpipe.runtime.machine.machine_use import machine_name
from diffusionpipe.runtime.recording.clocks import RankClock, RankTrace, timeline_of
from diffusionpipe.trainer.setup.session import Session
from diffusionpipe.trainer.step.loop import Stepper
from diffusionpipe.trainer.step.windows import WindowStepper
from diffusionpipe.units import Seconds


class TracedSteps:
    """Collects the times of this rank's steps, each from a start common to all ranks, and makes one timeline of all."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._met: Seconds = 0.0
        self._traces: list[tuple[Seconds, RankTrace]] = []
        """The length of the iteration, and the step."""

    def begin(self) -> None:
        """Waits at a barrier for all other ranks, and notes the start of a timed step."""
        dist.barrier()
        self._met = perf_counter()

    def end(self, stepper: Stepper | WindowStepper) -> None:
        """Adds the times of the step that has just ended; on GPUs it waits for the device."""
        executor = self._session.worker.train
        spans, length = executor.recording.spans()
        clock = RankClock(
            machine=machine_name(),
            is_device=self._session.job.device.type != "cpu",
            met=self._met,
            began=executor.began,
        )
        # Each step by tokens has its own micro-batches.
        own = executor.schedule if self._session.worker.cut is not None else None
        self._traces.append((length, RankTrace(clock=clock, spans=spans, update=stepper.phases(), schedule=own)))

    def timeline(self) -> Timeline | None:
        """The timeline, on all ranks, of the step whose iteration has median length on rank 0; None if none was timed.

        Every rank calls it after the same steps. It is one gathering of small objects for a run.
        """
        if not self._traces:
            return None
        # Every rank has lengths of its own; rank 0 chooses for all.
        by_length = sorted(range(len(self._traces)), key=lambda index: self._traces[index][0])
        chosen = broadcast(by_length[len(by_length) // 2], form_of(int))
        plan = self._session.plan
        return timeline_of(plan.mesh, plan.train, gather(self._traces[chosen][1], form_of(RankTrace)))
