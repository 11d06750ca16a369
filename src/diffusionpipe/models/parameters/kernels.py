"""Kernels of libraries that widen stored matrices on GPUs in one pass, where they are there and agree with ours.

Nothing is installed for it: `pip install bitsandbytes` lets a GPU widen faster. The choice is made once for each kind
of device, by a trial: a kernel that fails, or gives other numbers than `forms`, is not used, and a warning says so.
"""

import logging
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from diffusionpipe.costs.forms import BLOCK, INPUTS_OF_A_SCALE, Form, has_rows
from diffusionpipe.errors import ConfigError
from diffusionpipe.hidden_packages import reveal

logger = logging.getLogger(__name__)

LIBRARY = "bitsandbytes"


def number_type(form: Form) -> torch.dtype:
    """The dtype of the numbers of a form that has scales along rows.

    Raises:
        ConfigError: the form is not of this kind.
    """
    match form:
        case Form.FLOAT8:
            return torch.float8_e4m3fn
        case Form.INT8:
            return torch.int8
    raise ConfigError(
        f"{str(form)!r} is not a form of stored weights with scales along rows; use {Form.FLOAT8} or {Form.INT8}"
    )


class Kernel(Protocol):
    """A function of a library that widens a stored matrix: `kernel(numbers, scales, form, shape, dtype)`."""

    def __call__(
        self, numbers: Tensor, scales: Tensor, form: Form, shape: tuple[int, int], dtype: torch.dtype
    ) -> Tensor:
        """The wide matrix of this shape and dtype, from its numbers as bytes and the scales of their blocks."""
        ...


def suits(form: Form, columns: int) -> bool:
    """Whether the kernels can read a matrix with `columns` inputs in this form: its blocks must not cross rows."""
    return not has_rows(form) or columns % INPUTS_OF_A_SCALE == 0


def operators(name: str) -> Any:
    """The namespace of operators that the library with this name adds to torch.

    Raises ImportError if the library is not installed.
    """
    reveal()
    import_module(name)
    return getattr(torch.ops, name)


def kernel_of(library: Any) -> Kernel:
    """The kernel for all forms, made of bitsandbytes' operators, `library`.

    Raises AttributeError if its version lacks one of them.
    """
    return partial(_widened, library.dequantize_4bit, library.dequantize_blockwise)


def _widened(
    four_bits: Callable[..., Tensor],
    by_blocks: Callable[..., Tensor],
    numbers: Tensor,
    scales: Tensor,
    form: Form,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    if form is Form.NF4:
        return four_bits(numbers.view(-1, 1), scales, BLOCK, "nf4", list(shape), dtype)
    # The number that each of the 256 bytes stands for: the kernel looks it up.
    values = torch.arange(256, device=numbers.device).to(torch.uint8).view(number_type(form)).float()
    return by_blocks(numbers, scales.reshape(-1), values, INPUTS_OF_A_SCALE, dtype)


@cache
def kernel_on(device_type: str) -> Kernel | None:
    """The kernel that widens stored matrices on this type of device, e.g. "cuda"; None: torch's own operations do."""
    return chosen(device_type, operators) if device_type == "cuda" else None


def chosen(device_type: str, find: Callable[[str], Any]) -> Kernel | None:
    """The kernel of bitsandbytes, if it is there and passes a trial on the type of device; else None and a log line.

    `find(name)`: the operators of the library with this name.
    """
    try:
        kernel = kernel_of(find(LIBRARY))
    except ImportError:
        logger.info("widening=torch reason=%r", f"{LIBRARY} is not installed")
        return None
    except AttributeError as error:
        logger.warning("widening=torch reason=%r", f"{LIBRARY} has another version than is known: {error}")
        return None
    problem = _problem(kernel, device_type)
    if problem:
        logger.warning("widening=torch reason=%r", f"{LIBRARY} {problem}")
        return None
    logger.info("widening=%s", LIBRARY)
    return kernel


def _problem(kernel: Kernel, device_type: str) -> str:
    """The fault that a trial finds in a kernel, in words; "" for none.

    It widens random matrices of all forms to bfloat16.
    """
    from diffusionpipe.models.parameters.forms import encode, parts_for_kernels, widened_by_torch

    shape = (64, 2 * INPUTS_OF_A_SCALE)
    # From a generator of its own, so that no random number of the training changes.
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device_type)
    for form in Form:
        codes, scales = encode(form, weight)
        expected = widened_by_torch(codes, scales, form, shape, torch.bfloat16).float()
        try:
            found = kernel(*parts_for_kernels(codes, scales, form, shape), form, shape, torch.bfloat16).float()
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            return f"cannot widen {form} here: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        # Two neighbours in bfloat16 differ by 2^-8 to 2^-7: kernels may round the last bit otherwise.
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=2**-7, atol=1e-6):
            return f"widens {form} to other numbers"
    return ""
