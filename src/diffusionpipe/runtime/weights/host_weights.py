"""Weights of frozen layers that are kept in host memory and come to the device layer by layer, as they run.

    host      [ layer 0 | layer 1 | layer 2 | layer 3 | ...      all weights, once for all ranks of a machine,
                                                                 page-locked by each where devices are GPUs
    copies      0   1 ......  2 ...........  3 ......            on a stream of their own
    compute        [0     ]  [1         ]  [2     ]  [3 ...

    staging   | 0        |      1 |    layers take turns at its two ends, so a layer arrives while the one before it
              | 2      |        1 |    computes; it is as large as the two largest layers together,
              | 2      |      3   |    so any two have room beside each other

A copy waits until the layer that was at its end has been computed, and a layer waits for its own copy.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from diffusionpipe.errors import ConfigError
from diffusionpipe.holding.staging import Staging
from diffusionpipe.ir import Range
from diffusionpipe.models.graphs.graph import Layer, LayerGraph, own_parameters
from diffusionpipe.runtime.machine.buffers import memory_of
from diffusionpipe.runtime.weights.host_memory import check_free, lock_pages, pages, unlock_pages
from diffusionpipe.runtime.weights.node_memory import NodeMemory
from diffusionpipe.units import Bytes

_ALIGNMENT: Bytes = 512
"""Alignment of each parameter, as torch aligns its allocations on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """The weights of one layer: its parameters, their values in host memory, and the places of these."""

    parameters: tuple[nn.Parameter, ...]
    hosted: tuple[Tensor, ...]
    """The values of the layer's parameters in host memory."""
    places: tuple[Range, ...]
    """The ranges of bytes of the parameters in host memory; on the device they lie one after the other."""
    runs: tuple[Range, ...]
    """The bytes of `places`, with neighbouring ranges joined to one."""

    @property
    def size(self) -> Bytes:
        """Bytes that the weights take on the device."""
        return sum(map(len, self.places))


class _Event(Protocol):
    """A point in the work of a stream, as `torch.cuda` and `torch.cpu` have it."""

    def record(self, stream: object) -> None:
        """Let the event be the end of the work that the stream has been given by now."""
        ...

    def wait(self, stream: object) -> None:
        """Let the stream wait for the event before the work that it is given from now on."""
        ...


@dataclass(slots=True)
class _End:
    """One of the two ends of the staging memory, with the events of the layer that is copied there."""

    is_upper: bool
    """Whether it is the end with the highest addresses."""
    ready: _Event
    """The event after which the copy is on the device."""
    done: _Event
    """The event after which the layer has been computed."""


