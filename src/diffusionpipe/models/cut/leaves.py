"""The submodules of a model that are called as they are, and how their calls are seen and replaced."""

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diffusionpipe.models.graphs.graph import attribute


@dataclass(frozen=True, slots=True)
class SeenCall:
    """A call of a submodule that was caught before it was made: forward, name and arguments."""

    forward: Callable[..., Any]
    """The submodule's own forward."""
    name: str
    """The submodule's name in the model."""
    args: tuple[Any, ...]
    """The positional arguments of the call."""
    named: dict[str, Any]
    """The arguments of the call by name."""


def leaves_of(root: nn.Module, *, all_children: bool = False) -> tuple[str, ...]:
    """The names of the submodules that a cut calls whole: blocks of lists, and other children with parameters.

    With `all_children` also children without parameters. Of a child that holds most of the parameters in lists, and of
    a block of a U-Net, which lists residual blocks, the submodules are named in its place.

    >>> leaves_of(nn.ModuleDict({"embed": nn.Linear(2, 2), "blocks": nn.ModuleList([nn.Linear(2, 2), nn.SiLU()])}))
    ('embed', 'blocks.0')
    """
    return tuple(_leaves(root, "", _size_of_lists(root), all_children))


def _size_of_lists(module: nn.Module) -> int:
    """The number of values in all parameters that are in lists of modules, at any depth below the module."""
    if isinstance(module, nn.ModuleList):
        return sum(p.numel() for p in module.parameters())
    return sum(_size_of_lists(child) for child in module.children())


def _leaves(module: nn.Module, path: str, size: int, all_children: bool) -> Iterator[str]:
    for name, child in module.named_children():
        below = f"{path}{name}"
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if is_list or hasattr(child, "resnets") or 2 * _size_of_lists(child) > size:
            yield from _leaves(child, f"{below}.", size, all_children)
        elif all_children or any(True for _ in child.parameters()):
            yield below


def kind_of(module: nn.Module) -> Hashable:
    """A key on which the shapes of a module's results depend: modules with equal keys differ in their weights alone.

    It holds classes, shapes and dtypes of parameters and buffers, and the other attributes of the modules: numbers and
    words by value, objects of diffusers and transformers by their attributes, all else by identity.

    >>> kind_of(nn.Linear(2, 2)) == kind_of(nn.Linear(2, 2)) != kind_of(nn.Linear(2, 3))
    True
    """
    return tuple((name, _kind_of_object(each)) for name, each in module.named_modules())


def _kind_of_object(holder: object, *, looks_into: bool = True) -> Hashable:
    """A key of an object's class and attributes; `looks_into`: its objects of models' code count by attributes too."""
    kept = {name: value for name, value in vars(holder).items() if name != "_modules"}
    return type(holder), tuple(
        (name, _kind_of_object(value, looks_into=False) if looks_into and _is_holder(value) else _kind_of_value(value))
        for name, value in sorted(kept.items())
    )


def _kind_of_value(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, bool | int | float | str | torch.dtype | None):
        return type(value), value
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_kind_of_value, value))
    if isinstance(value, set):
        return type(value), frozenset(map(_kind_of_value, value))
    if isinstance(value, dict):
        return type(value), tuple((key, _kind_of_value(each)) for key, each in value.items())
    return id(value)


@contextmanager
def patched(root: nn.Module, leaves: Sequence[str], run: Callable[[SeenCall], Any]) -> Iterator[None]:
    """Within the block, a call of one of the named submodules `leaves` returns `run(the call)` instead."""
    patched: list[nn.Module] = []
    try:
        for name in leaves:
            leaf: Any = attribute(root, name)
            original = leaf.forward

            # Defaults hold this leaf's values; the loop's variables change.
            def replaced(*args: Any, _f: Any = original, _n: str = name, **named: Any) -> Any:
                return run(SeenCall(_f, _n, args, named))

            leaf.forward = replaced
            patched.append(leaf)
        yield
    finally:
        for leaf in patched:
            del leaf.forward


@contextmanager
def fake_tensors(root: nn.Module, mode: Any = None) -> Iterator[None]:
    """Within the block, all parameters and buffers are empty tensors of the same shapes and dtypes.

    `mode`: the context in which they are made, for tensors without memory; None: they are real, on the CPU.
    """
    tables: list[dict[str, Any]] = [t for m in root.modules() for t in (m._parameters, m._buffers)]
    originals = [dict(table) for table in tables]
    made: dict[int, Tensor] = {}
    with ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
        for table in tables:
            for name, tensor in table.items():
                if isinstance(tensor, nn.Parameter):
                    # Tied weights are one parameter here too.
                    fake = made.setdefault(
                        id(tensor),
                        nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"), requires_grad=False),
                    )
                    table[name] = fake
                elif tensor is not None:
                    table[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    try:
        yield
    finally:
        for table, original in zip(tables, originals, strict=True):
            table.update(original)


def _is_holder(value: object) -> bool:
    """Whether a module's attribute is an object of diffusers or transformers that may keep tensors."""
    owner = type(value).__module__.partition(".")[0]
    return owner in ("diffusers", "transformers") and hasattr(value, "__dict__") and not isinstance(value, nn.Module)


@contextmanager
def unchanged(root: nn.Module) -> Iterator[None]:
    """After the block, all that a forward left in the modules is removed, such as fake rotary tables.

    This holds for hooks too: transformers installs some at a model's first forward, and would do it again.
    """
    modules = tuple(root.modules())
    held = [value for module in modules for value in vars(module).values() if _is_holder(value)]
    hooks = [value for module in modules for name, value in vars(module).items() if name.endswith("_hooks")]
    places = [*(vars(holder) for holder in (*modules, *held)), *(value for value in hooks if isinstance(value, dict))]
    saved = [dict(place) for place in places]
    was_exporting = torch.compiler._is_exporting_flag
    torch.compiler._is_exporting_flag = True  # diffusers' caches ask it
    try:
        yield
    finally:
        torch.compiler._is_exporting_flag = was_exporting
        for place, attributes in zip(places, saved, strict=True):
            place.clear()
            place.update(attributes)
        # Cached functions of the models' modules may have returned fake tensors.
        for kind in {type(module) for module in modules}:
            for place in (kind, sys.modules[kind.__module__]):
                for value in list(vars(place).values()):
                    if callable(getattr(value, "cache_clear", None)):
                        value.cache_clear()
