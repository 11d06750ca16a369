"""What a stage computes: its block's layers on named tensors.

The executor sees a stage only as a `StageModule`; virtual stages (waits instead of compute) are another one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from diffusionpipe.models.graph import Layer, attribute, own_parameters
from diffusionpipe.runtime.split import Deferred, Forward, deferrable, own_gradients, run_deferring


class StageModule(Protocol):
    """A stage as the executor runs it."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Tensors that it needs."""
        ...

    def __call__(self, tensors: dict[str, Tensor], deferred: Deferred | None = None) -> Mapping[str, Tensor]:
        """Forward of one micro-batch: named inputs to named outputs. May empty `tensors`.

        `deferred`: where the backward is to put aside what weight gradients need; None: it computes them itself.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How layers compute. None: in the parameters' own dtype."""

    device: str = "cpu"
    autocast: torch.dtype | None = None

    def context(self) -> torch.autocast:
        """Autocast for a forward."""
        return torch.autocast(self.device, dtype=self.autocast, enabled=self.autocast is not None)


class LayerStage:
    """Layers of one block, run in order on named tensors."""

    def __init__(
        self,
        layers: Sequence[Layer],
        components: Mapping[str, nn.Module],
        *,
        outputs: Collection[str],
        checkpointed: Collection[str] = (),
        precision: Precision | None = None,
    ) -> None:
        """`outputs`: what others read of it. `checkpointed`: layers recomputed in the backward."""
        self.precision = precision or Precision()
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
                deferrable=tuple(deferrable(modules_of(layer, components[layer.component]))),
            )
            for layer, unused in zip(layers, _last_uses(layers, self.outputs), strict=True)
        ]
        waiting = {p for step in self._steps for m, _ in step.deferrable for p in m.parameters(recurse=False)}
        used = dict.fromkeys(p for step in self._steps for p in own_parameters(step.layer, step.component))
        self._complete_after_i = tuple(p for p in used if p.requires_grad and p not in waiting)

    @property
    def reads(self) -> tuple[str, ...]:
        """Tensors that the block needs from outside."""
        return self._reads

    def __call__(self, tensors: dict[str, Tensor], deferred: Deferred | None = None) -> dict[str, Tensor]:
        """Outputs by name; intermediate tensors are dropped as soon as no layer needs them."""
        if deferred is not None:
            own_gradients(self._complete_after_i)
        if self.precision.autocast is None:  # autocast costs microseconds even when it is off
            self._run(tensors, deferred)
        else:
            with self.precision.context():
                self._run(tensors, deferred)
        return {name: tensors[name] for name in self.outputs}

    def _run(self, tensors: dict[str, Tensor], deferred: Deferred | None) -> None:
        for step in self._steps:
            layer, run = step.layer, step.run(deferred)
            arguments = [tensors[name] for name in layer.reads]
            for name in step.unused:
                tensors.pop(name, None)
            if step.is_checkpointed and torch.is_grad_enabled():
                written = checkpoint(run, step.component, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                written = run(step.component, *arguments)
            tensors.update(zip(layer.writes, written, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    layer: Layer
    component: nn.Module
    is_checkpointed: bool
    unused: tuple[str, ...]
    """Tensors that nothing reads after it."""
    deferrable: tuple[tuple[nn.Module, Forward], ...]
    """Modules whose weight gradients can wait for W."""

    def run(self, deferred: Deferred | None) -> Callable[..., tuple[Tensor, ...]]:
        """The layer, also to be recomputed."""
        if deferred is None or not self.deferrable:
            return self.layer.run
        return partial(run_deferring, self.deferrable, deferred, self.layer.run)


def modules_of(layer: Layer, component: nn.Module) -> Iterator[nn.Module]:
    """The modules that a layer uses, their parts included."""
    for name in layer.modules:
        owned = attribute(component, name)
        if isinstance(owned, nn.Module):
            yield from owned.modules()


def _last_uses(layers: Sequence[Layer], outputs: Collection[str]) -> list[tuple[str, ...]]:
    """For each layer the tensors that nothing reads after it, its inputs included."""
    needed = set(outputs)
    unused: list[tuple[str, ...]] = []
    for layer in reversed(layers):
        unused.append(tuple(name for name in dict.fromkeys(layer.reads) if name not in needed))
        needed.update(layer.reads)
    return unused[::-1]