class HostWeights(Mapping[str, "HostedLayer"]):
    """Keeps the weights of one rank's frozen layers in host memory and copies them to the device as layers run.

    A mapping from the layer's name to its weights; layers without weights are left out. Mutable: `Parameter.data` and
    the staging memory change as layers run. Between uses a parameter's data are those in host memory; the `Parameter`
    stays the same object. On the CPU the same happens without streams, so that what works there works on a GPU.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        components: Mapping[str, nn.Module],
        device: torch.device,
        *,
        kept: Collection[nn.Parameter] = (),
        node: NodeMemory | None = None,
    ) -> None:
        """Moves the layers' parameters, which must be real, into host memory, and the buffers to the device.

        `kept`: parameters that other layers use too: these go to the device and stay there. `node`: the memory that
        all ranks of the machine share, which the values of its first rank fill; None for memory of this rank's own.

        Raises:
            ConfigError: there is less free host memory, or it cannot be page-locked.
        """
        self._device = device
        kept = frozenset(kept)
        # A parameter may be in several modules of a layer.
        own = {layer.name: tuple(dict.fromkeys(own_parameters(layer, components[layer.component]))) for layer in layers}
        _move_rest([parameter for some in own.values() for parameter in some if parameter in kept], device)
        _move_buffers({components[layer.component] for layer in layers}, device)
        places = _places(p for some in own.values() for p in some if p not in kept)
        size = max((place.stop for place in places.values()), default=0)
        self._memory = _own_pages(size) if node is None else node.pages(size)
        for parameter, place in places.items():
            hosted = _view(self._memory, place.start, parameter.data)
            # The first rank fills the shared memory; the others only look at it.
            parameter.data = hosted.copy_(parameter.data) if node is None or node.is_first else hosted
        if node is not None:
            node.settle()
        found = {name: _weights([p for p in some if p not in kept], places) for name, some in own.items()}
        self._weights = {name: weights for name, weights in found.items() if weights.parameters}
        self._backend = torch.get_device_module(device)
        self._stream = self._backend.Stream()
        ends = (_End(is_upper, self._backend.Event(), self._backend.Event()) for is_upper in (True, False))
        self._ends = Staging(*ends)
        self._staging: Tensor | None = None
        self._views: dict[tuple[str, bool], tuple[Tensor, ...]] = {}
        if device.type == "cuda" and len(self._memory):
            _lock(self._memory)
            # Not at the end of the process, when CUDA may be gone: the kernel unlocks the pages then.
            weakref.finalize(self, unlock_pages, self._memory, self._stream).atexit = False

    def __getitem__(self, layer: str) -> "HostedLayer":
        if layer not in self._weights:
            raise KeyError(layer)
        return HostedLayer(self, layer)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def present_layers(self) -> frozenset[str]:
        """Names of the layers whose weights are on the device or on their way to it; two at most."""
        return self._ends.layers

    @property
    def device_bytes(self) -> Bytes:
        """Bytes of device memory that weights take, the two largest layers'; allocated when the first layer comes."""
        return sum(sorted(weights.size for weights in self._weights.values())[-2:])

    def start(self, layer: str) -> None:
        """Begin to copy a layer's weights to the device, unless they are there.

        They take the place of the layer that ran before the last one, or of another that was started and has not run.
        """
        end = self._ends.place(layer)
        if end is None:
            return
        staging, weights = self._staging_memory(), self._weights[layer]
        # The upper layer ends where the memory ends, so both ends have room.
        at = len(staging) - weights.size if end.is_upper else 0
        # The layer that was at this end may still be computed.
        end.done.wait(self._stream)
        with self._backend.stream(self._stream):
            for run in weights.runs:
                # The pages are locked, so the host does not wait for the copy.
                staging[at : at + len(run)].copy_(self._memory[run.start : run.stop], non_blocking=True)
                at += len(run)
            end.ready.record(self._stream)

    def present(self, layer: str) -> None:
        """Let the compute that comes read the layer's weights on the device; one layer at a time."""
        weights = self._weights[layer]
        self.start(layer)
        end = self._ends.run(layer)
        end.ready.wait(self._backend.current_stream())
        for parameter, value in zip(weights.parameters, self._views_of(layer, end), strict=True):
            parameter.data = value

    def release(self, layer: str) -> None:
        """Let the parameters show the values in host memory again, once the layer has been computed."""
        weights, end = self._weights[layer], self._ends.run(layer)
        for parameter, value in zip(weights.parameters, weights.hosted, strict=True):
            parameter.data = value
        end.done.record(self._backend.current_stream())

    def lasting(self, written: Tensor) -> Tensor:
        """The tensor itself, or a copy if it is a view of weights, which the next layer's will overwrite."""
        is_view = self._staging is not None and memory_of(written) == memory_of(self._staging)
        return written.clone() if is_view else written

    def _staging_memory(self) -> Tensor:
        if self._staging is None:
            self._staging = torch.empty(self.device_bytes, dtype=torch.uint8, device=self._device)
            # The allocator may give memory of a tensor that is still read by work of the compute stream.
            self._stream.wait_stream(self._backend.current_stream())
        return self._staging

    def _views_of(self, layer: str, end: _End) -> tuple[Tensor, ...]:
        """Views of one end of the staging memory, one for each of the layer's parameters, with dtype and shape."""
        key = layer, end.is_upper
        # The staging memory stays at one place, so views are made once.
        if key not in self._views:
            weights, staging = self._weights[layer], self._staging_memory()
            at = len(staging) - weights.size if end.is_upper else 0
            views = []
            for place, value in zip(weights.places, weights.hosted, strict=True):
                views.append(_view(staging, at, value))
                at += len(place)
            self._views[key] = tuple(views)
        return self._views[key]


