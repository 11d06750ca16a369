"""The compute of a stage: its block's layers on named tensors.

The executor sees a stage only as a `StageModule`; virtual stages (waits instead of compute) are another one.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffusionpipe.models.graphs.graph import Layer, modules_of
from diffusionpipe.runtime.compute.casts import Casts
from diffusionpipe.runtime.compute.split import Deferred, Forward, cast_weights, forwards_of, run_with
from diffusionpipe.runtime.machine.buffers import storage_of
from diffusionpipe.runtime.recording.layer_watch import LayerWatch


class StageModule(Protocol):
    """The compute of one stage as the executor sees it: named input tensors to named output tensors."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the tensors that a forward needs."""
        ...

    def __call__(self, tensors: dict[str, Tensor], deferred: Deferred | None = None) -> Mapping[str, Tensor]:
        """The outputs of a forward of one micro-batch, by name; it may empty `tensors`, its inputs by name.

        `deferred`: where the backward puts aside the tensors that weight gradients need; None: it computes them itself.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The type of device and the autocast dtype of layers; None: they compute in the parameters' own dtype."""

    device: str = "cpu"
    autocast: torch.dtype | None = None

    def context(self) -> torch.autocast:
        """The autocast context manager for a forward, disabled where there is no autocast dtype."""
        return torch.autocast(self.device, dtype=self.autocast, enabled=self.autocast is not None)


class LayerStage:
    """A stage that runs the layers of one block, in order, on named tensors."""

    def __init__(
        self,
        layers: Sequence[Layer],
        components: Mapping[str, nn.Module],
        *,
        outputs: Collection[str],
        checkpointed: Collection[str] = (),
        precision: Precision | None = None,
        casts: Casts | None = None,
        watch: LayerWatch | None = None,
    ) -> None:
        """`outputs`: the tensors that others read of it. `checkpointed`: layers recomputed in the backward.

        `casts`: where `cast` puts copies of weights and forwards find them; None: autocast casts in every forward.
        `watch`: called for every layer while it is on; None: no calls.
        """
        self._watch = watch
        self.precision = precision or Precision()
        self._casts = Casts() if casts is None else casts
        self.outputs = tuple(outputs)
        written: set[str] = set()
        reads: dict[str, None] = {}
        for layer in layers:
            reads.update(dict.fromkeys(name for name in layer.reads if name not in written))
            written.update(layer.writes)
        self._reads = tuple(reads)
        missing = set(self.outputs) - written
        assert not missing, f"no layer writes {missing}"
        self._steps = [
            _Step(
                layer=layer,
                component=components[layer.component],
                is_checkpointed=layer.name in checkpointed,
                unused=unused,
                forwards=module_forwards(layer, components[layer.component]),
            )
            for layer, unused in zip(layers, _last_uses(layers, self.outputs), strict=True)
        ]
        # Tied weights come several times and are cast once.
        kept = [pair for step in self._steps if not step.is_checkpointed for pair in step.forwards]
        self._cast_weights = tuple(dict.fromkeys(cast_weights(kept)))

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the tensors that the layers read and none of them writes."""
        return self._reads

    def cast(self) -> None:
        """Copy the weights in autocast's dtype, for all forwards until they are dropped; nothing without autocast.

        Recomputed layers get none: memory is scarce there, and autocast's own copies go with each layer.
        """
        if self.precision.autocast is not None:
            self._casts.make(self._cast_weights, self.precision.autocast)

    def __call__(self, tensors: dict[str, Tensor], deferred: Deferred | None = None) -> dict[str, Tensor]:
        """The outputs of a forward by name; intermediate tensors are dropped as soon as no layer needs them."""
        if self.precision.autocast is None:  # autocast costs microseconds even when it is off
            self._run(tensors, deferred)
        else:
            with self.precision.context():
                self._run(tensors, deferred)
        return {name: tensors[name] for name in self.outputs}

    def _run(self, tensors: dict[str, Tensor], deferred: Deferred | None) -> None:
        watch = self._watch if self._watch is not None and self._watch.is_on else None
        if watch is not None:
            watch.begin()
        changes = deferred is not None or bool(self._casts)
        for step in self._steps:
            layer = step.layer
            run = step.changed(deferred, self._casts) if changes and step.forwards else layer.run
            arguments = [tensors[name] for name in layer.reads]
            for name in step.unused:
                tensors.pop(name, None)
            # Layers draw no random numbers (`models/graphs/conduct.py`), so there is no state to keep for
            # recomputation.
            if step.is_checkpointed and torch.is_grad_enabled():
                written = checkpoint(run, step.component, *arguments, use_reentrant=False, preserve_rng_state=False)
                written = _apart(written, arguments)
            else:
                written = run(step.component, *arguments)
            tensors.update(zip(layer.writes, written, strict=True))
            if watch is not None:
                watch.end(layer.name, len(written[0]))


def _apart(written: Sequence[Tensor], read: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tensors that a recomputed layer wrote, each in memory of its own size.

    Of such a layer only inputs and outputs are kept. An output that is a part of a larger tensor would keep all of it:
    the tokens of the picture, for example, beside tokens of text. Parts that fill a tensor together stay as they are,
    and so do parts of an input, which is kept anyway.
    """
    used: dict[int, int] = defaultdict(int)  # storage -> the bytes of the outputs in it
    for tensor in written:
        used[storage_of(tensor)] += tensor.numel() * tensor.element_size()
    for tensor in read:
        used[storage_of(tensor)] = tensor.untyped_storage().nbytes()
    return tuple(
        tensor.clone() if used[storage_of(tensor)] < tensor.untyped_storage().nbytes() else tensor for tensor in written
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One layer of a stage, with the component that holds its modules."""

    layer: Layer
    component: nn.Module
    is_checkpointed: bool
    unused: tuple[str, ...]
    """The layer's inputs that nothing reads after it."""
    forwards: tuple[tuple[nn.Module, Forward], ...]
    """Modules that can put weight gradients aside and read copies of their weights."""

    def changed(self, deferred: Deferred | None, casts: Casts) -> Callable[..., tuple[Tensor, ...]]:
        """The layer's `run` as a function in which its modules use `forwards`, also when it is recomputed."""
        return partial(run_with, self.forwards, deferred, casts, self.layer.run)


def module_forwards(layer: Layer, component: nn.Module) -> tuple[tuple[nn.Module, Forward], ...]:
    """(module, forward) for each module of the layer that can defer weight gradients; see `run_with`."""
    return tuple(forwards_of(modules_of(layer, component)))


def _last_uses(layers: Sequence[Layer], outputs: Collection[str]) -> list[tuple[str, ...]]:
    """For each layer, the names of its inputs that no later layer reads and that are not outputs of the stage."""
    needed = set(outputs)
    unused: list[tuple[str, ...]] = []
    for layer in reversed(layers):
        unused.append(tuple(name for name in dict.fromkeys(layer.reads) if name not in needed))
        needed.update(layer.reads)
    return unused[::-1]
