"""The optimizer of a rank's parameters, and its state under the names of the parameters and of their groups."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.errors import CheckpointError, RecipeError
from diffusionpipe.holding.rest import RESTS, Rest
from diffusionpipe.trainer.optim.classes import (
    OptimizerClass,
    check_arguments,
    keys_in_groups,
    optimizer_class,
    quiet,
    set_mode,
    stand_in_of,
    warned_once,
    why_refused,
    with_tuples,
)
from diffusionpipe.trainer.optim.entries import entries_of, roots_of, state_of
from diffusionpipe.trainer.optim.resting import Resting
from diffusionpipe.trainer.optim.rounding import ERROR, NARROW, NarrowParameter, Rounding

logger = logging.getLogger(__name__)

_FUSED_BY_DEFAULT = ("Adam", "AdamW")
_FAILURES = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
"""The errors with which constructors refuse arguments or parameters."""

_EXAMPLE = 2**14
"""The most elements of a parameter that is tried in place of a larger one.

It is more than 4,096, below which 8-bit optimizers keep wider numbers.
"""


@dataclass(frozen=True, slots=True)
class Group:
    """A group of parameters with the optimizer's class and arguments that hold for it."""

    name: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Arguments of the class for this group; they replace the arguments that hold for all groups."""
    optimizer: str = ""
    """Name of the class that steps this group; "": the class that is named for all groups."""
    is_flat: bool = False
    """Whether its parameters of more than two dimensions are stepped as matrices (first, all others)."""


@dataclass(frozen=True, slots=True)
class _Part:
    """An optimizer of one class, which steps a part of a rank's parameters, and the means to make another like it."""

    optimizer: torch.optim.Optimizer
    make: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    """Makes another optimizer of the same class and arguments from groups of parameters."""
    given: Mapping[str, Mapping[str, Any]]
    """Name of a group -> its entries without the parameters, as the optimizer was made."""


