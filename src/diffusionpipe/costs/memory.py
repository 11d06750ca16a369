"""What a rank holds in memory while it runs a schedule, item by item."""

from dataclasses import dataclass, fields

from diffusionpipe.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one rank at its peak."""

    parameters: Bytes = 0
    """Trained parameters as the layers read them."""
    gradients: Bytes = 0
    optimizer: Bytes = 0
    """Optimizer state and float32 master weights."""
    ema: Bytes = 0
    backup: Bytes = 0
    """What a post-validated step keeps to be taken back."""
    gathered: Bytes = 0
    """What is there of sharded blocks beside the rank's own part: parameters and narrow copies while they are whole,
    gradients until they are sent."""
    frozen: Bytes = 0
    """Frozen parameters: encoders, whole or the two layers of them that are there at a time, and frozen layers inside
    the trained part."""
    copies: Bytes = 0
    """Weights of trained layers that are not recomputed, once more, as they are read while an iteration runs."""
    activations: Bytes = 0
    """Kept from the forwards for the backwards."""
    messages: Bytes = 0
    """Received and not yet read, and gradients not yet sent, at the moment when these and the activations peak."""
    workspace: Bytes = 0
    """Beyond all that while the hungriest layer runs, a recomputed layer's activations included."""
    frozen_outputs: Bytes = 0
    """Outputs of the frozen layers that wait to be read: of this batch, and of the next one if it is encoded ahead."""

    @property
    def total(self) -> Bytes:
        """All items."""
        return sum(self.items().values())

    def items(self) -> dict[str, Bytes]:
        """The items by name, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
