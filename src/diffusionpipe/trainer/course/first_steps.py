"""The times of the first steps of a run, action by action and layer by layer, on all ranks.

    step      1 ... 5     6 ... 20                 21
              warm-up     recorded, each from      medians are gathered; rank 0 holds them against
                          a start of all ranks     the prediction (`PredictionMonitor`)

A barrier in front of each recorded step gives the ranks a common start, from which every rank counts. Ranks of one
machine count from the first that leaves the barrier, by the clock that they share (`runtime/recording/clocks.py`).
Which steps count says `counted_steps`: those that other programs disturbed never do. While too few count, or they vary
too much, a further round of steps is recorded.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist

from diffusionpipe.ir import Action, Mesh, Span, Timeline
from diffusionpipe.ir.recorded import LayerTime, Recorded, medians_of
from diffusionpipe.profiler.links import usable_memory
from diffusionpipe.runtime.comm.exchange import form_of, gather, gather_numbers
from diffusionpipe.runtime.machine.cores import cpu_wait_time
from diffusionpipe.runtime.machine.machine_use import (
    CorePlace,
    Counters,
    StepCounters,
    cores_of,
    place_of,
    read_counters,
    used_by_others,
)
from diffusionpipe.runtime.recording.clocks import lateness
from diffusionpipe.trainer.course.counted_steps import COUNTED, MOST_ROUNDS, Counted, Note, representative_steps
from diffusionpipe.trainer.course.run_state import RunState
from diffusionpipe.trainer.setup.session import Session
from diffusionpipe.trainer.step.loop import Stepper
from diffusionpipe.trainer.step.windows import WindowStepper
from diffusionpipe.units import Bytes, Seconds

logger = logging.getLogger(__name__)

WARM_UP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSteps:
    """One rank's times of the recorded steps, in seconds from the common start of a step, and its memory."""

    starts: tuple[Seconds, ...]
    """The start of each action of the rank's order, the median over the steps."""
    seconds: tuple[Seconds, ...]
    """The duration of each action of the rank's order, the median over the steps."""
    ends: tuple[Seconds, ...]
    """The end of each step's iteration."""
    steps: tuple[Seconds, ...]
    """The end of each whole step."""
    layers: tuple[LayerTime, ...]
    """The median time of each layer's forward, for each number of samples."""
    loading: Seconds | None
    """The processor time of the rank's data workers per step; None where it cannot be read."""
    memory: Bytes
    """The bytes of the rank's device that training may use."""


