"""An exported transformer as layers: one for each call of its modules, with the glue before it.

Each value of the trace goes where it costs least:

    table      depends on no input                    computed once on each device: rotary tables, position grids
    free       depends on inputs, but no parameter    computed by each layer that reads it: masks, sinusoids
    bound      all others                             computed by its first reader, sent to the others

A bound value whose dimension 0 is not the batch cannot be sent. Each reader computes it from what can. So a call whose
result cannot be sent, such as a learned position table, belongs to the layer that reads it.
"""

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn

from diffusionpipe.costs.graph import BYTES_OF_DTYPE
from diffusionpipe.errors import ModelError
from diffusionpipe.models.cut.exporting import Exported, Forward, export
from diffusionpipe.models.cut.glue import CALL, ConstantTables, GluedRun, closure
from diffusionpipe.models.cut.unread import unread_parameters
from diffusionpipe.models.graphs.conduct import draws, drops, named
from diffusionpipe.models.graphs.graph import Layer, attribute


def cut(
    root: nn.Module,
    forward: Forward,
    inputs: Mapping[str, Tensor],
    *,
    component: str = "transformer",
    output: str = "prediction",
    joined: Collection[str] = (),
) -> tuple[Layer, ...]:
    """The layers that together compute `forward(root, **inputs)`, read tensors named as the inputs and write `output`.

    Of the inputs only the shape of a sample and the dtype count. Run one after the other, the layers give the bits of
    the forward. Parameters on which its result does not depend are set to need no gradient. The modules named in
    `joined` are not layers of their own: each is called by the layer that reads its result. `component`: the name of
    `root` in the graph.

    Raises:
        ModelError: the forward cannot be cut; the message gives the reason.
    """
    _check_dropout(root)
    exported = export(root, forward, inputs)
    plan = _Plan(exported, component, output, joined)
    layers = plan.layers()
    _check_pieces(root, layers)
    _check_shared(root, layers)
    used = {parameter for layer in layers for name in layer.modules for parameter in _parameters(root, name)}
    used -= unread_parameters(root, exported, plan.needed)
    for parameter in root.parameters():
        parameter.requires_grad_(parameter.requires_grad and parameter in used)
    return layers


def _check_dropout(root: nn.Module) -> None:
    found = next((name for name, module in root.named_modules() if drops(module)), None)
    if found is not None:
        raise ModelError(f"{found} drops values at random while training; set the dropout in config.json to 0")


def _parameters(root: nn.Module, name: str) -> Iterator[nn.Parameter]:
    owned = attribute(root, name)
    if isinstance(owned, nn.Module):
        yield from owned.parameters()
    elif isinstance(owned, nn.Parameter):
        yield owned


def _check_pieces(root: nn.Module, layers: Sequence[Layer]) -> None:
    """Check that no layer of several modules has more than half of the parameters.

    Raises:
        ModelError: one does, because blocks pass on tensors that cannot be sent.
    """
    total = sum(p.numel() for p in root.parameters())
    for layer in layers:
        size = sum(p.numel() for name in layer.modules for p in _parameters(root, name))
        if len(layer.modules) > 1 and 2 * size > total:
            raise ModelError(
                f"{type(root).__name__} cannot be cut: its blocks pass on tensors whose dimension 0 is not the batch"
            )


def _check_shared(root: nn.Module, layers: Sequence[Layer]) -> None:
    owner: dict[nn.Parameter, str] = {}
    for layer in layers:
        for name in layer.modules:
            for parameter in _parameters(root, name):
                first = owner.setdefault(parameter, layer.name)
                if first != layer.name:
                    raise ModelError(
                        f"{type(root).__name__} cannot be cut: {first} and {layer.name} use the same parameter of "
                        f"{name}"
                    )


@dataclass(slots=True)
class _Piece:
    """A layer in the making: the nodes of the trace that it computes. Mutable."""

    name: str
    """The name of the layer."""
    steps: list[fx.Node] = field(default_factory=list)
    """The nodes that it computes, in order."""
    reads: dict[fx.Node, str] = field(default_factory=dict)
    """Node whose value it reads -> name of the tensor."""
    writes: dict[fx.Node, str] = field(default_factory=dict)
    """Node whose value it writes -> name of the tensor."""
    here: set[fx.Node] = field(default_factory=set)
    """All nodes whose values it has, read or computed."""


