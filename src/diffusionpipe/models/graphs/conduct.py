"""Faults that no layer may have: to draw random numbers, to mix samples, to change its own state.

A layout cuts the batch into micro-batches and gives them to ranks. It trains what one process trains if each sample
goes through each layer by itself: with no random numbers, which would depend on the rank; without the other samples, of
which a micro-batch has fewer; and without a state that changes with every call, of which a step has one for each
micro-batch.

Random numbers and means over samples are seen among torch's operations, while a layer runs on fake tensors, and so is a
parameter or buffer that it writes to. That one sample reads another can only be seen in values: layers that have real
weights run again, with one sample as before and others in place of the rest.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from diffusionpipe.models.graphs.graph import Layer, modules_of

LARGE = 2**20
"""The number of weights above which a layer is not run with real weights, which takes long; but see `_ORDERED`."""
_STATISTICS = nn.modules.batchnorm._BatchNorm, nn.modules.batchnorm._LazyNormBase
_ORDERED = nn.RNNBase, nn.MultiheadAttention
"""Modules that read dimension 0 as time unless `batch_first` is set: then a layer of any size is run."""
_TOLERANCE = 1e-3


def draws(operation: OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether an operation of torch draws random numbers when it is called with these arguments, given by name."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    # Dropouts call their probability p, recurrent operations dropout.
    name = "p" if "dropout" in operation.overloadpacket.__name__ else "dropout"
    probability = arguments.get("dropout_p", arguments.get(name))
    # Without such an argument it counts as training.
    is_off = arguments.get("train", arguments.get("training", True)) is False
    return probability != 0 and not is_off


def drops(module: nn.Module) -> bool:
    """Whether the module is a dropout in training mode with a probability above 0."""
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0


def averages(operation: OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Whether an operation of torch, called with these arguments, normalizes by the mean of several samples."""
    name = operation.overloadpacket.__name__
    if "batch_norm" not in name or "backward" in name or name.endswith("no_training"):
        return False
    # torch normalizes single samples (`instance_norm`) as one sample with more channels.
    return arguments.get("training", True) is not False and len(arguments["input"]) > 1


def named(operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name in the operation's schema -> argument of a call, with the defaults of arguments that are not given."""
    known = operation._schema.arguments
    defaults = {one.name: one.default_value for one in known if one.has_default_value()}
    return defaults | {one.name: value for one, value in zip(known, args, strict=False)} | dict(kwargs)


class Conduct:
    """A collection of layers' faults (drawn numbers, statistics of a batch, writes to buffers), from their operations.

    Mutable: `see` notes them.
    """

    def __init__(self) -> None:
        self._judges: dict[OpOverload, bool] = {}
        """Operation that was seen -> whether it may draw or mix, depending on its arguments."""
        self._drawn: dict[str, str] = {}
        self._averaged: dict[str, None] = {}
        self.changed: Mapping[nn.Module, str] = {}
        """Module -> name of its parameter or buffer that was written to."""

    def see(self, layer: str, operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note whether an operation of a layer draws random numbers or mixes samples, by the arguments of its call."""
        if operation not in self._judges:
            is_random = torch.Tag.nondeterministic_seeded in operation.tags
            self._judges[operation] = is_random or "batch_norm" in operation.overloadpacket.__name__
        if self._judges[operation]:
            arguments = named(operation, args, kwargs)
            if draws(operation, arguments):
                self._drawn.setdefault(layer, operation.overloadpacket.__name__)
            if averages(operation, arguments):
                self._averaged[layer] = None

    def problems(self, layers: Iterable[Layer], components: Mapping[str, nn.Module]) -> Iterator[str]:
        """A sentence for each faulty layer, with the modules that cause the fault and a remedy."""
        for layer in layers:
            modules = list(modules_of(layer, components[layer.component]))
            if layer.name in self._drawn:
                found = _kinds(filter(drops, modules))
                yield (
                    f"{layer.name} draws random numbers ({found or self._drawn[layer.name]}), which would depend on "
                    "the layout; set the probability to 0, or call eval() on the module"
                )
            elif layer.name in self._averaged:
                found = _kinds(m for m in modules if isinstance(m, _STATISTICS) and m.training)
                yield (
                    f"{layer.name} mixes the samples of a batch ({found or 'batch_norm'}), and a micro-batch has "
                    "others than the batch; use GroupNorm or LayerNorm, or call eval() on the module"
                )
            elif writer := next((module for module in modules if module in self.changed), None):
                yield (
                    f"{layer.name} writes to its {self.changed[writer]} ({type(writer).__name__}) each time it runs, "
                    "which is once for each micro-batch; call eval() on the module"
                )


def _kinds(modules: Iterable[nn.Module]) -> str:
    return ", ".join(dict.fromkeys(type(module).__name__ for module in modules))


def mixes_samples(layer: Layer, component: nn.Module, reads: Sequence[Tensor]) -> bool:
    """Whether the layer's outputs for one sample depend on another sample; False if that cannot be tried.

    It cannot be tried without real weights, or with too many of them.


    `component`: the module that it runs. `reads`: tensors of the shapes and dtypes that it reads, of at least two
    samples; their values do not count.
    """
    modules = list(modules_of(layer, component))
    tensors = [t for module in modules for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))]
    is_ordered = any(isinstance(module, _ORDERED) and not module.batch_first for module in modules)
    if any(t.is_meta for t in tensors) or (sum(t.numel() for t in tensors) > LARGE and not is_ordered):
        return False
    generator = torch.Generator().manual_seed(0)
    # The same shapes with other numbers.
    values, others = ([_drawn(read, generator) for read in reads] for _ in range(2))
    device = tensors[0].device if tensors else torch.device("cpu")

    def written(samples: Sequence[Tensor]) -> Sequence[Tensor]:
        found: Sequence[Tensor] = layer.run(component, *(sample.to(device) for sample in samples))
        return found

    try:
        found = written(values)
        for kept in (slice(0, 1), slice(1, None)):  # a recurrent module may read what is before it alone
            # The kept samples are equal in both runs, all others differ.
            for value, other in zip(values, others, strict=True):
                other[kept] = value[kept]
            changed = written(others)
            if not all(_is_close(one[kept], two[kept]) for one, two in zip(found, changed, strict=True)):
                return True
            others = [_drawn(read, generator) for read in reads]
    except (RuntimeError, ValueError, IndexError, TypeError):
        pass  # it does not take any values; its shapes fit, as a run on fake tensors has shown
    return False


def _drawn(like: Tensor, generator: torch.Generator) -> Tensor:
    if not like.dtype.is_floating_point:
        return torch.zeros(like.shape, dtype=like.dtype)
    return torch.rand(like.shape, generator=generator, dtype=torch.float32).to(like.dtype)


def _is_close(one: Tensor, other: Tensor) -> bool:
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * float(one.abs().max()), equal_nan=True)