class StepRecorder:
    """Records the times of one rank's steps, each from a start common to all ranks, and gathers all ranks' records."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._start: Seconds = 0.0
        self._waited: Seconds = 0.0
        self._spans: list[list[tuple[Seconds, Seconds]]] = []
        self._ends: list[Seconds] = []
        self._met: list[Seconds] = []
        """The time at which this rank left the barrier, step by step; all its times of the step count from it."""
        self._late: list[Seconds] = []
        """The time by which the first rank of its machine had left the barrier before, once `notes` has asked."""
        self._steps: list[Seconds] = []
        self._layers: list[list[LayerTime]] = []
        self._parts: list[float] = []
        """Part of each step without a core."""
        self._places: list[CorePlace] = []
        """Places of all ranks, from the first recorded step on."""
        self._begin: Counters | None = None
        self._counters: list[StepCounters] = []
        """Counters of all steps, as long as they can be read."""

    @property
    def num_steps(self) -> int:
        """The number of steps that were recorded."""
        return len(self._steps)

    def begin(self) -> None:
        """Waits at a barrier for all other ranks and begins to record a step."""
        if not self._places:  # only now are there data workers
            threads = torch.get_num_threads() if self._session.job.device.type == "cpu" else 1
            # Every rank reads the counters of all cores of this job on its machine.
            self._places = gather(place_of(threads), form_of(CorePlace))
        self._begin = self._read()
        if dist.is_initialized():
            dist.barrier()
        self._start, self._waited = perf_counter(), cpu_wait_time()
        self._met.append(self._start)
        self._session.worker.watch.start()

    def end(self, last: Seconds) -> None:
        """Adds the record of the step that has just ended; on GPUs it waits for the device.

        `last`: the end of the last work after the iteration, in seconds from the iteration's start.
        """
        worker = self._session.worker
        offset = worker.train.began - self._start
        spans, iteration = worker.train.recording.spans()
        self._spans.append([(offset + span.start, span.end - span.start) for span in spans])
        self._ends.append(offset + iteration)
        seconds = perf_counter() - self._start
        self._parts.append((cpu_wait_time() - self._waited) / seconds)
        # On a GPU the host may be ahead of the device, so the later end counts.
        self._steps.append(max(seconds, offset + last))
        self._layers.append(worker.watch.stop())
        end = self._read()
        if self._begin is not None and end is not None:
            self._counters.append(StepCounters(self._begin, end))

    def _read(self) -> Counters | None:
        """The counters of processor use that this rank's machine shows now, for all cores of this job's ranks there.

        None where they cannot be read.
        """
        own = self._places[dist.get_rank() if dist.is_initialized() else 0]
        return read_counters(cores_of(self._places, own.machine))

    def notes(self) -> list[Note]:
        """The measurements of each recorded step, by which `representative_steps` chooses.

        Every rank calls it, and all get the same.
        """
        # (3, steps), stacked (ranks, 3, steps); each of the three is (ranks, steps)
        numbers = torch.tensor([self._parts, self._ends, self._met], dtype=torch.float64)
        parts, ends, met = torch.stack(gather_numbers(numbers)).unbind(dim=1)
        machines = [place.machine for place in self._places]
        # (ranks, steps)
        late = torch.tensor([lateness(of_step, machines) for of_step in met.T.tolist()], dtype=torch.float64).T
        self._late = late[self._session.job.membership.rank].tolist()
        parts, ends = parts.amax(dim=0), (ends + late).amax(dim=0)  # (steps,): the slowest rank of each
        counters = gather(tuple(self._counters), form_of(tuple[StepCounters, ...]))
        # One rank without counters leaves the use by others unknown on all.
        is_known = all(len(own) == self.num_steps for own in counters)
        uses = used_by_others(self._places, counters) if is_known else [None] * self.num_steps
        return [
            Note(without_core=part, iteration=end, use=use)
            for part, end, use in zip(parts.tolist(), ends.tolist(), uses, strict=True)
        ]

    def own(self, counted: Sequence[int]) -> OwnSteps:
        """The times of this rank's steps at the positions `counted`, from 0; call it after `notes`."""
        late = self._late
        spans = [[(late[index] + start, seconds) for start, seconds in self._spans[index]] for index in counted]
        return OwnSteps(
            starts=tuple(median(start for start, _ in same) for same in zip(*spans, strict=True)),
            seconds=tuple(median(seconds for _, seconds in same) for same in zip(*spans, strict=True)),
            ends=tuple(late[index] + self._ends[index] for index in counted),
            steps=tuple(late[index] + self._steps[index] for index in counted),
            layers=medians_of(one for index in counted for one in self._layers[index]),
            memory=usable_memory(self._session.job),
            loading=self._loading(),
        )

    def _loading(self) -> Seconds | None:
        """The processor time of this rank's data workers per step; None where it cannot be read.

        It is the mean over all recorded steps: data workers work ahead, so that one step says nothing.
        """
        if not self._counters or len(self._counters) < self.num_steps:
            return None
        return (self._counters[-1].end.helpers - self._counters[0].begin.helpers) / self.num_steps

    def gathered(self, first: int, counted: Counted) -> tuple[Recorded, tuple[Bytes, ...]]:
        """The record of the steps on all ranks, and the usable memory of each rank's device in bytes.

        Every rank calls it, after `notes`. `first`: the number of the first recorded step. `counted`: steps that count.
        """
        ranks = gather(self.own(counted.steps), form_of(OwnSteps))
        orders = [self._session.plan.train.orders[self._session.plan.mesh.place(r)[1]] for r in range(len(ranks))]
        recorded = recorded_of(self._session.plan.mesh, ranks, orders, (first, first + self.num_steps - 1))
        recorded = replace(recorded, others=counted.others, num_disturbed=counted.num_disturbed)
        return recorded, tuple(rank.memory for rank in ranks)


