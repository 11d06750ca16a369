"""Optimizer classes by name: "AdamW" is torch.optim's, "package.module.Class" any other."""

import difflib
import importlib
import inspect
import io
import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout

import torch
from torch import nn

from diffusionpipe.errors import RecipeError
from diffusionpipe.hidden_packages import reveal

OptimizerClass = Callable[..., torch.optim.Optimizer]

EXTRA = ("bitsandbytes", "prodigyopt", "pytorch_optimizer", "schedulefree")
"""Packages of optimizers that come with diffusionpipe[optimizers]."""

_NEEDS_MORE_THAN_A_GRADIENT = {
    "LBFGS": "evaluates the loss several times in a step, which a pipeline cannot repeat",
    "SparseAdam": "needs sparse gradients, but no model has them",
}
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
"""The kinds of parameters that take further arguments, `*args` and `**options`."""
# A trial with dense gradients cannot tell these: they compile their first step for a minute, or hide their tensors.
_SUBCLASSES = ("torchao",)


def optimizer_class(name: str) -> OptimizerClass:
    """The optimizer class of this name: a class of torch.optim, or the class at a path such as "package.module.Class".

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
    if package == "bitsandbytes" or package not in EXTRA:
        reveal()  # a package that is not listed may import bitsandbytes too
    try:
        with quiet():
            found = getattr(importlib.import_module(module), own, None)
    except ImportError as error:
        if package in EXTRA and (error.name or "").partition(".")[0] == package:
            raise RecipeError(
                f"optimizer {name}: {package} is not installed; run pip install 'diffusionpipe[optimizers]'"
            ) from error
        raise RecipeError(f"optimizer {name} cannot be imported: {error}; install its package") from error
    if module == "torch.optim" and own in _NEEDS_MORE_THAN_A_GRADIENT:  # the same refusal by its whole path
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
    """Refuses an optimizer class that needs more than parameters and a rate, and arguments that it does not have.

    `name`: the class in the recipe's words; `of`: the class itself; `arguments`: for its constructor.

    Raises:
        RecipeError: it names the reason, or the arguments.
    """
    takes = inspect.signature(of).parameters
    options = [key for key, one in takes.items() if key not in ("params", "lr") and one.kind not in _VARIABLE]
    problems = [] if (need := _need(of, takes)) is None else [need]
    for key in arguments if need is None else ():
        if key == "lr":
            problems.append("lr is the recipe's learning rate; set it there")
        elif key not in options:
            close = difflib.get_close_matches(key, options, n=1)
            problems.append(f"{key} is unknown" + (f"; did you mean {close[0]}?" if close else ""))
    missing = [key for key in options if key not in arguments and takes[key].default is inspect.Parameter.empty]
    if not problems and missing:
        problems.append(f"it needs {' and '.join(missing)}; add them to its arguments")
    if problems:
        shown = "" if need else f" (options: {', '.join(options) or 'none'})"
        raise RecipeError(f"optimizer {name}: {'; '.join(problems)}{shown}")


def _need(of: OptimizerClass, takes: Mapping[str, inspect.Parameter]) -> str | None:
    """The demand of an optimizer class that no pipeline can meet, and the remedy; None if there is no such demand.

    A class that needs only parameters, their gradients and a rate has none. `takes`: its constructor's parameters.
    """
    if callable(getattr(of, "first_step", None)) and callable(getattr(of, "second_step", None)):
        return (
            "each of its steps evaluates the loss of the batch twice (a closure), and a pipeline runs a batch once; "
            "use one that steps by gradients, e.g. AdamW"
        )
    if "params" not in takes:
        return f"it takes {next(iter(takes), 'nothing')} in place of parameters; use one that is made of parameters"
    if "model" in takes and takes["model"].default is inspect.Parameter.empty:
        return "it takes a whole model, of which each rank has a part; use one that is made of parameters"
    if "lr" not in takes and all(one.kind is not inspect.Parameter.VAR_KEYWORD for one in takes.values()):
        return "it takes no learning rate (lr), which a run sets in each step; choose another one"
    return None


def why_refused(of: OptimizerClass | None, arguments: Mapping[str, object], error: Exception) -> str:
    """Why an optimizer's library raised `error` for the arguments of a recipe, in a sentence for the recipe's author.

    `of`: the class if its constructor raised the error, else None. With it the sentence names the first argument of a
    wrong kind and the argument's default.
    """
    text = str(error)
    if "closure" in text.lower():
        return "it wants a closure, which evaluates the loss again; choose another one"
    if "does not require grad" in text:
        return "it differentiates gradients, which a pipeline does not keep; choose another one"
    if isinstance(error, ValueError | RuntimeError | AssertionError) and "could not convert" not in text:
        return text
    return f"{_of_wrong_kind(of, arguments) or 'a value'} is of a wrong kind; correct it or leave it out"


def _of_wrong_kind(of: OptimizerClass | None, arguments: Mapping[str, object]) -> str | None:
    """The name and default of the first argument that the constructor refuses while all others have their defaults.

    None if there is none, or no class.
    """
    if of is None:
        return None
    # Each argument alone, beside the defaults of the others, shows which one is refused.
    for key, value in arguments.items():
        try:
            with quiet():
                of([nn.Parameter(torch.zeros(2, 2))], lr=1e-3, **with_tuples({key: value}))
        except Exception:  # libraries raise what they like
            default = inspect.signature(of).parameters[key].default
            return f"{key} (by default {list(default) if isinstance(default, tuple) else default})"
    return None


def with_tuples(arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments with tuples in place of lists, as TOML has no tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


class _Quiet:
    """A context that hides prints, warnings and log messages up to WARNING of this process while a thread is in it.

    Each of them is a setting of the whole process. If each thread restored the settings that it found, the thread that
    leaves last could restore the silence of another. So the first thread that enters saves and the last one restores.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._restoring = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._restoring.callback(logging.disable, logging.root.manager.disable)
                logging.disable(logging.WARNING)
                self._restoring.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                self._restoring.enter_context(redirect_stdout(io.StringIO()))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._restoring.close()


