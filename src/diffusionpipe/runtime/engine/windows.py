"""Runs a window again and again: the executor of training without a flush.

Each batch that may be in flight has a context: its slots, its messages, its rows. In window w, the instruction of an
action that leads by l is the one of batch w + l's context [1]. Contexts take turns (`ir.versions.batches_held`). Rows
are free for another batch after the batch's own window, all else at the end of the next one: its last messages have
surely been received then [2]. Sent tensors go before that, where the news of its arrival comes with the message of any
batch (`timing.sends.window_releases_of`) [3].

    window -1   window 0            window 1            window 2
    F0 F1       F2 B0 F3 B1 STEP    F4 B2 F5 B3 STEP    B4 B5 STEP     two micro-batches, batches 0 to 2, then a flush
    context 0   contexts 1 and 0    contexts 2 and 1    context 2

Before the first window of a stretch come windows that only begin batches; windows begin no batch that follows the next
flush. A window's fills encode a batch into the rows of its context. Without fills another executor does, at once, at
the window's ENCODE.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from diffusionpipe.ir import Action, Op, Range, Schedule
from diffusionpipe.ir.action import PRESENT, Reading
from diffusionpipe.ir.versions import batches_held
from diffusionpipe.runtime.comm.transport import Pending
from diffusionpipe.runtime.compute.store import RowStore
from diffusionpipe.runtime.engine.compiler import Compiler, Instruction
from diffusionpipe.runtime.engine.equipment import Equipment
from diffusionpipe.runtime.engine.executor import Executor, named, shortage_at, sources_of, with_inputs
from diffusionpipe.runtime.engine.routing import extents_of, routes_of
from diffusionpipe.runtime.engine.slot import Output, Slot
from diffusionpipe.runtime.engine.transfers import Sending
from diffusionpipe.runtime.job.progress import Whereabouts
from diffusionpipe.runtime.machine.error_file import is_shortage
from diffusionpipe.runtime.recording.trace import Recording, marks_of, recorder_for
from diffusionpipe.runtime.weights.versions import BlockVersions
from diffusionpipe.timing.sends import window_releases_of

Update = Callable[[int, int], None]
"""`update(block, step)`: a function that makes the optimizer's step of a block, whose gradients are complete."""

Predict = Callable[[int, int, int], None]
"""`predict(block, version, step)`: a function that moves a block's parameters from the values of a version to the
predicted values at the start of a step."""


def _no_update(block: int, step: int) -> None:
    raise AssertionError("no update is set")


def _no_prediction(block: int, version: int, step: int) -> None:
    raise AssertionError("no prediction is set")


def _no_input(batch: int) -> None:
    raise AssertionError("no input is set")


@dataclass(kw_only=True)
class _Context:
    """The messages, rows and instructions of a batch in flight; another batch takes them over later."""

    works: tuple[list[Pending], ...]
    """The transfers under way of each message, by message."""
    held: tuple[list[Tensor], ...]
    """The tensors that are being sent of each message, by message."""
    store: RowStore
    outputs: list[Output] = field(default_factory=list)
    """The batch's results so far: losses and predictions."""
    batch: int = -1
    """The number of the batch; -1 before the first."""
    program: list[Instruction] = field(default_factory=list)
    """The instruction of each action in the worker's order."""

    def take(self, batch: int) -> "_Context":
        """Hand the context over to this batch, if it is not the batch's yet; returns the context."""
        if self.batch != batch:
            self.batch = batch
            self.outputs.clear()
        return self

    def sending(self, slot: int) -> Sending:
        """The transfers under way of the message with this number, and the tensors that are being sent."""
        return self.works[slot], self.held[slot]

    def finish(self, slots: Iterable[int]) -> None:
        """Wait until the messages with these numbers are over, and drop their tensors."""
        for slot in slots:
            for work in self.works[slot]:
                work.wait()
            self.works[slot].clear()
            self.held[slot].clear()


