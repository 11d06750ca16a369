"""`dp.profile`: the costs of every layer of a model, measured here or computed for a device that is not here."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from diffusionpipe.costs import ModelGraph, Profile
from diffusionpipe.costs.devices import device_rates
from diffusionpipe.costs.files import write_profile
from diffusionpipe.errors import ConfigError
from diffusionpipe.library.models import Model
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.profiler import analytic_profile, profile_model

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
PRECISIONS = ("float32", "bfloat16", "float64")


def profile(
    model: Model,
    *,
    device: str = "cpu",
    analytic: str | None = None,
    precision: str | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    out: str | os.PathLike[str] | None = None,
) -> Profile:
    """Measure or compute the times and memory of every layer; returns the profile, as `dp.plan` takes it.

    Args:
        model: from `dp.pipeline`.
        device: where the layers are measured, "cpu" or "cuda".
        analytic: in place of measuring, the name of a known device for which they are computed, such as "a100-80".
        precision: the dtype in which layers compute, "float32", "float64" or "bfloat16" (autocast); None: the dtype of
            the parameters.
        batch_sizes: the numbers of samples in a micro-batch for which layers are measured or computed.
        out: a file that the profile is written to, which `dp.plan` and `diffusionpipe plan` read; None for no file.

    Raises:
        ConfigError: the device or the precision is not known; or the file cannot be written.
    """
    if not isinstance(model, Model):
        raise ConfigError(f"dp.profile takes a model, not a {type(model).__name__}; make one with dp.pipeline")
    precision = precision or precision_of(model)
    own = description_for(model, precision, device_rates(analytic).device_type if analytic else device)
    if analytic is not None:
        made = analytic_profile(model.graph, own, device=analytic, precision=precision, batch_sizes=batch_sizes)
    else:
        made = profile_model(model.graph, own, device=device, precision=precision, batch_sizes=batch_sizes)
    if out is not None:
        write_profile(made, Path(out))
    return made


def precision_of(model: Model) -> str:
    """The precision of a model's parameters: "float64" if one of them is float64, else "float32"."""
    return "float64" if any(p.dtype == torch.float64 for p in model.parameters()) else "float32"


def description_for(model: Model, precision: str, device: str = "cpu") -> ModelGraph:
    """The model's layers and tensors as plain data, in the dtypes that they have when layers compute in `precision`.

    `device`: "cpu" or "cuda", on which dtypes under autocast depend.

    Raises:
        ConfigError: the precision is not known, or does not suit the dtype of the parameters.
    """
    own = precision_of(model)
    if precision not in PRECISIONS:
        raise ConfigError(f"precision={precision!r}: use one of {', '.join(PRECISIONS)}")
    if precision == own:
        return model.description
    if precision != "bfloat16" or own != "float32":
        raise ConfigError(
            f"precision={precision!r}, but the parameters are {own}; convert the modules, or leave it out"
        )
    return describe(model.graph, autocast=torch.bfloat16, device="cpu" if not torch.cuda.is_available() else device)
