"""The memory of a rank while it runs a schedule, item by item: the items, and which follow from which.

Two callers fill the items. `timing.memory.peak_memory` counts a schedule, `planner.search.footprint` adds up sums over
ranges of layers, millions of times. The needs of a trained parameter and of a layer are said here, once for both.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from enum import Enum, auto
from operator import attrgetter

from diffusionpipe.costs.profile import Profile
from diffusionpipe.holding.state import Held
from diffusionpipe.holding.workload import Workload
from diffusionpipe.units import Bytes


class Trait(Enum):
    """A property of an item of memory, by which estimates and phases of a run choose the items that they count."""

    LASTING = auto()
    """Held between two iterations too."""
    COUNTED = auto()
    """Follows from the shapes of the parameters alone, so it is there without a profile."""
    GROWING = auto()
    """Grows with the size of the samples."""
    WHOLE = auto()
    """Whole on each copy of the pipeline, also where the copies hold parameters, gradients and states in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """The bytes that one rank holds at its peak, item by item."""

    parameters: Bytes = 0
    """Trained parameters as the layers read them."""
    gradients: Bytes = 0
    optimizer: Bytes = 0
    """Optimizer state and float32 master weights."""
    ema: Bytes = 0
    """The moving average of trained parameters."""
    backup: Bytes = 0
    """State that a post-validated step keeps to undo an early update, and memory that only updates use."""
    gathered: Bytes = 0
    """Memory of sharded blocks beside the rank's own part: parameters and narrow copies while they are whole, gradients
    until they are sent."""
    frozen: Bytes = 0
    """Frozen parameters: encoders, whole or the two layers of them that are there at a time, and frozen layers inside
    the trained part."""
    copies: Bytes = 0
    """Copies of the weights of trained layers in the precision in which they compute; none of recomputed layers."""
    activations: Bytes = 0
    """Tensors that forwards keep for the backwards."""
    messages: Bytes = 0
    """Received messages not yet read, and gradients not yet sent, when these and the activations peak together."""
    workspace: Bytes = 0
    """Temporary memory of the layer that needs the most while it runs, a recomputed layer's activations included; or of
    the frozen layers, where they need more."""
    frozen_outputs: Bytes = 0
    """Raw inputs of the samples that the rank encodes, and outputs of the frozen layers that wait to be read: of this
    batch, and of the next one if it is encoded ahead."""

    @property
    def total(self) -> Bytes:
        """The sum of all items, in bytes."""
        return sum(_VALUES(self))

    def items(self) -> dict[str, Bytes]:
        """Name of each item -> its bytes, in the order of the fields."""
        return dict(zip(_NAMES, _VALUES(self), strict=True))

    def having(self, trait: Trait) -> Bytes:
        """The sum of the items that have a trait, in bytes.

        >>> MemoryUse(parameters=4, activations=2, frozen_outputs=1).having(Trait.LASTING)
        5
        """
        return sum(size for name, size in self.items().items() if trait in TRAITS[name])


TRAITS = {
    "parameters": (Trait.LASTING, Trait.COUNTED),
    "gradients": (Trait.LASTING, Trait.COUNTED),
    "optimizer": (Trait.LASTING, Trait.COUNTED),
    "ema": (Trait.LASTING, Trait.COUNTED),
    "backup": (Trait.LASTING, Trait.COUNTED),
    "gathered": (),
    "frozen": (Trait.LASTING, Trait.COUNTED, Trait.WHOLE),
    "copies": (),
    "activations": (Trait.GROWING, Trait.WHOLE),
    "messages": (Trait.GROWING,),
    "workspace": (Trait.GROWING,),
    "frozen_outputs": (Trait.LASTING, Trait.GROWING, Trait.WHOLE),
}
"""The traits of each item of `MemoryUse`, by its name."""
_NAMES = tuple(field.name for field in fields(MemoryUse))
_VALUES = attrgetter(*_NAMES)


def use_of(held: Held, **others: Bytes) -> MemoryUse:
    """The memory of a rank with these trained parameters and states; `others` are the items that `held` does not have.

    `held.hosted` is left out, as it is not on the device.

    >>> use_of(Held(parameters=40, gradients=40, optimizer=80), frozen=7).total
    167
    """
    return MemoryUse(
        parameters=held.parameters,
        gradients=held.gradients,
        optimizer=held.optimizer,
        ema=held.ema,
        backup=held.backup,
        **others,
    )


def copies_of(layer: str, profile: Profile, workload: Workload, again: Collection[str]) -> Bytes:
    """The bytes of the copies of a trained layer's weights, in the precision of its computing, held for an iteration.

    0 for a layer in `again`, the layers that are recomputed in the backward.
    """
    return 0 if layer in again else workload.copies(profile.layer(layer))


def workspace_of(layer: str, samples: float, profile: Profile, workload: Workload, again: Collection[str]) -> Bytes:
    """The temporary bytes of a trained layer while it runs on `samples` samples.

    `again` are the layers that are recomputed in the backward: their activations and copies of weights count here too.
    """
    recomputed = profile.activation(layer, samples) + workload.copies(profile.layer(layer)) if layer in again else 0
    return recomputed + profile.workspace(layer, samples)


def forward_bytes(profile: Profile, layers: Sequence[str], samples: int) -> Bytes:
    """The largest memory in bytes of these layers for `samples` samples, one after the other, where nothing is kept.

    Tensors from other layers do not count. A tensor that one of these layers writes lives until the last of them that
    reads it has run, or to the end if none reads it.
    """
    specs = [profile.graph.layer(name) for name in layers]
    last = {name: index for index, layer in enumerate(specs) for name in layer.reads}
    live = most = 0
    ending: dict[int, Bytes] = {}
    for index, layer in enumerate(specs):
        live -= ending.pop(index - 1, 0)  # the layer before was the last to read it
        most = max(most, live * samples + profile.drawing(layer.name, samples))
        for name in layer.writes:
            end = last.get(name, len(specs))  # never read: it lives to the end
            if end > index:
                size = profile.graph.tensor(name).num_bytes
                live += size
                ending[end] = ending.get(end, 0) + size
    return most
