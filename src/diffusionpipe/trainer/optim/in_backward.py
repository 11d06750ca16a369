"""Updates within the backward: each parameter is stepped as soon as its gradient is there, and the gradient is freed.

    plain          B of all layers                 | step of all parameters      all gradients at once
    in backward    B layer 9, its step | B layer 8, its step | ...               the gradients of a layer

As LOMO (Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources", 2023,
https://arxiv.org/abs/2306.09782, section 3.1), with any class that steps parameters one by one. An update reads one
parameter and its gradient, so each gets the bits of an update of all at once. The norm of all gradients is known only
when all are gone: nothing can be clipped, and no step undone.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn

from diffusionpipe.runtime.weights.squares import sum_of_squares
from diffusionpipe.trainer.optim.optimizer import RankOptimizer


class InBackward:
    """Steps each parameter of a rank within the backward, as soon as its gradient is there, and frees the gradient."""

    def __init__(self, parameters: Collection[nn.Parameter], optimizer: RankOptimizer, device: torch.device) -> None:
        """Registers a hook on each parameter, which steps it as soon as a backward has added its gradient.

        Call `begin` before each backward. `device`: where the sum of squares of the gradients is computed.
        """
        self._optimizer, self._device = optimizer, device
        self._number = 0
        self._left: set[nn.Parameter] = set()
        self._all = frozenset(parameters)
        self.squares = self._nothing()
        """The sum of squares of the step's gradients so far, float64, without dimensions."""
        for parameter in parameters:
            # Called when a backward has added the whole gradient.
            parameter.register_post_accumulate_grad_hook(self._take)

    def begin(self, number: int) -> None:
        """Prepares for the backward of update `number`, and sets the sum of squares to 0.

        The learning rates of the update must be set before.
        """
        self._number, self._left, self.squares = number, set(self._all), self._nothing()

    def _take(self, parameter: Tensor) -> None:
        """Add the squared norm of a parameter's gradient to the sum, step the parameter, and free the gradient."""
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None, "the hook comes when it is there"
        assert parameter in self._left, "a second backward would step it twice: a step has one micro-batch"
        self._left.discard(parameter)
        self.squares += sum_of_squares([parameter.grad], self._device)
        self._optimizer.step_alone(parameter, self._number)
        parameter.grad = None

    def _nothing(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)
