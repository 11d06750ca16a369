"""The one interpreter: runs any schedule on one worker.

At construction every action of the worker's order becomes an instruction, a pair of closures (wait, run) with all its
routes resolved; an iteration is a plain loop over them:

    for wait, run in program:
        wait()       block until the messages that the action needs are there; None  (idle in the trace)
        run()        compute, start a send or a receive, start a reduction          (busy in the trace)

    RECV_F 1 ──> new memory ──> F 1 ──> output ──> SEND_F 1                   what arrives goes with its last tensor,
                                  │                                           an output after its last reader,
    SEND_B 1 <── input gradient <── B 1 <── gradient <── RECV_B 1             a sent tensor once the peer has
                                                                              surely waited for it (`releases_of`)

The preparation of a stage once in an iteration, for all its micro-batches, is in the loop right before its first F:
after the RECV_F that posts its inputs, so that they can arrive meanwhile.

Two workers, threads here, with waits of no length in place of compute. Worker 0 starts to send at once and computes on;
it posts the receive of a gradient before its second forward [1], and waits for it only in front of the backward [2]:

>>> from diffusionpipe.costs import Costs, StageCosts, TensorSpec
>>> from diffusionpipe.ir import Edge, Message, Pipeline, Placement, Stage, parse_action
>>> from diffusionpipe.runtime.comm.threads import run_threads
>>> from diffusionpipe.runtime.rehearsals.virtual import virtual_executor
>>> edge = Edge(producer=0, consumer=1, tensors=("x",), gradients=("x",))
>>> pipeline = Pipeline(stages=(0, 1), microbatches=(1, 1), ops=frozenset({Op.F, Op.B}), edges=(edge,))
>>> there, back = dict(source=0, destination=1), dict(source=1, destination=0, is_gradient=True)
>>> schedule = Schedule(
...     name="example",
...     placement=Placement(stages=(Stage(worker=0, weights=0), Stage(worker=1, weights=1)), pipelines=(pipeline,)),
...     orders=tuple(tuple(map(parse_action, order.split())) for order in (
...         "0F0 0SEND_F0>0 0RECV_B0>2 0F1 0SEND_F1>1 0B0 0RECV_B1>3 0B1",
...         "1RECV_F0>0 1F0 1RECV_F1>1 1B0 1SEND_B0>2 1F1 1B1 1SEND_B1>3",
...     )),
...     messages=tuple(
...         Message(microbatch=number, samples=Range(0, 1), tensors=("x",), **ends)
...         for ends in (there, back) for number in (0, 1)
...     ),
... )
>>> costs = Costs(stages=(StageCosts(forward=0, backward=0),) * 2)
>>> tensors = {name: TensorSpec(name=name, shape=(), needs_gradient=name != "noisy") for name in ("noisy", "x", "loss")}
>>> def main(rank, transport):
...     executor = virtual_executor(
...         schedule, rank, costs=costs, tensors=tensors, transport=transport, inputs=("noisy",)
...     )
...     outputs = executor.run()
...     program = executor._programs[0].instructions()
...     waits = [str(step) for (wait, _), (_, step) in zip(program, executor._steps) if wait]
...     return [output.name for output in outputs], waits
>>> run_threads(2, main)
[([], ['0B0', '0B1']), (['loss', 'loss'], ['1F0', '1F1'])]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from diffusionpipe.ir import MESSAGE_OPS, Action, Op, Range, Schedule
from diffusionpipe.runtime.comm.transport import Pending
from diffusionpipe.runtime.compute.stage import StageModule
from diffusionpipe.runtime.compute.store import RowStore
from diffusionpipe.runtime.engine.compiler import Compiler
from diffusionpipe.runtime.engine.equipment import Equipment
from diffusionpipe.runtime.engine.program import Program
from diffusionpipe.runtime.engine.routing import Route, extents_of, fed_rows, routes_of
from diffusionpipe.runtime.engine.slot import Output, Slot
from diffusionpipe.runtime.job.progress import Whereabouts
from diffusionpipe.runtime.machine.error_file import is_shortage
from diffusionpipe.runtime.machine.occupied_memory import occupied_memory
from diffusionpipe.runtime.recording.trace import Recording, StreamRecorder, marks_of, position_of, recorder_for
from diffusionpipe.timing.sends import releases_of
from diffusionpipe.units import Seconds

_WORDS = {Op.F: "forward", Op.B: "backward", Op.I: "input backward", Op.W: "weight backward"}
"""Op -> its name in texts that users see."""


class Executor:
    """Runs one worker's order of a schedule, an iteration at each `run`. Mutable: it holds what is in flight."""

    def __init__(
        self,
        schedule: Schedule,
        worker: int,
        equipment: Equipment,
        *,
        store: RowStore | None = None,
        others: Sequence[Equipment] = (),
    ) -> None:
        """`store`: where frozen outputs go instead of a store of its own; for the prologue of another executor.

        `others`: the parts for samples of further sizes: stages and tensors of their own, all else is the same.

        Raises:
            ScheduleError: the order holds ops that this executor does not know.
        """
        self.schedule, self.worker, self._equipment = schedule, worker, equipment
        routes = routes_of(schedule, worker)
        extents = with_inputs(extents_of(schedule, worker, equipment.raw_inputs), schedule, routes, equipment.stages)
        # An executor that is given a store encodes nothing ahead: the prologue, and steps that are cut by tokens.
        is_ahead = any(pipeline.is_ahead for pipeline in schedule.placement.pipelines) and store is None
        # Two stores take turns: while one is read, the other is filled for the next iteration.
        self._stores = [
            store
            or RowStore(
                extents,
                equipment.tensors,
                equipment.device,
                others=[other.tensors for other in others],
                cells=cells_of(schedule),
            )
            for _ in range(1 + is_ahead)
        ]
        self._turn = 0
        self._works: tuple[list[Pending], ...] = tuple([] for _ in schedule.messages)
        self._held: tuple[list[Tensor], ...] = tuple([] for _ in schedule.messages)
        self._outputs: list[Output] = []
        order = schedule.orders[worker]
        own = [action.slot for action in order if action.op in MESSAGE_OPS and action.slot is not None]
        self._own_transfers = [(self._works[k], self._held[k]) for k in own]
        slots = {key: Slot() for key in routes}
        self.deferred = tuple(slot.deferred for slot in slots.values())
        """The tensors that I puts aside for W, of each stage and micro-batch."""
        releases = {
            action: tuple((self._works[k], self._held[k]) for k in over)
            for action, over in releases_of(schedule).items()
        }
        compiler = Compiler(
            schedule=schedule,
            worker=worker,
            equipment=equipment,
            routes=routes,
            releases=releases,
            slots=slots,
            works=self._works,
            held=self._held,
            outputs=self._outputs,
            reading=self._stores[0],
            writing=self._stores[-1],
            trained=frozenset(action.stage for action in order if action.op in (Op.B, Op.I)),
        )
        # Of two stores, turn 0 reads the first and fills the last, turn 1 the other way round. A single store is both.
        turns = (replace(compiler, reading=r, writing=self._stores[i - 1]) for i, r in enumerate(self._stores))
        steps = _prepared(order, equipment.preparations)
        self._programs = [Program(steps, [turn, *(turn.of_size(other) for other in others)]) for turn in turns]
        # Every turn and every size of samples has the same waits, so one list of marks serves all.
        marks = marks_of([wait is not None for wait, _ in self._programs[0].instructions()])
        self._steps = list(zip(marks, steps, strict=True))
        # Two take turns: one is read while the device runs what the other records.
        self._recordings = [
            Recording(worker=worker, recorder=recorder_for(equipment.device), steps=self._steps) for _ in range(2)
        ]
        self._sources = sources_of(schedule, worker, equipment.rank_of_worker)
        self._num_runs = 0

    @property
    def recording(self) -> Recording:
        """The times of the last iteration, or of the one under way; they can be read until the end of the next one."""
        return self._recordings[0]

    @property
    def began(self) -> Seconds:
        """The time at which the last iteration began, in seconds of the host's clock (`perf_counter`)."""
        return self.recording.recorder.began

    @property
    def store(self) -> RowStore:
        """The store into which raw inputs are put before the next run.

        They belong to the next run's batch or, if the schedule encodes ahead, to the batch after it.
        """
        return self._stores[1 - self._turn] if len(self._stores) > 1 else self._stores[0]

    @property
    def first_store(self) -> RowStore:
        """The store from which the next iteration reads frozen outputs; the prologue fills it."""
        return self._stores[self._turn]

    def run(self) -> list[Output]:
        """Run one iteration; returns the tensors that no other stage reads (losses, predictions), by micro-batch.

        Gradients are left in the parameters' `.grad`, summed over replicas where the schedule reduces them. Raw inputs
        must be in `store` before.

        Raises:
            RuntimeError: an error of a layer or a transfer; where memory ran out, a note says at which action.
            MemoryError: the host has no more memory; a note says at which action.
        """
        self._outputs.clear()
        self._num_runs += 1
        self._recordings.reverse()
        recorder = self.recording.recorder
        recorder.reset()
        mark = recorder.mark
        mark()  # the start of the iteration
        try:
            for wait, run in self._programs[self._turn].instructions():
                if wait is not None:
                    wait()  # [2]
                    mark()
                run()  # [1]
                mark()
            self._finish()
        except (RuntimeError, MemoryError) as error:
            if is_shortage(error):
                error.add_note(shortage_at(self._steps, self.recording.recorder, self._equipment.device))
            raise
        finally:
            # Also after an error: copies of the weights are stale after the next update.
            self._equipment.cleanup()
        mark()
        self._turn = (self._turn + 1) % len(self._stores)
        return list(self._outputs)

    def passed(self) -> tuple[int, ...]:
        """The number of iterations begun, and the numbers of marks passed in the last one and in the one before.

        Any thread may call it.
        """
        return self._num_runs, *(recording.recorder.passed() for recording in self._recordings)

    def whereabouts(self) -> Whereabouts | None:
        """The action under way and the ranks that it waits for; None between iterations; any thread may call it."""
        # The host may issue an iteration already while the device is still in the one before.
        positions = (recording.position() for recording in reversed(self._recordings))
        position = next((found for found in positions if found is not None), None)
        if position is None:
            return None
        index, is_waiting = position
        if index == len(self._steps):
            return Whereabouts(action="the end of the iteration", awaited=())
        step = self._steps[index][1]
        if not isinstance(step, Action):
            return Whereabouts(action=named(step))
        return Whereabouts(action=named(step), awaited=self._sources.get(step, ()) if is_waiting else None)

    def prepare(self) -> None:
        """Cast now the weights that `run` casts before each stage's first forward; the next `run` finds the copies."""
        for preparation in self._equipment.preparations.values():
            preparation()

    def rewind(self) -> None:
        """Let the next run repeat the last one: it reads the same frozen outputs and fills the same store again."""
        self._turn = (self._turn - 1) % len(self._stores)

    def mark(self) -> None:
        """Record a time after the last iteration, for `Recording.times_after`."""
        self.recording.recorder.mark()

    def _finish(self) -> None:
        # Left over are sends of whose end no news has come, and frozen outputs of the next batch, for which no action
        # waits.
        for works, held in self._own_transfers:
            if works:
                for work in works:
                    work.wait()
                works.clear()
                held.clear()
        for block in self._equipment.gradients.values():
            block.finish()


