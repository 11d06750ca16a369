"""Counts the bytes that a candidate's units hold, from sums over ranges of layers.

The items are the same as in `timing.memory`, and so is the need of a layer. Parameters and all that counts with them,
copies and the workspace of trained layers are exact. The rest is known only of a plan, and counts so:

    states in parts   an equal part; at least the states of the largest parameter, which one copy has whole
    encoders          every host holds all of them, and encodes an equal share of the batch while nothing else is there
    activations       at their own peak, with messages or without; a unit with several stages also counts the tensors
                      that one of them reads of another; where the backward is split, those that W needs from I on
    messages          none: as many as two may wait while activations peak, but which is known of no order before it
                      is timed, and a guess too high would lose plans that fit
    frozen outputs    of one batch those that the unit's stages read, and raw inputs of an equal share; not the next
                      one's, nor those that it encodes for others
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import mul

from diffusionpipe.holding.memory import MemoryUse, use_of
from diffusionpipe.ir import Schedule, Sharded
from diffusionpipe.planner.assembly.structure import Holding, generated, holding_of
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.encoders import frozen_workspace
from diffusionpipe.planner.pricing.storing import encoder_bytes
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.tables import Tables
from diffusionpipe.units import Bytes

_Stage = tuple[int, int, int, float]
"""(first layer of a stage, layer after its last, micro-batches, samples of each)."""
Beside = tuple[Sequence[Bytes], Sequence[Bytes]]
"""(bytes of two messages of each unit, bytes of activations that each unit holds while it waits), by unit."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """A counter of the peak memory of candidates of one setting, which keeps parts that several of them share."""

    tables: Tables

    @cached_property
    def frozen_bytes(self) -> Bytes:
        """The bytes of the frozen part's weights on a rank that runs the frozen part."""
        return encoder_bytes(self.tables.setting)

    @cached_property
    def frozen_workspace(self) -> Bytes:
        """The most bytes that frozen layers hold while a chunk runs through them."""
        rows = -(-self.tables.setting.workload.batch // self.tables.setting.cluster.num_ranks)
        return max(
            (frozen_workspace(self.tables.setting, layers, min(rows, chunk)) for layers, chunk in self.tables.encoders),
            default=0,
        )

    @cached_property
    def raw_inputs(self) -> Bytes:
        """The bytes of raw inputs that frozen layers alone read, for a host's equal share of the batch."""
        setting = self.tables.setting
        graph, rows = setting.graph, -(-setting.workload.batch // setting.cluster.num_ranks)
        return rows * sum(graph.tensor(n).num_bytes for n in {*graph.inputs} - {*graph.reads_of(graph.backbone_layers)})

    def may_fit(self, arrangement: Arrangement, *, times: int = 1) -> bool:
        """Whether a pipeline's devices have room for `times` times its parameters and states."""
        table = self.tables.table
        held = use_of(table.held(0, self.tables.num_layers), frozen=table.frozen_bytes[-1])
        return times * held.total <= sum(self.tables.ground(arrangement).memories)

    def stage_bytes(
        self, first: int, stop: int, samples: float, microbatches: int, in_flight: int, *, is_host: bool = True
    ) -> Bytes:
        """The peak bytes of a rank with layers `first`, ..., `stop` - 1 and `in_flight` micro-batches in flight.

        `samples`: the samples of a micro-batch. `microbatches`: their number in an iteration. `is_host`: the rank also
        encodes.
        """
        return self._stage_bytes(first, stop, samples, microbatches, in_flight, is_host)

    @cached_property
    def _stage_bytes(self) -> Callable[[int, int, float, int, int, bool], Bytes]:
        """The function that `stage_bytes` calls; it keeps results, as the same stage is asked for on many devices."""

        def stage_bytes(
            first: int, stop: int, samples: float, microbatches: int, in_flight: int, is_host: bool
        ) -> Bytes:
            return self._used(((first, stop, microbatches, samples),), ((in_flight, 0),), is_host).total

        return lru_cache(maxsize=1 << 16)(stage_bytes)

    def use(
        self,
        stages: Sequence[_Stage],
        peaks: Sequence[Sequence[int]],
        *,
        is_host: bool = True,
    ) -> MemoryUse:
        """The memory of a rank with these stages at its peak, item by item.

        A stage is (first layer, layer after the last, micro-batches, samples of each).

        `peaks` are numbers of micro-batches whose activations it holds at the same time, and of micro-batches of which
        it holds the tensors for W, stage by stage (`Holding.peaks`).
        """
        return self._use(tuple(stages), tuple(map(tuple, peaks)), is_host)

    @cached_property
    def _use(self) -> Callable[[tuple[_Stage, ...], tuple[tuple[int, ...], ...], bool], MemoryUse]:
        """The function that `use` calls; it keeps results, as ranks that a moved cut does not touch are asked again."""
        return lru_cache(maxsize=1 << 14)(self._used)

    def _used(self, stages: tuple[_Stage, ...], peaks: tuple[tuple[int, ...], ...], is_host: bool) -> MemoryUse:
        table, held, copies = self.tables.table, self.tables.setting.ledger.base, 0
        frozen, encoding, raw = (self.frozen_bytes, self.frozen_workspace, self.raw_inputs) if is_host else (0, 0, 0)
        for first, stop in dict.fromkeys(stage[:2] for stage in stages):  # two directions may share one
            held = held.plus(table.held(first, stop))
            frozen += table.frozen_bytes[stop] - table.frozen_bytes[first]
            copies += table.copies[stop] - table.copies[first]
        if table.owners > 1:
            largest = max((table.largest(*stage[:2]) for stage in stages), key=lambda one: one.on_device)
            held = held.at_least(self.tables.setting.ledger.base.plus(largest))
        kept = [
            num_bytes
            for first, stop, _, samples in stages
            for num_bytes in (table.activation(first, stop, samples), table.kept(first, stop, samples))
        ]
        activations = max(sum(map(mul, peak, kept)) for peak in peaks)
        workspace = max(table.workspace(first, stop, samples) for first, stop, _, samples in stages)
        return use_of(
            held,
            frozen=frozen,
            copies=copies,
            activations=activations,
            # While encoders run, no activations are held (see the module's docstring): only the bytes beyond the
            # activations count.
            workspace=max(workspace, encoding - activations),
            frozen_outputs=raw + sum(round(s * n * table.frozen_reads[first][stop]) for first, stop, n, s in stages),
        )

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate fits in memory, without a simulation."""
        return self.overflow(candidate, self.held(candidate)) <= 0

    def overflow(self, candidate: Candidate, held: Sequence[Bytes]) -> Bytes:
        """The bytes that the fullest device lacks for this memory of its units; negative: bytes that are left."""
        memories = self.tables.ground(candidate.arrangement).memories
        return max(one - memory for one, memory in zip(held, memories, strict=True))

    def held(self, candidate: Candidate) -> tuple[Bytes, ...]:
        """The peak bytes of each unit of a candidate, by unit."""
        return tuple(use.total for use in self.uses(candidate))

    def uses(self, candidate: Candidate) -> tuple[MemoryUse, ...]:
        """The memory of each unit of a candidate at its peak, item by item, by unit."""
        uses: list[MemoryUse] = []
        for count, own, peaks in self._workers(candidate):
            uses += [self.use(own, peaks, is_host=are_hosts(candidate.hosts, len(uses), count))] * count
        return tuple(uses)

    def hosts_and_chunk(
        self, candidate: Candidate, most_of_messages: Bytes, beside: Callable[[], Beside]
    ) -> tuple[tuple[int, ...] | None, int]:
        """(units that can hold the frozen layers beside training, None for all; the most samples of a fill).

        The filler chooses in the same way by the plan (`Needs`). Sharded copies are taken to have room for all.

        Args:
            candidate: the layout.
            most_of_messages: an upper bound of the bytes of two messages of a unit.
            beside: gives the bytes of messages and activations beside the fills; called only if they decide.
        """
        tables, rooms, others = self.tables, list[tuple[Bytes, MemoryUse]](), list[Bytes]()
        batch = tables.setting.workload.batch // candidate.arrangement.data_parallel
        needs = tables.needs(batch)
        if candidate.sharded is Sharded.ALL:
            return None, max(needs.running)
        memories = tables.ground(candidate.arrangement).memories
        for count, own, peaks in self._workers(candidate):
            use = self.use(own, peaks, is_host=False)
            # What is read from the frozen part is held twice where it is encoded ahead.
            held = use.total + use.frozen_outputs
            rooms += [(memory - held, use) for memory in memories[len(rooms) : len(rooms) + count]]
            others += [tables.kept_for_others(tuple(stage[:2] for stage in own))] * count
        least = [(free - most_of_messages, use.workspace) for free, use in rooms]
        # Room for all, even with the most bytes that messages can take: the simulation would change nothing.
        if (found := needs.hosts_and_chunk([least], others, batch)) == (None, max(needs.running)):
            return found
        messages, waiting = beside()
        # Fills run in waits: activations that a wait does not hold leave their bytes free.
        relaxed = [
            (free, use.workspace + use.activations - held) for (free, use), held in zip(rooms, waiting, strict=True)
        ]
        cautious = [(free - two, unused) for (free, unused), two in zip(relaxed, messages, strict=True)]
        return needs.hosts_and_chunk([cautious, relaxed], others, batch)

    def blocks(self, candidate: Candidate) -> list[frozenset[int]]:
        """The indices of the blocks that each worker of a candidate holds, by worker."""
        holding = self._holding(candidate.orders or candidate.schedule, candidate.workers, candidate.microbatches)
        return [frozenset(block for block, _ in own) for own in holding.blocks]

    def _workers(self, candidate: Candidate) -> Iterator[tuple[int, list[_Stage], Sequence[Sequence[int]]]]:
        """(number of its units, its stages, its peaks as `Holding.peaks` has them) of each worker of a candidate."""
        holding = self._holding(candidate.orders or candidate.schedule, candidate.workers, candidate.microbatches)
        spans = list(zip(candidate.starts, (*candidate.starts[1:], self.tables.num_layers), strict=True))
        for worker, count in enumerate(candidate.replicas):
            own = [
                (*spans[block], number, self.tables.unit_samples(candidate.arrangement, holding.parts[block]) / count)
                for block, number in holding.blocks[worker]
            ]
            yield count, own, holding.peaks[worker]

    @cached_property
    def _holding(self) -> Callable[[Schedule | str, int, int], Holding]:
        return lru_cache(maxsize=1024)(_holding)


def _holding(schedule: Schedule | str, workers: int, microbatches: int) -> Holding:
    return holding_of(generated(schedule, workers, microbatches, 1) if isinstance(schedule, str) else schedule)


def are_hosts(hosts: tuple[int, ...] | None, unit: int, count: int) -> bool:
    """Whether one of the units `unit`, ..., `unit` + `count` - 1 is in `hosts`; None: all are."""
    return hosts is None or any(unit <= host < unit + count for host in hosts)
