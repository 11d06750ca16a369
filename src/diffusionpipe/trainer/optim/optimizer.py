"""Optimizers of torch by name, and their state under the names of the parameters."""

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from diffusionpipe.errors import CheckpointError, RecipeError

logger = logging.getLogger(__name__)

_NEEDS_MORE_THAN_A_GRADIENT = {
    "LBFGS": "evaluates the loss several times in a step, which a pipeline cannot repeat",
    "SparseAdam": "needs sparse gradients, but no model has them",
}
_FUSED_BY_DEFAULT = ("Adam", "AdamW")


@dataclass(frozen=True, slots=True)
class Group:
    """Parameters with one learning rate, in a parameter group of torch."""

    name: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the optimizer's class for this group that differ from the optimizer's own, and others."""


def build_optimizer(
    name: str,
    named_parameters: Mapping[str, nn.Parameter],
    learning_rate: float,
    arguments: Mapping[str, object],
    group_of: Callable[[str], Group] = lambda _: Group(),
) -> torch.optim.Optimizer | None:
    """The optimizer `torch.optim.<name>` of this rank's trainable parameters, or None where it owns none.

    Each of its parameter groups holds the parameters of a group, by whose name it is called in "group".

    `arguments` go to its constructor (lists become tuples, as TOML has no tuples); a group's arguments go over them.
    Adam and AdamW use their fused kernel where this device has one, unless the arguments choose `fused`, `foreach`,
    `capturable` or `differentiable`. A rank without parameters checks the arguments as well, so that a wrong one stops
    every rank.

    Raises:
        RecipeError: no such optimizer, one that a pipeline cannot run, or arguments that it refuses.
    """
    optimizer_class = _optimizer_class(name)
    chosen = _with_tuples(arguments)
    _check_arguments(name, optimizer_class, chosen)
    chosen["lr"] = learning_rate
    parameters = list(named_parameters.values())
    stand_in = nn.Parameter(torch.zeros(2, 2))
    decided = {"fused", "foreach", "capturable", "differentiable"} & chosen.keys()
    if name in _FUSED_BY_DEFAULT and not decided and _runs_fused(optimizer_class, parameters or [stand_in]):
        chosen["fused"] = True
    try:
        optimizer = optimizer_class(_groups(named_parameters, group_of) or [stand_in], **chosen)
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in chosen.items())
        raise RecipeError(f"optimizer {name} refuses its arguments ({given}): {error}") from error
    return optimizer if parameters else None


def _groups(named_parameters: Mapping[str, nn.Parameter], group_of: Callable[[str], Group]) -> list[dict[str, object]]:
    groups: dict[str, dict[str, object]] = {}
    members: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named_parameters.items():
        group = group_of(name)
        members.setdefault(group.name, []).append(parameter)
        groups[group.name] = {"params": members[group.name], "group": group.name, **_with_tuples(group.arguments)}
    return list(groups.values())


def _with_tuples(arguments: Mapping[str, object]) -> dict[str, object]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


def problem_of_shapes(
    name: str, shapes: Mapping[str, Sequence[int]], learning_rate: float, arguments: Mapping[str, object]
) -> str | None:
    """Which parameters of these shapes the optimizer refuses, such as biases for Muon; None if it takes them all.

    Raises:
        RecipeError: no such optimizer, or one that a pipeline cannot run.
    """
    optimizer_class = _optimizer_class(name)
    chosen = _with_tuples(arguments)
    whys: dict[tuple[int, ...], str | None] = {}
    for shape in {tuple(shape) for shape in shapes.values()}:
        try:
            optimizer_class([nn.Parameter(torch.empty(shape, device="meta"))], lr=learning_rate, **chosen)
            whys[shape] = None
        except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
            whys[shape] = str(error)
    refused = [parameter for parameter, shape in shapes.items() if whys[tuple(shape)] is not None]
    if not refused:
        return None
    example = f"{refused[0]} of shape {tuple(shapes[refused[0]])}: {whys[tuple(shapes[refused[0]])]}"
    return (
        f"{name} cannot train {len(refused)} of the {len(shapes)} trained parameters, e.g. {example}. Choose another "
        "optimizer, e.g. AdamW"
    )


def problem_of_step(name: str, dimensions: int, arguments: Mapping[str, object], device: str) -> str | None:
    """Why the optimizer cannot step on this kind of device, as with `capturable` on a CPU; None if it can.

    A parameter of `dimensions` dimensions is tried; the constructor must take the arguments.
    """
    parameter = nn.Parameter(torch.zeros((2,) * dimensions, device=device))
    optimizer = build_optimizer(name, {"parameter": parameter}, 1e-3, arguments)
    assert optimizer is not None, "it has a parameter"
    try:
        _example_state(optimizer, parameter)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "none"
        return f"{name} cannot step on {device} with these ({given}), so change them: {error}"
    return None


def set_learning_rates(optimizer: torch.optim.Optimizer | None, rates: Mapping[str, float]) -> None:
    """Sets the learning rate of the next update of each group."""
    for group in optimizer.param_groups if optimizer is not None else ():
        group["lr"] = rates[group["group"]]


def state_per_parameter(name: str, arguments: Mapping[str, object]) -> int:
    """Numbers that the optimizer keeps for each parameter: state tensors of a parameter's own shape.

    Raises:
        RecipeError: as `build_optimizer`.
    """
    state, shape = _state_of_one(name, arguments)
    return sum(value.shape == shape for value in state.values())


def kept_state(name: str, arguments: Mapping[str, object]) -> frozenset[str]:
    """Names of the tensors that the optimizer keeps for each parameter after a step, as a checkpoint has them.

    Raises:
        RecipeError: as `build_optimizer`.
    """
    return frozenset(_state_of_one(name, arguments)[0])


def _state_of_one(name: str, arguments: Mapping[str, object]) -> tuple[dict[str, Tensor], torch.Size]:
    """The state of a tiny parameter after a step, and the parameter's shape."""
    stand_in = nn.Parameter(torch.zeros(2, 2))
    usable = {key: value for key, value in arguments.items() if key != "capturable"}  # which a CPU cannot have
    optimizer = build_optimizer(name, {"stand_in": stand_in}, 1e-3, usable)
    assert optimizer is not None, "it has a parameter"
    return _example_state(optimizer, stand_in), stand_in.shape


