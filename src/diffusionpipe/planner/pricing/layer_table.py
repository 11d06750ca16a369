"""Sums of times and bytes over ranges of layers, made once: dynamic programs ask for them millions of times."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod
from operator import add

from diffusionpipe.costs import HostTimes, LayerSpec, ModelGraph, ParameterSpec, Profile
from diffusionpipe.holding import Held, Ledger, Workload
from diffusionpipe.holding.memory import copies_of, workspace_of
from diffusionpipe.units import Bytes, Seconds

Load = tuple[Bytes, int]
"""(bytes of one sample that pass from one stage to another, number of tensors that pass)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSums:
    """Running sums of times and bytes over the trained layers for one micro-batch; entry l has layers 0, ..., l - 1."""

    forward: tuple[Seconds, ...]
    """Running sums of forwards, with the mean time that probes add: F (1 + k / M) for k probes of M micro-batches."""
    backward: tuple[Seconds, ...]
    """Running sums of input gradients, weight gradients and recomputed forwards."""
    activation: tuple[Bytes, ...]
    """Running sums of the bytes of their own tensors that layers keep; 0 for recomputed layers, whose inputs are in
    `LayerTable.held_bytes`."""
    layers: tuple[Sequence[Seconds], Sequence[Seconds], Sequence[Seconds]]
    """(forward, input gradient, weight gradient) by layer: the first without probes, the second with recomputation."""
    forward_only: Sequence[Seconds]
    """The forward of each layer in a probe, which keeps nothing for a backward, by layer."""
    probes: Seconds
    """The seconds that probes add to the forward through all layers."""

    def times(self, first: int, stop: int, *, is_probe: bool = False) -> tuple[Seconds, Seconds, Seconds]:
        """(forward, input gradient, weight gradient) in seconds of a stage with layers `first`, ..., `stop` - 1.

        With `is_probe` the forward is one that keeps nothing for a backward, and the gradients have no meaning.
        """
        forward, input_grad, weight_grad = self.layers  # summed anew: differences of running sums would round
        forward = self.forward_only if is_probe else forward
        return sum(forward[first:stop]), sum(input_grad[first:stop]), sum(weight_grad[first:stop])

    def steps(self) -> tuple[Seconds, ...]:
        """The seconds of forward and backward together, by layer."""
        both = [f + b for f, b in zip(self.forward, self.backward, strict=True)]
        return tuple(after - before for before, after in pairwise(both))