@dataclass(frozen=True, slots=True)
class HostedLayer:
    """The weights of one frozen layer in host memory, which `prepare` and `present` bring to the device."""

    all: HostWeights
    name: str

    def prepare(self) -> None:
        """Begin to copy the layer's weights to the device."""
        self.all.start(self.name)

    def present(self) -> None:
        """Let the layer's parameters show the copy on the device; the compute that comes waits for it."""
        self.all.present(self.name)

    def release(self) -> None:
        """Let the layer's parameters show the values in host memory again."""
        self.all.release(self.name)

    def lasting(self, written: Tensor) -> Tensor:
        """The tensor that the layer wrote, or a copy if it is a view of weights on the device."""
        return self.all.lasting(written)


def _move_rest(kept: Collection[nn.Parameter], device: torch.device) -> None:
    """Move these parameters to the device, where they stay."""
    for parameter in kept:
        parameter.data = parameter.data.to(device)


def _move_buffers(components: Collection[nn.Module], device: torch.device) -> None:
    """Move all buffers of the components to the device, but for those on the meta device; each is small."""
    for component in components:
        for module in component.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if not buffer.is_meta and buffer.device != device:
                    setattr(module, name, buffer.to(device))


def _places(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Range]:
    """Parameter -> the range of its bytes in host memory, one after the other; lengths are aligned."""
    places: dict[nn.Parameter, Range] = {}
    end = 0
    for parameter in parameters:
        if parameter not in places:
            start, end = end, end + -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
            places[parameter] = Range(start, end)
    return places


def _weights(parameters: Sequence[nn.Parameter], places: Mapping[nn.Parameter, Range]) -> _Weights:
    mine = tuple(places[parameter] for parameter in parameters)
    runs: list[Range] = []
    # Neighbours in host memory are neighbours on the device too, so one copy brings both.
    for place in mine:
        if runs and runs[-1].stop == place.start:
            runs[-1] = Range(runs[-1].start, place.stop)
        else:
            runs.append(place)
    hosted = tuple(parameter.data for parameter in parameters)
    return _Weights(parameters=tuple(parameters), hosted=hosted, places=mine, runs=tuple(runs))


def _view(memory: Tensor, start: Bytes, like: Tensor) -> Tensor:
    """A view of the memory from byte `start` on, with the dtype and shape of the tensor `like`."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _own_pages(size: Bytes) -> Tensor:
    check_free(size)
    return pages(size)


def _lock(memory: Tensor) -> None:
    """Page-lock the memory for CUDA.

    Raises:
        ConfigError: CUDA refuses.
    """
    status = lock_pages(memory)
    if status:
        raise ConfigError(
            f"{memory.nbytes / 2**30:.1f} GiB of host memory for the frozen part cannot be page-locked (CUDA error "
            f"{status}); free memory of this machine, or set pipeline.offload_frozen = false"
        )


def host_weights_of(
    graph: LayerGraph, frozen: Collection[str], device: torch.device, node: NodeMemory | None
) -> HostWeights:
    """Move the weights of the frozen layers with these names into host memory, but for those that other layers use too.

    `node`: memory that all ranks of the machine share; None: memory of this rank's own.

    Raises:
        ConfigError: there is less free host memory, or it cannot be page-locked.
    """
    own = [layer for layer in graph.layers if layer.name in frozen]
    return HostWeights(own, graph.components, device, kept=_used_by_others(graph, frozen), node=node)


def hosted_parameters(graph: LayerGraph, frozen: Collection[str]) -> frozenset[nn.Parameter]:
    """The parameters that `host_weights_of` moves into host memory."""
    own = (layer for layer in graph.layers if layer.name in frozen)
    return _used_by(graph, own) - _used_by_others(graph, frozen)


def _used_by_others(graph: LayerGraph, frozen: Collection[str]) -> frozenset[nn.Parameter]:
    return _used_by(graph, (layer for layer in graph.layers if layer.name not in frozen))


def _used_by(graph: LayerGraph, layers: Iterable[Layer]) -> frozenset[nn.Parameter]:
    return frozenset(p for layer in layers for p in own_parameters(layer, graph.components[layer.component]))
