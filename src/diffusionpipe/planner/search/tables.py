"""Sums that all candidates of one setting share: over its layers, its arrangements, and its frozen work."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate

from diffusionpipe.costs import Profile
from diffusionpipe.ir import Range
from diffusionpipe.planner.assembly.buckets import bucket_starts
from diffusionpipe.planner.filling.frozen_layers import FillOptions, frozen_layers
from diffusionpipe.planner.filling.shares import seconds_a_sample
from diffusionpipe.planner.pricing.arrangement import Arrangement, RankLayout
from diffusionpipe.planner.pricing.collectives import rooted
from diffusionpipe.planner.pricing.copied import CopiedProfile, computing
from diffusionpipe.planner.pricing.encoders import (
    Needs,
    components_of,
    encode_chunks_of,
    kept_for_others,
    needs_of,
)
from diffusionpipe.planner.pricing.layer_table import LayerTable
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import frozen_time
from diffusionpipe.planner.search.branch_order import part_in_a_row, tree_of_branches
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.series_parallel import Tree, listed
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, kw_only=True)
class FrozenWork:
    """A range of layers of the frozen block, with their times on a device of speed 1."""

    names: tuple[str, ...]
    profile: Profile

    @cached_property
    def host(self) -> Seconds:
        """The seconds in which a host issues these layers."""
        return sum(self.profile.layer(name).host.forward for name in self.names)

    @cached_property
    def seconds(self) -> Callable[[int], Seconds]:
        """A function from a number of samples to the seconds of these layers."""
        return lru_cache(maxsize=None)(lambda samples: frozen_time(self.profile, self.names, samples))


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The sums and functions that are made once for all candidates of a setting."""

    setting: Setting

    @property
    def table(self) -> LayerTable:
        """The sums of times and bytes over ranges of the trained part's layers."""
        return self.setting.table

    @cached_property
    def num_layers(self) -> int:
        """The number of layers of the trained part."""
        return len(self.table.names)

    @cached_property
    def tree(self) -> Tree | None:
        """The tree of the trained layers, if branches may gain and layers are listed branch by branch; else None."""
        tree = tree_of_branches(self.setting)
        return tree if tree is not None and listed(tree) == tuple(range(self.num_layers)) else None

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """The position of each backbone's first layer among the trained layers, then the number of trained layers."""
        graph = self.setting.graph
        return tuple(accumulate((len(graph.layers_of(backbone)) for backbone in graph.backbones), initial=0))

    @cached_property
    def ground(self) -> Callable[[Arrangement], RankLayout]:
        """A function from an arrangement to its layout on the setting's cluster; each is made once."""
        return lru_cache(maxsize=None)(lambda a: RankLayout(arrangement=a, cluster=self.setting.cluster))

    @cached_property
    def encoders(self) -> list[tuple[Sequence[str], int]]:
        """(layers, samples that go through them at a time) of each frozen component."""
        chunks = encode_chunks_of(self.setting)
        return [(layers, chunks[name]) for name, layers in components_of(self.setting.graph).items()]

    @cached_property
    def frozen_seconds(self) -> Seconds:
        """The seconds of frozen work for one rank's equal share of the batch, in chunks, on the slowest device."""
        return self._equal_share(self.encoding)

    @cached_property
    def frozen_seconds_ahead(self) -> Seconds:
        """Seconds of frozen work for a rank's equal share of the batch on the slowest device.

        Waits for weights are left out, because copies of the model hide them.
        """
        return self._equal_share(self.encoding_ahead)

    def _equal_share(self, encoding: Callable[[int], Seconds]) -> Seconds:
        cluster = self.setting.cluster
        rows = -(-self.setting.workload.batch // cluster.num_ranks)
        return encoding(rows) / min(device.speed for device in cluster.devices)

    @cached_property
    def encoding(self) -> Callable[[int], Seconds]:
        """A function from a number of samples to the seconds of their frozen work, with the start of each fill.

        In chunks, on a device of speed 1.
        """
        return self._encoding(self.setting.profile.forward)

    @cached_property
    def encoding_ahead(self) -> Callable[[int], Seconds]:
        """A function like `encoding`, but without waits for weights that come from host memory."""
        if not isinstance(self.setting.profile, CopiedProfile):
            return self.encoding
        return self._encoding(partial(computing, self.setting.profile))

    @cached_property
    def computing(self) -> Callable[[int], Seconds]:
        """A function from a number of samples to seconds of the frozen layers' compute on a device of speed 1.

        Starts of fills and waits for weights in host memory are left out.
        """
        return self._encoding(partial(computing, self.setting.profile), start=0.0)

    def _encoding(
        self, forward: Callable[[str, float], Seconds], start: Seconds | None = None
    ) -> Callable[[int], Seconds]:
        start = self.setting.fill_start if start is None else start

        def seconds(rows: int) -> Seconds:
            total = 0.0
            for layers, chunk in self.encoders:
                whole, rest = divmod(rows, chunk)
                total += whole * (start + sum(forward(name, chunk) for name in layers))
                total += start * (rest > 0) + sum(forward(name, rest) for name in layers)  # no samples take no time
            return total

        return lru_cache(maxsize=None)(seconds)

    @cached_property
    def frozen_outputs(self) -> Callable[[int, int], tuple[str, ...]]:
        """A function (first, stop) -> the frozen tensors that layers first, ..., stop - 1 read."""
        graph, names = self.setting.graph, self.table.names
        return lru_cache(maxsize=None)(lambda first, stop: graph.frozen_outputs(names[first:stop]))

    @cached_property
    def needs(self) -> Callable[[int], Needs]:
        """A function from a number of samples to the memory that the frozen layers need to encode them."""
        return lru_cache(maxsize=None)(lambda batch: needs_of(self.setting, batch))

    @cached_property
    def kept_for_others(self) -> Callable[[tuple[tuple[int, int], ...]], Bytes]:
        """A function from a worker's spans of layers to the bytes of a sample that it holds only because it encodes."""
        graph = self.setting.graph
        return lru_cache(maxsize=1 << 14)(
            lambda spans: kept_for_others(graph, {name for span in spans for name in self.frozen_outputs(*span)})
        )

    @cached_property
    def seconds_a_sample(self) -> Callable[[int, bool], Seconds]:
        """A function (samples of a fill, whether waits for weights are left out) -> seconds of frozen work a sample.

        The seconds are of a device of speed 1; the waits are for weights that come from the host.
        """
        setting, profile = self.setting, self.setting.profile
        options = FillOptions(overhead=setting.fill_start)
        ahead = replace(frozen_layers(profile), forward=self._computing_layer)
        known = {False: frozen_layers(profile), True: ahead}
        return lru_cache(maxsize=None)(lambda chunk, is_ahead: seconds_a_sample(known[is_ahead], options, chunk))

    def _computing_layer(self, layer: int, samples: int) -> Seconds:
        return computing(self.setting.profile, self.setting.graph.frozen_layers[layer], samples)

    @cached_property
    def frozen_outputs_bytes(self) -> dict[str, Bytes]:
        """Name of each frozen tensor that trained layers read -> its bytes for one sample."""
        return {name: self.setting.graph.tensor(name).num_bytes for name in self.frozen_outputs(0, self.num_layers)}

    @cached_property
    def frozen_work(self) -> Callable[[Range], FrozenWork]:
        """A function from a range of the frozen block's layers to their work; each is made once."""
        names, profile = self.setting.graph.frozen_layers, self.setting.profile
        return lru_cache(maxsize=None)(lambda r: FrozenWork(names=names[r.start : r.stop], profile=profile))

    def reduction(self, ground: RankLayout, first: int, stop: int, units: Sequence[int]) -> Seconds:
        """The seconds of the sum of the gradients of layers `first`, ..., `stop` - 1 over all groups of these units."""
        num_bytes = self.table.held(first, stop).gradients
        rate, holders = ground.reduction(units)
        return rate.seconds(num_bytes, holders) if num_bytes else 0.0

    def at_owners(self, ground: RankLayout, first: int, stop: int, units: Sequence[int]) -> tuple[Seconds, Seconds]:
        """(seconds in which these layers' gradients go to their owners, seconds in which parameters come back)."""
        held, ranks, cluster = self.table.held(first, stop), ground.ranks(units), self.setting.cluster
        # Parameters are about equally divided over the owners.
        gradients, parameters = (
            rooted(cluster, [size // len(ranks)] * len(ranks), ranks) for size in (held.gradients, held.parameters)
        )
        return gradients, parameters

    def unit_samples(self, arrangement: Arrangement, microbatches: int) -> float:
        """The number of samples of a micro-batch of one group, in a stage of one unit."""
        return self.setting.workload.batch / (arrangement.data_parallel * microbatches)

    def least_times(self, arrangement: Arrangement, microbatches: int) -> tuple[Seconds, Seconds]:
        """(least compute of a unit, its least wait in a pipeline of stages of one unit each), in seconds.

        One micro-batch passes all stages and comes back, and the stage with the most work does that for all the others.
        """
        sums = self.table.sums(self.unit_samples(arrangement, microbatches), microbatches)
        whole = sums.forward[-1] + sums.backward[-1]
        speeds = self.ground(arrangement).speeds
        once = whole - sums.probes  # probes come before the ramp, or in it
        if self.tree is not None:
            once *= part_in_a_row(self.setting)
        # The wait is the ramp less its share of the work.
        return microbatches * whole / sum(speeds), once / max(speeds) - once / sum(speeds)

    @cached_property
    def gradient_edges(self) -> tuple[tuple[int, ...], ...]:
        """The earlier trained layers to which each trained layer sends a gradient, by layer."""
        graph = self.setting.graph
        writer = {name: number for number, layer in enumerate(self.table.layers) for name in layer.writes}
        return tuple(
            tuple(writer[name] for name in layer.reads if name in writer and graph.tensor(name).needs_gradient)
            for layer in self.table.layers
        )

    @cached_property
    def least_work(self) -> Callable[[float], Seconds]:
        """A function from the samples of a micro-batch to the least seconds of one sample through all trained layers.

        Replicas of a stage share a micro-batch, so a layer may run on any part of it, and its cheapest part counts.
        """

        def seconds(samples: float) -> Seconds:
            # What a layer takes for a sample is least at one of the sizes of its profile, or at the largest part.
            sizes = {samples, *(n for n in self.setting.profile.batch_sizes if n < samples)}
            rates = [[step / size for step in self.table.sums(size).steps()] for size in sizes]
            return sum((min(own) for own in zip(*rates, strict=True)), start=0.0)

        return lru_cache(maxsize=None)(seconds)

    @cached_property
    def least_encoding(self) -> Seconds:
        """The least seconds of frozen work for one sample, on a device of speed 1."""
        profile = self.setting.profile
        return sum(
            min(computing(profile, name, size) / size for size in profile.batch_sizes)
            for layers, _ in self.encoders
            for name in layers
        )

    def block_starts(self, candidate: Candidate) -> tuple[int, ...]:
        """The first layer of each block of a candidate, after its stages were cut into buckets as in `build_plan`."""
        if candidate.buckets == 1:
            return candidate.starts
        trained = self.table.trained
        stops = (*candidate.starts[1:], self.num_layers)
        return tuple(
            first + start
            for first, stop in zip(candidate.starts, stops, strict=True)
            for start in bucket_starts([trained[i + 1] - trained[i] for i in range(first, stop)], candidate.buckets)
        )
