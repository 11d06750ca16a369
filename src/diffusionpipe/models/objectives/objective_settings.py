"""The objective as a recipe states it, and which of its settings go together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import pi

from diffusionpipe.errors import RecipeError


class Prediction(StrEnum):
    """The quantity that the denoiser predicts: the noise, a velocity, or the direction of a flow."""

    EPSILON = "epsilon"
    """The noise (Ho et al., 2020, https://arxiv.org/abs/2006.11239)."""
    V_PREDICTION = "v_prediction"
    """sqrt(abar) * noise - sqrt(1 - abar) * latents (Salimans & Ho, 2022, https://arxiv.org/abs/2202.00512)."""
    FLOW_MATCHING = "flow_matching"
    """noise - latents on the straight path between them (Lipman et al., 2023, https://arxiv.org/abs/2210.02747;
    Liu et al., 2023, https://arxiv.org/abs/2209.03003)."""


class TimeSampling(StrEnum):
    """The distribution of a flow's times or, for `SPEED`, of the steps of a discrete schedule."""

    UNIFORM = "uniform"
    LOGIT_NORMAL = "logit_normal"
    """sigmoid of a normal number (Esser et al., 2024, section 3.1, https://arxiv.org/abs/2403.03206)."""
    MODE = "mode"
    """A density with its maximum, or its minimum, in the middle (Esser et al., 2024, section 3.1)."""
    BETA = "beta"
    """A beta distribution."""
    SPEED = "speed"
    """Fewer draws of steps that are nearly noise; see `models.objectives.speed`."""


class Weighting(StrEnum):
    """A rule for the weight of a sample's loss by its time t (of a flow after its shift), beside `min_snr_gamma`."""

    NONE = "none"
    SIGMA_SQRT = "sigma_sqrt"
    """1 / t^2, as in diffusers' compute_loss_weighting_for_sd3."""
    COSMAP = "cosmap"
    """2 / (pi (1 - 2 t + 2 t^2)), a density of times as a weight (Esser et al., 2024, section 3.1; diffusers too)."""
    DEBIASED = "debiased"
    """1 / sqrt(snr) of the noise's error (Yu et al., 2023, https://arxiv.org/abs/2310.08442)."""


class LossKind(StrEnum):
    """The cost of the error e of one predicted number, before the mean over the sample."""

    L2 = "l2"
    """The squared error e^2."""
    HUBER = "huber"
    """2 d (sqrt(e^2 + d^2) - d) with d = `huber_delta`: e^2 for small errors, 2 d |e| for large ones. The pseudo-Huber
    loss (Charbonnier et al., 1997, https://doi.org/10.1109/83.551699), scaled as in diffusers' training scripts with
    it (examples/research_projects/scheduled_huber_loss_training)."""


MIN_MODE_SCALE, MAX_MODE_SCALE = -1.0, 2 / (pi - 2)
"""The bounds of `mode_scale`, between which times grow with the uniform number (Esser et al., 2024, section 3.1)."""
MIN_BETA, MAX_BETA = 0.1, 100.0
"""The least and the largest parameter for which `beta_quantile` has its accuracy."""
DEFAULTS: Mapping[str, object] = {
    "time_sampling": TimeSampling.UNIFORM,
    "logit_mean": 0.0,
    "logit_std": 1.0,
    "mode_scale": 1.29,
    "beta_alpha": 2.0,
    "beta_beta": 2.0,
    "speed_pairs": False,
    "time_range": (0.0, 1.0),
    "weighting": Weighting.NONE,
    "loss": LossKind.L2,
    "huber_delta": 0.1,
}
"""Setting -> its default value. A setting that has its default is never refused."""
TWO_WEIGHTS_OF_TIMES = "time_sampling = speed and {key} both weigh the times; remove one of them"
_OF_FLOWS = (Weighting.SIGMA_SQRT, Weighting.COSMAP)
_OF_SAMPLING = {
    "logit_mean": TimeSampling.LOGIT_NORMAL,
    "logit_std": TimeSampling.LOGIT_NORMAL,
    "mode_scale": TimeSampling.MODE,
    "beta_alpha": TimeSampling.BETA,
    "beta_beta": TimeSampling.BETA,
    "speed_pairs": TimeSampling.SPEED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """The settings of the training objective, as the recipe's section `objective` states them."""

    prediction: Prediction = Prediction.EPSILON
    """The quantity that the denoiser predicts."""
    min_snr_gamma: float | None = None
    """The cap of the signal-to-noise ratio in a sample's weight (Hang et al., 2023, https://arxiv.org/abs/2303.09556);
    None: no such weight."""
    time_sampling: TimeSampling = TimeSampling.UNIFORM
    """The distribution of the times."""
    logit_mean: float = 0.0
    """Mean of the normal number of `logit_normal`; below 0 more times are near the data."""
    logit_std: float = 1.0
    """Standard deviation of the normal number of `logit_normal`."""
    mode_scale: float = 1.29
    """The parameter s of `mode`: above 0 times gather in the middle, below 0 at both ends."""
    beta_alpha: float = 2.0
    """Alpha of `beta`: the density near 0 (data) is like t^(alpha - 1)."""
    beta_beta: float = 2.0
    """Beta of `beta`: the density near 1 (noise) is like (1 - t)^(beta - 1)."""
    speed_pairs: bool = False
    """Whether samples of `speed` are drawn in pairs, the partner at the mirrored step."""
    time_range: tuple[float, float] = (0.0, 1.0)
    """The times that are drawn, after `shift`, from the smallest to the largest: 0 is data, 1 noise. They are
    distributed as without it, as if every time outside had been drawn again."""
    shift: float | None = 1.0
    """Shift of flow times towards noise: t becomes shift * t / (1 + (shift - 1) * t) (Esser et al., 2024, section
    5.3.2). None: as the scheduler's configuration states."""
    weighting: Weighting = Weighting.NONE
    """The weight of a sample's loss by its time."""
    loss: LossKind = LossKind.L2
    """The cost of an error."""
    huber_delta: float = 0.1
    """The error from which on the Huber loss grows less than the square."""
    self_conditioning: float = 0.0
    """Share of the samples of every batch for which the denoiser reads its own estimate; see
    `models.base.self_conditioning`."""
    has_learned_range: bool = False
    """Whether the variance of each denoising step is learnt too, with `learned_variance`."""

    def __post_init__(self) -> None:
        is_flow = self.prediction is Prediction.FLOW_MATCHING
        problems = [
            (
                is_flow and self.min_snr_gamma is not None,
                "min_snr_gamma has no effect for flow_matching; leave it out",
            ),
            (self.min_snr_gamma is not None and self.min_snr_gamma <= 0, "min_snr_gamma must be positive, e.g. 5"),
            (
                not is_flow and self.shift not in (None, 1),
                f"shift needs flow_matching, not {self.prediction}; remove it",
            ),
            (self.has_learned_range and is_flow, "variance = learned_range has no effect for flow_matching; remove it"),
            (self.shift is not None and self.shift <= 0, "shift must be positive"),
            (
                self.weighting is Weighting.DEBIASED and self.min_snr_gamma is not None,
                "weighting = debiased and min_snr_gamma are two weights of one sample; remove one of them",
            ),
            (
                self.time_sampling is TimeSampling.SPEED and self.min_snr_gamma is not None,
                TWO_WEIGHTS_OF_TIMES.format(key="min_snr_gamma"),
            ),
            (not 0 <= self.self_conditioning <= 1, "self_conditioning is a share; use a number from 0 to 1"),
        ]
        found = [text for is_found, text in problems if is_found]
        values = {name: getattr(self, name) for name in DEFAULTS}
        found += [f"{key}: {text}" for key, text in problems_of(values, self.prediction)]
        if found:
            raise RecipeError("\n".join(f"objective: {text}" for text in found))


def problems_of(values: Mapping[str, object], prediction: Prediction | None) -> Iterator[tuple[str, str]]:
    """(key, sentence with the problem and its remedy) of each setting that has no effect or a wrong value.

    `values`: all settings in `DEFAULTS`, by key. `prediction` is None if the recipe leaves it to the folder; settings
    that depend on it are then not refused.
    """
    given = {key for key, default in DEFAULTS.items() if values[key] != default}
    sampling = TimeSampling(str(values["time_sampling"]))
    if sampling is TimeSampling.SPEED and prediction is Prediction.FLOW_MATCHING:
        yield (
            "time_sampling",
            "speed needs epsilon or v_prediction, not flow_matching, which has no time steps; remove it",
        )
    if (
        "time_sampling" in given
        and sampling is not TimeSampling.SPEED
        and prediction not in (None, Prediction.FLOW_MATCHING)
    ):
        yield "time_sampling", f"{sampling} needs flow_matching, not {prediction}; remove it"
    weighting = Weighting(str(values["weighting"]))
    if weighting in _OF_FLOWS and prediction not in (None, Prediction.FLOW_MATCHING):
        yield "weighting", f"{weighting} needs flow_matching, not {prediction}; remove it"
    if weighting is Weighting.DEBIASED and prediction is Prediction.FLOW_MATCHING:
        yield "weighting", "debiased needs epsilon or v_prediction, not flow_matching; remove it"
    if "huber_delta" in given and values["loss"] != LossKind.HUBER:
        yield "huber_delta", f'it has no effect for the {values["loss"]} loss; set loss = "huber" or remove it'
    for key in (key for key in _OF_SAMPLING if key in given):
        if sampling is not _OF_SAMPLING[key]:
            yield key, f'it has no effect for {sampling} times; set time_sampling = "{_OF_SAMPLING[key]}" or remove it'
    if values["speed_pairs"] and "time_range" in given:
        yield "speed_pairs", "partners would lie outside time_range; remove one of them"
    yield from _problems_of_numbers(values)


def _problems_of_numbers(values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    limits = {
        "mode_scale": (MIN_MODE_SCALE, MAX_MODE_SCALE, "; other times would not grow with the uniform number"),
        "beta_alpha": (MIN_BETA, MAX_BETA, ""),
        "beta_beta": (MIN_BETA, MAX_BETA, ""),
    }
    for key, (least, most, why) in limits.items():
        if not least <= _number(values[key]) <= most:
            yield key, f"{_number(values[key]):g} is not a number from {least:g} to {most:.4g}{why}"
    for key, usual in (("logit_std", 1), ("huber_delta", 0.1)):
        if _number(values[key]) <= 0:
            yield key, f"{_number(values[key]):g} must be positive, e.g. {usual:g}"
    bounds = values["time_range"]
    assert isinstance(bounds, tuple)
    if not 0 <= bounds[0] < bounds[1] <= 1:
        yield "time_range", f"{list(bounds)} is not [from, to] with 0 <= from < to <= 1; use e.g. [0.0, 0.875]"


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)
