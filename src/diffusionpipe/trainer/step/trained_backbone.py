"""The part of a backbone that one rank trains: its gradients, its clipping and its learning rates."""

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
    """The backbone's name; "" for the only one."""
    loss: float
    """The mean loss of the batch."""
    norm: float
    """The norm of the backbone's gradients, before clipping."""
    learning_rate: float
    """The learning rate of the backbone's own group of parameters."""
    of_components: Mapping[str, float] = field(default_factory=dict)
    """Component or part of a group with a learning rate of its own -> this rate."""

    def numbers(self) -> dict[str, float]:
        """The backbone's numbers for the metrics, by keys such as "loss/NAME", and its components' learning rates.

        For the only backbone, whose name is "", loss, norm and rate are left out: the step's result has them.
        """
        found = {"loss": self.loss, "gradient_norm": self.norm, "learning_rate": self.learning_rate}
        own = {f"{key}/{self.name}": value for key, value in found.items()} if self.name else {}
        return {**own, **{f"learning_rate/{name}": rate for name, rate in self.of_components.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedBackbone:
    """The parameters of a backbone that one rank trains, with their learning rates and clipping."""

    backbone: Backbone
    parameters: list[nn.Parameter]
    """The parameters of the backbone that this rank trains."""
    owned: list[nn.Parameter]
    """The parameters that count on this rank when every parameter is counted once over all ranks."""
    rates: Mapping[str, LearningRateSchedule]
    """Name of a group of the backbone's parameters -> its learning rate schedule; one has the backbone's name."""
    clip_norm: float | None
    """The norm of the gradients above which they are scaled down; None: never."""

    def sums(self, outputs: Sequence[Output], device: torch.device) -> Tensor:
        """[squared gradient norm, sum of losses] of the backbone on a rank, (2,) float64, to be summed over ranks."""
        squares = sum_of_squares([p.grad for p in self.owned if p.grad is not None], device)
        losses = (output.value.double().sum() for output in outputs if output.name == self.backbone.loss)
        loss = sum(losses, torch.zeros((), dtype=torch.float64, device=device))
        return torch.stack([squares, loss])

    def result(self, step: int, sums: Tensor, batch: int, factor: float = 1.0) -> BackboneResult:
        """The backbone's result in step `step`, counted from 0, from the `sums` over all ranks.

        `batch`: the samples of a step. `factor` multiplies the learning rates.
        """
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
        """The learning rate of each of the backbone's groups in update `step`, counted from 0, by the group's name."""
        return {group: learning_rate_at(step, rates) for group, rates in self.rates.items()}

    def factor(self, sums: Tensor) -> Tensor | None:
        """The factor that clips the backbone's gradients, at most 1, from the `sums` over all ranks.

        None if the recipe does not clip them.
        """
        return None if self.clip_norm is None else clip_factor(sums[0].sqrt(), self.clip_norm)

    def clip(self, factor: Tensor) -> None:
        """Multiplies the backbone's gradients by the factor in place."""
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