@dataclass(frozen=True, kw_only=True)
class LayerTable:
    """Sums of times and bytes over ranges of the trained part's layers, made of a profile and a workload."""

    profile: Profile
    workload: Workload
    owners: int = 1
    """The number of copies that hold the optimizer's states and averages in parts; 1: each holds all."""
    _sums: dict[tuple[float, float | None], LayerSums] = field(default_factory=dict, repr=False, compare=False)
    _workspace: dict[float, tuple[Bytes, ...]] = field(default_factory=dict, repr=False, compare=False)
    _kept: dict[float, tuple[Bytes, ...]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the trained part's layers, in order."""
        return self.profile.graph.backbone_layers

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The specifications of the trained part's layers, in order."""
        of_name = {layer.name: layer for layer in self.profile.graph.layers}
        return tuple(of_name[name] for name in self.names)

    @cached_property
    def _position(self) -> Mapping[str, int]:
        return {name: position for position, name in enumerate(self.names)}

    def range_of(self, layers: Sequence[str]) -> tuple[int, int]:
        """(position of the first of these layers, position after the last); they must follow each other."""
        first = self._position[layers[0]] if layers else 0
        assert self.names[first : first + len(layers)] == tuple(layers), "a stage's layers follow each other"
        return first, first + len(layers)

    @cached_property
    def checkpointed(self) -> frozenset[str]:
        """The names of the layers that are recomputed in the backward."""
        return checkpointed_layers(self.workload, self.names)

    def sums(self, samples: float, microbatches: float | None = None) -> LayerSums:
        """The sums of times and bytes for one of `microbatches` micro-batches of `samples` samples; each is made once.

        Weights are cast once in an iteration, which counts in equal parts in the forwards of all its micro-batches;
        weights of recomputed layers are cast in every forward. None: casts are left out.
        """
        key = samples, microbatches
        if key not in self._sums:
            forward = [self._forward(name, samples, microbatches) for name in self.names]
            forward_only = [self._forward_only(name, samples, microbatches) for name in self.names]
            input_grad = [self._input_grad(name, samples, microbatches) for name in self.names]
            weight_grad = [self.profile.weight_grad(name, samples) for name in self.names]
            probes = [self._probe(name, samples, microbatches) for name in self.names]
            self._sums[key] = LayerSums(
                forward=tuple(accumulate(map(add, forward, probes), initial=0.0)),
                backward=tuple(accumulate(map(add, input_grad, weight_grad), initial=0.0)),
                layers=(forward, input_grad, weight_grad),
                forward_only=forward_only,
                probes=sum(probes),
                activation=tuple(accumulate((self._activation(layer, samples) for layer in self.layers), initial=0)),
            )
        return self._sums[key]

    def _forward(self, name: str, samples: float, microbatches: float | None) -> Seconds:
        return self.profile.forward(name, samples) + self._casting(name, microbatches)

    def _forward_only(self, name: str, samples: float, microbatches: float | None) -> Seconds:
        return self.profile.forward_only(name, samples) + self._casting(name, microbatches)

    def _casting(self, name: str, microbatches: float | None) -> Seconds:
        """The seconds of casting a layer's weights that count in one of `microbatches` forwards; None: 0."""
        if microbatches is None:
            return 0.0
        return self.workload.cast_time(self.profile.layer(name)) / (1 if name in self.checkpointed else microbatches)

    @cached_property
    def _probed(self) -> Mapping[str, float]:
        """Layer -> the share of the samples for which its forward runs a second time, without gradients."""
        graph, shares = self.profile.graph, dict(self.profile.graph.probes)
        return {
            name: float(shares[backbone.name])
            for backbone in graph.backbones
            if backbone.name in shares
            for name in graph.layers_of(backbone)
        }

    def _probe(self, name: str, samples: float, microbatches: float | None) -> Seconds:
        """The seconds that a layer's probe adds to a forward on average; only recomputed layers cast weights in it."""
        casts = self.workload.cast_time(self.profile.layer(name)) if microbatches and name in self.checkpointed else 0.0
        return self._probed.get(name, 0.0) * (self.profile.forward_only(name, samples) + casts)

    @cached_property
    def casts(self) -> tuple[Seconds, ...]:
        """Running sums over layers of the seconds of casting each layer's weights once."""
        return self._running(lambda name: self.workload.cast_time(self.profile.layer(name)))

    def host(self, first: int, stop: int) -> HostTimes:
        """The seconds in which a host issues layers `first`, ..., `stop` - 1; recomputed forwards count twice."""
        forward, input_grad, weight_grad = (sums[stop] - sums[first] for sums in self._hosts)
        return HostTimes(forward=forward, input_grad=input_grad, weight_grad=weight_grad)

    @cached_property
    def _hosts(self) -> tuple[tuple[Seconds, ...], ...]:
        """(forwards, input gradients, weight gradients): running sums over layers of the host's seconds for each."""
        hosts = {name: self.profile.layer(name).host for name in self.names}
        return (
            self._running(lambda name: hosts[name].forward),
            self._running(lambda name: hosts[name].input_grad + hosts[name].forward * (name in self.checkpointed)),
            self._running(lambda name: hosts[name].weight_grad),
        )

    @cached_property
    def copies(self) -> tuple[Bytes, ...]:
        """Running sums over layers of the bytes of narrow copies of weights that last for an iteration."""
        sizes = (copies_of(name, self.profile, self.workload, self.checkpointed) for name in self.names)
        return tuple(accumulate(sizes, initial=0))

    def _running(self, cost: Callable[[str], float]) -> tuple[float, ...]:
        return tuple(accumulate((cost(name) for name in self.names), initial=0.0))

    def _input_grad(self, name: str, samples: float, microbatches: float | None) -> Seconds:
        # The forward that comes again delays the gradient of the inputs, not the one of the weights.
        again = self._forward(name, samples, microbatches) if name in self.checkpointed else 0.0
        return again + self.profile.input_grad(name, samples)

    def _activation(self, layer: LayerSpec, samples: float) -> Bytes:
        return 0 if layer.name in self.checkpointed else self.profile.activation(layer.name, samples)

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Running sums over layers of the count of trained numbers; a tied parameter counts at its first layer."""
        return self._running_sizes({p.name: prod(p.shape) for p in self.profile.graph.parameters if p.is_trainable})

    @cached_property
    def frozen(self) -> tuple[int, ...]:
        """Running sums over the trained part's layers of the count of frozen numbers."""
        return self._running_sizes({p.name: prod(p.shape) for p in self._frozen})

    @cached_property
    def ledger(self) -> Ledger:
        """The ledger with the bytes of each parameter of the model in training with this workload."""
        return Ledger(graph=self.profile.graph, workload=self.workload)

    def largest(self, first: int, stop: int) -> Held:
        """The bytes, item by item, of the largest trained parameter of layers `first`, ..., `stop` - 1.

        Parameters are never divided, so one copy has it whole.
        """
        return max(self._largest[first:stop], key=lambda one: one.on_device)

    @cached_property
    def _largest(self) -> tuple[Held, ...]:
        """The bytes, item by item, of each layer's largest trained parameter, by layer; zeros if it has none."""
        trained = self.ledger.trained
        own = ([trained[name] for name in layer.parameters if name in trained] for layer in self.layers)
        return tuple(max(sizes, key=lambda one: one.on_device, default=Held()) for sizes in own)

    def __getstate__(self) -> dict[str, object]:
        """The fields alone, for pickle: values computed from them include functions, which cannot be pickled."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @cached_property
    def held(self) -> Callable[[int, int], Held]:
        """A function (first, stop) -> bytes by item of the trained parameters of layers `first`, ..., `stop` - 1.

        Gradients, optimizer states and averages are items too. If copies hold states in parts, it is an equal part of
        the states. Each range is added up once.
        """
        trained, owners = self.ledger.trained, self.owners
        columns = zip(*trained.values(), strict=True) if trained else [()] * len(Held())
        sums = [self._running_sizes(dict(zip(trained, column, strict=True))) for column in columns]
        running = tuple(map(Held._make, zip(*sums, strict=True)))

        def held(first: int, stop: int) -> Held:
            found = running[stop].minus(running[first])
            return found if owners == 1 else found.in_parts(owners)

        return lru_cache(maxsize=None)(held)

    @cached_property
    def frozen_bytes(self) -> tuple[Bytes, ...]:
        """Running sums over the trained part's layers of the bytes of their frozen parameters."""
        return self._running_sizes(self.ledger.frozen)

    @cached_property
    def gathered_bytes(self) -> tuple[Bytes, ...]:
        """Running sums over layers of the bytes of their parameters as they are gathered from their owners."""
        ledger, precision = self.ledger, self.profile.precision
        return self._running_sizes({p.name: ledger.gathered(p, precision) for p in ledger.graph.parameters})

    @property
    def _frozen(self) -> list[ParameterSpec]:
        return [p for p in self.profile.graph.parameters if not p.is_trainable]

    def _running_sizes(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Running sums over layers of the sizes of their parameters; a tied one counts at its first layer.

        `sizes`: parameter -> its size.
        """
        seen: set[str] = set()
        found = [0]
        for layer in self.layers:
            # Parameters that an earlier layer has counted are the same numbers.
            new = {name for name in layer.parameters if name in sizes} - seen
            seen |= new
            found.append(found[-1] + sum(sizes[name] for name in new))
        return tuple(found)

    @cached_property
    def crossing(self) -> tuple[tuple[Bytes, Bytes], ...]:
        """(bytes of one sample that cross a cut forward, bytes of gradients back), by cut; cut l is before layer l.

        A tensor crosses every cut between the layer that writes it and the last that reads it, each one once: the skips
        of a U-Net count at every cut below their arc. Frozen tensors and raw inputs cross no cut.
        """
        written = {name: i for i, layer in enumerate(self.layers) for name in layer.writes}
        last = {name: i for i, layer in enumerate(self.layers) for name in layer.reads if name in written}
        cuts = [[0, 0] for _ in range(len(self.layers) + 1)]
        for name, stop in last.items():
            tensor = self.profile.graph.tensor(name)
            for cut in range(written[name] + 1, stop + 1):
                cuts[cut][0] += tensor.num_bytes
                cuts[cut][1] += tensor.num_bytes if tensor.needs_gradient else 0
        return tuple((forward, backward) for forward, backward in cuts)

    @cached_property
    def passed(self) -> tuple[tuple[Bytes, Bytes], ...]:
        """(forward, back) bytes of one sample that the layer before a cut sends to the layer after it, by cut.

        These tensors cross the cut for any stages around it, and not before the stage before it is done.
        """
        found = [(0, 0)] * (len(self.layers) + 1)
        # Only a reader right after the cut: others may be on the same stage, or be reached later.
        for writer, readers, forward, backward in self._readers:
            if writer + 1 in readers:
                ahead, back = found[writer + 1]
                found[writer + 1] = ahead + forward, back + backward
        return tuple(found)

    @cached_property
    def held_bytes(self) -> tuple[tuple[Bytes, ...], ...]:
        """A table: entry [first][stop] has the bytes of one sample that layers hold for the backward.

        The layers are first, ..., stop - 1. The bytes count besides `LayerSums.activation`: tensors that the layers
        read from other trained layers, and tensors that a recomputed layer writes for another.
        """
        graph, table = self.profile.graph, []
        for first in range(len(self.layers) + 1):
            row, held = [0] * (first + 1), set[str]()
            outside = trained_reads(graph, self.names[first:])
            for layer in self.layers[first:]:
                new = outside.intersection(layer.reads)
                if layer.name in self.checkpointed:
                    # Outputs of a recomputed layer are kept as inputs of their readers.
                    new |= graph.read_tensors.intersection(layer.writes)
                row.append(row[-1] + sum(graph.tensor(name).num_bytes for name in new - held))
                held |= new
            table.append(tuple(row))
        return tuple(table)

    @cached_property
    def frozen_reads(self) -> tuple[tuple[Bytes, ...], ...]:
        """A table: entry [first][stop] has the bytes of a sample's frozen and raw tensors that layers read.

        The layers are first, ..., stop - 1.
        """
        graph = self.profile.graph
        own = {name for layer in self.layers for name in layer.writes}
        table = []
        for first in range(len(self.layers) + 1):
            row, seen = [0] * (first + 1), set[str]()
            for layer in self.layers[first:]:
                new = set(layer.reads) - own - seen
                seen |= new
                row.append(row[-1] + sum(graph.tensor(name).num_bytes for name in new))
            table.append(tuple(row))
        return tuple(table)

    @cached_property
    def _readers(self) -> tuple[tuple[int, tuple[int, ...], Bytes, Bytes], ...]:
        """(layer that writes, layers that read, bytes of a sample, bytes of its gradient) of tensors between layers."""
        written = {name: i for i, layer in enumerate(self.layers) for name in layer.writes}
        readers: dict[str, list[int]] = {}
        for i, layer in enumerate(self.layers):
            for name in dict.fromkeys(layer.reads):
                if name in written:
                    readers.setdefault(name, []).append(i)
        tensors = [self.profile.graph.tensor(name) for name in readers]
        return tuple(
            (written[t.name], tuple(readers[t.name]), t.num_bytes, t.num_bytes if t.needs_gradient else 0)
            for t in tensors
        )

    def flows(self, starts: Sequence[int]) -> dict[tuple[int, int], tuple[Load, Load]]:
        """(producer, consumer) -> (load forward, load of the gradients back), between stages with these first layers.

        A load is (bytes of one sample, number of tensors). Stages that exchange nothing are left out.
        """
        found: dict[tuple[int, int], tuple[Load, Load]] = {}
        for writer, readers, forward, backward in self._readers:
            source = bisect_right(starts, writer) - 1
            for target in dict.fromkeys(bisect_right(starts, reader) - 1 for reader in readers):
                if target != source:
                    (ahead, tensors), (back, gradients) = found.get((source, target), ((0, 0), (0, 0)))
                    found[source, target] = (
                        (ahead + forward, tensors + 1),
                        (back + backward, gradients + (backward > 0)),
                    )
        return dict(sorted(found.items()))

    def workspace(self, first: int, stop: int, samples: float) -> Bytes:
        """The most temporary bytes that one of layers `first`, ..., `stop` - 1 needs on `samples` samples.

        A recomputed layer also needs all that it would keep otherwise.
        """
        if samples not in self._workspace:
            self._workspace[samples] = tuple(
                workspace_of(name, samples, self.profile, self.workload, self.checkpointed) for name in self.names
            )
        return max(self._workspace[samples][first:stop])

    def activation(self, first: int, stop: int, samples: float) -> Bytes:
        """Bytes that layers `first`, ..., `stop` - 1 keep for the backward of one micro-batch of `samples` samples."""
        sums = self.sums(samples).activation
        return sums[stop] - sums[first] + round(samples * self.held_bytes[first][stop])

    def kept(self, first: int, stop: int, samples: float) -> Bytes:
        """Bytes that layers `first`, ..., `stop` - 1 keep between op I and op W of one micro-batch.

        Recomputed layers count too.
        """
        if samples not in self._kept:
            self._kept[samples] = tuple(accumulate((self.profile.kept(n, samples) for n in self.names), initial=0))
        sums = self._kept[samples]
        return sums[stop] - sums[first] + round(samples * self._kept_reads[first][stop])

    @cached_property
    def _kept_reads(self) -> tuple[tuple[Bytes, ...], ...]:
        """A table: entry [first][stop] has the bytes of one sample's tensors that layers read and that W reads again.

        The layers are first, ..., stop - 1. Each tensor counts once. Tensors of the frozen part and raw inputs are held
        anyway and do not count.
        """
        graph, table = self.profile.graph, []
        reads = [frozenset(self.profile.kept_reads(name)) - graph.frozen_tensors for name in self.names]
        for first in range(len(self.layers) + 1):
            row, held = [0] * (first + 1), set[str]()
            for own in reads[first:]:
                row.append(row[-1] + sum(graph.tensor(name).num_bytes for name in own - held))
                held |= own
            table.append(tuple(row))
        return tuple(table)


def trained_reads(graph: ModelGraph, layers: Collection[str]) -> frozenset[str]:
    """The names of the tensors that these layers read from other trained layers."""
    return frozenset(graph.reads_of(layers)) - graph.frozen_tensors


def checkpointed_layers(workload: Workload, names: tuple[str, ...]) -> frozenset[str]:
    """The layers of `names` that are recomputed: a pattern of the workload (as of file names) matches them."""
    return frozenset(n for n in names if any(fnmatchcase(n, pattern) for pattern in workload.checkpointed))
