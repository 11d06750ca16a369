"""A copy of all that an optimizer step changes, so that a step taken too early can be taken back.

    blocking         backward | sum of all ranks' norms ... waiting ... | clip, step | next iteration
    post-validated   backward | start that sum, keep a copy, step       | next iteration | validate the step

Clipping and the check for infinities need the norm over all stages, so every rank would wait for the slowest at the end
of each iteration. A post-validated rank assumes that the norm will be small enough and continues. If that turns out
wrong, it puts the copy back, steps again with clipped gradients, and runs the iteration that used the wrong weights
once more. After Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, https://arxiv.org/abs/2401.10241, section 4,
which undoes the arithmetic of the step instead; a copy is exact, for every optimizer.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from diffusionpipe.trainer.optim.optimizer import RankOptimizer


class Backup:
    """A copy of parameters, their gradients and the optimizer's state before a step.

    It costs as much memory as these.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: RankOptimizer | None) -> None:
        self._parameters = list(parameters)
        self._optimizer = optimizer
        self._copies: dict[tuple[int, str], Tensor] = {}
        self._values: dict[tuple[int, str], object] = {}
        """The entries of the optimizer's state that are not tensors."""
        self._groups: list[dict[str, object]] = []
        """The values that steps change in each of the optimizer's groups."""

    @torch.no_grad()
    def keep(self) -> None:
        """Copies the present parameters, gradients and optimizer state, into the same memory each time."""
        present = self._present()
        copies = {key: self._room(key, value) for key, value in present.items()}
        if present:
            torch._foreach_copy_(list(copies.values()), list(present.values()))
        self._copies = copies
        self._values = {
            (i, name): copy.deepcopy(value)
            for i, state in enumerate(self._states())
            for name, value in state.items()
            if not isinstance(value, Tensor)
        }
        if self._optimizer is not None:
            self._groups = [copy.deepcopy(values) for values in self._optimizer.group_values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Writes the copied values back: parameters, gradients and optimizer have the same bits as before."""
        for i, parameter in enumerate(self._parameters):
            # The iteration since may have made gradients, or freed them.
            if (i, ".grad") not in self._copies:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        for i, state in enumerate(self._states()):
            for name in list(state):
                if (i, name) in self._values:
                    # A later step may change the value in place, and be taken back again.
                    state[name] = copy.deepcopy(self._values[i, name])
                elif (i, name) not in self._copies:
                    del state[name]
        present = self._present()
        if present:
            torch._foreach_copy_(list(present.values()), [self._copies[key] for key in present])
        if self._optimizer is not None:
            self._optimizer.set_group_values(copy.deepcopy(self._groups))

    def _states(self) -> list[dict[str, object]]:
        """The optimizer's state of each parameter; {} where it has none."""
        if self._optimizer is None:
            return [{} for _ in self._parameters]
        return [self._optimizer.state_of(p) for p in self._parameters]

    def _present(self) -> dict[tuple[int, str], Tensor]:
        """(index of a parameter, name) -> tensor: its value under "", its gradient, and the entries of its state."""
        found: dict[tuple[int, str], Tensor] = {}
        for i, (parameter, state) in enumerate(zip(self._parameters, self._states(), strict=True)):
            found[i, ""] = parameter.detach()
            if parameter.grad is not None:
                found[i, ".grad"] = parameter.grad
            found |= {(i, name): value for name, value in state.items() if isinstance(value, Tensor)}
        return found

    def _room(self, key: tuple[int, str], value: Tensor) -> Tensor:
        kept = self._copies.get(key)
        # The same memory each time.
        return kept if kept is not None and kept.shape == value.shape else torch.empty_like(value)
