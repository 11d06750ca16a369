"""A schedule: for each worker the ordered actions, with the messages and fills that they name."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from diffusionpipe.ir.action import MESSAGE_OPS, Action, Op
from diffusionpipe.ir.placement import Placement, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One transfer between two workers: one SEND and one RECV name it."""

    source: int
    """The sending stage."""
    destination: int
    """The receiving stage. A gradient's source is the stage that read the activation."""
    microbatch: int
    """The micro-batch, counted in the sending stage's pipeline (0 for frozen outputs)."""
    samples: Range
    """Samples of that micro-batch (of the whole batch for frozen outputs)."""
    tensors: tuple[str, ...]
    """The names of the message's tensors, in the order in which they travel."""
    is_gradient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Frozen work: some layers of an encoder stage's block on some samples."""

    stage: int
    """The encoder stage, a stage of a frozen pipeline."""
    component: str
    """The name of the component for people: "vae", "text_encoder"; "" for a mixture."""
    layers: Range
    """Layers, counted within the stage's block."""
    samples: Range
    """The range of the batch's samples that the fill encodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The work of every worker in one iteration."""

    name: str
    placement: Placement
    orders: tuple[tuple[Action, ...], ...]
    """One ordered list of actions per worker."""
    messages: tuple[Message, ...] = ()
    fills: tuple[Fill, ...] = ()

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return len(self.orders)

    @property
    def has_communication(self) -> bool:
        """Whether sends and receives are explicit."""
        return any(action.op in MESSAGE_OPS for order in self.orders for action in order)

    @property
    def splits_backwards(self) -> bool:
        """Whether gradients of inputs and of weights are computed apart, in any of its pipelines."""
        return any(Op.W in pipeline.ops for pipeline in self.placement.pipelines)

    @property
    def lead(self) -> int:
        """In a window the largest lead of an action; 0: the schedule is an iteration that ends with a flush."""
        return max((action.reading.lead for order in self.orders for action in order), default=0)

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Every (worker, action), worker by worker, in order."""
        for worker, order in enumerate(self.orders):
            for action in order:
                yield worker, action

    def num_microbatches(self) -> int:
        """The micro-batches of all trained pipelines together; probes run the same ones again and add none."""
        return sum(len(p.microbatches) for p in self.placement.pipelines if Op.ENCODE not in p.ops and not p.is_probe)


def lone_blocks(schedule: Schedule) -> frozenset[int]:
    """The trained blocks that one worker alone holds; data-parallel copies of it are not in the schedule."""
    holders: dict[int, set[int]] = defaultdict(set)
    for stage in schedule.placement.stages:
        holders[stage.weights].add(stage.worker)
    return frozenset(weights for weights, workers in holders.items() if len(workers) == 1)
