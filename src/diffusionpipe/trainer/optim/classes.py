"""Optimizer classes by name: "AdamW" is torch.optim's, "package.module.Class" any other."""

import difflib
import importlib
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout

import torch
from torch import nn

from diffusionpipe.errors import RecipeError

OptimizerClass = Callable[..., torch.optim.Optimizer]

EXTRA = ("bitsandbytes", "prodigyopt", "pytorch_optimizer", "schedulefree")
"""Packages of optimizers that come with diffusionpipe[optimizers]."""

_NEEDS_MORE_THAN_A_GRADIENT = {
    "LBFGS": "evaluates the loss several times in a step, which a pipeline cannot repeat",
    "SparseAdam": "needs sparse gradients, but no model has them",
}
# A trial with dense gradients cannot tell these: they compile their first step for a minute, or hide their tensors.
_SUBCLASSES = ("torchao",)


def optimizer_class(name: str) -> OptimizerClass:
    """The class with this name, which the recipe or an option gives.

    Raises:
        RecipeError: there is none, its package is not installed, or a pipeline cannot run it.
    """
    if "." in name:
        return _class_of_path(name)
    known = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
        and key not in _NEEDS_MORE_THAN_A_GRADIENT
    }
    if name in known:
        return known[name]
    if name in _NEEDS_MORE_THAN_A_GRADIENT:
        raise RecipeError(
            f"optimizer {name} {_NEEDS_MORE_THAN_A_GRADIENT[name]}; use one of {', '.join(sorted(known))}"
        )
    of_lower = {key.lower(): key for key in known}
    close = difflib.get_close_matches(name.lower(), of_lower, n=1)
    hint = f"did you mean {of_lower[close[0]]}? " if close else ""
    raise RecipeError(
        f"torch.optim has no optimizer {name!r}; {hint}a class of another package is named by its path, e.g. "
        f"bitsandbytes.optim.AdamW8bit; torch.optim has {', '.join(sorted(known))}"
    )


def _class_of_path(name: str) -> OptimizerClass:
    module, _, own = name.rpartition(".")
    package = module.partition(".")[0]
    if not all(part.isidentifier() for part in name.split(".")):
        raise RecipeError(f'optimizer {name!r} is not the path of a class; write "package.module.Class"')
    if package in _SUBCLASSES:
        raise RecipeError(
            f"optimizer {name} keeps tensors of its own classes, which a checkpoint for other layouts cannot hold; use "
            "e.g. bitsandbytes.optim.AdamW8bit"
        )
    try:
        with quiet():
            found = getattr(importlib.import_module(module), own, None)
    except ImportError as error:
        if package in EXTRA and (error.name or "").partition(".")[0] == package:
            raise RecipeError(
                f"optimizer {name}: {package} is not installed; run pip install 'diffusionpipe[optimizers]'"
            ) from error
        raise RecipeError(f"optimizer {name} cannot be imported: {error}; install its package") from error
    if module == "torch.optim" and own in _NEEDS_MORE_THAN_A_GRADIENT:
        return optimizer_class(own)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        classes = [
            key
            for key, value in vars(importlib.import_module(module)).items()
            if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and not key.startswith("_")
        ]
        close = difflib.get_close_matches(own, classes, n=1)
        hint = f"; did you mean {module}.{close[0]}?" if close else "; give the path of a class of torch's Optimizer"
        raise RecipeError(f"optimizer {name}: {module} has no optimizer {own}{hint}")
    return found


def check_arguments(name: str, of: OptimizerClass, arguments: Mapping[str, object]) -> None:
    """Refuses arguments that the constructor does not have.

    Raises:
        RecipeError: names them.
    """
    options = [key for key in inspect.signature(of).parameters if key not in ("params", "lr", "kwargs")]
    problems = []
    for key in arguments:
        if key == "lr":
            problems.append("lr is the recipe's learning rate; set it there")
        elif key not in options:
            close = difflib.get_close_matches(key, options, n=1)
            problems.append(f"{key} is unknown" + (f"; did you mean {close[0]}?" if close else ""))
    if problems:
        raise RecipeError(f"optimizer {name}: {'; '.join(problems)} (options: {', '.join(options)})")


def with_tuples(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments with tuples in place of lists, as TOML has no tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


@contextmanager
def quiet() -> Iterator[None]:
    """Hides what a library prints and warns of while its optimizers are only tried."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def warned_once(say: Callable[[str], None]) -> Iterator[None]:
    """Says each warning of a library once, which would else come for every parameter."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(one.message) for one in found):
        say(text)


def set_mode(optimizer: torch.optim.Optimizer, *, is_training: bool) -> None:
    """Puts an optimizer that has modes, such as those without schedules, into the one for training or for reading."""
    change = getattr(optimizer, "train" if is_training else "eval", None)
    if callable(change):
        change()


def has_modes(of: OptimizerClass) -> bool:
    """Whether the class has a mode for training and one for reading the weights."""
    return callable(getattr(of, "train", None)) and callable(getattr(of, "eval", None))


def stand_in_of(parameter: torch.Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    """A small parameter of the same type on the same device, with a gradient."""
    stand_in = nn.Parameter(torch.full(shape, 0.01, dtype=parameter.dtype, device=parameter.device))
    stand_in.grad = torch.full_like(stand_in, 0.01)
    return stand_in


def keys_in_groups(of: OptimizerClass, group: Mapping[str, object]) -> tuple[str, ...]:
    """The keys of a parameter group that steps may change: all but its arguments; torch's own change none."""
    if of.__module__.startswith("torch.optim"):
        return ()
    known = {*inspect.signature(of).parameters, "params", "lr", "initial_lr", "group", "train_mode"}
    return tuple(key for key, value in group.items() if key not in known and not isinstance(value, str))