def named(step: object) -> str:
    """A step of an iteration in words, for messages: "action 1F0 (forward of stage 1, micro-batch 0)".

    `step`: an `Action`; anything else is the casting of weights.
    """
    if not isinstance(step, Action):
        return "the casts of the weights"
    words = f" ({_WORDS[step.op]} of stage {step.stage}, micro-batch {step.microbatch})" if step.op in _WORDS else ""
    return f"action {step}{words}"


def shortage_at(steps: Sequence[tuple[tuple[int, int], object]], recorder: StreamRecorder, device: torch.device) -> str:
    """A sentence that names the step at which the host was when memory ran out, and the memory in use.

    `steps`: (marks, action or function) of each step, as in `Recording.steps`. `recorder`: the marks passed.
    """
    index, _ = position_of([marks for marks, _ in steps], recorder.issued())
    place = named(steps[index][1]) if index < len(steps) else "the end of the iteration"
    sizes = occupied_memory(device).items()
    held = ", ".join(f"{name.removesuffix('_gib').replace('_', ' ')} {size:.1f} GiB" for name, size in sizes)
    return f"It ran out at {place}; {held}."


def sources_of(schedule: Schedule, worker: int, rank_of: Callable[[int], int]) -> dict[Action, tuple[int, ...]]:
    """For each forward and backward of a worker, the ranks that send the messages which it reads, sorted.

    `rank_of`: a function from a worker to its rank.
    """
    sources: dict[Action, tuple[int, ...]] = {}
    placement = schedule.placement
    order = schedule.orders[worker]
    messages = [schedule.messages[a.slot] for a in order if a.op in (Op.RECV_F, Op.RECV_B) and a.slot is not None]
    # Frozen outputs that are computed ahead have come by the end of the iteration before.
    received = [message for message in messages if not placement.pipeline_of(message.source).is_ahead]
    for action in order:
        if action.op in (Op.F, Op.B, Op.I):
            found = {
                rank_of(placement.stages[message.source].worker)
                for message in received
                if message.destination == action.stage
                # Frozen work has one micro-batch, the whole batch, so its messages concern every forward.
                and message.is_gradient == (action.op is not Op.F)
                and (placement.is_frozen(message.source) or message.microbatch == action.microbatch)
            }
            sources[action] = tuple(sorted(found))
    return sources


