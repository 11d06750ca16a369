"""How many bytes a candidate's units hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from diffusionpipe.ir import Schedule
from diffusionpipe.planner.assembly.structure import Holding, generated, holding_of
from diffusionpipe.planner.pricing.encoders import frozen_workspace
from diffusionpipe.planner.pricing.offload import encoder_bytes
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.tables import Tables
from diffusionpipe.units import Bytes


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Peak memory of candidates of one setting; what several of them share is made once."""

    tables: Tables

    @cached_property
    def frozen_bytes(self) -> Bytes:
        """Of the frozen components on every rank that runs them."""
        return encoder_bytes(self.tables.setting)

    @cached_property
    def frozen_workspace(self) -> Bytes:
        """The most that one frozen layer needs while a chunk runs through it."""
        rows = -(-self.tables.setting.workload.batch // self.tables.setting.cluster.num_ranks)
        return max(
            (frozen_workspace(self.tables.setting, layers, min(rows, chunk)) for layers, chunk in self.tables.encoders),
            default=0,
        )

    def stage_bytes(
        self, first: int, stop: int, samples: float, microbatches: int, in_flight: int, *, is_host: bool = True
    ) -> Bytes:
        """Peak memory of a rank that holds these layers, but for its message buffers; a host also encodes."""
        return self.unit_bytes([(first, stop, microbatches)], [(in_flight,)], samples, is_host=is_host)

    def unit_bytes(
        self,
        stages: Sequence[tuple[int, int, int]],
        peaks: Sequence[Sequence[int]],
        samples: float,
        *,
        is_host: bool = True,
    ) -> Bytes:
        """The same of a rank with these stages: first layer, the layer behind the last, micro-batches of each.

        `peaks` are numbers of micro-batches whose activations it holds at the same time, stage by stage.
        """
        table, workload = self.tables.table, self.tables.setting.workload
        blocks = dict.fromkeys((first, stop) for first, stop, _ in stages)  # two directions may share one
        weights = sum(
            (table.trained[stop] - table.trained[first]) * workload.bytes_per_trained
            + (table.frozen_bytes[stop] - table.frozen_bytes[first])
            + (table.copies[stop] - table.copies[first])
            for first, stop in blocks
        )
        kept = [table.activation(first, stop, samples) for first, stop, _ in stages]
        reads = sum(
            round(samples * microbatches * table.frozen_reads[first][stop]) for first, stop, microbatches in stages
        )
        return (
            weights
            + is_host * self.frozen_bytes
            + max(sum(number * one for number, one in zip(peak, kept, strict=True)) for peak in peaks)
            + max(is_host * self.frozen_workspace, *(table.workspace(first, stop, samples) for first, stop in blocks))
            + reads
        )

    def fits(self, candidate: Candidate) -> bool:
        """Whether it fits in memory, without the simulation of an estimate."""
        return self.overflow(candidate, self.held(candidate)) <= 0

    def overflow(self, candidate: Candidate, held: Sequence[Bytes]) -> Bytes:
        """By how much the fullest device is too small for what units hold; negative: what is left."""
        memories = self.tables.ground(candidate.arrangement).memories
        return max(one - memory for one, memory in zip(held, memories, strict=True))

    def held(self, candidate: Candidate) -> tuple[Bytes, ...]:
        """Peak memory of each unit."""
        samples = self.tables.unit_samples(candidate.arrangement, candidate.microbatches)
        holding = self._holding(candidate.orders or candidate.schedule, candidate.workers, candidate.microbatches)
        spans = list(zip(candidate.starts, (*candidate.starts[1:], self.tables.num_layers), strict=True))
        held: list[Bytes] = []
        for worker, count in enumerate(candidate.replicas):
            is_host = are_hosts(candidate.hosts, len(held), count)
            own = [(*spans[block], microbatches) for block, microbatches in holding.blocks[worker]]
            held += [self.unit_bytes(own, holding.peaks[worker], samples / count, is_host=is_host)] * count
        return tuple(held)

    @cached_property
    def _holding(self) -> Callable[[Schedule | str, int, int], Holding]:
        return lru_cache(maxsize=1024)(_holding)


def _holding(schedule: Schedule | str, workers: int, microbatches: int) -> Holding:
    return holding_of(generated(schedule, workers, microbatches, 1) if isinstance(schedule, str) else schedule)


def are_hosts(hosts: tuple[int, ...] | None, unit: int, count: int) -> bool:
    """Whether one of these units holds the frozen layers."""
    return hosts is None or any(unit <= host < unit + count for host in hosts)
