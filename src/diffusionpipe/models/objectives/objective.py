"""The goal of the training: how noise is added to latents, the denoiser's target, and the loss of each sample.

Both ends of the data path are layers of the graph: `noise` is frozen, so it is computed ahead like everything else that
is frozen, and `loss` is the last layer.
"""

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.graph import Layer, num_tokens
from diffusionpipe.models.objectives.flow_shift import FlowShift, shift_of
from diffusionpipe.models.objectives.learned_variance import Noised, variance_loss
from diffusionpipe.models.objectives.noise_levels import alphas_cumprod
from diffusionpipe.models.objectives.objective_settings import (
    LossKind,
    ObjectiveSettings,
    Prediction,
    TimeSampling,
    Weighting,
)
from diffusionpipe.models.objectives.speed import speed_times
from diffusionpipe.models.objectives.time_sampling import flow_times

__all__ = [
    "Objective",
    "ObjectiveSettings",
    "Prediction",
    "TimeSampling",
    "hybrid_loss_layer",
    "loss_layer",
    "noise_layer",
    "objective_inputs",
]


class Objective(nn.Module):
    """The training objective: adds noise to latents, makes the target, and weighs the loss.

    Its only state is the buffer of cumulative alphas.
    """

    alphas_cumprod: Tensor
    """The cumulative alpha of each time step, float32 (steps,)."""

    def __init__(self, settings: ObjectiveSettings, scheduler: Mapping[str, object]) -> None:
        """Make an objective of these settings, with the noise levels and the shift of times of a scheduler.

        `scheduler`: the configuration of a diffusers scheduler; {} for its defaults. Its shift is used for a flow if
        `settings.shift` is None.

        Raises:
            ModelError: the configuration has wrong values, is of a class that is not supported, or shifts times in a
                way that is not supported.
        """
        super().__init__()
        self.settings = settings
        is_flow = settings.prediction is Prediction.FLOW_MATCHING
        self.shift = FlowShift(static=settings.shift or 1.0)
        if is_flow and settings.shift is None:
            self.shift = shift_of(scheduler)
        # Never cast, unlike the buffers of models: bfloat16 alphas would be other noise levels.
        self.register_buffer("alphas_cumprod", alphas_cumprod(scheduler), persistent=False)
        self.num_timesteps = len(self.alphas_cumprod)
        # Rounded, because 0.29 * 100 is a little less than 29.
        low, high = (round(bound * self.num_timesteps, 6) for bound in settings.time_range)
        self.steps = math.floor(low), math.ceil(high)
        """The time steps of `time_range`: the first, and the one after the last."""
        is_speed = settings.time_sampling is TimeSampling.SPEED
        self.speed = speed_times(self.alphas_cumprod, *self.steps) if is_speed else None
        is_blind = settings.prediction is Prediction.EPSILON and not self.alphas_cumprod.min() > 0
        if settings.self_conditioning and is_blind:
            raise ModelError(
                "objective: self_conditioning cannot estimate clean samples from the noise that a model predicts where "
                "the scheduler leaves no signal (rescale_betas_zero_snr); train a model that predicts v_prediction"
            )
        if settings.weighting is Weighting.DEBIASED and is_blind:
            raise ModelError(
                "objective: the weight of debiased is infinite where the scheduler leaves no signal "
                "(rescale_betas_zero_snr); remove weighting, or train a model that predicts v_prediction"
            )

    @property
    def is_flow(self) -> bool:
        """Whether the denoiser predicts a flow, whose times are fractions; else time steps are whole numbers."""
        return self.settings.prediction is Prediction.FLOW_MATCHING

    def add_noise(
        self, latents: Tensor, noise: Tensor, time: Tensor, *, patch: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(noisy latents, timesteps that the denoiser reads, its target, weight of each sample's loss).

        `time` are uniform numbers in [0, 1), shape (B,). Timesteps are int64, for flows float32. `patch` is described
        at `LayerGraph`.

        Raises ModelError if the shift of times depends on tokens and `patch` is None.
        """
        if self.is_flow:
            return self._add_flow_noise(latents, noise, self.flow_time(time, num_tokens(latents.shape[1:], patch)))
        timesteps = self._timesteps(time)
        alphas = self.alphas_cumprod[timesteps]  # (B,)
        signal = _per_sample(alphas.to(latents.dtype) ** 0.5, latents)
        sigma = _per_sample((1 - alphas.to(latents.dtype)) ** 0.5, latents)
        noisy = signal * latents + sigma * noise
        target = noise if self.settings.prediction is Prediction.EPSILON else signal * noise - sigma * latents
        return noisy, timesteps, target, self._weight(alphas)

    def _add_flow_noise(self, latents: Tensor, noise: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sigma = _per_sample(t.to(latents.dtype), latents)
        noisy = sigma * noise + (1.0 - sigma) * latents
        return noisy, t * self.num_timesteps, noise - latents, self._flow_weight(t)

    def flow_time(self, time: Tensor, num_tokens: int | None = None) -> Tensor:
        """The times of a flow, 0 is data and 1 noise, for the uniform numbers `time` in [0, 1), of the same shape.

        `num_tokens`: the number of tokens of a sample, for a shift that depends on it.

        Raises ModelError if the shift depends on it and it is None.
        """
        return flow_times(self.settings, self.shift, time, num_tokens)

    def _timesteps(self, time: Tensor) -> Tensor:
        """The timesteps, int64, for uniform numbers in [0, 1), of the same shape.

        Step k of n belongs to the times from k / n to (k + 1) / n. With `SPEED` the distribution is `self.speed`.
        """
        if self.speed is not None:
            return self.speed.timesteps(time, in_pairs=self.settings.speed_pairs)
        low, high = self.settings.time_range
        if (low, high) != (0, 1):
            time = low + (high - low) * time.double()
        first, end = self.steps
        # A float32 number just below 1 times 1000 rounds to 1000.
        return (time * self.num_timesteps).long().clamp(first, end - 1)

    def _flow_weight(self, t: Tensor) -> Tensor:
        """The weight of each sample's loss at these shifted times of a flow, (B,); see `Weighting`."""
        match self.settings.weighting:
            case Weighting.SIGMA_SQRT:
                # Schedulers have no time between 0 and that of one step; at 0 the weight would be infinite.
                return t.clamp(min=1 / self.num_timesteps) ** -2
            case Weighting.COSMAP:
                return 2 / (math.pi * (1 - 2 * t + 2 * t * t))
        return torch.ones_like(t)

    def _weight(self, alphas: Tensor) -> Tensor:
        """The weight of each sample's loss at these cumulative alphas, (B,), where the model is not a flow's.

        Hang et al., section 3.4: min(snr, gamma) / snr for epsilon, min(snr, gamma) / (snr + 1) for v. Debiased: with
        the weight 1 / sqrt(snr) of the noise's error, the weight of v's error is sqrt(snr) / (snr + 1), because v's
        error is the noise's times sqrt((snr + 1) / snr).
        """
        gamma = self.settings.min_snr_gamma
        if self.settings.weighting is Weighting.DEBIASED:
            is_v = self.settings.prediction is Prediction.V_PREDICTION
            return (alphas * (1 - alphas) if is_v else (1 - alphas) / alphas).sqrt()
        if gamma is None:
            return torch.ones_like(alphas)
        snr = alphas / (1 - alphas)
        if self.settings.prediction is Prediction.EPSILON:
            return (gamma / snr).clamp(max=1)  # not min(snr, gamma) / snr, which is 0 / 0 at zero terminal SNR
        return snr.clamp(max=gamma) / (snr + 1)

    def estimate(self, prediction: Tensor, noisy: Tensor, timesteps: Tensor) -> Tensor:
        """The clean latents that follow from a prediction, of the shape and dtype of `noisy`, without a gradient."""
        with torch.no_grad():
            # Further channels state variances.
            prediction = prediction[:, : noisy.shape[1]].to(noisy.dtype)
            if self.is_flow:
                return noisy - _per_sample((timesteps / self.num_timesteps).to(noisy.dtype), noisy) * prediction
            alphas = self.alphas_cumprod.to(timesteps.device)[timesteps.long()]  # (B,)
            signal = _per_sample(alphas.to(noisy.dtype) ** 0.5, noisy)
            sigma = _per_sample((1 - alphas.to(noisy.dtype)) ** 0.5, noisy)
            if self.settings.prediction is Prediction.EPSILON:
                return (noisy - sigma * prediction) / signal
            return signal * noisy - sigma * prediction

    def loss(self, prediction: Tensor, target: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
        """The loss of each sample, (B,): its mean cost times its weight, in float64 if an input is, else float32.

        The cost is `settings.loss`. `mask`: a factor of each latent's cost, (B, 1, h, w); the mean is still over all
        latents. Channels of the prediction beyond the target's, which state variances, get no gradient.
        """
        is_double = torch.float64 in (prediction.dtype, target.dtype)
        dtype = torch.float64 if is_double else torch.float32
        error = prediction[:, : target.shape[1]].to(dtype) - target.to(dtype)
        cost = self._cost(error)
        if mask is not None:
            cost = cost * mask.to(dtype)  # (B, C, h, w)
        return cost.flatten(1).mean(1) * weight.to(dtype)

    def _cost(self, error: Tensor) -> Tensor:
        if self.settings.loss is LossKind.L2:
            return error * error
        delta = self.settings.huber_delta
        # 2 d (sqrt(e^2 + d^2) - d), written without a difference of two numbers that are nearly the same.
        return 2 * delta * error * error / ((error * error + delta * delta).sqrt() + delta)

    def hybrid_loss(
        self, prediction: Tensor, target: Tensor, weight: Tensor, pixels: Tensor, noisy: Tensor, timesteps: Tensor
    ) -> Tensor:
        """The loss of each sample, (B,): the sum of `loss` and `variance_loss`, which trains the variances.

        `prediction` has the variances in its second half of channels.
        """
        simple = self.loss(prediction, target, weight)
        mean, values = (half.to(simple.dtype) for half in prediction.chunk(2, dim=1))
        if self.settings.prediction is Prediction.V_PREDICTION:
            # The noise that v implies: sqrt(abar) v + sqrt(1 - abar) x_t.
            alphas = _per_sample(self.alphas_cumprod[timesteps], mean)
            mean = alphas.sqrt() * mean + (1 - alphas).sqrt() * noisy
        noised = Noised(pixels=pixels, noisy=noisy, noise=mean.detach(), timesteps=timesteps)
        return simple + variance_loss(values, noised, self.alphas_cumprod)


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.ndim - 1))


def objective_inputs(latents: tuple[int, ...], dtype: str = "float32") -> tuple[TensorSpec, ...]:
    """Descriptions of the raw inputs of `noise_layer`: noise of the latents' shape, and a uniform number a sample."""
    return TensorSpec(name="noise", shape=latents, dtype=dtype), TensorSpec(name="time", shape=())


def noise_layer(patch: int | None = None, reads: str = "latents") -> Layer:
    """The layer that makes "noisy", "timesteps", the target and its weight from latents, noise and time.

    `patch`: see `LayerGraph`. `reads`: "pixels" for a denoiser of the pictures themselves.
    """
    return Layer(
        name="objective.noise",
        component="objective",
        reads=(reads, "noise", "time"),
        writes=("noisy", "timesteps", "target", "loss_weight"),
        modules=("alphas_cumprod",),
        run=partial(Objective.add_noise, patch=patch),
    )


def loss_layer() -> Layer:
    """The last layer of a model: it reads prediction, target and weight, and writes one loss a sample, (B,)."""
    return Layer(
        name="objective.loss",
        component="objective",
        reads=("prediction", "target", "loss_weight"),
        writes=("loss",),
        run=_run_loss,
    )


def hybrid_loss_layer() -> Layer:
    """The last layer of a denoiser of pictures that also states variances: it writes one loss a sample, (B,)."""
    return Layer(
        name="objective.loss",
        component="objective",
        reads=("prediction", "target", "loss_weight", "pixels", "noisy", "timesteps"),
        writes=("loss",),
        modules=("alphas_cumprod",),
        run=_run_hybrid_loss,
    )


def _run_hybrid_loss(objective: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    assert isinstance(objective, Objective)
    return (objective.hybrid_loss(*tensors),)


def _run_loss(objective: nn.Module, prediction: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    assert isinstance(objective, Objective)
    return (objective.loss(prediction, target, weight),)
