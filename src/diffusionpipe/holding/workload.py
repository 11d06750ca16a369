"""The memory that training needs besides the model: optimizer state, master weights, averages, batch."""

from dataclasses import dataclass, replace
from difflib import get_close_matches

from diffusionpipe.costs.profile import LayerProfile
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding.state import Item, State, plain_states
from diffusionpipe.holding.storage import DEVICE, Storage
from diffusionpipe.units import Bytes, Seconds

STATE_OF_OPTIMIZER = {
    "ASGD": 1,
    "Adadelta": 2,
    "Adafactor": 0,
    "Adagrad": 1,
    "Adam": 2,
    "AdamW": 2,
    "Adamax": 2,
    "Muon": 1,
    "NAdam": 2,
    "RAdam": 2,
    "RMSprop": 1,
    "Rprop": 2,
    "SGD": 0,
}
"""Name of an optimizer of torch.optim -> the numbers that it keeps for each weight, as wide as the weight, with default
arguments. The state that Adafactor keeps for rows and columns is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The settings of training that cost memory or time beside the model: batch, states, storages, recomputation."""

    batch: int
    """Samples of one step over all ranks."""
    states: tuple[State, ...] = plain_states()
    """All that a trained parameter holds, itself included; by default Adam in float32."""
    once: Bytes = 0
    """Bytes that the optimizer holds once on each rank that trains anything, such as tables of codes."""
    update: Bytes = 0
    """Bytes that are on such a rank's device only while it updates its parameters."""
    frozen: Storage = DEVICE
    """The storage of frozen layers inside the trained part."""
    encoders: Storage = DEVICE
    """The storage of the frozen part."""
    checkpointed: tuple[str, ...] = ()
    """Patterns of the names of layers that are recomputed in the backward."""
    encode_chunk: int = 16
    """Samples that go through the frozen layers at a time, at most."""

    def width(self, item: Item) -> int:
        """The bytes on the device that the states of this item take for each number of a parameter."""
        return sum(state.width for state in self.states if state.item is item and not state.is_hosted)

    def without(self, item: Item) -> "Workload":
        """The same workload without the states of this item."""
        return replace(self, states=tuple(state for state in self.states if state.item is not item))

    def narrow(self, width: int) -> "Workload":
        """The same workload with all frozen weights at `width` bytes for each number."""
        return replace(self, frozen=self.frozen.narrow(width), encoders=self.encoders.narrow(width))

    @property
    def rounds(self) -> bool:
        """Whether updates round parameters that are kept in bfloat16."""
        return any(state.narrow is not None for state in self.states)

    @property
    def sums_narrow(self) -> bool:
        """Whether the gradients of parameters kept in bfloat16 are bfloat16 too."""
        return any(state.item is Item.GRADIENTS and state.narrow == 2 for state in self.states)

    @property
    def needs_cast(self) -> bool:
        """Whether weights are wider than bfloat16, so that bfloat16 layers read copies of them."""
        return self.width(Item.PARAMETERS) > 2

    def cast_time(self, layer: LayerProfile) -> Seconds:
        """The seconds of casting the layer's weights to bfloat16 once; 0 where weights are narrow already."""
        return layer.cast if self.needs_cast else 0.0

    def copies(self, layer: LayerProfile) -> Bytes:
        """The bytes of the layer's copies of its weights in bfloat16; 0 where weights are narrow already."""
        return layer.copies if self.needs_cast else 0


def has_plain_states(name: str) -> bool:
    """Whether the states of this optimizer are tensors of the parameters' shapes.

    True for the names of torch.optim except "Adafactor"; False for a path with a dot, an optimizer of another package.
    """
    return "." not in name and name != "Adafactor"


def state_of_optimizer(name: str) -> int:
    """The count of numbers that this optimizer of torch.optim keeps for each weight, with its default arguments.

    The state that Adafactor keeps for rows and columns is not counted.

    Raises:
        ConfigError: `STATE_OF_OPTIMIZER` does not list the name; the message proposes a close one.
    """
    if name not in STATE_OF_OPTIMIZER:
        of_lower = {known.lower(): known for known in STATE_OF_OPTIMIZER}
        close = get_close_matches(name.lower(), of_lower, n=1)
        known = f"known are {', '.join(STATE_OF_OPTIMIZER)}"
        hint = f"did you mean {of_lower[close[0]]}? K{known[1:]}" if close else known
        raise ConfigError(f"there is no optimizer {name!r}; {hint}")
    return STATE_OF_OPTIMIZER[name]
