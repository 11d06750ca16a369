"""What the first steps of a run take, action by action and layer by layer, on all ranks.

    step      1 ... 5     6 ... 20                 21
              warm-up     recorded, each from      medians are gathered; rank 0 holds them against
                          a start of all ranks     the prediction (`PredictionJudge`)

A barrier in front of each recorded step gives the ranks a common start, from which every rank counts.
"""

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch.distributed as dist

from diffusionpipe.ir import Action, Mesh, Span, Timeline
from diffusionpipe.ir.recorded import LayerTime, Recorded
from diffusionpipe.profiler.links import usable_memory
from diffusionpipe.runtime.exchange import form_of, gather
from diffusionpipe.trainer.loop import Stepper
from diffusionpipe.trainer.run_state import RunState
from diffusionpipe.trainer.session import Session
from diffusionpipe.trainer.windows import WindowStepper
from diffusionpipe.units import Bytes, Seconds

WARM_UP = 5
COUNTED = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSteps:
    """What one rank has recorded. Times count from the common start of a step."""

    starts: tuple[Seconds, ...]
    """Of each action of its order, the median over the steps,"""
    seconds: tuple[Seconds, ...]
    """and how long it took."""
    ends: tuple[Seconds, ...]
    """Of the iteration, step by step,"""
    steps: tuple[Seconds, ...]
    """and of the whole step."""
    layers: tuple[LayerTime, ...]
    """Medians over all forwards of as many samples."""
    memory: Bytes
    """What training may use of its device."""


class StepRecorder:
    """Records steps of one rank. Mutable: it holds what it has recorded."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._start: Seconds = 0.0
        self._spans: list[list[tuple[Seconds, Seconds]]] = []
        self._ends: list[Seconds] = []
        self._steps: list[Seconds] = []
        self._layers: dict[tuple[str, int], list[Seconds]] = defaultdict(list)
        self._actions: list[Action] = []

    @property
    def num_steps(self) -> int:
        """How many it has recorded."""
        return len(self._steps)

    def begin(self) -> None:
        """Start together with all other ranks."""
        if dist.is_initialized():
            dist.barrier()
        self._start = perf_counter()
        self._session.worker.watch.start()

    def end(self, last: Seconds) -> None:
        """The step is over; on GPUs it waits for the device.

        `last`: the end of the last work after the iteration, in seconds from the iteration's start.
        """
        worker = self._session.worker
        offset = worker.train.began - self._start
        spans, iteration = worker.train.recording.spans()
        self._actions = [span.action for span in spans]
        self._spans.append([(offset + span.start, span.end - span.start) for span in spans])
        self._ends.append(offset + iteration)
        self._steps.append(max(perf_counter() - self._start, offset + last))
        for one in worker.watch.stop():
            self._layers[one.name, one.samples].append(one.seconds)

    def own(self) -> OwnSteps:
        """What this rank has recorded; every rank calls it."""
        return OwnSteps(
            starts=tuple(median(start for start, _ in same) for same in zip(*self._spans, strict=True)),
            seconds=tuple(median(seconds for _, seconds in same) for same in zip(*self._spans, strict=True)),
            ends=tuple(self._ends),
            steps=tuple(self._steps),
            layers=tuple(
                LayerTime(name=name, samples=samples, seconds=median(found))
                for (name, samples), found in self._layers.items()
            ),
            memory=usable_memory(self._session.job),
        )

    def gathered(self, first: int) -> tuple[Recorded, tuple[Bytes, ...]]:
        """What all ranks have recorded from step `first` on, and the memory of each; every rank calls it."""
        ranks = gather(self.own(), form_of(OwnSteps))
        orders = [self._session.plan.train.orders[self._session.plan.mesh.place(r)[1]] for r in range(len(ranks))]
        recorded = recorded_of(self._session.plan.mesh, ranks, orders, (first, first + self.num_steps - 1))
        return recorded, tuple(rank.memory for rank in ranks)


def recorded_of(
    mesh: Mesh, ranks: list[OwnSteps], orders: list[tuple[Action, ...]], steps: tuple[int, int]
) -> Recorded:
    """The recordings of all ranks as one."""
    spans = tuple(
        Span(worker=rank, action=action, start=start, end=start + seconds)
        for rank, (own, order) in enumerate(zip(ranks, orders, strict=True))
        for action, start, seconds in zip(order, own.starts, own.seconds, strict=True)
    )
    layers: dict[tuple[str, int], list[Seconds]] = defaultdict(list)
    for own in ranks:
        for one in own.layers:
            layers[one.name, one.samples].append(one.seconds)
    return Recorded(
        steps=steps,
        timeline=Timeline(num_workers=mesh.num_ranks, spans=spans, source="measured"),
        ends=tuple(median(own.ends) for own in ranks),
        iteration=median(max(ends) for ends in zip(*(own.ends for own in ranks), strict=True)),
        step=median(max(times) for times in zip(*(own.steps for own in ranks), strict=True)),
        layers=tuple(
            LayerTime(name=name, samples=samples, seconds=median(found)) for (name, samples), found in layers.items()
        ),
    )


class FirstSteps:
    """Records the first steps of a run and has them judged. Mutable."""

    def __init__(self, state: RunState) -> None:
        session, recipe = state.session, state.session.recipe
        self._state, self._first = state, state.step + WARM_UP
        has_prediction = recipe.pipeline.is_profiled and session.worker.window is None
        is_long_enough = recipe.training.steps - state.step > WARM_UP + COUNTED
        wanted = state.hooks.judge is not None and has_prediction and is_long_enough
        self._recorder = StepRecorder(session) if wanted else None
        self._judge = state.hooks.judge if session.is_first else None

    @property
    def _records(self) -> bool:
        return self._recorder is not None and self._first <= self._state.step < self._first + COUNTED

    def begin(self) -> None:
        """The next step begins."""
        if self._records and self._recorder is not None:
            self._recorder.begin()

    def end(self, stepper: Stepper | WindowStepper) -> None:
        """The step is over, and `state.step` still counts those before it; every rank calls it."""
        if self._records and self._recorder is not None and isinstance(stepper, Stepper):
            self._recorder.end(max((phase.end for phase in stepper.phases()), default=0.0))
            if self._recorder.num_steps == COUNTED:
                recorded, memory = self._recorder.gathered(self._first + 1)
                if self._judge is not None and self._state.metrics is not None:
                    found = self._judge.check(recorded, memory)
                    self._state.metrics.write(self._state.step + 1, found)
        elif self._judge is not None:
            self._judge.look()

    def close(self) -> None:
        """Training is over."""
        if self._judge is not None:
            self._judge.close()