class _Plan:
    """The division of a traced forward into layers: which layer computes, reads and writes the value of which node."""

    def __init__(self, exported: Exported, component: str, output: str, joined: Collection[str]) -> None:
        self.exported, self.component, self.output_name, self.joined = exported, component, output, joined
        # The output node has one argument, a tuple of all outputs.
        self.output: fx.Node = next(n for n in exported.graph.nodes if n.op == "output").args[0][0]
        self.inputs = {n: exported.inputs[n.name] for n in exported.graph.nodes if n.name in exported.inputs}
        self.batch = next(iter(self.inputs)).meta["val"].shape[0].node.expr
        self.is_table: dict[fx.Node, bool] = {}
        self.is_free: dict[fx.Node, bool] = {}
        for node in exported.graph.nodes:
            self._classify(node)
        self.owner: dict[fx.Node, _Piece] = {}
        self.tables = ConstantTables(exported)
        self.needed = self._needed()

    def _classify(self, node: fx.Node) -> None:
        _check_random(node)
        arguments = node.all_input_nodes
        if node.op == "placeholder":
            is_parameter = node.name in self.exported.parameters
            # Buffers and constants: training does not change them.
            self.is_table[node] = node not in self.inputs and not is_parameter
            self.is_free[node] = not is_parameter
        elif self._is_batch(node):
            self.is_table[node], self.is_free[node] = False, True
        else:
            is_call = node.target is CALL
            self.is_table[node] = not is_call and all(self.is_table[n] for n in arguments)
            self.is_free[node] = not is_call and all(self.is_free[n] for n in arguments)

    def _is_batch(self, node: fx.Node) -> bool:
        """Whether the node's value is the number of samples itself."""
        value = node.meta.get("val")
        return isinstance(value, torch.SymInt) and value.node.expr == self.batch and node.op == "call_function"

    def _is_sent(self, node: fx.Node) -> bool:
        """Whether a layer can write the node's value for others: a tensor whose dimension 0 is the batch."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or value.ndim == 0 or str(value.dtype)[6:] not in BYTES_OF_DTYPE:
            return False
        first = value.shape[0]
        return isinstance(first, torch.SymInt) and first.node.expr == self.batch

    def layers(self) -> tuple[Layer, ...]:
        """The layers, one for each module that is called by itself, in the order of the first calls.

        Raises:
            ModelError: the forward cannot be cut so.
        """
        calls = [node for node in self.needed if node.target is CALL and self._stands_alone(node)]
        if not calls:
            raise ModelError("no call of a block depends on the batch")
        pieces: dict[str, _Piece] = {}
        for call in calls:
            name = f"{self.component}.{self.exported.call(call).module}"
            if name in pieces:
                self._compute_again(call, pieces[name])
                continue
            piece = pieces[name] = _Piece(name)
            self._compute(call, piece)
        # The glue after the last call belongs to its layer.
        self._compute(self.output, piece)
        piece.writes[self.output] = self.output_name
        return tuple(self._layer(piece) for piece in pieces.values())

    def _compute_again(self, call: fx.Node, piece: _Piece) -> None:
        """Add a further call of a module to `piece`, the layer of its first call.

        Raises:
            ModelError: the call reads values of later layers, not inputs or values of this one alone.
        """
        before = [n for n in closure(call.all_input_nodes) if not self.is_free[n] and n not in piece.here]
        if any(node.op == "call_function" for node in before):
            raise ModelError(f"{piece.name} is called again with what later layers write; it cannot be a layer")
        self._compute(call, piece)

    def _needed(self) -> list[fx.Node]:
        """The nodes of the trace on which the output depends, in order."""
        found = {self.output}
        for node in reversed(self.exported.graph.nodes):
            if node in found:
                found.update(node.all_input_nodes)
        return [node for node in self.exported.graph.nodes if node in found]

    def _stands_alone(self, call: fx.Node) -> bool:
        """Whether the call is a layer of its own: not `joined`, with inputs that vary and results that can be sent."""
        if self.exported.call(call).module in self.joined:
            return False
        return all(self._is_sent(user) for user in call.users) and any(
            not self.is_table[n] for n in call.all_input_nodes
        )

    def _compute(self, node: fx.Node, piece: _Piece) -> None:
        """Add the node's value to the piece: as a tensor that it reads, or as steps that compute it.

        Raises:
            ModelError: another layer computes it and cannot send it.
        """
        if node in piece.here:
            return
        piece.here.add(node)
        if node in self.inputs:
            piece.reads[node] = self.inputs[node]
            return
        if self.is_table[node] or self._is_batch(node) or node.op in ("placeholder", "get_attr"):
            piece.steps.append(node)
            return
        owner = self.owner.get(node)
        # Bound: its first reader computes it and sends it to the others.
        if owner is not None and not self.is_free[node] and self._is_sent(node):
            piece.reads[node] = owner.writes.setdefault(node, self._name(node, owner))
            return
        if owner is not None and node.target is CALL and self._stands_alone(node):
            raise ModelError(f"{owner.name} writes a value whose dimension 0 is not the batch")
        for argument in node.all_input_nodes:
            self._compute(argument, piece)
        piece.steps.append(node)
        # Values that cannot be sent are computed by several pieces; the first one is the owner.
        self.owner.setdefault(node, piece)
        if node.target is CALL:
            for user in node.users:  # what a call returns is there, whether or not its own layer reads it
                self._compute(user, piece)

    def _name(self, node: fx.Node, owner: _Piece) -> str:
        if node.target is operator.getitem and node.all_input_nodes[0].target is CALL:
            call, index = node.args
            assert isinstance(call, fx.Node)
            module = self.exported.call(call).module
            if next(each for each in self.exported.calls if each.module == module) is self.exported.call(call):
                return f"{self.component}.{module}.{index}" if index else f"{self.component}.{module}"
        return f"{owner.name}.{node.name}"

    def _layer(self, piece: _Piece) -> Layer:
        owned = self.exported.owned
        modules: dict[str, None] = {}
        for node in piece.steps:
            if node.target is CALL:
                modules[self.exported.call(node).module] = None
            elif node.op == "placeholder" and node.name in owned:
                modules[owned[node.name]] = None
            if self.is_table[node]:
                modules.update(dict.fromkeys(owned[n.name] for n in closure([node]) if n.name in owned))
        run = GluedRun(
            self.exported,
            tuple(piece.steps),
            frozenset(n for n in piece.steps if self.is_table[n]),
            frozenset(n for n in piece.steps if self._is_batch(n)),
            tuple(piece.reads),
            tuple(piece.writes),
            frozenset(node for node in piece.writes if all(user.target is CALL for user in node.users)),
            self.tables,
        )
        return Layer(
            name=piece.name,
            component=self.component,
            reads=tuple(piece.reads.values()),
            writes=tuple(piece.writes.values()),
            modules=tuple(modules),
            run=run,
        )


def _check_random(node: fx.Node) -> None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.users:
        return
    if draws(target, named(target, node.args, node.kwargs)):
        raise ModelError(f"its forward draws random numbers ({target})")