def optimizer_tensors(
    optimizer: torch.optim.Optimizer | None, named_parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The optimizer's state by "parameter.key" ("unet.conv_in.weight.exp_avg"), step counters included.

    State that the optimizer has not created yet is not there: torch creates the state of a parameter in its first step.
    """
    if optimizer is None:
        return {}
    return {
        f"{name}.{key}": value
        for name, parameter in named_parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def empty_optimizer_tensors(
    optimizer: torch.optim.Optimizer | None,
    named_parameters: Mapping[str, nn.Parameter],
    stored: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """New tensors to load the state that a checkpoint has of these parameters into, for `restore_optimizer`.

    `stored` describes the checkpoint's optimizer tensors (shape and type count). Neither parameters nor optimizer are
    touched: which keys the state has, and on which device, is seen from the step of a small copy with two elements per
    dimension. Creating the state by a step with zero gradients instead would not be the same for SGD with dampening or
    Rprop, whose first step differs from the later ones.

    Raises:
        CheckpointError: the checkpoint holds the state of another optimizer.
    """
    if optimizer is None:
        return {}
    empty: dict[str, Tensor] = {}
    problems: list[str] = []
    example_of_kind: dict[tuple[int, torch.dtype, torch.device, str], dict[str, Tensor]] = {}
    name_of_group = {parameter: group["group"] for group in optimizer.param_groups for parameter in group["params"]}
    keys_of_parameter: dict[str, list[str]] = {}
    for full_name in stored:
        parameter_name, _, key = full_name.rpartition(".")
        keys_of_parameter.setdefault(parameter_name, []).append(key)
    for name, parameter in named_parameters.items():
        kind = (parameter.ndim, parameter.dtype, parameter.device, name_of_group[parameter])
        if kind not in example_of_kind:
            example_of_kind[kind] = _example_state(optimizer, parameter)
        example = example_of_kind[kind]
        found = keys_of_parameter.get(name, [])
        if found and set(found) != set(example):
            problems.append(f"{name}: found {sorted(found)}, expected {sorted(example)}")
            continue
        for key in found:
            description = stored[f"{name}.{key}"]
            empty[f"{name}.{key}"] = torch.empty(description.shape, dtype=description.dtype, device=example[key].device)
    if problems:
        raise CheckpointError(
            f"the checkpoint does not hold the state of {type(optimizer).__name__} for {len(problems)} parameters "
            f"({'; '.join(problems[:3])}{'; ...' if len(problems) > 3 else ''}); "
            "resume with the optimizer and the options that wrote it"
        )
    return empty


def restore_optimizer(
    optimizer: torch.optim.Optimizer | None,
    named_parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
) -> None:
    """Replaces the optimizer's state by `tensors` ("parameter.key"); parameters without any start from nothing."""
    if optimizer is None:
        return
    optimizer.state.clear()
    keys_of_parameter: dict[str, dict[str, Tensor]] = {}
    for full_name, value in tensors.items():
        parameter_name, _, key = full_name.rpartition(".")
        keys_of_parameter.setdefault(parameter_name, {})[key] = value
    for name, parameter in named_parameters.items():
        if name in keys_of_parameter:
            optimizer.state[parameter] = keys_of_parameter[name]


def _optimizer_class(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The class of torch.optim with this name."""
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
    raise RecipeError(f"torch.optim has no optimizer {name!r}; {hint}There are {', '.join(sorted(known))}")


def _check_arguments(
    name: str, optimizer_class: Callable[..., torch.optim.Optimizer], arguments: Mapping[str, object]
) -> None:
    """Refuses arguments that the constructor does not have."""
    options = [key for key in inspect.signature(optimizer_class).parameters if key not in ("params", "lr")]
    problems = []
    for key in arguments:
        if key == "lr":
            problems.append("lr is the recipe's learning rate; set it there")
        elif key not in options:
            close = difflib.get_close_matches(key, options, n=1)
            problems.append(f"{key} is unknown" + (f"; did you mean {close[0]}?" if close else ""))
    if problems:
        raise RecipeError(f"optimizer {name}: {'; '.join(problems)} (options: {', '.join(options)})")


def _runs_fused(optimizer_class: Callable[..., torch.optim.Optimizer], parameters: list[nn.Parameter]) -> bool:
    """Whether the fused kernel takes these parameters, found by stepping small tensors of their types and devices."""
    stand_ins = [
        nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
        for dtype, device in sorted({(p.dtype, p.device) for p in parameters}, key=str)
    ]
    for stand_in in stand_ins:
        stand_in.grad = torch.zeros_like(stand_in)
    try:
        optimizer_class(stand_ins, fused=True).step()
    except RuntimeError as error:
        logger.info("fused=False reason=%s", str(error).splitlines()[0])
        return False
    return True


def _example_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """The state that one step gives to a tiny parameter of the same group, rank, type and device."""
    stand_in = nn.Parameter(torch.zeros((2,) * parameter.ndim, dtype=parameter.dtype, device=parameter.device))
    stand_in.grad = torch.ones_like(stand_in)
    options = inspect.signature(type(optimizer)).parameters
    group = next(group for group in optimizer.param_groups if any(parameter is one for one in group["params"]))
    chosen = {key: value for key, value in group.items() if key in options and key != "params"}
    constructor: Callable[..., torch.optim.Optimizer] = type(optimizer)
    example = constructor([stand_in], **chosen)
    example.step()
    return {key: value for key, value in example.state[stand_in].items() if isinstance(value, Tensor)}
