"""The form in which an optimizer's states are kept between updates: as they are made, or in host memory.

An update brings them, a bucket of parameters at a time, and puts them back (`trainer/optim/resting.py`).
"""

from dataclasses import dataclass, replace

from diffusionpipe.errors import ConfigError
from diffusionpipe.holding.state import State

WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a number of each type in which states may be kept."""


@dataclass(frozen=True, kw_only=True)
class Rest:
    """The place and the number type in which an optimizer's states are kept between updates."""

    is_hosted: bool = False
    """Whether they are in host memory."""
    dtype: str | None = None
    """The type of their numbers, a key of `WIDTHS`; None: as the optimizer makes them."""

    @property
    def is_plain(self) -> bool:
        """Whether the states stay as the optimizer makes them, on the device."""
        return not self.is_hosted and self.dtype is None

    def takes(self, key: str) -> bool:
        """Whether the optimizer's state with the name `key` is kept in this form; here every state with a name is."""
        return bool(key)

    def kept(self, state: State) -> tuple[State, ...]:
        """The states that hold `state` in this form between updates, with their widths and places; here one.

        Raises:
            ConfigError: `dtype` is set, and the state's bytes are listed by parameter, so its numbers cannot be cast.
        """
        if self.dtype is not None and state.sizes:
            raise ConfigError(
                f"optimizer.states: {self.dtype} is for optimizers whose states have the shapes of the parameters; set "
                'it to "device" or "host"'
            )
        width = state.width if self.dtype is None else WIDTHS[self.dtype]
        return (replace(state, width=width, is_hosted=self.is_hosted),)


RESTS: dict[str, Rest] = {"device": Rest(), "host": Rest(is_hosted=True)}
"""The forms by the names that `optimizer.states` takes. One that is added is counted, run, saved and resumed."""
