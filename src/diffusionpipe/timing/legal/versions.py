"""The rules of windows and of steps: gradients of two batches never mix, and nothing reads weights of the future."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from diffusionpipe.ir.action import MESSAGE_OPS, Action, Op
from diffusionpipe.ir.schedule import Schedule, lone_blocks
from diffusionpipe.ir.versions import batches_held


def step_problems(schedule: Schedule) -> Iterator[str]:
    """One sentence for each STEP without gradients before it, and each gradient that no later STEP takes in.

    There is no sentence for blocks without any STEP.
    """
    stages = schedule.placement.stages
    for worker, order in enumerate(schedule.orders):
        pending: dict[int, Action] = {}
        stepped: set[int] = set()
        for action in order:
            block = stages[action.stage].weights
            if action.op in (Op.B, Op.W):
                pending[block] = action
            elif action.op is Op.STEP:
                stepped.add(block)
                if pending.pop(block, None) is None:
                    yield f"worker {worker}: {action} comes before any gradient of its batch"
        for block in sorted(stepped & pending.keys()):
            yield f"worker {worker}: no STEP takes in the gradient of {pending[block]}"


def without_encoding(window: Schedule) -> Schedule:
    """The window without the ENCODE actions that mark where its batches are encoded; one with fills is unchanged."""
    if window.fills:
        return window
    return replace(window, orders=tuple(tuple(a for a in order if a.op is not Op.ENCODE) for order in window.orders))


def window_problems(window: Schedule) -> Iterator[str]:
    """One sentence for each fault of a window that its unrolled schedule would not show."""
    yield from _step_places(window)
    if not window.fills:
        yield from _encodings(window)
    yield from _leads(window)
    yield from _readings(window)
    yield from _tables(window)
    for worker, action in window.actions():
        if action.op in (Op.B, Op.I, Op.W, Op.REDUCE_GRAD, Op.STEP) and action.reading.lead:
            yield f"worker {worker}: {action} belongs to a later batch; only forwards and messages may"


def _encodings(window: Schedule) -> Iterator[str]:
    """One sentence for each worker that does not encode once in a window, before all else that it does for the batch.

    There is none for a window that does not encode at all.
    """
    if not any(action.op is Op.ENCODE for _, action in window.actions()):
        return
    for worker, order in enumerate(window.orders):
        places = [place for place, action in enumerate(order) if action.op is Op.ENCODE]
        if len(places) != 1:
            yield f"worker {worker}: {len(places)} ENCODEs in a window; it needs one"
            continue
        lead = order[places[0]].reading.lead
        for place, action in enumerate(order):
            # An action that leads by n runs n windows before its batch's own, so the larger lead comes first.
            if (-action.reading.lead, place) < (-lead, places[0]):
                yield f"worker {worker}: {action} comes before {order[places[0]]}, which encodes its batch"


def _leads(window: Schedule) -> Iterator[str]:
    """One sentence for each action that begins its batch too early: with more lead than the forward that leads most.

    The encoding of a batch and its messages may come one window earlier.
    Stores take turns, as many as batches may live at once (`ir.versions.batches_held`): earlier the rows of a batch
    would overwrite another batch's, which are still read.
    """
    most = batches_held(window) - 2
    for worker, action in window.actions():
        is_frozen = action.op is Op.ENCODE
        if action.op in MESSAGE_OPS and action.slot is not None:
            is_frozen = window.placement.is_frozen(window.messages[action.slot].source)
        if action.reading.lead > most + is_frozen:
            yield f"worker {worker}: {action} leads by more than {most + is_frozen}; another batch is in its place then"


def _step_places(window: Schedule) -> Iterator[str]:
    """One sentence for each trained block and holder without exactly one STEP after its gradients and their sum."""
    stages = window.placement.stages
    lone = lone_blocks(window)
    for worker, order in enumerate(window.orders):
        last: dict[int, int] = {}
        steps = Counter[int]()
        for place, action in enumerate(order):
            block = stages[action.stage].weights
            if action.op in (Op.B, Op.W, Op.REDUCE_GRAD):
                last[block] = place
            if action.op is Op.STEP:
                steps[block] += 1
        for place, action in enumerate(order):
            block = stages[action.stage].weights
            if action.op is Op.STEP and place < last.get(block, -1):
                yield f"worker {worker}: {action} comes before {order[last[block]]}, whose gradient it takes in"
        reduced = {stages[action.stage].weights for action in order if action.op is Op.REDUCE_GRAD}
        for block in sorted(last.keys() - lone - reduced):
            yield f"worker {worker}: block {block} has no REDUCE_GRAD in a window, but other workers hold it too"
        for block in sorted(last.keys() | steps.keys()):
            if steps[block] != 1:
                yield f"worker {worker}: block {block} has {steps[block]} STEPs in a window; it needs one"


def _readings(window: Schedule) -> Iterator[str]:
    """One sentence for each action that reads a wrong version of the weights.

    Nothing may read a version of the future. A backward has to read the version that its forward read, or the newest.
    W reads none.
    """
    forwards = {(a.stage, a.microbatch): a.reading for _, a in window.actions() if a.op is Op.F}
    for worker, order in enumerate(window.orders):
        done = Counter[int]()
        for action in order:
            block, reading = window.placement.stages[action.stage].weights, action.reading
            if action.op is Op.STEP:
                done[block] += 1
            elif action.op in (Op.F, Op.B, Op.I) and reading.staleness < reading.lead - done[block]:
                # `done` STEPs of this window have made newer versions; the batch begins `lead` windows later. The rest
                # is not there yet.
                newest = reading.lead - done[block]
                yield f"worker {worker}: {action} reads weights of the future; the newest are ~{newest} for its batch"
            if action.op in (Op.B, Op.I) and reading.staleness:
                # A forward that is missing is reported elsewhere.
                forward = forwards.get((action.stage, action.microbatch), reading)
                if (forward.staleness, forward.predicted) != (reading.staleness, reading.predicted):
                    yield f"worker {worker}: {action} reads neither what its forward read (~{forward.staleness}) nor ~0"
            if action.op not in (Op.F, Op.B, Op.I) and (reading.staleness or reading.predicted):
                yield f"worker {worker}: {action} reads no weights, so it has no staleness"


def _tables(window: Schedule) -> Iterator[str]:
    """One sentence for each action that reads another version of a block than another holder of it does."""
    seen: dict[tuple[int, Op, int | None], Action] = {}
    for worker, action in window.actions():
        if action.op in (Op.F, Op.B, Op.I):
            key = window.placement.stages[action.stage].weights, action.op, action.microbatch
            other = seen.setdefault(key, action)
            if other.reading.staleness != action.reading.staleness:
                yield f"worker {worker}: {action} and {other} hold one block but read different versions of it"
