"""Bytes that layers keep for their backward, and bytes that live while they run."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffusionpipe.costs import ModelGraph
from diffusionpipe.models.graphs.graph import Layer
from diffusionpipe.runtime.machine.buffers import storage_of
from diffusionpipe.units import Bytes


class SavedStorages(saved_tensors_hooks):
    """Notes the storages of all tensors that autograd saves for a backward, while it is entered as a context."""

    def __init__(self) -> None:
        self.storages: dict[int, Bytes] = {}
        """Key of a storage (`storage_of`) -> its bytes."""
        super().__init__(self._note, _unchanged)

    def _note(self, tensor: Tensor) -> Tensor:
        self.storages[storage_of(tensor)] = tensor.untyped_storage().nbytes()
        return tensor


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(slots=True)
class KeptBytes:
    """Adds up the bytes that the layers of one run keep for their backward, layer by layer.

    Bytes that a layer keeps of its inputs are charged to the layer that wrote them, once, however many layers keep it;
    inputs that come from the frozen part are charged to none.
    """

    model: ModelGraph
    own: dict[str, Bytes] = field(default_factory=dict)
    """The bytes that each layer keeps for its backward, by layer."""
    put_aside: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Layer -> the names of its inputs that stay for its W, as they were first written."""
    _outputs: dict[str, Bytes] = field(default_factory=dict)
    _alias: dict[str, str] = field(default_factory=dict)
    _kept: set[str] = field(default_factory=set)

    def add(
        self,
        layer: Layer,
        kept: SavedStorages,
        reads: Mapping[str, Tensor],
        writes: Mapping[str, Tensor],
        weights: set[int],
        put_aside: Sequence[int] = (),
    ) -> None:
        """Add the storages that one layer has kept for its backward.

        Args:
            layer: the layer.
            kept: the storages.
            reads: the layer's inputs by name.
            writes: the layer's outputs by name.
            weights: the keys of the storages of its parameters and buffers, which do not count.
            put_aside: the positions among the layer's inputs of the tensors that stay for its W.
        """
        read_as = {storage_of(tensor): name for name, tensor in reads.items()}
        written_as: dict[int, str] = {}
        for name, tensor in writes.items():
            key = storage_of(tensor)
            # A view of an input, or of an output before it, takes no memory of its own.
            original = read_as.get(key) or written_as.get(key)
            if original is not None:
                self._alias[name] = original
            elif key not in weights:
                written_as[key] = name
                self._outputs[name] = tensor.untyped_storage().nbytes()
        own = 0
        for key, num_bytes in kept.storages.items():
            # Charged to the layer that wrote it, once, whichever layers keep it.
            if key in read_as:
                self._keep(read_as[key])
            elif key in written_as:
                self._keep(written_as[key])
            elif key not in weights:
                own += num_bytes
        self.own[layer.name] = own
        self.put_aside[layer.name] = tuple(dict.fromkeys(self._original(layer.reads[at]) for at in put_aside))

    def _original(self, name: str) -> str:
        while name in self._alias:
            name = self._alias[name]
        return name

    def _keep(self, name: str) -> None:
        self._kept.add(self._original(name))

    def totals(self) -> dict[str, Bytes]:
        """Layer -> the bytes charged to it: its own, and its outputs that any layer keeps; 0 for frozen layers."""
        frozen = set(self.model.frozen_layers)
        return {
            spec.name: 0
            if spec.name in frozen
            else self.own.get(spec.name, 0) + sum(self._outputs.get(n, 0) for n in spec.writes if n in self._kept)
            for spec in self.model.layers
        }


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no annotations here
    """Counts, while entered, the bytes of storages that operations make and that still live, and their peak.

    Storages that existed before do not count. Memory that a kernel takes and returns by itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: Bytes = 0
        self.peak: Bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def restart_peak(self) -> None:
        """Set the peak to the bytes that live now; from then on it is counted again."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = tree_leaves((args, kwargs or {}))
        # Storages that an operation gets from outside existed before, so they never count.
        for tensor in _tensors(arguments):
            self._see(tensor, counts=False)
        result = func(*args, **kwargs or {})
        for tensor in _tensors(tree_leaves(result)):
            self._see(tensor, counts=True)
        return result

    def _see(self, tensor: Tensor, *, counts: bool) -> None:
        key, storage = storage_of(tensor), tensor.untyped_storage()
        if key in self._known:
            return
        takes_any = counts and tensor.device.type != "meta"  # fake tensors say another device
        num_bytes = storage.nbytes() if takes_any else 0

        def forget(_: object) -> None:
            self.live -= num_bytes
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, forget)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)


def _tensors(values: Iterable[object]) -> Iterable[Tensor]:
    return (value for value in values if isinstance(value, Tensor))