class WindowExecutor:
    """Runs one worker's order of a window, for training without a flush.

    Mutable: batches stay in flight between windows.
    """

    def __init__(
        self,
        schedule: Schedule,
        worker: int,
        equipment: Equipment,
        versions: Mapping[int, BlockVersions],
        encoding: tuple[Schedule, Equipment] | None,
    ) -> None:
        """`versions`: the versions of the weights of each block of this worker, by block.

        `encoding`: the schedule of a batch's encoding and its equipment; None where the window has fills.
        """
        self.schedule, self.worker, self._equipment = schedule, worker, equipment
        self._versions = versions
        self.update: Update = _no_update
        """The function that does the work of op STEP; the caller sets it before the first window."""
        self.predict: Predict = _no_prediction
        """The function that predicts weights for actions that read predicted ones; the caller sets it if there are."""
        self._window, self._begun, self._num_runs = 0, 0, 0
        self._feed: Callable[[int], None] = _no_input
        flat = _flat(schedule)
        routes = routes_of(flat, worker)
        read = with_inputs({}, flat, routes, equipment.stages)
        rows = _joined(read, extents_of(encoding[0] if encoding else flat, worker, equipment.raw_inputs))
        self._first_fill = next((action for action in schedule.orders[worker] if action.op is Op.ENCODE), None)
        frozen = {k for k, message in enumerate(schedule.messages) if schedule.placement.is_frozen(message.source)}
        self._frozen, self._trained = tuple(sorted(frozen)), tuple(set(range(len(schedule.messages))) - frozen)
        stores = [RowStore(rows, equipment.tensors, equipment.device) for _ in range(batches_held(schedule))]
        self._contexts = [_context_of(schedule, store) for store in stores]
        releases = {_plain(action): over for action, over in window_releases_of(schedule).items()}
        for number, context in enumerate(self._contexts):
            store = context.store
            encoder = Executor(encoding[0], worker, encoding[1], store=store) if encoding else None
            compiler = Compiler(
                schedule=flat,
                worker=worker,
                equipment=equipment,
                routes=routes,
                releases={
                    # `later`: how many batches after the action's own the batch of the send is.
                    action: tuple(self._context(number + later).sending(sent) for sent, later in over)  # [3]
                    for action, over in releases.items()
                },
                slots={key: Slot() for key in routes},
                works=context.works,
                held=context.held,
                outputs=context.outputs,
                reading=store,
                writing=store,
                trained=frozenset(action.stage for action in flat.orders[worker] if action.op in (Op.B, Op.I)),
            )
            context.program = [
                self._instruction(compiler, context, encoder, action) for action in schedule.orders[worker]
            ]
        self._recordings = [
            Recording(worker=worker, recorder=recorder_for(equipment.device), steps=()) for _ in range(2)
        ]
        self._sources = sources_of(flat, worker, equipment.rank_of_worker)

    @property
    def recording(self) -> Recording:
        """The times of the last window, or of the one under way; they can be read until the end of the next one."""
        return self._recordings[0]

    @property
    def batch(self) -> int:
        """The number of the batch that the next window completes, which is the number of steps made."""
        return self._window

    def store(self, batch: int) -> RowStore:
        """The store for the raw inputs of a batch that is about to be encoded."""
        return self._context(batch).store

    @property
    def stores(self) -> tuple[RowStore, ...]:
        """The stores of all batches that may be in flight at once."""
        return tuple(context.store for context in self._contexts)

    def run(self, stop: int, feed: Callable[[int], None]) -> list[Output]:
        """Run the next window; returns this worker's outputs (losses) of the batch that it completes, by micro-batch.

        Args:
            stop: the batch before which there is a flush; it must not change while batches after it have begun.
            feed: called with each batch before this worker encodes any of it, in order; it puts the raw inputs into the
                batch's store. Its time is a wait of the batch's first fill.
        """
        # The flush would then wait for batches whose windows come after it.
        assert self._begun <= stop, "batches after the flush have begun"
        lead = self.schedule.lead
        self._num_runs += 1
        self._feed = feed
        if self._begun == self._window:  # nothing is in flight
            # Of these windows only actions that lead exist: they begin the first batches.
            for number in range(self._window - lead, self._window):
                self._run(number, stop)
        self._run(self._window, stop)
        self._begun = min(stop, self._window + lead + 1)
        outputs = list(self._context(self._window).outputs)
        self._context(self._window).finish(self._frozen)  # [2]
        self._context(self._window - 1).finish(self._trained)
        self._window += 1
        # At a flush no later window comes at whose end these sends would be waited for.
        if self._window == stop:
            for context in self._contexts:
                context.finish(self._trained)
            for versions in self._versions.values():
                versions.flush()
        return outputs

    def passed(self) -> tuple[int, ...]:
        """The number of windows begun, and the numbers of marks passed in the last one and in the one before.

        Any thread may call it.
        """
        return self._num_runs, *(recording.recorder.passed() for recording in self._recordings)

    def whereabouts(self) -> Whereabouts | None:
        """The action under way and the ranks that it waits for; None between windows; any thread may call it."""
        positions = [(recording, recording.position()) for recording in reversed(self._recordings)]
        found = next(((recording, position) for recording, position in positions if position is not None), None)
        if found is None:
            return None
        recording, (index, is_waiting) = found
        if index >= len(recording.steps):
            return Whereabouts(action="the end of the window", awaited=())
        step = recording.steps[index][1]
        assert isinstance(step, Action)
        return Whereabouts(action=named(step), awaited=self._sources.get(_plain(step), ()) if is_waiting else None)

    def mark(self) -> None:
        """Record a time after the last window, for `Recording.times_after`."""
        self.recording.recorder.mark()

    def _context(self, batch: int) -> _Context:
        return self._contexts[batch % len(self._contexts)]

    def _run(self, number: int, stop: int) -> None:
        """Run a window's actions, but for batches that are complete already or begin after the flush.

        `number`: of the window. `stop`: the batch before which there is a flush.
        """
        batches = [(number + action.reading.lead, action) for action in self.schedule.orders[self.worker]]
        program = [
            (action, *self._context(batch).take(batch).program[place])  # [1]
            for place, (batch, action) in enumerate(batches)
            if self._window <= batch < stop
        ]
        # A window near a flush lacks the actions of other batches, so each window has steps of its own.
        marks = marks_of([wait is not None for _, wait, _ in program])
        steps = list(zip(marks, (action for action, _, _ in program), strict=True))
        self._recordings = [replace(self._recordings[1], steps=steps), self._recordings[0]]
        recorder = self.recording.recorder
        recorder.reset()
        mark = recorder.mark
        mark()
        try:
            for _, wait, run in program:
                if wait is not None:
                    wait()
                    mark()
                run()
                mark()
        except (RuntimeError, MemoryError) as error:
            if is_shortage(error):
                error.add_note(shortage_at(steps, recorder, self._equipment.device))
            raise
        mark()

    def _instruction(
        self, compiler: Compiler, context: _Context, encoder: Executor | None, action: Action
    ) -> Instruction:
        """(wait, run) of an action in a context; `run` first puts in place the version of the weights that it reads."""
        block, staleness = self.schedule.placement.stages[action.stage].weights, action.reading.staleness
        if action.op is Op.STEP:
            return None, self._step(block, context)
        if action.op is Op.ENCODE:
            encode = _encoding(encoder) if encoder else compiler.instruction(_plain(action))[1]
            return (lambda: self._feed(context.batch)) if action == self._first_fill else None, encode
        wait, run = compiler.instruction(_plain(action))
        # W reads the tensors that I has put aside and no weights, so it needs no version.
        if action.op not in (Op.F, Op.B, Op.I):
            return wait, run
        versions = self._versions[block]

        def bound() -> None:
            # The step of batch b starts from version b.
            version, step = context.batch - staleness, context.batch
            if action.reading.predicted:
                versions.bind_predicted(version, step, lambda known: self.predict(block, known, step))
            else:
                versions.bind(version)
            run()

        return wait, bound

    def _step(self, block: int, context: _Context) -> Callable[[], None]:
        versions, gradients = self._versions[block], self._equipment.gradients[block]

        def step() -> None:
            # REDUCE_GRAD has only started the sums.
            gradients.finish()
            versions.step(lambda: self.update(block, context.batch))

        return step