def recorded_of(
    mesh: Mesh, ranks: list[OwnSteps], orders: list[tuple[Action, ...]], steps: tuple[int, int]
) -> Recorded:
    """One record of all ranks: the timeline of medians, the median iteration and step, and the times of layers.

    `ranks`: the times of each rank. `orders`: the actions of each rank. `steps`: the numbers of the first and the last
    recorded step.
    """
    loading = tuple(own.loading for own in ranks if own.loading is not None)
    spans = tuple(
        Span(worker=rank, action=action, start=start, end=start + seconds)
        for rank, (own, order) in enumerate(zip(ranks, orders, strict=True))
        for action, start, seconds in zip(order, own.starts, own.seconds, strict=True)
    )
    return Recorded(
        steps=steps,
        timeline=Timeline(num_workers=mesh.num_ranks, spans=spans, source="measured"),
        ends=tuple(median(own.ends) for own in ranks),
        iteration=median(max(ends) for ends in zip(*(own.ends for own in ranks), strict=True)),
        step=median(max(times) for times in zip(*(own.steps for own in ranks), strict=True)),
        layers=medians_of(one for own in ranks for one in own.layers),
        loading=loading if len(loading) == len(ranks) else (),
    )


def _has_prediction(state: RunState) -> bool:
    """Whether the plan predicts the time of the run's steps, and all steps are alike.

    Steps that read results of encoders from a cache are shorter, steps by tokens have orders of their own, and the time
    of steps on patches depends on the size of the patches.
    """
    recipe, worker = state.session.recipe, state.session.worker
    is_alike = worker.window is None and worker.cut is None and state.cache is None and recipe.data.patches is None
    return recipe.pipeline.is_profiled and is_alike


class FirstSteps:
    """A recorder of a run's first steps, which rank 0 compares with the prediction.

    It records 15 steps after the first 5, up to three times.
    """

    def __init__(self, state: RunState) -> None:
        session, recipe = state.session, state.session.recipe
        self._state, self._first = state, state.step + WARM_UP
        # One step at least follows the recorded ones: the prediction is for the rest of the run.
        is_long_enough = recipe.training.num_steps - state.step > WARM_UP + COUNTED
        wanted = state.hooks.judge is not None and _has_prediction(state) and is_long_enough
        self._recorder = StepRecorder(session) if wanted else None
        self._judge = state.hooks.judge if session.is_first else None
        self._is_over = False

    @property
    def _records(self) -> bool:
        return self._recorder is not None and self._first <= self._state.step and not self._is_over

    def begin(self) -> None:
        """Begins to record the next step, if it is one of those to record."""
        if self._records and self._recorder is not None:
            self._recorder.begin()

    def end(self, stepper: Stepper | WindowStepper) -> None:
        """Ends the record of a step, and has the record judged after each 15 steps.

        Every rank calls it, before `state.step` counts the step. At other steps rank 0's judge shows results of its
        work in the background.
        """
        if self._records and self._recorder is not None and isinstance(stepper, Stepper):
            self._recorder.end(max((phase.end for phase in stepper.phases()), default=0.0))
            if self._recorder.num_steps % COUNTED == 0:
                self._round_over(self._recorder)
        elif self._judge is not None:
            # The search for a faster layout runs in another process: has it ended?
            self._judge.look()

    def _round_over(self, recorder: StepRecorder) -> None:
        """Has the recorded steps judged on rank 0, or lets 15 more be recorded because too few of them count."""
        step = self._state.step + 1  # `state.step` does not count this step yet
        left = self._state.session.recipe.training.num_steps - step
        counted = representative_steps(recorder.notes())
        if counted.why_more and left > COUNTED and recorder.num_steps < MOST_ROUNDS * COUNTED:
            logger.info('prediction_checked_after=%d reason="%s"', step + COUNTED, counted.why_more)
            return
        self._is_over = True
        if not counted.steps:
            if self._judge is not None:
                self._judge.give_up((self._first + 1, step), counted.others or 0.0)
            return
        recorded, memory = recorder.gathered(self._first + 1, counted)
        if self._judge is not None and self._state.metrics is not None:
            self._state.metrics.write(step, self._judge.check(recorded, memory))

    def close(self) -> None:
        """Ends the judge of the first steps, because training is over."""
        if self._judge is not None:
            self._judge.close()
