"""A schedule: for each worker the ordered actions, with the messages and fills that they name."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from diffusionpipe.ir.action import MESSAGE_OPS, Action, Op
from diffusionpipe.ir.placement import Placement, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One transfer of tensors between two workers; one SEND and one RECV action name it by its index."""

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
    """One piece of frozen work: some layers of an encoder stage's block on some samples."""

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
    """The ordered actions of every worker in one iteration, with the placement, messages and fills that they name."""

    name: str
    placement: Placement
    orders: tuple[tuple[Action, ...], ...]
    """One ordered list of actions per worker."""
    messages: tuple[Message, ...] = ()
    fills: tuple[Fill, ...] = ()

    @property
    def num_workers(self) -> int:
        """The number of orders, one for each worker."""
        return len(self.orders)

    @property
    def has_communication(self) -> bool:
        """Whether any order has sends or receives; without them messages are implied."""
        return any(action.op in MESSAGE_OPS for order in self.orders for action in order)

    @property
    def splits_backwards(self) -> bool:
        """Whether any pipeline computes gradients of inputs (I) and of weights (W) in separate actions."""
        return any(Op.W in pipeline.ops for pipeline in self.placement.pipelines)

    @property
    def lead(self) -> int:
        """The most batches by which an action of a window is ahead; 0: the schedule ends with a flush."""
        return max((action.reading.lead for order in self.orders for action in order), default=0)

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Every (worker, action) of the schedule, worker by worker, in the order of each."""
        for worker, order in enumerate(self.orders):
            for action in order:
                yield worker, action

    def num_microbatches(self) -> int:
        """The number of micro-batches of all trained pipelines together; probes run the same ones and add none."""
        return sum(len(p.microbatches) for p in self.placement.pipelines if Op.ENCODE not in p.ops and not p.is_probe)


def lone_blocks(schedule: Schedule) -> frozenset[int]:
    """The ids of the blocks that one worker alone holds in this schedule, frozen blocks included.

    Data-parallel copies do not count, as a schedule does not have them.
    """
    holders: dict[int, set[int]] = defaultdict(set)
    for stage in schedule.placement.stages:
        holders[stage.weights].add(stage.worker)
    return frozenset(weights for weights, workers in holders.items() if len(workers) == 1)
