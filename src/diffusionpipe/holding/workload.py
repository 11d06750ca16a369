"""The memory that training needs besides the model: optimizer state, master weights, averages, batch."""

from dataclasses import dataclass
from difflib import get_close_matches
from math import prod

from diffusionpipe.costs.graph import ParameterSpec
from diffusionpipe.costs.profile import LayerProfile
from diffusionpipe.errors import ConfigError
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
"""Numbers that an optimizer of torch.optim with default arguments keeps for each parameter, as wide as it is. The state
that Adafactor keeps for rows and columns is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The training around a model."""

    batch: int
    """Samples of one step over all ranks."""
    parameter_bytes: int = 4
    """Bytes of one trained parameter as the layers read it."""
    gradient_bytes: int = 4
    master_bytes: int = 0
    """Bytes of a float32 copy beside narrower parameters; 0 for none."""
    optimizer_bytes: int = 8
    """Bytes of optimizer state per trained parameter; 8 for Adam's two float32 moments."""
    ema_bytes: int = 0
    """Bytes of a parameter's average: 4 with a float32 average, 0 without one."""
    frozen_bytes: int | None = None
    """Bytes of one frozen parameter, the same for all; None: each has those of its dtype in the model graph."""
    checkpointed: tuple[str, ...] = ()
    """Patterns of layers that are recomputed in the backward."""
    has_backup: bool = False
    """Whether a copy of trained parameters, gradients and optimizer state is kept (post-validated steps)."""
    encode_chunk: int = 16
    """Samples that go through the frozen layers at a time, at most."""
    offload_frozen: bool = False
    """Whether the frozen part's parameters are kept in host memory and come to the device layer by layer, as they run.
    """

    @property
    def has_casts(self) -> bool:
        """Whether weights are wider than bfloat16, so that bfloat16 layers read copies of them."""
        return self.parameter_bytes > 2

    def cast_time(self, layer: LayerProfile) -> Seconds:
        """Time of casting the layer's weights once; 0 where they are narrow already."""
        return layer.cast if self.has_casts else 0.0

    def copies(self, layer: LayerProfile) -> Bytes:
        """Bytes of the copies that this makes."""
        return layer.copies if self.has_casts else 0

    def frozen_size(self, parameter: ParameterSpec) -> Bytes:
        """Bytes that a frozen parameter takes."""
        if self.frozen_bytes is None:
            return parameter.num_bytes
        return prod(parameter.shape) * self.frozen_bytes


def state_of_optimizer(name: str) -> int:
    """Numbers that the optimizer of that name keeps for each parameter, with its default arguments.

    Raises:
        ConfigError: it is not known.
    """
    if name not in STATE_OF_OPTIMIZER:
        of_lower = {known.lower(): known for known in STATE_OF_OPTIMIZER}
        close = get_close_matches(name.lower(), of_lower, n=1)
        hint = f"did you mean {of_lower[close[0]]}? " if close else ""
        raise ConfigError(f"there is no optimizer {name!r}; {hint}Known are {', '.join(STATE_OF_OPTIMIZER)}")
    return STATE_OF_OPTIMIZER[name]
