"""Prodigy over several ranks: its estimate d of the distance to the solution needs two sums over all parameters.

    d_hat = (beta3 numerator + sum of d / d0 rate <g, x0 - x>) / sum of |s|_1        s <- beta3 s + d / d0 rate g

The class of the package sums over the parameters that it has, which are only this rank's. So the two sums are computed
before its step, from its own state, and added over all ranks; its step is then led to the d that follows. The present d
is the one that scales this step's update, as in one process.

Mishchenko and Defazio, "Prodigy: An Expeditiously Adaptive Parameter-Free Learner", ICML 2024,
https://arxiv.org/abs/2306.06101.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import torch
from torch import Tensor, nn

PATHS = ("prodigyopt.Prodigy", "prodigyopt.prodigy.Prodigy")
"""The paths of the class whose sums are taken over all ranks."""

SumOver = Callable[[Tensor], Tensor]
"""A function that returns the sum of a float64 vector over all ranks, in host memory."""


@dataclass(slots=True)
class SharedProdigy:
    """Steps a rank's Prodigy with the two sums over the parameters of all ranks; it keeps the last rate."""

    optimizer: torch.optim.Optimizer | None
    """The Prodigy that steps the rank's parameters; None on a rank without parameters, which takes part in the sums."""
    owned: Collection[nn.Parameter]
    """The parameters that count on this rank when every parameter is counted once."""
    sum_over: SumOver
    """Sums a vector over all ranks."""
    device: torch.device
    """The device on which the sums are computed."""
    rate: float = 0.0
    """d x the learning rate of the last step, by which updates were scaled."""

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Steps the rank's parameters with the d that follows from all ranks' gradients; every rank calls it."""
        owned = set(self.owned)
        # [numerator, denominator, d, 1], summed over ranks; the last two give d on a rank without parameters.
        own, local = torch.zeros(4, dtype=torch.float64, device=self.device), 0.0
        if self.optimizer is not None:
            first = self.optimizer.param_groups[0]
            own[2:] = torch.tensor([first["d"], 1.0], dtype=torch.float64)
            for parameter, group in _stepped(self.optimizer):
                numerator, denominator = self._terms(parameter, group, first)
                # Of all parameters that the class sees here, also of those that count on another rank.
                local += float(denominator)
                if parameter in owned:  # once over all ranks
                    own[:2] += torch.stack([numerator, denominator])
        numerator, denominator, distances, count = self.sum_over(own).tolist()
        self.rate = distances / count * learning_rate if count else 0.0
        if self.optimizer is not None and denominator > 0:
            self._step(numerator, denominator, is_still=local == 0)

    def _terms(self, parameter: nn.Parameter, group: Mapping[str, Any], first: Mapping[str, Any]) -> list[Tensor]:
        """The parameter's terms of the two sums, [numerator, denominator], each a float64 tensor without dimensions.

        `group`: the parameter's group; `first`: the first group, which has the values that hold for all.
        """
        assert self.optimizer is not None
        assert parameter.grad is not None
        state, slices = self.optimizer.state.get(parameter, {}), group["slice_p"]
        gradient = parameter.grad
        if group["weight_decay"] and not group["decouple"]:  # as the class does it
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        gradient = gradient.flatten()[::slices]
        d, rate = first["d"], _rate(self.optimizer)
        scale = d / group["d0"] * (d if group["safeguard_warmup"] else rate)
        # The first step: x0 is x, and s is 0.
        if not state:
            return [torch.zeros((), dtype=torch.float64, device=self.device), (scale * gradient).abs().sum().double()]
        moved = torch.dot(gradient, state["p0"] - parameter.flatten()[::slices]).double()
        length = state["s"].mul(_beta3(first)).add_(gradient, alpha=scale).abs().sum().double()
        return [d / group["d0"] * rate * moved, length]

    def _step(self, numerator: float, denominator: float, *, is_still: bool) -> None:
        """Run the class's own step so that it arrives at the d that follows from the sums over all ranks.

        `is_still`: whether this rank's part of the denominator is 0, so that the class does nothing.
        """
        assert self.optimizer is not None
        groups = self.optimizer.param_groups
        first = groups[0]
        d, rate = first["d"], _rate(self.optimizer)
        kept = {key: first[key] for key in ("d_coef", "growth_rate")}
        numerator += _beta3(first) * float(first["d_numerator"])
        d_hat = first["d_coef"] * numerator / denominator
        d_max = max(first["d_max"], d_hat)
        d_new = min(d_max, (max(d, d_hat) if d == first["d0"] else d) * first["growth_rate"])
        # With these the class takes the least of d_max and infinity.
        first.update(d_max=d_new, d_coef=0.0, growth_rate=inf)
        self.optimizer.step()
        if is_still:  # the class returns early, because its own sum is 0
            self._finish(rate)
        first.update(kept)
        for group in groups:
            group.update(d=d_new, d_max=d_max, d_hat=d_hat, d_numerator=numerator, d_denom=denominator)

    def _finish(self, rate: float) -> None:
        """Apply the weight decay and count the step, on a rank whose gradients have all been 0 so far.

        The class leaves both out there. `rate`: d x the learning rate.
        """
        assert self.optimizer is not None
        for parameter, group in _stepped(self.optimizer):
            self.optimizer.state[parameter]["step"] += 1
            if group["weight_decay"] and group["decouple"]:
                parameter.add_(parameter, alpha=-group["weight_decay"] * rate)
        for group in self.optimizer.param_groups:
            group["k"] += 1


def _stepped(optimizer: torch.optim.Optimizer) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
    """Each parameter that a step changes, and its group: parameters with a gradient, groups with a rate above 0."""
    for group in optimizer.param_groups:
        if group["lr"] > 0:
            yield from ((parameter, group) for parameter in group["params"] if parameter.grad is not None)


def _beta3(group: Mapping[str, Any]) -> float:
    beta3 = group["beta3"]
    return sqrt(group["betas"][1]) if beta3 is None else float(beta3)


def _rate(optimizer: torch.optim.Optimizer) -> float:
    """The product of d and the learning rate in the present step, with Adam's bias correction if the class makes it."""
    first = optimizer.param_groups[0]
    beta1, beta2 = first["betas"]
    count = first["k"] + 1
    corrected = sqrt(1 - beta2**count) / (1 - beta1**count) if first["use_bias_correction"] else 1.0
    return float(first["d"] * max(group["lr"] for group in optimizer.param_groups) * corrected)
