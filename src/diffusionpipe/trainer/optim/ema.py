"""An exponential moving average of the weights."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.optim.rounding import NARROW, key_of, round_into


class Ema:
    """The moving averages of this rank's parameters, in float32, in the parameters' type if that is wider, or bfloat16.

    On the device they cost one copy of the parameters, and half as much in bfloat16. On the host they cost no memory of
    the device. With a decay of 0.9999 an update is smaller than the last digit of a bfloat16 number, so it is rounded
    stochastically (`rounding`). Inside `swapped` there is a copy of the parameters whose type is not the average's.
    """

    def __init__(
        self,
        named_parameters: Mapping[str, nn.Parameter],
        decays: Mapping[str, float],
        kept: str = "device",
        seed: int = 0,
    ) -> None:
        """Starts the averages at the present values of the parameters that have a decay.

        `decays`: the decay by the parameter's name. `kept`: where or as what the averages are kept: "device", "host" or
        "bfloat16". `seed`: the seed of the rounding.

        Raises:
            RecipeError: a decay is not in [0, 1).
        """
        for decay in decays.values():
            if not 0.0 <= decay < 1.0:
                raise RecipeError(f"the decay of the moving average is {decay}; it must be at least 0 and less than 1")
        self._kept, self._seed = kept, seed
        self._names = tuple(name for name in named_parameters if name in decays)
        self._parameters = [named_parameters[name] for name in self._names]
        self._averages = [self._first(parameter.detach()) for parameter in self._parameters]
        self._of_decay: dict[float, list[int]] = {}
        """Decay -> the numbers of its parameters."""
        for number, name in enumerate(self._names):
            self._of_decay.setdefault(decays[name], []).append(number)
        self._is_swapped = False

    def _first(self, values: Tensor) -> Tensor:
        """The average of a parameter with these values before the first step: a copy of them in the kept form."""
        if self._kept == "bfloat16":
            return values.to(NARROW, copy=True)
        if self._kept == "host":
            wide = torch.promote_types(values.dtype, torch.float32)
            # Page-locked memory is copied faster.
            return torch.empty_like(values, dtype=wide, device="cpu", pin_memory=values.is_cuda).copy_(values)
        return _wide(values).clone()

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Adds the parameters after update `step`, counted from 0, to the averages.

        average = d average + (1 - d) parameter, with d = min(decay, (1 + step) / (10 + step)): the first steps forget
        the random start quickly, as in TensorFlow's ExponentialMovingAverage with num_updates
        (https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage). d is a function of the step
        alone, so a resumed average continues exactly.
        """
        assert not self._is_swapped, "the parameters hold the averages: leave swapped() before training on"
        for decay, numbers in self._of_decay.items():
            weight = 1.0 - min(decay, (1 + step) / (10 + step))
            alike = [number for number in numbers if self._is_alike(number)]
            if alike:
                parameters = [self._parameters[number].detach() for number in alike]
                torch._foreach_lerp_([self._averages[number] for number in alike], parameters, weight)
            for number in sorted(set(numbers) - set(alike)):  # one by one, so that no two are there in float32
                self._take_in(number, weight, step)

    def _is_alike(self, number: int) -> bool:
        """Whether average `number` has the type and the device of its parameter, so that many are updated at once."""
        parameter, average = self._parameters[number], self._averages[number]
        is_wide = average.dtype.itemsize >= torch.float32.itemsize
        return is_wide and (average.dtype, average.device) == (parameter.dtype, parameter.device)

    def _take_in(self, number: int, weight: float, step: int) -> None:
        """Move average `number` towards its parameter by the fraction `weight`, on the parameter's device.

        It is computed in float32 or wider. `step` decides how an average in bfloat16 is rounded.
        """
        values, average = _wide(self._parameters[number].detach()), self._averages[number]
        wide = average.to(device=values.device, dtype=values.dtype, copy=True).lerp_(values, weight)
        if average.dtype is NARROW:
            key = key_of(self._seed, f"average of {self._names[number]}", step)
            round_into(average.view(-1), wide.float().view(-1), key)
        else:
            average.copy_(wide)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """A context in which the parameters have the averages' values; at its end they get their own bits back."""
        assert not self._is_swapped, "swapped() does not nest"
        self._is_swapped = True
        try:
            with ExitStack() as back:
                for parameter, average in zip(self._parameters, self._averages, strict=True):
                    values = parameter.detach()
                    # Exchanged one by one: only a single tensor is there twice.
                    if values.dtype == average.dtype:
                        _exchange(values, average)
                        back.callback(_exchange, values, average)
                    else:
                        # Narrower or wider numbers would not give the very same bits back.
                        back.callback(values.copy_, values.clone())
                        values.copy_(average)
                yield
        finally:
            self._is_swapped = False

    def tensors(self) -> dict[str, Tensor]:
        """The averages themselves by parameter name; loading into them in place restores the average."""
        assert not self._is_swapped, "the parameters hold the averages"
        return dict(zip(self._names, self._averages, strict=True))


def _exchange(one: Tensor, other: Tensor) -> None:
    """Give each of two tensors the other's values."""
    value = one.clone()
    one.copy_(other)
    other.copy_(value)


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or as it is where that is wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
