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
    """The results of one step for a backbone."""

    name: str
    loss: float
    norm: float
    """Norm of its gradients, before clipping."""
    learning_rate: float
    of_components: Mapping[str, float] = field(default_factory=dict)
    """The learning rates of its components that have their own."""

    def numbers(self) -> dict[str, float]:
        """The backbone's own numbers in the metrics; its components' own learning rates if there are no others."""
        found = {"loss": self.loss, "gradient_norm": self.norm, "learning_rate": self.learning_rate}
        own = {f"{key}/{self.name}": value for key, value in found.items()} if self.name else {}
        return {**own, **{f"learning_rate/{name}": rate for name, rate in self.of_components.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBackbone:
    """A backbone on one rank: the parameters that it trains there, and how."""

    backbone: Backbone
    parameters: list[nn.Parameter]
    owned: list[nn.Parameter]
    """Those that count on this rank when every parameter is counted once."""
    rates: Mapping[str, LearningRateSchedule]
    """Learning rates of its groups of parameters: of its own name's group, and of components with values of their own.
    """
    clip_norm: float | None

    def sums(self, outputs: Sequence[Output], device: torch.device) -> Tensor:
        """The rank's part of its squared gradient norm and of its loss, (2,)."""
        squares = sum_of_squares([p.grad for p in self.owned if p.grad is not None], device)
        losses = (output.value.double().sum() for output in outputs if output.name == self.backbone.loss)
        loss = sum(losses, torch.zeros((), dtype=torch.float64, device=device))
        return torch.stack([squares, loss])

    def result(self, step: int, sums: Tensor, batch: int, factor: float = 1.0) -> BackboneResult:
        """The result of the sums over all ranks; learning rates are multiplied by `factor`."""
        rates = {name: rate * factor for name, rate in self.rates_at(step).items()}
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
        """The learning rates of its groups in update `step`, counted from 0."""
        return {group: learning_rate_at(step, rates) for group, rates in self.rates.items()}

    def factor(self, sums: Tensor) -> Tensor | None:
        """The factor of its gradients; None where they are never clipped."""
        return None if self.clip_norm is None else clip_factor(sums[0].sqrt(), self.clip_norm)

    def clip(self, factor: Tensor) -> None:
        """Multiply its gradients with the factor; other backbones' gradients stay as they are."""
        scale([p.grad for p in self.parameters if p.grad is not None], factor)


def trained_backbone(session: Session, backbone: Backbone) -> TrainedBackbone:
    """A backbone of the session's model on its rank."""
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