_quiet = _Quiet()


def quiet() -> AbstractContextManager[None]:
    """A context that hides a library's prints and warnings while its optimizers are tried; threads may share it."""
    return _quiet


@contextmanager
def warned_once(say: Callable[[str], None]) -> Iterator[None]:
    """A context that collects all warnings, and calls `say` at its end once for each different text."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(one.message) for one in found):
        say(text)


def set_mode(optimizer: torch.optim.Optimizer, *, is_training: bool) -> None:
    """Calls the optimizer's `train` or `eval`, if it has such modes, as schedule-free ones do."""
    change = getattr(optimizer, "train" if is_training else "eval", None)
    if callable(change):
        change()


def has_modes(of: OptimizerClass) -> bool:
    """Whether the optimizer class has a mode for training and one for reading the weights, `train` and `eval`."""
    return callable(getattr(of, "train", None)) and callable(getattr(of, "eval", None))


def stand_in_of(parameter: torch.Tensor, shape: tuple[int, ...]) -> nn.Parameter:
    """A new parameter of this shape with values and gradients 0.01, of the type and on the device of `parameter`."""
    stand_in = nn.Parameter(torch.full(shape, 0.01, dtype=parameter.dtype, device=parameter.device))
    stand_in.grad = torch.full_like(stand_in, 0.01)
    return stand_in


def keys_in_groups(of: OptimizerClass, group: Mapping[str, object]) -> tuple[str, ...]:
    """The keys of a parameter group that a class's steps may change: all but its arguments; () for torch.optim."""
    if of.__module__.startswith("torch.optim"):
        return ()
    # "group" is our own key, "train_mode" one of schedule-free optimizers, which `set_mode` sets.
    known = {*inspect.signature(of).parameters, "params", "lr", "initial_lr", "group", "train_mode"}
    return tuple(key for key, value in group.items() if key not in known and not isinstance(value, str))