def _context_of(schedule: Schedule, store: RowStore) -> _Context:
    """A context with the given rows, without transfers and without a program."""
    messages = schedule.messages
    return _Context(works=tuple([] for _ in messages), held=tuple([] for _ in messages), store=store)


def _encoding(encoder: Executor) -> Callable[[], None]:
    """A function that runs the encoder once: it encodes a whole batch."""

    def encode() -> None:
        encoder.run()

    return encode


def _flat(window: Schedule) -> Schedule:
    """The window as an iteration whose fills encode its own batch: within a context everything is of one batch."""
    pipelines = tuple(replace(pipeline, is_ahead=False) for pipeline in window.placement.pipelines)
    return replace(
        window,
        orders=tuple(tuple(map(_plain, order)) for order in window.orders),
        placement=replace(window.placement, pipelines=pipelines),
    )


def _plain(action: Action) -> Action:
    """The action without lead and staleness, as in an iteration with a flush."""
    return action if action.reading == PRESENT else replace(action, reading=Reading())


def _joined(*extents: Mapping[str, Range]) -> dict[str, Range]:
    """Name -> the smallest range that holds a tensor's rows in all `extents`."""
    found: dict[str, Range] = {}
    for one in extents:
        for name, rows in one.items():
            other = found.get(name, rows)
            found[name] = Range(min(rows.start, other.start), max(rows.stop, other.stop))
    return found
