"""Trainings in float64 whose losses do not depend on the processor.

Some functions compute in float32 whatever the precision of the model is, and torch's float32 kernels differ between
processors in the last bits. Within `in_double` these functions compute in float64. Where torch adds, multiplies,
divides or takes a root in float32, every processor rounds alike; such steps are left alone.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import diffusers.models.embeddings
import diffusers.models.transformers.transformer_flux
import torch
import transformers.models.t5.modeling_t5
from kit.tiny_runs import train
from torch import Tensor
from torch.overrides import TorchFunctionMode

from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.recipe import Recipe

WIDENED = (
    (diffusers.models.embeddings, "get_timestep_embedding"),
    (diffusers.models.transformers.transformer_flux, "apply_rotary_emb"),
    (transformers.models.t5.modeling_t5.T5LayerNorm, "forward"),
)
"""Functions that convert to float32 within: the sines of timesteps, the rotation of positions, the norm of T5."""
ROUNDED = ((torch, "sigmoid"), (torch.special, "ndtri"))
"""What makes the times of a flow, which are float32 and stay so: computed in float64, then rounded."""


class _Float32IsFloat64(TorchFunctionMode):
    """Within, whatever asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        positional = (_wide(value) for value in args)
        return func(*positional, **{key: _wide(value) for key, value in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _widened(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Float32IsFloat64():
            return function(*args, **kwargs)

    return run


def _rounded(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    @wraps(function)
    def run(values: Tensor) -> Tensor:
        return function(values.double()).to(values.dtype)

    return run


@contextmanager
def in_double() -> Iterator[None]:
    """`WIDENED` and `ROUNDED` compute in float64, for the length of the block."""
    with ExitStack() as patches:
        for replace, functions in ((_widened, WIDENED), (_rounded, ROUNDED)):
            for owner, name in functions:
                patches.enter_context(mock.patch.object(owner, name, replace(getattr(owner, name))))
        yield


def train_in_double(job: Job, recipe: Recipe) -> int:
    """`tiny_runs.train` on this rank of a job, so computed."""
    with in_double():
        return train(job, recipe)
