"""Makes quick estimates of candidates: the simulation of a candidate's plan, without fills, without making the plan.

    structure   its schedule, ready to be timed: made once for all cuts of the model that exchange tensors alike
    costs       prices of stages, links, collectives and frozen work, from sums over ranges of layers
    time        `timing` of both: the result of `simulate` after `communicate`

Frozen work before the pipeline, and the messages with its outputs, are part of the structure. Frozen work in waits is
counted as if it filled every wait of the devices that have memory for it, in fills as large as memory allows: both
follow the filler's own rule (`pricing.encoders.Needs`), beside the activations of waits and beside messages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

from diffusionpipe.costs import Costs, Link
from diffusionpipe.ir import Edge, Sharded
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.planner.assembly.structure import Encoding, Pair, Structure, ahead, back, structure_of
from diffusionpipe.planner.filling.shares import idle_level
from diffusionpipe.planner.pricing.encoders import encode_chunks_of
from diffusionpipe.planner.pricing.layer_table import Load
from diffusionpipe.planner.pricing.meetings import occupancy
from diffusionpipe.planner.pricing.stage_costs import FREE, fill_times, gathers, reductions, stage_costs
from diffusionpipe.planner.search.candidates import Candidate, Estimate
from diffusionpipe.planner.search.footprint import Beside, Footprint
from diffusionpipe.planner.search.tables import Tables
from diffusionpipe.timing import Times
from diffusionpipe.timing.buffers import two_messages
from diffusionpipe.timing.held import most_in_waits
from diffusionpipe.units import Seconds

Flows = dict[tuple[int, int], tuple[Load, Load]]


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """A maker of quick estimates for candidates of one setting, which keeps parts that several of them share."""

    tables: Tables
    footprint: Footprint
    _sharded: dict[tuple[int, ...], tuple[tuple[Seconds, ...], tuple[Seconds, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """First layers of blocks -> (seconds of each stage's reduction, seconds of each stage's gather)."""

    def estimate(
        self,
        candidate: Candidate,
        *,
        is_filled: bool,
        head: Seconds = 0.0,
        is_hopeless: Callable[[Estimate], bool] | None = None,
    ) -> Estimate:
        """The time and the memory of a candidate's plan by a quick simulation.

        Args:
            candidate: the layout to plan.
            is_filled: whether frozen work of the next batch runs in the waits; else this batch's comes first.
            head: the extra time of the first stage before each of its forwards.
            is_hopeless: is called with the estimate in which no message waits for another, which is quickly made. If it
                returns True, that estimate is returned.
        """
        structure, costs = self._priced(candidate, head, is_encoding=not is_filled)
        busy = [0.0] * candidate.arrangement.units
        for place, stage in zip(structure.places, costs.stages, strict=False):  # encoders come last
            busy[place.unit] += place.microbatches * (stage.forward + (0.0 if place.is_probe else stage.backward))
        held, frozen = self.footprint.held(candidate), self.tables.frozen_seconds
        filled: Callable[[Seconds], Seconds] | None = None  # set below, before the first call of `estimate`

        def estimate(times: Times, awake: Times) -> Estimate:
            return Estimate(
                # Without fills the frozen work is a part of the makespan, before the pipeline.
                pipeline=times.makespan if filled else max(0.0, times.makespan - frozen),
                busy=sum(busy) / candidate.arrangement.units,
                frozen=frozen,
                iteration=filled(awake.makespan) if filled else times.makespan,
                held=held,
                overflow=self.footprint.overflow(candidate, held),
            )

        # Nothing needs to wake from a wait that is filled.
        ways = [costs, replace(costs, waking=())] if costs.waking and is_filled else [costs]
        # With waking first; last without it, where waits are filled.
        unqueued = [structure.unqueued(one) for one in ways]
        if is_filled:
            filled = self._filler(candidate, busy, structure, costs, unqueued[0])
        least = estimate(unqueued[0], unqueued[-1])
        if is_hopeless and is_hopeless(least):
            return least
        queued = [structure.queued(one, times) for one, times in zip(ways, unqueued, strict=True)]
        return estimate(queued[0], queued[-1])

    def timed(self, candidate: Candidate, *, is_encoding: bool = False) -> Times:
        """The times of all events of a candidate's iteration; with `is_encoding` its batch is encoded first.

        Without, there is no frozen work.
        """
        structure, costs = self._priced(candidate, 0.0, is_encoding=is_encoding)
        return structure.queued(costs, structure.unqueued(costs))

    def _priced(self, candidate: Candidate, head: Seconds, *, is_encoding: bool) -> tuple[Structure, Costs]:
        starts = self.tables.block_starts(candidate)
        flows = self.tables.table.flows(starts)
        structure = self.structure(candidate, flows, starts if is_encoding else None)
        costs = self._costs(candidate, structure, starts, flows, head)
        return structure, self._with_frozen(candidate, structure, costs) if is_encoding else costs

    def structure(self, candidate: Candidate, flows: Flows, starts: tuple[int, ...] | None = None) -> Structure:
        """The structure of the candidate's schedule, with edges between the blocks of `flows`; each is made once.

        `starts`: the first layers of its blocks, for a structure with frozen work before the first forward; None: it
        has no frozen work.
        """
        layout = Layout(
            batch=self.tables.setting.workload.batch,
            stages=candidate.workers,
            microbatches=candidate.microbatches,
            schedule=candidate.schedule,
            orders=candidate.orders,
            backbones=candidate.backbones,
            replicas=candidate.replicas,
            data_parallel=candidate.arrangement.data_parallel,
            buckets=candidate.buckets,
            sharded=candidate.sharded,
            probes=self.tables.setting.graph.probes,
        )
        pairs = tuple((pair, back[1] > 0) for pair, (_, back) in flows.items())
        return self._structure(layout, pairs, None if starts is None else self._encoding(starts))

    @cached_property
    def _encoding(self) -> Callable[[tuple[int, ...]], Encoding]:
        """A function from the first layers of an iteration's blocks to the frozen work before it."""
        tables, setting = self.tables, self.tables.setting
        layout = Layout(
            batch=setting.workload.batch,
            stages=1,
            microbatches=1,
            encode_chunk=setting.workload.encode_chunk,
            encode_chunks=tuple(encode_chunks_of(setting).items()),
        )
        runs = layout.encoding(setting.graph, ())

        def found(starts: tuple[int, ...]) -> Encoding:
            spans = zip(starts, (*starts[1:], tables.num_layers), strict=True)
            return replace(runs, outputs=tuple(tables.frozen_outputs(*span) for span in spans))

        return found

    @cached_property
    def _structure(self) -> Callable[[Layout, tuple[Pair, ...], Encoding | None], Structure]:
        made = lru_cache(maxsize=256)(structure_of)

        def found(layout: Layout, pairs: tuple[Pair, ...], encoding: Encoding | None) -> Structure:
            # Families agree at many sizes: without their names, what they agree in is made once.
            return made(replace(layout.generated(), name=""), layout.division, pairs, encoding)

        return lru_cache(maxsize=256)(found)

    def _costs(
        self, candidate: Candidate, structure: Structure, starts: tuple[int, ...], flows: Flows, head: Seconds
    ) -> Costs:
        """The costs of the structure's schedule, as `costs_of` gives them, without frozen work.

        `head`: extra seconds of the first stage before each of its forwards.
        """
        tables, ground = self.tables, self.tables.ground(candidate.arrangement)
        spans = list(zip(starts, (*starts[1:], tables.num_layers), strict=True))

        def loads(edge: Edge) -> tuple[Load, Load]:
            places = structure.places
            return flows[places[edge.producer].block, places[edge.consumer].block]

        def link(pair: tuple[int, int]) -> Link:
            return ground.link(pair[0], 1, pair[1], 1)

        occupied = occupancy(len(structure.places), structure.meetings, link, loads)
        stages = []
        for place, taken in zip(structure.places, occupied, strict=True):
            sums = tables.table.sums(place.samples, None if candidate.sharded is Sharded.ALL else place.forwards)
            forward, input_grad, weight_grad = sums.times(*spans[place.block], is_probe=place.is_probe)
            times = forward + (0.0 if place.block or place.is_probe else head), input_grad, weight_grad
            host = tables.table.host(*spans[place.block])
            stages.append(stage_costs(times, ground.speeds[place.unit], taken, host))
        reduces, unshards = self._collectives(candidate, structure, starts)
        return Costs(
            stages=tuple(stages),
            reduces=reduces,
            unshards=unshards,
            waking=tables.setting.profile.waking,
            tensor_bytes={
                name: num_bytes
                for (a, b), ((there, _), (back_again, _)) in flows.items()
                for name, num_bytes in ((ahead(a, b), there), (back(a, b), back_again))
            },
            link=tables.setting.cluster.intra,
            links={pair: link(pair) for pair in structure.pairs},
        )

    def _with_frozen(self, candidate: Candidate, structure: Structure, costs: Costs) -> Costs:
        """The costs with the prices of the structure's frozen work added."""
        tables, schedule = self.tables, structure.schedule
        works = [tables.frozen_work(fill.layers) for fill in schedule.fills]
        costs = replace(
            costs,
            # The last stages are the encoders': they take the times of their fills.
            stages=(*costs.stages, *[FREE] * (len(schedule.placement.stages) - len(costs.stages))),
            host_fills=tuple(work.host for work in works),
            tensor_bytes={**costs.tensor_bytes, **tables.frozen_outputs_bytes},
        )
        names, speeds = [work.names for work in works], tables.ground(candidate.arrangement).speeds

        def seconds(slot: int) -> Seconds:
            return works[slot].seconds(len(schedule.fills[slot].samples))

        return replace(costs, fills=fill_times(schedule, names, speeds, costs, tables.setting.profile, seconds))

    def _collectives(
        self, candidate: Candidate, structure: Structure, starts: tuple[int, ...]
    ) -> tuple[tuple[Seconds, ...], tuple[Seconds, ...]]:
        """(seconds of each stage's gradient sum, seconds of each stage's gather), by stage; () for no gathers."""
        tables, ground = self.tables, self.tables.ground(candidate.arrangement)
        spans = list(zip(starts, (*starts[1:], tables.num_layers), strict=True))
        if candidate.sharded is Sharded.ALL:  # each rank owns some of the parameters, which decides the times
            if starts not in self._sharded:
                trained = [tables.table.names[first:stop] for first, stop in spans]
                blocks = [*trained, tables.setting.graph.frozen_layers]
                task = structure.schedule, blocks, candidate.layout(tables.setting).mesh, tables.setting
                self._sharded[starts] = reductions(*task), gathers(*task)
            return self._sharded[starts]
        if candidate.sharded is Sharded.OPTIMIZER:
            moved = [tables.at_owners(ground, *span, own) for span, own in zip(spans, structure.holders, strict=True)]
            return tuple(moved[place.block][0] for place in structure.places), tuple(
                moved[place.block][1] for place in structure.places
            )
        summed = [tables.reduction(ground, *span, units) for span, units in zip(spans, structure.holders, strict=True)]
        return tuple(summed[place.block] for place in structure.places), ()

    def _filler(
        self, candidate: Candidate, busy: Sequence[Seconds], structure: Structure, costs: Costs, times: Times
    ) -> Callable[[Seconds], Seconds]:
        """A function from the pipeline's seconds to the iteration's, if hosts fill all its waits with frozen work.

        `busy`: the compute of each unit in seconds. `times`: the times without queues, which say what waits hold.
        """
        tables, ground = self.tables, self.tables.ground(candidate.arrangement)
        if not tables.setting.graph.frozen_layers:
            return lambda pipeline: pipeline
        pipelines = structure.schedule.placement.pipelines
        # As if both messages held all tensors, in each direction.
        most_of_messages = (
            2 * len(pipelines) * max(place.samples for place in structure.places) * sum(costs.tensor_bytes.values())
        )
        beside = partial(self._beside, candidate, structure, costs, times)
        found, chunk = self.footprint.hosts_and_chunk(candidate, most_of_messages, beside)
        speeds = {host: ground.speeds[host] for host in (range(len(busy)) if found is None else found)}
        batch = tables.setting.workload.batch // candidate.arrangement.data_parallel
        largest = min(chunk, -(-batch // len(speeds)))  # no fill has more samples than a host's share
        # Copies of the model hide the copies of weights from the host between their fills.
        work = batch * tables.seconds_a_sample(largest, candidate.arrangement.units == 1)
        return lambda pipeline: idle_level(pipeline, busy, work, speeds)

    def _beside(self, candidate: Candidate, structure: Structure, costs: Costs, times: Times) -> Beside:
        """(bytes of two messages of each unit, bytes of activations that each unit holds while it waits), by unit."""
        starts, table = self.tables.block_starts(candidate), self.tables.table
        spans = list(zip(starts, (*starts[1:], self.tables.num_layers), strict=True))
        sizes = [
            (table.activation(*spans[place.block], place.samples), table.kept(*spans[place.block], place.samples))
            for place in structure.places
        ]
        schedule = structure.schedule
        return two_messages(schedule, costs.tensor_bytes), most_in_waits(schedule, sizes, times)