class RankOptimizer:
    """One or more optimizer classes that step a rank's parameters together; used in place of one of torch."""

    def __init__(
        self,
        parts: Sequence[_Part],
        flat: Mapping[nn.Parameter, nn.Parameter],
        narrow: Mapping[nn.Parameter, NarrowParameter] = MappingProxyType({}),
    ) -> None:
        """Joins the optimizers of `parts`, one for each class, and sets their mode for training.

        `flat`: parameter -> the matrix of the same memory that is stepped in its place. `narrow`: parameter that is
        kept in bfloat16 -> the object that widens it before its step and rounds it after.
        """
        self._parts, self._flat, self._narrow = tuple(parts), dict(flat), dict(narrow)
        self._is_new = True
        self._resting: Resting | None = None
        self.rest(RESTS["device"])
        for part in self._parts:
            set_mode(part.optimizer, is_training=True)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all classes, dicts as torch has them; the objects themselves."""
        return [group for part in self._parts for group in part.optimizer.param_groups]

    @property
    def parts(self) -> tuple[torch.optim.Optimizer, ...]:
        """The optimizers of torch or another library that this one joins, one for each class."""
        return tuple(part.optimizer for part in self._parts)

    @property
    def defaults(self) -> dict[str, object]:
        """The default arguments of the first class, as torch keeps them."""
        return self._parts[0].optimizer.defaults

    @property
    def name(self) -> str:
        """The names of the optimizer's classes with "and" between."""
        return " and ".join(type(one).__name__ for one in self.parts)

    def step(self, number: int = 0) -> None:
        """Steps all parameters that have gradients; a library's warnings are logged once, with the first step.

        `number`: the number of the update, counted from 0; the rounding of weights in bfloat16 depends on it.
        """
        with self._as_matrices(self._flat), warned_once(logger.warning) if self._is_new else nullcontext():
            for optimizer in self.parts:
                self._step(optimizer, number)
        self._is_new = False

    def step_alone(self, parameter: nn.Parameter, number: int) -> None:
        """Steps one parameter, which has a gradient, to the same bits as `step`; `number`: the number of the update."""
        stepped, part = self._place(parameter)
        with (
            self._as_matrices(self._flat.keys() & {parameter}),
            warned_once(logger.warning) if self._is_new else nullcontext(),
            _alone(part.optimizer, stepped),
        ):
            self._step(part.optimizer, number)
        self._is_new = False

    @contextmanager
    def _as_matrices(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """A context in which the matrices for these parameters have the parameters' memory and gradients.

        The optimizer steps the matrices in place of the parameters.
        """
        matrices = []
        for parameter in parameters:
            matrix = self._flat[parameter]
            matrix.data = parameter.detach().view(matrix.shape)  # whose memory may have been replaced
            matrix.grad = None if parameter.grad is None else parameter.grad.reshape(matrix.shape)
            matrices.append(matrix)
        try:
            yield
        finally:
            # Views keep the gradients' memory, through the next forward and backward too.
            for matrix in matrices:
                matrix.grad = None

    def _step(self, optimizer: torch.optim.Optimizer, number: int) -> None:
        if self._resting is None:
            optimizer.step()
        else:
            self._resting.step(optimizer, number)

    def rest(self, rest: Rest) -> None:
        """Sets the form in which the states are kept between updates; call it before there are any states.

        A class that counts its steps for all parameters together can have only the plain form (`optimizer_check`).
        """
        narrow = {one.stand_in: one for one in self._narrow.values()}
        shared = frozenset() if rest.is_plain else self.shared_keys()
        self._resting = Resting(rest, shared, narrow) if narrow or not rest.is_plain else None

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The optimizer's state of a parameter by key; {} before its first step.

        It includes the rounding error of a parameter in bfloat16, if that is kept.
        """
        stepped, part = self._place(parameter)
        state: dict[str, Any] = part.optimizer.state.get(stepped, {})
        narrow = self._narrow.get(parameter)
        return state if narrow is None or narrow.error is None else {**state, ERROR: narrow.error}

    def set_state(self, parameter: nn.Parameter, state: dict[str, object]) -> None:
        """Replaces the state of a parameter by this dict. The dict itself is kept, and steps change it."""
        stepped, part = self._place(parameter)
        if parameter in self._narrow:
            error = state.pop(ERROR, None)
            self._narrow[parameter].error = error if isinstance(error, Tensor) else None
        part.optimizer.state[stepped] = state
        if self._resting is not None:
            self._resting.put(stepped, state)

    def forget(self) -> None:
        """Removes the states of all parameters; the groups keep their values."""
        for part in self._parts:
            part.optimizer.state.clear()
        for narrow in self._narrow.values():
            narrow.error = None

    def group_values(self) -> list[dict[str, Any]]:
        """The values that steps change in each parameter group, by key; they are not copied."""
        return [{key: group[key] for key in keys} for group, keys in self._changing]

    def set_group_values(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Puts values that `group_values` has returned into the groups, and removes keys that they lack."""
        for (group, keys), own in zip(self._changing, values, strict=True):
            for key in set(keys) - own.keys():  # a step that is taken back may have added them
                del group[key]
            group.update(own)

    @property
    def _changing(self) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
        """Each parameter group of torch's optimizers, and the keys of it that steps change."""
        return [(group, keys_in_groups(type(one), group)) for one in self.parts for group in one.param_groups]

    def example(self, parameter: nn.Parameter) -> "StateExample":
        """The entries of the optimizer's state after trial steps of a small parameter of the same group and type."""
        stepped, part = self._place(parameter)
        group = _group_of(part, stepped)
        found = _example(part, str(group["group"]), stepped)
        if parameter not in self._narrow or not self._narrow[parameter].keeps_error:
            return found
        error = {ERROR: torch.empty(0, dtype=parameter.dtype, device=parameter.device)}
        return replace(found, at_once={**found.at_once, **error}, later={**found.later, **error})

    def kind_of(self, parameter: nn.Parameter) -> object:
        """A key that is equal for parameters whose `example` is the same: small shape, types, device and group.

        So the example of one parameter can be used for all parameters with the same key.
        """
        stepped, part = self._place(parameter)
        group = _group_of(part, stepped)["group"]
        return _small(stepped.shape), parameter.dtype, stepped.dtype, stepped.device, group

    def shared_keys(self) -> frozenset[str]:
        """The names of the state entries whose memory all parameters share: the code tables of 8-bit optimizers, ..."""
        return frozenset(key for part in self._parts for key in _shared(part))

    def _place(self, parameter: nn.Parameter) -> tuple[nn.Parameter, _Part]:
        narrow = self._narrow.get(parameter)
        stepped = self._flat.get(parameter, parameter) if narrow is None else narrow.stand_in
        if len(self._parts) == 1:  # no search in the usual case
            return stepped, self._parts[0]
        for part in self._parts:
            if any(stepped is one for group in part.optimizer.param_groups for one in group["params"]):
                return stepped, part
        raise KeyError(parameter)


@contextmanager
def _alone(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Iterator[None]:
    """A context in which the optimizer has only this one of its parameters, so that a step ignores the others."""
    groups = optimizer.param_groups
    own = next(group for group in groups if any(parameter is one for one in group["params"]))
    members = own["params"]
    try:
        optimizer.param_groups, own["params"] = [own], [parameter]
        yield
    finally:
        optimizer.param_groups, own["params"] = groups, members


def _group_of(part: _Part, parameter: nn.Parameter) -> dict[str, Any]:
    return next(group for group in part.optimizer.param_groups if any(parameter is one for one in group["params"]))


@dataclass(frozen=True, slots=True)
class StateExample:
    """The entries, as tensors by name, that an optimizer class keeps of a small parameter and of its group."""

    at_once: Mapping[str, Tensor]
    """The parameter's entries after one step."""
    later: Mapping[str, Tensor]
    """The parameter's entries after three steps."""
    group: Mapping[str, Tensor]
    """The entries of the parameter's group that steps change, after three steps."""


def build_optimizer(
    name: str,
    named_parameters: Mapping[str, nn.Parameter],
    learning_rate: float,
    arguments: Mapping[str, object],
    group_of: Callable[[str], Group] = lambda _: Group(),
    rounding: Rounding | None = None,
) -> RankOptimizer | None:
    """The optimizer of this name for this rank's trainable parameters, or None if the rank has none.

    Each of its parameter groups holds the parameters for which `group_of`, called with a parameter's name, returns the
    same group. The entry "group" of it is the group's name.

    `arguments` go to the class's constructor (lists become tuples, as TOML has no tuples); a group's arguments replace
    them. Adam and AdamW use their fused kernel where this device has one, unless the arguments choose `fused`,
    `foreach`, `capturable` or `differentiable`. A rank without parameters checks the arguments too, so that a wrong
    one stops every rank. With `rounding` parameters in bfloat16 are widened for their steps, and rounded after them.

    Raises:
        RecipeError: no such optimizer, one that a pipeline cannot run, or arguments that it refuses.
    """
    members: dict[str, dict[str, nn.Parameter]] = {}
    groups: dict[str, Group] = {}
    flat: dict[nn.Parameter, nn.Parameter] = {}
    narrow: dict[nn.Parameter, NarrowParameter] = {}
    for key, parameter in named_parameters.items():
        group = group_of(key)
        groups[group.name] = group
        members.setdefault(group.name, {})[key] = parameter
        is_matrix = group.is_flat and parameter.ndim > 2
        # A stand-in has the shape of the matrix already.
        if rounding is not None and parameter.dtype is NARROW:
            shape = (parameter.shape[0], parameter[0].numel()) if is_matrix else tuple(parameter.shape)
            narrow[parameter] = NarrowParameter(key, parameter, shape, rounding)
        elif is_matrix:
            flat[parameter] = nn.Parameter(parameter.detach().view(parameter.shape[0], -1))
    stepped = flat | {parameter: one.stand_in for parameter, one in narrow.items()}
    parts = []
    # `[name]`: a rank without parameters still checks the arguments.
    for of in dict.fromkeys(group.optimizer or name for group in groups.values()) or [name]:
        own = {key: group for key, group in groups.items() if (group.optimizer or name) == of}
        own_arguments = arguments if of == name else next(iter(own.values())).arguments
        listed = [
            {"params": [stepped.get(p, p) for p in members[key].values()], "group": key, **with_tuples(group.arguments)}
            for key, group in own.items()
        ]
        parts.append(_part(of, listed, learning_rate, own_arguments))
    return RankOptimizer(parts, flat, narrow) if named_parameters else None


def _part(name: str, groups: list[dict[str, Any]], learning_rate: float, arguments: Mapping[str, object]) -> _Part:
    of = optimizer_class(name)
    chosen = with_tuples(arguments)
    check_arguments(name, of, chosen)
    chosen["lr"] = learning_rate
    parameters = [parameter for group in groups for parameter in _parameters(group)]
    stand_in = nn.Parameter(torch.zeros(2, 2))
    decided = {"fused", "foreach", "capturable", "differentiable"} & chosen.keys()
    # Found by a trial: which types and devices the kernel takes depends on the version of torch.
    if name in _FUSED_BY_DEFAULT and not decided and _runs_fused(of, parameters or [stand_in]):
        chosen["fused"] = True

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return of(groups, **chosen)

    used = groups or [{"params": [stand_in], "group": ""}]
    given = {str(group["group"]): {key: value for key, value in group.items() if key != "params"} for group in used}
    try:
        return _Part(make(used), make, given)
    except _FAILURES as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "none are given"
        why = why_refused(of, arguments, error)
        raise RecipeError(f"optimizer {name} refuses its arguments ({shown}): {why}") from error


def _parameters(group: Mapping[str, Any]) -> list[nn.Parameter]:
    found: list[nn.Parameter] = group["params"]
    return found


def problem_of_shapes(
    name: str, shapes: Mapping[str, Sequence[int]], learning_rate: float, arguments: Mapping[str, object]
) -> str | None:
    """A sentence on the parameters whose shapes the optimizer refuses, such as biases for Muon; None if it takes all.

    `shapes`: by parameter name.

    Raises:
        RecipeError: no such optimizer, or one that a pipeline cannot run.
    """
    of = optimizer_class(name)
    chosen = with_tuples(arguments)
    whys: dict[tuple[int, ...], str | None] = {}
    for shape in {tuple(shape) for shape in shapes.values()}:  # each shape once: models have many equal ones
        try:
            with quiet():
                # Without memory or values.
                of([nn.Parameter(torch.empty(shape, device="meta"))], lr=learning_rate, **chosen)
            whys[shape] = None
        except _FAILURES as error:
            whys[shape] = str(error)
    refused = [parameter for parameter, shape in shapes.items() if whys[tuple(shape)] is not None]
    if not refused:
        return None
    example = f"{refused[0]} of shape {tuple(shapes[refused[0]])}: {whys[tuple(shapes[refused[0]])]}"
    return (
        f"{name} cannot train {len(refused)} of the {len(shapes)} trained parameters, e.g. {example}. Give them a "
        'second class ([optimizer.rest] with name = "AdamW"), or choose another optimizer, e.g. AdamW'
    )


def problem_of_step(name: str, dimensions: int, arguments: Mapping[str, object], device: str) -> str | None:
    """Why the optimizer cannot step on this kind of device, as with `capturable` on a CPU; None if it can.

    It is tried with a parameter of `dimensions` dimensions.

    Raises:
        RecipeError: no such optimizer, one that a pipeline cannot run, or arguments that its constructor refuses.
    """
    parameter = nn.Parameter(torch.zeros((2,) * dimensions, device=device))
    with quiet():
        optimizer = build_optimizer(name, {"parameter": parameter}, 1e-3, arguments)
        assert optimizer is not None, "it has a parameter"
        try:
            optimizer.example(parameter)
        except RecipeError as error:
            return f"{name}: {error}"
        except Exception as error:  # libraries raise what they like
            given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            which = f" with these ({given}), so change them" if given else ""
            return f"{name} cannot step on {device}{which}: {why_refused(None, arguments, error)}"
    return None


def set_learning_rates(optimizer: RankOptimizer | torch.optim.Optimizer | None, rates: Mapping[str, float]) -> None:
    """Sets the learning rate of each parameter group for the next update; `optimizer` None: nothing is done.

    `rates`: learning rates by the group's name.
    """
    for group in optimizer.param_groups if optimizer is not None else ():
        group["lr"] = rates[str(group["group"])]


def state_per_parameter(name: str, arguments: Mapping[str, object]) -> int:
    """How many state tensors of a parameter's own shape the optimizer keeps: 2 for AdamW, 0 for plain SGD.

    Raises:
        RecipeError: no such optimizer, one that a pipeline cannot run, or arguments that it refuses.
    """
    state, shape = _state_of_one(name, arguments)
    return sum(value.shape == shape for value in state.values())


def kept_state(name: str, arguments: Mapping[str, object]) -> frozenset[str]:
    """Names of the entries that the optimizer keeps for each parameter after a step, as a checkpoint has them.

    Raises:
        RecipeError: no such optimizer, one that a pipeline cannot run, or arguments that it refuses.
    """
    return frozenset(_state_of_one(name, arguments)[0])


def _state_of_one(name: str, arguments: Mapping[str, object]) -> tuple[Mapping[str, Tensor], torch.Size]:
    """The entries of the optimizer's state of a small parameter after one step, and the parameter's shape."""
    stand_in = nn.Parameter(torch.zeros(2, 2))
    usable = {key: value for key, value in arguments.items() if key != "capturable"}  # which a CPU cannot have
    with quiet():
        optimizer = build_optimizer(name, {"stand_in": stand_in}, 1e-3, usable)
        assert optimizer is not None, "it has a parameter"
        return optimizer.example(stand_in).at_once, stand_in.shape


def optimizer_tensors(
    optimizer: RankOptimizer | None, named_parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The optimizer's state as tensors by "parameter.entry" ("unet.conv_in.weight.exp_avg"); {} for None.

    Step counters are included. A parameter without a step has no entries: torch creates its state in the first step.
    """
    if optimizer is None:
        return {}
    return {
        f"{name}.{key}": value
        for name, parameter in named_parameters.items()
        for key, value in entries_of(optimizer.state_of(parameter)).items()
    }


def group_tensors(optimizer: RankOptimizer | None) -> dict[str, Tensor]:
    """The values that steps change in the optimizer's groups, as tensors by "group.entry": counters, Prodigy's d.

    {} if the optimizer is None, and before the first step.
    """
    if optimizer is None or all(not optimizer.state_of(p) for g in optimizer.param_groups for p in _parameters(g)):
        return {}
    return {
        f"{group['group']}.{key}": value
        for group, values in zip(optimizer.param_groups, optimizer.group_values(), strict=True)
        for key, value in entries_of(values).items()
    }


def empty_optimizer_tensors(
    optimizer: RankOptimizer | None,
    named_parameters: Mapping[str, nn.Parameter],
    stored: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """New tensors by "parameter.entry" into which a checkpoint's state can be loaded, for `restore_optimizer`.

    `stored` describes the checkpoint's optimizer tensors (shape and type count). Neither parameters nor optimizer are
    touched: which keys the state has, and on which device, is seen from the steps of a smaller copy. Creating the state
    by a step with zero gradients instead would not be the same for SGD with dampening or Rprop, whose first step
    differs from the later ones.

    Raises:
        CheckpointError: the checkpoint holds the state of another optimizer.
    """
    if optimizer is None:
        return {}
    empty: dict[str, Tensor] = {}
    problems: list[str] = []
    examples: dict[object, StateExample] = {}
    entries_by_parameter = _by_owner(stored)
    for name, parameter in named_parameters.items():
        found = entries_by_parameter.get(name)
        if not found:
            continue
        kind = optimizer.kind_of(parameter)
        if kind not in examples:
            with quiet():
                examples[kind] = optimizer.example(parameter)
        example, roots = examples[kind], set(roots_of(found))
        expected = roots_of(example.at_once)
        # An entry may appear in a later step only, so a checkpoint may have it or not.
        if not set(expected) <= roots <= set(roots_of(example.later)):
            problems.append(f"{name}: found {sorted(roots)}, expected {sorted(expected)}")
            continue
        for key, description in found.items():
            alike = example.later.get(key)
            device = parameter.device if alike is None else alike.device
            # Numbers of Python are read on the host; tensors where the optimizer keeps them.
            empty[f"{name}.{key}"] = torch.empty(
                description.shape, dtype=description.dtype, device=torch.device("cpu") if ":" in key else device
            )
    if problems:
        raise _other_state(optimizer, f"{len(problems)} parameters", problems)
    return empty


def empty_group_tensors(
    optimizer: RankOptimizer | None, stored: Mapping[str, Tensor], *, is_new: bool
) -> dict[str, Tensor]:
    """New tensors by "group.entry" into which a checkpoint's values of the groups can be loaded, for `restore_groups`.

    `stored` describes the checkpoint's tensors. `is_new`: the checkpoint is from before the first step, when groups
    hold nothing yet.

    Raises:
        CheckpointError: the checkpoint holds the values of another optimizer, or of other groups.
    """
    empty: dict[str, Tensor] = {}
    problems: list[str] = []
    entries_by_group = _by_owner(stored)
    for group in optimizer.param_groups if optimizer is not None and not is_new else ():
        assert optimizer is not None
        name, parameter = str(group["group"]), _parameters(group)[0]
        with quiet():
            expected = optimizer.example(parameter).group
        found = entries_by_group.get(name, {})
        if set(roots_of(found)) != set(roots_of(expected)):
            problems.append(f"group {name!r}: found {roots_of(found)}, expected {roots_of(expected)}")
        for key, description in found.items():
            device = parameter.device if ":" not in key else torch.device("cpu")
            empty[f"{name}.{key}"] = torch.empty(description.shape, dtype=description.dtype, device=device)
    if problems:
        assert optimizer is not None
        raise _other_state(optimizer, f"{len(problems)} groups", problems)
    return empty


def restore_optimizer(
    optimizer: RankOptimizer | None,
    named_parameters: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
) -> None:
    """Replaces the optimizer's state by `tensors` ("parameter.entry"); a parameter without any has no state then.

    Raises:
        CheckpointError: an entry of a list is missing.
    """
    if optimizer is None:
        return
    optimizer.forget()
    entries_by_parameter = _by_owner(tensors)
    shared, pool = optimizer.shared_keys() if entries_by_parameter else frozenset(), dict[str, Tensor]()
    for name, parameter in named_parameters.items():
        entries = dict(entries_by_parameter.get(name, {}))
        # Each parameter's copy was saved. Equal ones get one memory again, as the class has it.
        for key in shared & entries.keys():
            first = pool.setdefault(key, entries[key])
            if first.shape == entries[key].shape and torch.equal(first, entries[key]):
                entries[key] = first
        if entries:
            optimizer.set_state(parameter, _restored(name, entries))


def restore_groups(optimizer: RankOptimizer | None, tensors: Mapping[str, Tensor]) -> None:
    """Writes values of a checkpoint, `tensors` ("group.entry"), into the groups of the optimizer.

    Raises:
        CheckpointError: an entry of a list is missing.
    """
    entries_by_group = _by_owner(tensors)
    for group in optimizer.param_groups if optimizer is not None else ():
        name = str(group["group"])
        group.update(_restored(f"group {name!r}", entries_by_group.get(name, {})))


def _restored(owner: str, entries: Mapping[str, Tensor]) -> dict[str, object]:
    try:
        return state_of(entries)
    except KeyError as error:
        raise CheckpointError(f"the checkpoint lacks {error.args[0]!r} of {owner}; resume from another one") from error


def _by_owner(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Owner -> entry -> tensor, from tensors named "owner.entry"; an owner's name may have dots, an entry has none."""
    found: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        owner, _, key = full_name.rpartition(".")  # names of parameters have dots
        found.setdefault(owner, {})[key] = tensor
    return found


def _other_state(optimizer: RankOptimizer, count: str, problems: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint does not hold the state of {optimizer.name} for {count} "
        f"({'; '.join(problems[:3])}{'; ...' if len(problems) > 3 else ''}); "
        "resume with the optimizer and the options that wrote it"
    )


def _runs_fused(of: OptimizerClass, parameters: list[nn.Parameter]) -> bool:
    """Whether the class's fused kernel accepts these parameters, by a step of small tensors of like type and device."""
    stand_ins = [  # one for each kind is enough
        nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
        for dtype, device in sorted({(p.dtype, p.device) for p in parameters}, key=str)
    ]
    for stand_in in stand_ins:
        stand_in.grad = torch.zeros_like(stand_in)
    try:
        of(stand_ins, fused=True).step()
    except RuntimeError as error:
        logger.info("fused=False reason=%s", str(error).splitlines()[0])
        return False
    return True


def _example(part: _Part, group: str, like: nn.Parameter) -> StateExample:
    """The entries of an optimizer's state after one and after three steps of a small parameter like `like`.

    `group`: the name of the group whose arguments hold.
    """
    stand_in = stand_in_of(like, _small(like.shape))
    example = part.make([{**part.given[group], "params": [stand_in]}])
    set_mode(example, is_training=True)
    found: list[dict[str, Tensor]] = []
    for _ in range(3):  # some entries appear in the second step, or the third
        example.step()
        found.append({key: value.clone() for key, value in entries_of(example.state.get(stand_in, {})).items()})
    own = example.param_groups[0]
    return StateExample(found[0], found[-1], entries_of({key: own[key] for key in keys_in_groups(type(example), own)}))


def _small(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape with the same number of dimensions and at most `_EXAMPLE` elements: long sides are halved."""
    sides = list(shape)
    while sides and torch.Size(sides).numel() > _EXAMPLE:
        largest = max(range(len(sides)), key=sides.__getitem__)
        sides[largest] = -(-sides[largest] // 2)
    return tuple(sides)


def _shared(part: _Part) -> Iterator[str]:
    """The names of the state entries that two parameters have in the same memory."""
    like = next(parameter for group in part.optimizer.param_groups for parameter in group["params"])
    # 8,192 numbers: 8-bit classes keep shorter parameters in wide numbers, without their tables.
    pair = [stand_in_of(like, (128, 64)) for _ in range(2)]
    with quiet():
        example = part.make([{"params": pair, "group": ""}])
        set_mode(example, is_training=True)
        example.step()
    one, other = (entries_of(example.state.get(parameter, {})) for parameter in pair)
    for key in one.keys() & other.keys():
        if one[key].data_ptr() == other[key].data_ptr():
            yield key
