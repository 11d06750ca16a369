"""The ledger: the bytes that a rank holds of any parameters or layers of a model, and the time of bringing them.

Peak memory, the sums of the search, phases, expectations before a run, reductions, gathers and copies from the host all
ask it; nobody else multiplies shapes by widths.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from diffusionpipe.costs.graph import ModelGraph, ParameterSpec, scales_of
from diffusionpipe.holding.state import Held, held_of
from diffusionpipe.holding.workload import Workload
from diffusionpipe.units import Bytes, Seconds

NOTHING = Held()


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenWeights:
    """The bytes of the frozen part's weights on a rank that runs it, on the device and in host memory."""

    device: Bytes
    """Bytes on the device: layers that are always there, and layers that come and go."""
    host: Bytes
    """Bytes in host memory, once for all ranks of a machine."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The bytes that a rank holds of a model's parameters, under the states and storages of a workload."""

    graph: ModelGraph
    workload: Workload

    @cached_property
    def trained(self) -> Mapping[str, Held]:
        """Name of a trained parameter -> its bytes and the bytes of its gradient and states, by item."""
        states = self.workload.states
        return {p.name: held_of(states, p) for p in self.graph.parameters if p.is_trainable}

    @cached_property
    def frozen(self) -> Mapping[str, Bytes]:
        """Name of a frozen parameter -> its bytes in the storage that keeps it."""
        # Frozen layers inside the trained part have a storage of their own; a parameter that encoders use too counts
        # there.
        inside = self.graph.parameters_of(self.graph.backbone_layers)
        workload = self.workload
        return {
            p.name: (workload.frozen if p.name in inside else workload.encoders).size(p)
            for p in self.graph.parameters
            if not p.is_trainable
        }

    def held(self, names: Collection[str]) -> Held:
        """The bytes, by item, of a rank that holds and updates these parameters; frozen ones do not count.

        `base` is included. All items are 0 if no parameter is trained.
        """
        own = [self.trained[name] for name in self.trained.keys() & names]
        return self.base.plus(Held._make(map(sum, zip(*own, strict=True)))) if own else NOTHING

    def unowned(self, names: Collection[str]) -> Held:
        """The bytes of parameters and gradients of a rank that holds these parameters but updates none.

        Frozen ones do not count.
        """
        own = [self.trained[name] for name in self.trained.keys() & names]
        return Held(parameters=sum(one.parameters for one in own), gradients=sum(one.gradients for one in own))

    @cached_property
    def base(self) -> Held:
        """The bytes that a rank with any trained parameter holds once, beside the parameters and their states."""
        return Held(optimizer=self.workload.once, backup=self.workload.update)

    def frozen_bytes(self, names: Collection[str]) -> Bytes:
        """The bytes of the frozen ones among these parameters in the storage that keeps them; each counts once."""
        frozen = self.frozen
        return sum(frozen[name] for name in frozen.keys() & names)

    def frozen_of(self, layers: Collection[str]) -> Bytes:
        """The bytes of the frozen parameters of these layers in the storage that keeps them; a tied one counts once."""
        return self.frozen_bytes(self.graph.parameters_of(layers))

    def resting(self, layers: Sequence[str]) -> FrozenWeights:
        """The bytes of these frozen layers' weights, on the device and in host memory; `layers` run in this order."""
        kept, staged = self.resting_parts(layers)
        return FrozenWeights(
            device=self.frozen_of(kept) + staged, host=self.frozen_of(self.workload.encoders.hosted(layers))
        )

    def resting_parts(self, layers: Sequence[str]) -> tuple[frozenset[str], Bytes]:
        """(the frozen layers among these whose weights stay on the device, bytes on it for layers that come and go)."""
        storage = self.workload.encoders
        hosted = storage.hosted(layers)
        staged = storage.staged([self.frozen_of([layer]) for layer in layers if layer in hosted])
        return frozenset(layers) - hosted, staged

    def fetches(self, layers: Sequence[str], bandwidth: float) -> Mapping[str, Seconds]:
        """Layer whose weights come from the host -> the seconds of copying them, at `bandwidth` bytes a second.

        Layers without bytes are left out.
        """
        storage = self.workload.encoders
        hosted = storage.hosted(layers)
        sizes = {layer: self.frozen_of([layer]) for layer in layers if layer in hosted}
        return {layer: storage.fetch(size, bandwidth) for layer, size in sizes.items() if size}

    def stored(self, parameter: ParameterSpec) -> Bytes:
        """The bytes of a parameter alone, trained or frozen, without its gradient and states."""
        if parameter.is_trainable:
            return self.trained[parameter.name].parameters
        return self.frozen[parameter.name]

    def gathered(self, parameter: ParameterSpec, precision: str) -> Bytes:
        """The bytes of a parameter as it is gathered from its owner for layers that compute in `precision`.

        For "bfloat16" and "float16" they are 2 bytes a number at most: the owner casts wider ones before they travel.
        The scales of stored matrices travel as they are. So do norms and tables, but here they count as narrow: their
        bytes are few.
        """
        stored = self.stored(parameter)
        if precision not in ("bfloat16", "float16") or parameter.name in self._scales:
            return stored
        return min(stored, 2 * prod(parameter.shape))

    @cached_property
    def _scales(self) -> frozenset[str]:
        return scales_of(self.graph.parameters)