def cells_of(schedule: Schedule) -> tuple[Range, ...]:
    """The batch's rows that each micro-batch has: all different ranges, sorted; frozen work has none of its own."""
    pipelines = (one for one in schedule.placement.pipelines if Op.ENCODE not in one.ops)
    rows = {(own.start, own.stop) for one in pipelines for own in map(one.rows, range(len(one.microbatches)))}
    return tuple(Range(start, stop) for start, stop in sorted(rows))


def _prepared(
    order: Sequence[Action], preparations: Mapping[int, Callable[[], None]]
) -> list[Action | Callable[[], None]]:
    """The order with each stage's preparation in front of its first forward."""
    steps: list[Action | Callable[[], None]] = []
    pending = dict(preparations)
    for action in order:
        if action.op is Op.F and action.stage in pending:
            steps.append(pending.pop(action.stage))
        steps.append(action)
    return steps


def with_inputs(
    extents: Mapping[str, Range],
    schedule: Schedule,
    routes: Mapping[tuple[int, int], Route],
    stages: Mapping[int, StageModule],
) -> dict[str, Range]:
    """Name -> the rows of the batch that are kept of a tensor: `extents`, and the inputs that stages find nowhere else.

    The added tensors are those that a stage reads and neither a stage nor the frozen part writes.
    """
    rows = dict(extents)
    for (stage, _), route in routes.items():
        for name in stages[stage].reads if stage in stages else ():
            # Raw inputs, and the estimate of a micro-batch that is not probed, which is read as zeros.
            if name not in route.inputs:
                rows[name] = fed_rows(schedule.placement, stage, rows.get(name))
    return rows
