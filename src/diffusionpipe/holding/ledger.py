"""The ledger: the bytes that a rank holds of any parameters or layers of a model, and the time of bringing them.

Peak memory, the sums of the search, phases, expectations before a run, reductions, gathers and copies from the host all
ask it; nobody else multiplies shapes by widths.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from diffusionpipe.costs.graph import ModelGraph, ParameterSpec
from diffusionpipe.holding.state import Held, held_of
from diffusionpipe.holding.workload import Workload
from diffusionpipe.units import Bytes, Seconds

NOTHING = Held()


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWeights:
    """The weights of the frozen part on a rank that runs it."""

    device: Bytes
    """Bytes on the device: layers that are always there, and layers that come and go."""
    host: Bytes
    """Bytes in host memory, once for all ranks of a machine."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """A model's parameters with a workload's states and storages."""

    graph: ModelGraph
    workload: Workload

    @cached_property
    def trained(self) -> Mapping[str, Held]:
        """Trained parameter -> its bytes, with all that lies beside it."""
        states = self.workload.states
        return {p.name: held_of(states, p) for p in self.graph.parameters if p.is_trainable}

    @cached_property
    def frozen(self) -> Mapping[str, Bytes]:
        """Frozen parameter -> its bytes at rest."""
        inside = self.graph.parameters_of(self.graph.backbone_layers)
        workload = self.workload
        return {
            p.name: (workload.frozen if p.name in inside else workload.encoders).size(p)
            for p in self.graph.parameters
            if not p.is_trainable
        }

    def held(self, names: Collection[str]) -> Held:
        """The sum over the trained ones of these parameters, each once, on a rank that holds them."""
        own = [self.trained[name] for name in self.trained.keys() & names]
        return self.base.plus(Held._make(map(sum, zip(*own, strict=True)))) if own else NOTHING

    def unowned(self, names: Collection[str]) -> Held:
        """The sum over the trained ones of these parameters on a rank that holds them and updates none of them."""
        own = [self.trained[name] for name in self.trained.keys() & names]
        return Held(parameters=sum(one.parameters for one in own), gradients=sum(one.gradients for one in own))

    @property
    def base(self) -> Held:
        """The bytes of a rank that trains any parameter, without its parameters and their states."""
        return Held(optimizer=self.workload.once, backup=self.workload.update)

    def frozen_bytes(self, names: Collection[str]) -> Bytes:
        """Bytes of the frozen ones of these parameters, each once."""
        frozen = self.frozen
        return sum(frozen[name] for name in frozen.keys() & names)

    def frozen_of(self, layers: Collection[str]) -> Bytes:
        """Bytes of the frozen parameters of these layers; a tied one counts once."""
        return self.frozen_bytes(self.graph.parameters_of(layers))

    def resting(self, layers: Sequence[str]) -> FrozenWeights:
        """The weights of a frozen part of these layers, in the order in which they run."""
        kept, staged = self.resting_parts(layers)
        return FrozenWeights(
            device=self.frozen_of(kept) + staged, host=self.frozen_of(self.workload.encoders.hosted(layers))
        )

    def resting_parts(self, layers: Sequence[str]) -> tuple[frozenset[str], Bytes]:
        """The layers of a frozen part whose weights stay on the device, and bytes there of those that come and go."""
        storage = self.workload.encoders
        hosted = storage.hosted(layers)
        staged = storage.staged([self.frozen_of([layer]) for layer in layers if layer in hosted])
        return frozenset(layers) - hosted, staged

    def fetches(self, layers: Sequence[str], bandwidth: float) -> Mapping[str, Seconds]:
        """Layer whose weights are brought from the host -> the time of that, at `bandwidth` bytes a second."""
        storage = self.workload.encoders
        hosted = storage.hosted(layers)
        sizes = {layer: self.frozen_of([layer]) for layer in layers if layer in hosted}
        return {layer: storage.fetch(size, bandwidth) for layer, size in sizes.items() if size}

    def stored(self, parameter: ParameterSpec) -> Bytes:
        """Bytes of a parameter itself where it is owned."""
        if parameter.is_trainable:
            return self.trained[parameter.name].parameters
        return self.frozen[parameter.name]

    def gathered(self, parameter: ParameterSpec, precision: str) -> Bytes:
        """Bytes of a parameter as it is gathered from its owner for layers that compute in that precision.

        Wider ones are cast by their owner, and narrow copies travel.
        """
        stored = self.stored(parameter)
        return min(stored, 2 * prod(parameter.shape)) if precision in ("bfloat16", "float16") else stored
