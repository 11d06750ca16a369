"""The scheduler that draws with a trained model: the scheduler of its source folder with the changes of the recipe."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.flow_shift import is_flow_scheduler, shift_of
from diffusionpipe.models.objectives.noise_levels import FLOWS
from diffusionpipe.models.objectives.objective import Prediction
from diffusionpipe.models.opening.folder import family_of, scheduler_config

_FLOW_SCHEDULER = "FlowMatchEulerDiscreteScheduler"
_WITHOUT_SHIFT = "LTXEulerAncestralRFScheduler"
"""A scheduler whose class has no `shift`. With a shift `_FLOW_SCHEDULER` replaces it, and draws at the same times."""


def sampling_scheduler(
    source_model: Path, prediction: Prediction, shift: float | None, *, has_learned_range: bool = False
) -> dict[str, Any]:
    """The configuration of the scheduler that draws with a trained model, by field; its class is in "_class_name".

    It is the configuration in the source folder, unless that belongs to another kind of prediction. `shift`: the
    recipe's number for flow matching, which replaces all shifting in the folder's configuration; None if the recipe
    has none. `has_learned_range`: whether variances were learnt; if not, drawing ignores the variances of the denoiser.

    Raises:
        ModelError: the source folder has no scheduler.
    """
    config = scheduler_config(source_model)
    if family_of(source_model).has_variances:
        is_learned = str(config.get("variance_type")).startswith("learned")
        if has_learned_range or is_learned:
            # Fixed_small is the default of diffusers' class.
            config |= {"variance_type": "learned_range" if has_learned_range else "fixed_small"}
    timesteps = config.get("num_train_timesteps", 1000)
    if prediction is Prediction.FLOW_MATCHING and is_flow_scheduler(config):
        if shift is None:
            return config
        if config["_class_name"] == _WITHOUT_SHIFT:
            config = {"num_train_timesteps": timesteps, "_class_name": _FLOW_SCHEDULER}
        return config | _static(config, shift)
    if prediction is Prediction.FLOW_MATCHING:
        return {"num_train_timesteps": timesteps, "shift": shift or 1.0, "_class_name": _FLOW_SCHEDULER}
    if is_flow_scheduler(config):
        # The betas are then the defaults of DDPMScheduler, as in training.
        config = {"num_train_timesteps": timesteps, "clip_sample": False, "_class_name": "DDPMScheduler"}
    is_stated = config.get("prediction_type", str(Prediction.EPSILON)) == str(prediction)
    return config if is_stated else config | {"prediction_type": str(prediction)}


def refuse_unknown_times(scheduler: object) -> None:
    """Refuses a diffusers scheduler without sigmas, such as DDIM's, if one of its times is beyond its table of noise.

    diffusers adds `steps_offset` to the times, so with as many steps as the model has times the first is too late.

    Raises:
        ValueError: there is such a time.
    """
    table, times = getattr(scheduler, "alphas_cumprod", None), getattr(scheduler, "timesteps", None)
    if table is None or times is None or hasattr(scheduler, "sigmas") or not len(times):
        return
    if (last := int(max(times))) >= len(table):
        raise ValueError(f"they begin at time {last}, and the last time of the model is {len(table) - 1}")


def _static(config: Mapping[str, Any], shift: float) -> dict[str, Any]:
    """The fields to change in a scheduler's configuration so that times are shifted by `shift` and by nothing else."""
    name = "shift" if config["_class_name"] in FLOWS else "flow_shift"
    wanted = {name: shift, "use_dynamic_shifting": False, "shift_terminal": None}
    defaults = {name: 1.0, "use_dynamic_shifting": False, "shift_terminal": None}
    # Fields that would only state a default stay away, so that an unchanged folder stays as it is.
    return {key: value for key, value in wanted.items() if config.get(key, defaults[key]) != value}


def shift_contradiction(folder: Path, graph: LayerGraph, prediction: Prediction, shift: float | None) -> str | None:
    """A warning, with both numbers, that the recipe's shift differs from the shift of the folder's scheduler.

    None if they are equal, or if there are not two shifts of flow matching.
    """
    config = scheduler_config(folder)
    if prediction is not Prediction.FLOW_MATCHING or shift is None or not is_flow_scheduler(config):
        return None
    own = shift_of(config)
    factor = own.factor(graph.num_tokens)
    if factor == shift and not own.terminal:
        return None
    details = []
    if own.dynamic is not None:
        details.append(f"{graph.num_tokens} tokens")
    if own.terminal:
        details.append(f"shift_terminal {own.terminal:g}")
    stated = f"{factor:.4g}" + (f" ({', '.join(details)})" if details else "")
    return (
        f"objective.shift is {shift:g}, but the model's own scheduler shifts times by {stated}; the run trains, draws "
        f"and exports with {shift:g}. Remove objective.shift to train as the model was trained."
    )
