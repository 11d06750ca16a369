"""Which of diffusers' schedulers a model may have, by class, and the noise levels that each class has by itself.

    discrete    a table of cumulative alphas; noisy = sqrt(abar) * latents + sqrt(1 - abar) * noise
    flow        times of a straight path; see `flow_shift`

A class that is on neither list is refused by its name: its noise levels, or what it predicts, would be guessed.
"""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import Tensor

from diffusionpipe.errors import ModelError

DISCRETE = (
    "CogVideoXDDIMScheduler",
    "CogVideoXDPMScheduler",
    "DDIMParallelScheduler",
    "DDIMScheduler",
    "DDPMParallelScheduler",
    "DDPMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSDEScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LCMScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "SASolverScheduler",
    "TCDScheduler",
    "UniPCMultistepScheduler",
)
"""Some of them draw flows too, if their configuration says so (`prediction_type`)."""
FLOWS = (
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "LTXEulerAncestralRFScheduler",
)
_DEFAULT = "DDPMScheduler"
_MAX_TIMESTEPS = 1_000_000
_NAMES = (
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "rescale_betas_zero_snr",
    "snr_shift_scale",
)


def refuse_unknown(name: str, source: str = "scheduler_config.json: ") -> None:
    """Check that the scheduler class with this name is supported.

    Raises ModelError, which lists the supported ones, if it is not. `source`: the start of the message, which names the
    file.
    """
    if name not in (*DISCRETE, *FLOWS):
        shown = name if name.isidentifier() and len(name) < 80 else repr(name[:40])
        raise ModelError(
            f"{source}the scheduler {shown} is not supported: its noise levels and its predictions are not known here; "
            f"supported: {', '.join(sorted((*DISCRETE, *FLOWS)))}"
        )


def alphas_cumprod(scheduler: Mapping[str, object]) -> Tensor:
    """The cumulative alphas, float32 (steps,), of a scheduler's configuration, as its own class computes them.

    A configuration without a class counts as DDPMScheduler's, and so does a flow's, which has no betas of its own.

    Raises ModelError for an unknown class, and for values that make no noise levels.
    """
    import diffusers

    name = str(scheduler.get("_class_name", _DEFAULT))
    refuse_unknown(name)
    steps = scheduler.get("num_train_timesteps", 1000)
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= _MAX_TIMESTEPS:
        raise ModelError(
            f"scheduler_config.json: num_train_timesteps is {str(steps)[:40]}; it must be a whole number from 1 to "
            f"{_MAX_TIMESTEPS:,}"
        )
    kind: Any = getattr(diffusers, _DEFAULT if name in FLOWS else name)
    known = signature(kind.__init__).parameters
    # A configuration may hold settings of other schedulers, which this class does not take.
    given = {key: scheduler[key] for key in _NAMES if key in scheduler and key in known}
    try:
        alphas: Tensor = kind(**given).alphas_cumprod.clone()
    except Exception as error:  # a wrong value leads to anything
        raise ModelError(f"scheduler_config.json makes no noise levels: {type(error).__name__}: {error}") from error
    if alphas.shape != (steps,) or not alphas.isfinite().all() or alphas.min() < 0 or alphas.max() > 1:
        raise ModelError(
            f"scheduler_config.json: {', '.join(given)} make noise levels (alphas_cumprod) that are not {steps} "
            "numbers from 0 to 1"
        )
    return alphas
