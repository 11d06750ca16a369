"""One action of one worker, and its text form.

Compute actions are written as torch.distributed.pipelining writes them: `2F0` is the forward of micro-batch 0 on stage
2. Parts that torch's form cannot say are appended: `2SEND_F0>5` sends message 5 of the schedule, `1ENCODE#4` runs fill
4 on encoder stage 1, `2REDUCE_GRAD` has no micro-batch. In a window (`ir.unroll`) an action may belong to a later batch
and read older weights: `0F2+1~1` is a forward of the next batch, on weights that are one version old; `^1` says that
they are predicted one step ahead.
"""

import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from diffusionpipe.errors import ScheduleError


class Op(StrEnum):
    """The kind of work that an action does. The zero-bubble papers write B for `I`."""

    F = "F"
    """A forward of a stage on a micro-batch."""
    B = "B"
    """Whole backward: input and weight gradients."""
    I = "I"  # noqa: E741
    """Gradient with respect to the stage's inputs."""
    W = "W"
    """Gradient with respect to the stage's weights."""
    SEND_F = "SEND_F"
    """Start sending an activation."""
    RECV_F = "RECV_F"
    """Start receiving an activation."""
    SEND_B = "SEND_B"
    """Start sending the gradient of an activation."""
    RECV_B = "RECV_B"
    """Start receiving the gradient of an activation."""
    REDUCE_GRAD = "REDUCE_GRAD"
    """Start summing the stage's gradients over all ranks that hold the same weights."""
    ENCODE = "ENCODE"
    """Frozen work: one fill."""
    STEP = "STEP"
    """Optimizer step of one stage's weights, in a window."""
    UNSHARD = "UNSHARD"
    """Start gathering the parameters of the stage's block, of which every data-parallel group holds a part."""
    RESHARD = "RESHARD"
    """Free the gathered parameters of the stage's block, which other data-parallel groups own."""

    __hash__ = str.__hash__  # that of Enum is a Python function, and every look-up of an action hashes its op


COMPUTE_OPS = frozenset({Op.F, Op.B, Op.I, Op.W})
SEND_OPS = frozenset({Op.SEND_F, Op.SEND_B})
RECV_OPS = frozenset({Op.RECV_F, Op.RECV_B})
MESSAGE_OPS = SEND_OPS | RECV_OPS
STAGE_OPS = frozenset({Op.REDUCE_GRAD, Op.STEP, Op.UNSHARD, Op.RESHARD})
"""Ops of a whole stage: they have no micro-batch."""

_TEXT = re.compile(
    r"(?P<stage>\d{1,9})(?P<op>SEND_F|RECV_F|SEND_B|RECV_B|REDUCE_GRAD|ENCODE|STEP|UNSHARD|RESHARD|F|B|I|W)"
    r"(?P<microbatch>\d{1,9})?(?:[>#](?P<slot>\d{1,9}))?"
    r"(?:\+(?P<lead>\d{1,4}))?(?:~(?P<staleness>\d{1,4}))?(?:\^(?P<predicted>\d{1,4}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The batch to which an action of a window belongs, and the age of the weights that it reads, as three numbers."""

    lead: int = 0
    """How many batches later than the window's own its batch is."""
    staleness: int = 0
    """How many versions older than its batch's own starting point the weights are."""
    predicted: int = 0
    """The number of steps by which these weights are predicted ahead of their version; 0: they are not predicted."""

    def __str__(self) -> str:
        marks = (("+", self.lead), ("~", self.staleness), ("^", self.predicted))
        return "".join(f"{mark}{number}" for mark, number in marks if number)


PRESENT = Reading()
"""The reading of an action that works on the window's own batch, with the weights of its starting point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One entry of a worker's order: a stage, an op, and where the op has them a micro-batch and a slot.

    Raises:
        ScheduleError: the op needs a micro-batch or a slot that is missing, or has one that it does not take.
    """

    stage: int
    """The stage it belongs to, an index into `Placement.stages`."""
    op: Op
    microbatch: int | None = None
    """The micro-batch, counted within the stage's pipeline; None for ops of a whole stage and for ENCODE."""
    slot: int | None = None
    """Sends and receives: index into `Schedule.messages`. ENCODE: index into `Schedule.fills`. Else None."""
    # Equality compares it. The hash leaves it out, as every look-up of an action computes a hash.
    reading: Reading = field(default=PRESENT, hash=False, repr=False)
    """The batch that the action works on in a window, and the weights that it reads."""

    def __post_init__(self) -> None:
        needs_microbatch = self.op in COMPUTE_OPS or self.op in MESSAGE_OPS
        needs_slot = self.op in MESSAGE_OPS or self.op is Op.ENCODE
        if (self.microbatch is not None) != needs_microbatch or (self.slot is not None) != needs_slot:
            wants = f"{'a' if needs_microbatch else 'no'} micro-batch and {'a' if needs_slot else 'no'} slot"
            raise ScheduleError([f"{self.op} of stage {self.stage} takes {wants}; got {self.microbatch}, {self.slot}"])

    def __str__(self) -> str:
        microbatch = "" if self.microbatch is None else self.microbatch
        slot = "" if self.slot is None else f"{'#' if self.op is Op.ENCODE else '>'}{self.slot}"
        return f"{self.stage}{self.op.value}{microbatch}{slot}{self.reading}"


@lru_cache(maxsize=1 << 17)
def compute_action(stage: int, op: Op, microbatch: int) -> Action:
    """The action of this stage, op (F, B, I or W) and micro-batch; equal arguments give the same, cached object.

    Raises:
        ScheduleError: the op takes no micro-batch, or also needs a slot.
    """
    return Action(stage=stage, op=op, microbatch=microbatch)


def parse_action(text: str) -> Action:
    """The action that `text` writes, such as "2F0"; the inverse of `str(action)`.

    >>> parse_action("2F0")
    Action(stage=2, op=<Op.F: 'F'>, microbatch=0, slot=None)
    >>> str(parse_action("2SEND_F0>5")), str(parse_action("1ENCODE#4")), str(parse_action("3REDUCE_GRAD"))
    ('2SEND_F0>5', '1ENCODE#4', '3REDUCE_GRAD')
    >>> parse_action("0F2+1~1").reading
    Reading(lead=1, staleness=1, predicted=0)

    Raises:
        ScheduleError: `text` is not an action.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise ScheduleError([f"{shown!r} is not an action; write e.g. 2F0, 2B0, 2SEND_F0>5, 2REDUCE_GRAD or 1ENCODE#4"])
    microbatch, slot = match["microbatch"], match["slot"]
    marks = {name: int(match[name]) for name in ("lead", "staleness", "predicted") if match[name] is not None}
    return Action(
        stage=int(match["stage"]),
        op=Op(match["op"]),
        microbatch=None if microbatch is None else int(microbatch),
        slot=None if slot is None else int(slot),
        reading=Reading(**marks) if marks else PRESENT,
    )
