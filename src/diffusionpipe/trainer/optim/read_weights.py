"""The averages of an optimizer with modes, which are read in place of the weights that it trains.

Schedule-free optimizers take gradients at one point (training mode), and their result is another one, an average
(reading mode). Validation, samples, checkpoints' averages and exports take the average.

Defazio et al., "The Road Less Scheduled", NeurIPS 2024, https://arxiv.org/abs/2405.15682.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from diffusionpipe.trainer.optim.classes import set_mode
from diffusionpipe.trainer.optim.optimizer import RankOptimizer


class ReadWeights:
    """The averages that a schedule-free optimizer computes of a rank's parameters, with the methods of `Ema`.

    It keeps no tensors. While the averages are read there is a copy of the trained parameters, because the way back
    through the optimizer would round them.
    """

    def __init__(self, named_parameters: Mapping[str, nn.Parameter], optimizer: RankOptimizer | None) -> None:
        self._named, self._optimizer = dict(named_parameters), optimizer
        self._is_swapped = False

    def update(self, step: int) -> None:
        """Does nothing: the optimizer itself updates the averages in its step."""

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """A context in which the parameters have the averages' values; at its end they get their own bits back."""
        assert not self._is_swapped, "swapped() does not nest"
        self._is_swapped = True
        trained = {name: parameter.detach().clone() for name, parameter in self._named.items()}
        try:
            self._set_mode(is_training=False)
            yield
        finally:
            self._set_mode(is_training=True)
            with torch.no_grad():
                for name, parameter in self._named.items():
                    parameter.copy_(trained[name])
            self._is_swapped = False

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the averages, by parameter name; loading into them changes nothing."""
        with self.swapped():
            return {name: parameter.detach().clone() for name, parameter in self._named.items()}

    def _set_mode(self, *, is_training: bool) -> None:
        for optimizer in self._optimizer.parts if self._optimizer is not None else ():
            set_mode(optimizer, is_training=is_training)
