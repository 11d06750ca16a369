"""The shift of a flow's times towards noise, as diffusers' FlowMatch schedulers state it.

A larger picture needs more noise to hide as much, so models are trained and sampled at shifted times: t becomes
f * t / (1 + (f - 1) * t) (Esser et al., 2024, section 5.3.2, https://arxiv.org/abs/2403.03206). SD3's scheduler states
the factor f. FLUX.1's makes it of mu, a straight line in the number of tokens of a picture: f = exp(mu).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import Tensor

from diffusionpipe.errors import ModelError
from diffusionpipe.models.objectives.noise_levels import FLOWS, refuse_unknown

_TIME_SHIFT_TYPES = ("exponential", "linear")


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicShift:
    """A factor of shifted times that depends on the number of tokens of a sample, linearly or exponentially."""

    base_tokens: int
    """The number of tokens of a small picture."""
    base_mu: float
    """The shift mu of pictures of `base_tokens` tokens."""
    max_tokens: int
    """The number of tokens of a large picture."""
    max_mu: float
    """The shift mu of pictures of `max_tokens` tokens; for all others mu lies on the line through both points."""
    is_exponential: bool
    """Whether the factor is exp(mu); otherwise it is mu."""

    def mu(self, num_tokens: int) -> float:
        """The shift mu for a sample of `num_tokens` tokens, as diffusers' pipelines give it to `set_timesteps`."""
        slope = (self.max_mu - self.base_mu) / (self.max_tokens - self.base_tokens)
        return num_tokens * slope + (self.base_mu - slope * self.base_tokens)

    def factor(self, num_tokens: int) -> float:
        """The factor F for a sample of `num_tokens` tokens: mu, or exp(mu)."""
        mu = self.mu(num_tokens)
        return math.exp(mu) if self.is_exponential else mu


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowShift:
    """How the times of a flow are shifted towards noise: by a fixed factor, or by one that depends on tokens."""

    static: float = 1.0
    """The factor if `dynamic` is None; 1 shifts nothing."""
    dynamic: DynamicShift | None = None
    """The factor that depends on the number of tokens; None: it is `static`."""
    terminal: float = 0.0
    """The time that 0 becomes; all times are stretched linearly from [0, 1] to [terminal, 1] after the shift."""

    def factor(self, num_tokens: int | None) -> float:
        """The factor F of the shift t -> F t / (1 + (F - 1) t) for a sample of `num_tokens` tokens.

        Raises:
            ModelError: the factor depends on the number of tokens, but the model has no tokens.
        """
        if self.dynamic is None:
            return self.static
        if num_tokens is None:
            raise ModelError(
                "the scheduler shifts times by the number of tokens (use_dynamic_shifting), but this denoiser has no "
                "tokens; set objective.shift to a number"
            )
        return self.dynamic.factor(num_tokens)

    def apply(self, time: Tensor, num_tokens: int | None = None) -> Tensor:
        """The times after the shift, of the same shape; 0 is data and 1 noise.

        Raises:
            ModelError: the factor depends on the number of tokens, which is not given.
        """
        factor = self.factor(num_tokens)
        if factor != 1:
            time = factor * time / (1 + (factor - 1) * time)
        # Noise stays at 1; the end at the data moves to `terminal`.
        return 1 - (1 - time) * (1 - self.terminal) if self.terminal else time

    def undo(self, time: float, num_tokens: int | None = None) -> float:
        """The time that `apply` shifts to `time`: its inverse; 0 for times that it does not reach.

        Raises:
            ModelError: the factor depends on the number of tokens, which is not given.
        """
        time = 1 - (1 - time) / (1 - self.terminal) if self.terminal else time
        factor = self.factor(num_tokens)
        # The formula of `apply`, solved for the time before the shift.
        return max(0.0, time / (factor - (factor - 1) * time))


def is_flow_scheduler(config: Mapping[str, object]) -> bool:
    """Whether a scheduler's configuration is for flows, by its class or by its `prediction_type`."""
    return config.get("_class_name") in FLOWS or config.get("prediction_type") == "flow_prediction"


def shift_of(config: Mapping[str, object]) -> FlowShift:
    """The shift in a diffusers scheduler's configuration; one that shifts nothing if it is not for flows.

    Sampling stretches its times so that the last one before 0 is `shift_terminal`. Here 0 itself is stretched to it,
    which is the same in the limit of many steps.

    Raises:
        ModelError: the class is unknown, or the configuration shifts in a way that is not supported.
    """
    if "_class_name" in config:
        refuse_unknown(str(config["_class_name"]))
    if not is_flow_scheduler(config):
        return FlowShift()
    import diffusers

    name = str(config["_class_name"])
    scheduler_class = getattr(diffusers, name, None)
    if scheduler_class is None:
        raise ModelError(f"diffusers has no scheduler {name!r}; install a version of diffusers that has it")
    try:
        if name not in FLOWS:
            return _shift_beside(scheduler_class.from_config(dict(config)).config, name)
        # With the defaults of the class; LTX's has none and draws at the times of this one.
        has_shift = "shift" in signature(scheduler_class.__init__).parameters
        own = scheduler_class if has_shift else diffusers.FlowMatchEulerDiscreteScheduler
        return _shift_in(own.from_config(dict(config)).config)
    except (TypeError, ValueError, OverflowError, ZeroDivisionError, KeyError, AttributeError, RuntimeError) as error:
        raise ModelError(
            f"scheduler_config.json does not make a {name}: {type(error).__name__}: {error}; restore the model's own"
        ) from error


def _shift_in(values: Mapping[str, Any]) -> FlowShift:
    """The shift in a flow scheduler's configuration, `values`, in which defaults are filled in.

    Raises ModelError as in `shift_of`, and any error that a wrong value leads to.
    """
    if values.get("invert_sigmas"):
        raise ModelError("the scheduler's invert_sigmas = true is not supported; objective.shift cannot replace it")
    terminal = float(values.get("shift_terminal") or 0)
    if not values.get("use_dynamic_shifting"):
        return FlowShift(static=float(values["shift"]), terminal=terminal)
    kind = values.get("time_shift_type", _TIME_SHIFT_TYPES[0])
    numbers: list[Any] = [
        values.get(key) for key in ("base_image_seq_len", "base_shift", "max_image_seq_len", "max_shift")
    ]
    if kind not in _TIME_SHIFT_TYPES or None in numbers:
        raise ModelError(
            f"the scheduler's time_shift_type {kind!r} with base_image_seq_len, base_shift, max_image_seq_len, "
            f"max_shift = {numbers} is not supported; set objective.shift to a number"
        )
    base_tokens, base_mu, max_tokens, max_mu = numbers
    return FlowShift(
        dynamic=DynamicShift(
            base_tokens=int(base_tokens),
            base_mu=float(base_mu),
            max_tokens=int(max_tokens),
            max_mu=float(max_mu),
            is_exponential=kind == "exponential",
        ),
        terminal=terminal,
    )


def _shift_beside(values: Mapping[str, Any], name: str) -> FlowShift:
    """The shift in the configuration of a scheduler for a flow, of a class `name` for other predictions too.

    Raises ModelError as in `shift_of`.
    """
    if not values.get("use_flow_sigmas"):
        raise ModelError(
            f"the scheduler is a {name} for flow_prediction, but use_flow_sigmas is not true, so its noise levels are "
            "not a flow's; set it in scheduler_config.json"
        )
    return FlowShift(static=float(values["flow_shift"]))
