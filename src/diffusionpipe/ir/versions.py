"""Which weights the actions of a window read, and how many versions of a block live at once.

A step of a block is its optimizer update; version v of a block are its weights after v steps. An action belongs to the
step that takes in its gradient. Its **staleness** says how many versions older than that step's own starting point the
weights are that it reads.
"""

from collections import defaultdict
from collections.abc import Mapping
from enum import StrEnum

from diffusionpipe.ir.action import Op
from diffusionpipe.ir.schedule import Schedule


class Versions(StrEnum):
    """The ways in which a pipeline treats the weights while several batches are in flight."""

    FLUSHED = "flushed"
    """No batch begins before the update of the one before it."""
    STASHED = "stashed"
    """Forwards read the newest weights, and a backward reads what its forward read (PipeDream)."""
    VERTICAL = "vertical"
    """Forwards and backwards as "stashed", but all stages read the version of the first stage (PipeDream with vertical
    sync)."""
    DELAYED = "delayed"
    """Forward and backward read weights that are a fixed number of steps old, on all stages alike (PipeDream-2BW)."""
    NEWEST = "newest"
    """Forward and backward read the newest weights, each when it runs (stale weights, TiMePReSt, PipeMare, PACI)."""
    PREDICTED = "predicted"
    """Weights as "stashed", moved ahead by the optimizer's direction as far as they are old (SpecTrain, XPipe)."""


Staleness = Mapping[tuple[int, Op], tuple[int, ...]]
"""(stage, op) -> the staleness of each of its micro-batches."""


def staleness_of(window: Schedule) -> Staleness:
    """(stage, op) -> by how many versions the weights that each micro-batch reads are old; of F, B and I.

    >>> from diffusionpipe.passes import with_versions
    >>> from diffusionpipe.planner.assembly.windows import overlap
    >>> window = with_versions(overlap(4, 4), Versions.STASHED)
    >>> [staleness_of(window)[stage, Op.F] for stage in range(4)]
    [(1, 1, 1, 0), (1, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0)]
    """
    found: dict[tuple[int, Op], dict[int, int]] = defaultdict(dict)
    for _, action in window.actions():
        if action.op in (Op.F, Op.B, Op.I) and action.microbatch is not None:
            found[action.stage, action.op][action.microbatch] = action.reading.staleness
    return {key: tuple(row[microbatch] for microbatch in sorted(row)) for key, row in found.items()}


def versions_read(window: Schedule, batches: int) -> dict[tuple[int, Op, int], int]:
    """(stage, op, micro-batch counted over all batches) -> the version of the weights that it reads, from 0 on.

    Ops are F, B and I. Of predicted weights it is the version from which they are predicted.

    >>> from diffusionpipe.passes import with_versions
    >>> from diffusionpipe.planner.assembly.windows import overlap
    >>> read = versions_read(with_versions(overlap(4, 1), Versions.STASHED), 6)
    >>> [read[0, Op.F, batch] for batch in range(6)]
    [0, 0, 0, 0, 1, 2]
    """
    found: dict[tuple[int, Op, int], int] = {}
    for _, action in window.actions():
        if action.op in (Op.F, Op.B, Op.I) and action.microbatch is not None:
            count = len(window.placement.pipeline_of(action.stage).microbatches)
            for batch in range(batches):
                key = action.stage, action.op, action.microbatch + batch * count
                # Before the first update everything reads version 0.
                found[key] = max(0, batch - action.reading.staleness)
    return found


def versions_held(window: Schedule) -> dict[int, int]:
    """Block -> the number of versions of its weights that live at once, predicted copies included.

    Before a block's step, the newest version in the window of batch b is version b. A forward that leads by l and is a
    steps stale reads version b + l - a then, so a - l versions older than the newest one. The weights that a backward
    reads must live until it runs, when its own batch has become the window's: that is as many versions back as it is
    stale. Predicted weights are copies beside the newest version, as many as `predictions_held` says.
    """
    predicted = predictions_held(window)
    oldest: dict[int, int] = defaultdict(int)
    for _, action in window.actions():
        block = window.placement.stages[action.stage].weights
        if action.op in (Op.F, Op.B, Op.I):
            age = 0 if action.reading.predicted else action.reading.staleness - action.reading.lead
            oldest[block] = max(oldest[block], age)
    return {block: 1 + age + predicted.get(block, 0) for block, age in sorted(oldest.items())}


def batches_held(window: Schedule) -> int:
    """The number of batches of which a worker holds rows or messages at once.

    With the forward that leads most by L: the window's own, L that have begun, and one that is being encoded, or whose
    last gradients may still be on their way.
    """
    return 2 + max(action.reading.lead for _, action in window.actions() if action.op is Op.F)


def predictions_held(window: Schedule) -> dict[int, int]:
    """Block -> the most predicted copies of its weights that live at once; blocks without any are left out.

    Forwards of a batch that read the same version share a copy. It lives from the first of these forwards to the last
    of their backwards, some windows later.
    """
    found: dict[int, int] = defaultdict(int)
    leads = {(a.stage, a.microbatch): a.reading.lead for _, a in window.actions() if a.op is Op.F}
    for order in window.orders:
        lives: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for place, action in enumerate(order):
            if action.reading.predicted:
                lead = leads[action.stage, action.microbatch]
                counted = place + len(order) * (lead - action.reading.lead)  # from the start of the forward's window
                lives[window.placement.stages[action.stage].weights][lead].append(counted)
        for block, of_lead in lives.items():
            for now in range(len(order)):
                # Each window begins a copy like this one: how many have begun, less how many have ended.
                counts = [
                    (now - min(life)) // len(order) - (now - max(life) - 1) // len(order) for life in of_lead.values()
                ]
                found[block] = max(found[block], sum(counts))
    return dict(found)
