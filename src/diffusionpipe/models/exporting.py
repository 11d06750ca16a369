"""A transformer's forward as calls of its own modules with glue between them, by torch.export.

Modules that hold parameters are called as they are: each block of the model's lists, and each other child of the
model. While torch.export traces the model, every such module is one opaque operator, so the exporter never looks into
it. What is left is the glue: reshapes, concatenations, rotary tables, masks.

    embed ---+                              call 0   embed
             |                              glue     x.flatten(2).transpose(1, 2)
    (glue) --+--- blocks.0 --- blocks.1     call 1   blocks.0
                                            call 2   blocks.1
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graph import attribute

Forward = Callable[..., Tensor]
"""`forward(transformer, **tensors)` returns one tensor, dimension 0 of all of them is the batch."""
_BATCHES = (3, 5)
"""Two batch sizes tell a dimension that grows with the batch from one that does not."""


class _Mark:
    """Stands for a value that differs from call to call."""


_TENSOR, _BATCH = _Mark(), _Mark()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a submodule."""

    module: str
    tree: pytree.TreeSpec
    """Of its positional and named arguments."""
    leaves: tuple[object, ...]
    """The leaves of `tree`; places of tensors and of the number of samples are marked."""

    def run(self, root: nn.Module, tensors: Sequence[Tensor], batch: int) -> list[Tensor]:
        """Calls the submodule as the model does, and returns the tensors that it returned."""
        rest = iter(tensors)
        leaves = [next(rest) if v is _TENSOR else batch if v is _BATCH else v for v in self.leaves]
        positional, named = pytree.tree_unflatten(leaves, self.tree)
        found: Any = attribute(root, self.module)
        given = {id(tensor) for tensor in tensors}
        result = pytree.tree_leaves(found(*positional, **named))
        return [leaf for leaf in result if isinstance(leaf, Tensor) and id(leaf) not in given]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A traced forward."""

    graph: fx.Graph
    """Placeholders of inputs, parameters, buffers and constants; glue; calls of `diffusionpipe::call_module`."""
    calls: tuple[ModuleCall, ...]
    inputs: Mapping[str, str]
    """Placeholder -> argument of the forward."""
    owned: Mapping[str, str]
    """Placeholder -> name of a parameter or buffer below the model."""
    constants: Mapping[str, Tensor]
    """Placeholder -> a tensor that belongs to no parameter or buffer."""
    graph_module: fx.GraphModule


@torch.library.custom_op("diffusionpipe::call_module", mutates_args=())
def _call_module(tensors: list[Tensor], batch: int, recorder: int, call: int) -> list[Tensor]:
    """A call of a submodule while a model is traced; it never runs."""
    raise AssertionError("a traced call runs through its ModuleCall")


@_call_module.register_fake
def _(tensors: list[Tensor], batch: int, recorder: int, call: int) -> list[Tensor]:
    return [shape.empty(batch) for shape in _RECORDERS[recorder].written[call]]


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor's shape; (per sample, constant) of each dimension, one of which is zero."""

    dimensions: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    def empty(self, batch: int) -> Tensor:
        return torch.empty([each * batch if each else rest for each, rest in self.dimensions], dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class _Passed:
    """A tensor that a module was given and returns as it is; `index` among those that it was given."""

    index: int


@dataclass(slots=True)
class _Recorder:
    """What the submodules were called with and returned."""

    modules: list[str] = field(default_factory=list)
    written: list[list[_Shape]] = field(default_factory=list)
    trees: list[pytree.TreeSpec] = field(default_factory=list)
    templates: list[list[object]] = field(default_factory=list)
    results: list[list[tuple[tuple[int, ...], torch.dtype]]] = field(default_factory=list)


_RECORDERS: dict[int, _Recorder] = {}
"""Of the traces that are under way: an operator's fake implementation has no other way to find its own."""


def leaves_of(root: nn.Module, *, all_children: bool = False) -> tuple[str, ...]:
    """The submodules that are called as they are: blocks of lists, and other children with parameters.

    With `all_children` also children without parameters. A child that holds most of what is in lists is looked into.

    >>> leaves_of(nn.ModuleDict({"embed": nn.Linear(2, 2), "blocks": nn.ModuleList([nn.Linear(2, 2), nn.SiLU()])}))
    ('embed', 'blocks.0')
    """
    return tuple(_leaves(root, "", _size_of_lists(root), all_children))


def _size_of_lists(module: nn.Module) -> int:
    """Numbers in the parameters of its lists, but for lists in lists."""
    if isinstance(module, nn.ModuleList):
        return sum(p.numel() for p in module.parameters())
    return sum(_size_of_lists(child) for child in module.children())


def _leaves(module: nn.Module, path: str, size: int, all_children: bool) -> Iterator[str]:
    for name, child in module.named_children():
        below = f"{path}{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or 2 * _size_of_lists(child) > size:
            yield from _leaves(child, f"{below}.", size, all_children)
        elif all_children or any(True for _ in child.parameters()):
            yield below


def export(root: nn.Module, forward: Forward, inputs: Mapping[str, Tensor]) -> Exported:
    """Traces `forward(root, **inputs)`; the inputs give shapes and dtypes of a sample, and dimension 0 is the batch.

    Nothing is computed: weights may be on the meta device, and only glue is traced, so that a model of 20 B parameters
    takes seconds.

    Raises:
        ModelError: the forward cannot be traced for every batch size; the message gives the reason.
    """
    try:
        return _export(root, forward, inputs, leaves_of(root))
    except ModelError:
        # A child without parameters may do in Python what cannot be traced. Then it is called as it is, too.
        if leaves_of(root) == leaves_of(root, all_children=True):
            raise
    return _export(root, forward, inputs, leaves_of(root, all_children=True))


def _export(
    root: nn.Module, forward: Forward, inputs: Mapping[str, Tensor], leaves: tuple[str, ...]
) -> Exported:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    recorder, key = _Recorder(), id(root)
    _RECORDERS[key] = recorder
    try:
        with torch.no_grad():
            for index, batch in enumerate(_BATCHES):
                with _unchanged(root), FakeTensorMode(allow_non_fake_inputs=True), _fake_tensors(root):
                    given = {n: torch.empty((batch, *t.shape[1:]), dtype=t.dtype) for n, t in inputs.items()}
                    with _patched(root, leaves, lambda *a, i=index: _record(recorder, i, *a)):
                        forward(root, **given)
            _find_shapes(recorder)
            mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
            with _unchanged(root), _fake_tensors(root, mode):
                return _traced(root, forward, inputs, leaves, recorder, key, mode)
    except ModelError:
        raise
    except Exception as error:  # the exporter raises whatever a model's code leads to
        raise ModelError(f"{type(root).__name__} cannot be cut: {reason_of(error)}") from error
    finally:
        del _RECORDERS[key]


def reason_of(error: Exception) -> str:
    """The first sentence of an exporter's error."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


class _Root(nn.Module):
    def __init__(self, root: nn.Module, forward: Forward, names: Sequence[str], batch: list[Any]) -> None:
        super().__init__()
        self.root, self.names, self.batch = root, tuple(names), batch
        self.call = forward

    def forward(self, *tensors: Tensor) -> Tensor:
        self.batch[:] = [tensors[0].shape[0]]
        return self.call(self.root, **dict(zip(self.names, tensors, strict=True)))


def _traced(
    root: nn.Module, forward: Forward, inputs: Mapping[str, Tensor], leaves: tuple[str, ...], recorder: _Recorder,
    key: int, mode: Any,
) -> Exported:
    batch: list[Any] = []
    calls: list[ModuleCall] = []

    def stub(_: Callable[..., Any], name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        call, tensors = _call_of(name, args, named, batch[0])
        index = len(calls)
        calls.append(call)
        written = torch.ops.diffusionpipe.call_module(tensors, batch[0], key, index)
        rest = iter(written)
        values = [
            next(rest) if value is _TENSOR else tensors[value.index] if isinstance(value, _Passed) else value
            for value in recorder.templates[index]
        ]
        return pytree.tree_unflatten(values, recorder.trees[index])

    wrapper = _Root(root, forward, list(inputs), batch)
    dim = torch.export.Dim("batch", min=2, max=1 << 20)
    with mode:
        given = tuple(torch.empty((_BATCHES[0], *t.shape[1:]), dtype=t.dtype) for t in inputs.values())
    with _patched(root, leaves, stub):
        calls.clear()
        program = torch.export.export(
            wrapper, given, strict=False, dynamic_shapes=(tuple({0: dim} for _ in given),)
        )
    calls = calls[-len(recorder.written):]
    if any(node.op == "call_function" and _is_mutable(node.target) for node in program.graph.nodes):
        program = program.run_decompositions({})
    return _exported(program, calls, list(inputs))


def _is_mutable(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _exported(program: Any, calls: Sequence[ModuleCall], names: list[str]) -> Exported:
    signature = program.graph_signature
    owned = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    constants = {key: program.constants[name] for key, name in signature.inputs_to_lifted_tensor_constants.items()}
    return Exported(
        graph=program.graph,
        calls=tuple(calls),
        inputs=dict(zip(signature.user_inputs, names, strict=True)),
        owned={key: name.removeprefix("root.") for key, name in owned.items()},
        constants=constants,
        graph_module=program.graph_module,
    )


@contextmanager
def _patched(root: nn.Module, leaves: Sequence[str], run: Callable[..., Any]) -> Iterator[None]:
    """Calls of the leaves go to `run(forward, name, args, kwargs)`."""
    patched: list[nn.Module] = []
    try:
        for name in leaves:
            leaf: Any = attribute(root, name)
            original = leaf.forward

            def replaced(*args: Any, _f: Any = original, _n: str = name, **named: Any) -> Any:
                return run(_f, _n, args, named)

            leaf.forward = replaced
            patched.append(leaf)
        yield
    finally:
        for leaf in patched:
            del leaf.forward


@contextmanager
def _fake_tensors(root: nn.Module, mode: Any = None) -> Iterator[None]:
    """Puts fake tensors in place of all parameters; of buffers only those on the meta device."""
    tables: list[dict[str, Any]] = [t for m in root.modules() for t in (m._parameters, m._buffers)]
    originals = [dict(table) for table in tables]
    made: dict[int, Tensor] = {}
    with ExitStack() as stack:
        if mode is not None:
            stack.enter_context(mode)
        for table in tables:
            for name, tensor in table.items():
                if isinstance(tensor, nn.Parameter):
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
    """Whether a module's attribute is an object of a model's code that may keep tensors."""
    owner = type(value).__module__.partition(".")[0]
    return owner in ("diffusers", "transformers") and hasattr(value, "__dict__") and not isinstance(value, nn.Module)


@contextmanager
def _unchanged(root: nn.Module) -> Iterator[None]:
    """What the modules keep of a forward, such as rotary tables, is forgotten: it would be fake tensors."""
    modules = tuple(root.modules())
    held = [value for module in modules for value in vars(module).values() if _is_holder(value)]
    places = [vars(holder) for holder in (*modules, *held)]
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
        for kind in {type(module) for module in modules}:
            for place in (kind, sys.modules[kind.__module__]):
                for value in list(vars(place).values()):
                    if callable(getattr(value, "cache_clear", None)):
                        value.cache_clear()


def _call_of(
    name: str, args: tuple[Any, ...], named: dict[str, Any], batch: int | torch.SymInt
) -> tuple[ModuleCall, list[Tensor]]:
    leaves, tree = pytree.tree_flatten((args, named))
    marked = [_TENSOR if isinstance(v, Tensor) else _BATCH if isinstance(v, torch.SymInt) else v for v in leaves]
    if any(isinstance(v, torch.SymInt) and v.node.expr != batch.node.expr for v in leaves):
        raise ModelError(f"{name} is called with a number that depends on the batch")
    return ModuleCall(module=name, tree=tree, leaves=tuple(marked)), [v for v in leaves if isinstance(v, Tensor)]


def _record(
    recorder: _Recorder, index: int, original: Callable[..., Any], name: str, args: tuple[Any, ...], named: Any
) -> Any:
    result = original(*args, **named)
    given = [id(leaf) for leaf in pytree.tree_leaves((args, named)) if isinstance(leaf, Tensor)]
    leaves, tree = pytree.tree_flatten(result)
    template = [
        leaf if not isinstance(leaf, Tensor) else _Passed(given.index(id(leaf))) if id(leaf) in given else _TENSOR
        for leaf in leaves
    ]
    if index == 0:
        recorder.trees.append(tree)
        recorder.templates.append(template)
        recorder.modules.append(name)
    made = [leaf for leaf, of in zip(leaves, template, strict=True) if of is _TENSOR]
    recorder.results.append([(tuple(t.shape), t.dtype) for t in made])
    return result


def _find_shapes(recorder: _Recorder) -> None:
    """From results for both batch sizes. Raises ModelError where the calls depend on the batch."""
    number = len(recorder.modules)
    if len(recorder.results) != 2 * number:
        raise ModelError("the model calls its blocks once a sample, not once a batch")
    for module, few, many in zip(recorder.modules, recorder.results[:number], recorder.results[number:], strict=True):
        shapes = []
        for (first, dtype), (second, _) in zip(few, many, strict=True):
            dimensions = []
            for a, b in zip(first, second, strict=True):
                if a != b and a * _BATCHES[1] != b * _BATCHES[0]:
                    raise ModelError(f"{module} writes a tensor whose size does not follow the batch")
                dimensions.append((0, a) if a == b else (a // _BATCHES[0], 0))
            shapes.append(_Shape(tuple(dimensions), dtype))
        recorder.written.append(shapes)
