"""A backbone on one rank: its gradients, its clipping, its learning rate; other backbones have their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from diffusionpipe.costs import Backbone
from diffusionpipe.runtime.engine.slot import Output
from diffusionpipe.runtime.weights.squares import sum_of_squares
from diffusionpipe.trainer.optim.gradient_norm import clip_factor, scale
from diffusionpipe.trainer.optim.learning_rate import LearningRateSchedule, learning_rate_at
from diffusionpipe.trainer.setup.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class BackboneResult:
    """The loss, gradient norm and learning rates of one step for one backbone."""

    name: str
    loss: float
    norm: float
    """Norm of its gradients, before clipping."""
    learning_rate: float
    of_components: Mapping[str, float] = field(default_factory=dict)
    """The learning rates of its components that have their own."""

    def numbers(self) -> dict[str, float]:
        """The backbone's own numbers for the metrics, as "loss/NAME", and its components' learning rates.

        The only backbone, whose name is "", has its loss, norm and rate in the step's result alone.
        """
        found = {"loss": self.loss, "gradient_norm": self.norm, "learning_rate": self.learning_rate}
        own = {f"{key}/{self.name}": value for key, value in found.items()} if self.name else {}
        return {**own, **{f"learning_rate/{name}": rate for name, rate in self.of_components.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBackbone:
    """The parameters of a backbone that one rank trains, with their learning rates and clipping."""

    backbone: Backbone
    parameters: list[nn.Parameter]
    owned: list[nn.Parameter]
    """Those that count on this rank when every parameter is counted once."""
    rates: Mapping[str, LearningRateSchedule]
    """Learning rates of its groups of parameters: of its own name's group, and of components with values of their own.
    """
    clip_norm: float | None

    def sums(self, outputs: Sequence[Output], device: torch.device) -> Tensor:
        """The rank's part of the backbone's squared gradient norm and of the sum of its losses, (2,) float64."""
        squares = sum_of_squares([p.grad for p in self.owned if p.grad is not None], device)
        losses = (output.value.double().sum() for output in outputs if output.name == self.backbone.loss)
        loss = sum(losses, torch.zeros((), dtype=torch.float64, device=device))
        return torch.stack([squares, loss])

    def result(self, step: int, sums: Tensor, batch: int, factor: float = 1.0) -> BackboneResult:
        """The loss, norm and rates of step `step` from the `sums` over all ranks; `factor` multiplies the rates."""
        rates = {name: rate * factor for name, rate in self.rates_at(step).items()}
        # Parts of a group ("|rest", "|*.bias") are shown only where their rate differs from the group's.
        own = {name for name in rates if self.rates[name] != self.rates.get(name.partition("|")[0])}
        components = {name for name in rates if "|" not in name and name != self.backbone.name}
        return BackboneResult(
            name=self.backbone.name,
            loss=float(sums[1]) / batch,
            norm=float(sums[0].sqrt()),
            learning_rate=rates[self.backbone.name],
            of_components={name.strip("|"): rate for name, rate in rates.items() if name in components | own},
        )

    def rates_at(self, step: int) -> dict[str, float]:
        """The learning rate of each of its groups in update `step`, counted from 0, by the group's name."""
        return {group: learning_rate_at(step, rates) for group, rates in self.rates.items()}

    def factor(self, sums: Tensor) -> Tensor | None:
        """The factor that clips its gradients, at most 1, from the `sums` over all ranks.

        None where they are never clipped.
        """
        return None if self.clip_norm is None else clip_factor(sums[0].sqrt(), self.clip_norm)

    def clip(self, factor: Tensor) -> None:
        """Multiplies its gradients by the factor in place; other backbones' gradients stay as they are."""
        scale([p.grad for p in self.parameters if p.grad is not None], factor)


def trained_backbone(session: Session, backbone: Backbone) -> TrainedBackbone:
    """The parameters of one backbone on the session's rank, with their learning rates and clipping."""
    recipe = session.recipe.alone(backbone.name)
    names = session.model.parameters_of(session.model.layers_of(backbone))
    own = {name: p for name, p in session.worker.parameters.items() if name in names}
    return TrainedBackbone(
        backbone=backbone,
        parameters=list(own.values()),
        owned=[p for name, p in own.items() if name in session.worker.owned],
        rates=session.groups.rates(backbone.name),
        clip_norm=recipe.training.clip_norm,
    )
