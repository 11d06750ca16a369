"""The quick estimate of a candidate: the simulation of its plan, but for the frozen work, without making the plan.

    structure   its schedule, ready to be timed: made once for all cuts of the model that exchange tensors alike
    costs       prices of stages, links and collectives, from sums over ranges of layers
    time        `timing` of both: what `simulate` says after `communicate`

The frozen work is counted in two ways: before the pipeline, and as if it filled every wait.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from diffusionpipe.costs import Costs, Link
from diffusionpipe.ir import Edge
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.planner.assembly.structure import Pair, Structure, ahead, back, structure_of
from diffusionpipe.planner.filling.shares import idle_level
from diffusionpipe.planner.pricing.layer_table import Load
from diffusionpipe.planner.pricing.meetings import occupancy
from diffusionpipe.planner.pricing.stage_costs import gathers, reductions, stage_costs
from diffusionpipe.planner.search.candidates import Candidate, Estimate
from diffusionpipe.planner.search.footprint import Footprint
from diffusionpipe.planner.search.tables import Tables
from diffusionpipe.timing import Times
from diffusionpipe.units import Seconds

Flows = dict[tuple[int, int], tuple[Load, Load]]


@dataclass(frozen=True, kw_only=True)
class Estimates:
    """Estimates candidates of one setting; what several of them share is made once."""

    tables: Tables
    footprint: Footprint
    _sharded: dict[tuple[int, ...], tuple[tuple[Seconds, ...], tuple[Seconds, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """First layers of blocks -> what their reductions and their gathers take."""

    def estimate(
        self, candidate: Candidate, *, head: Seconds = 0.0, is_hopeless: Callable[[Estimate], bool] | None = None
    ) -> Estimate:
        """What the plan takes, and what it needs.

        Args:
            candidate: what is to be planned.
            head: what the first stage does before each of its forwards besides.
            is_hopeless: asked about the time in which no message waits for another, which is quickly known. If it says
                yes, that is the answer.
        """
        structure, costs = self._priced(candidate, head)
        busy = [0.0] * candidate.arrangement.units
        for place, stage in zip(structure.places, costs.stages, strict=True):
            busy[place.unit] += place.microbatches * (stage.forward + (0.0 if place.is_probe else stage.backward))
        held = self.footprint.held(candidate)

        def estimate(times: Times, awake: Times) -> Estimate:
            return Estimate(
                pipeline=times.makespan,
                lead=times.start(times.graph.is_on_host.index(True)) if candidate.sharded else 0.0,
                busy=sum(busy) / candidate.arrangement.units,
                frozen=self.tables.frozen_seconds,
                filled=self._filled(candidate, awake.makespan, busy),
                held=held,
                overflow=self.footprint.overflow(candidate, held),
            )

        # Nothing needs to wake from a wait that is filled.
        ways = [costs, replace(costs, waking=())] if costs.waking else [costs]
        unqueued = [structure.unqueued(one) for one in ways]
        least = estimate(unqueued[0], unqueued[-1])
        if is_hopeless and is_hopeless(least):
            return least
        queued = [structure.queued(one, times) for one, times in zip(ways, unqueued, strict=True)]
        return estimate(queued[0], queued[-1])

    def timed(self, candidate: Candidate) -> Times:
        """When everything happens in its iteration without frozen work."""
        structure, costs = self._priced(candidate, 0.0)
        return structure.queued(costs, structure.unqueued(costs))

    def _priced(self, candidate: Candidate, head: Seconds) -> tuple[Structure, Costs]:
        starts = self.tables.block_starts(candidate)
        flows = self.tables.table.flows(starts)
        structure = self.structure(candidate, flows)
        return structure, self._costs(candidate, structure, starts, flows, head)

    def structure(self, candidate: Candidate, flows: Flows) -> Structure:
        """The candidate's schedule with edges between the blocks between which something flows; each is made once."""
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
        return self._structure(layout, tuple((pair, back[1] > 0) for pair, (_, back) in flows.items()))

    @cached_property
    def _structure(self) -> Callable[[Layout, tuple[Pair, ...]], Structure]:
        made = lru_cache(maxsize=256)(structure_of)

        def found(layout: Layout, pairs: tuple[Pair, ...]) -> Structure:
            # Families agree at many sizes: without their names, what they agree in is made once.
            return made(replace(layout.generated(), name=""), layout.division, pairs)

        return lru_cache(maxsize=256)(found)

    def _costs(
        self, candidate: Candidate, structure: Structure, starts: tuple[int, ...], flows: Flows, head: Seconds
    ) -> Costs:
        """What `costs_of` says of the structure's schedule, with the first stage's `head`."""
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
            sums = tables.table.sums(place.samples, None if candidate.sharded else place.forwards)
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

    def _collectives(
        self, candidate: Candidate, structure: Structure, starts: tuple[int, ...]
    ) -> tuple[tuple[Seconds, ...], tuple[Seconds, ...]]:
        """The times of each stage's reduction and gather."""
        tables, ground = self.tables, self.tables.ground(candidate.arrangement)
        spans = list(zip(starts, (*starts[1:], tables.num_layers), strict=True))
        if candidate.sharded:  # each rank owns some of the parameters, which decides how long they come and go
            if starts not in self._sharded:
                blocks = [tables.table.names[first:stop] for first, stop in spans]
                task = structure.schedule, blocks, candidate.layout(tables.setting).mesh, tables.setting
                self._sharded[starts] = reductions(*task), gathers(*task)
            return self._sharded[starts]
        summed = [tables.reduction(ground, *span, units) for span, units in zip(spans, structure.holders, strict=True)]
        return tuple(summed[place.block] for place in structure.places), ()

    def _filled(self, candidate: Candidate, pipeline: Seconds, busy: Sequence[Seconds]) -> Seconds:
        """The iteration if its hosts took the frozen work into all their waits."""
        arrangement = candidate.arrangement
        hosts = range(arrangement.units) if candidate.hosts is None else candidate.hosts
        rows = -(-self.tables.setting.workload.batch // (arrangement.data_parallel * len(hosts)))
        speeds = {host: self.tables.ground(arrangement).speeds[host] for host in hosts}
        encoding = self.tables.encoding_ahead if candidate.arrangement.units == 1 else self.tables.encoding
        return idle_level(pipeline, busy, len(hosts) * encoding(rows), speeds)
