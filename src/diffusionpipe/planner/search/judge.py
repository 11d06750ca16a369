"""How candidates for a plan are judged: first by the partition's objective, then by a quick simulation."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import lcm

from diffusionpipe.ir import Schedule
from diffusionpipe.planner.assembly.structure import Pair, Structure, generated, structure_of
from diffusionpipe.planner.filling.shares import idle_level
from diffusionpipe.planner.pricing.arrangement import Arrangement, Ground
from diffusionpipe.planner.pricing.stage_costs import Setting
from diffusionpipe.planner.search.candidates import Candidate, Estimate
from diffusionpipe.planner.search.dynamic_program import (
    LinkTime,
    Objective,
    Partition,
    Question,
    StageTime,
    best_partitions,
)
from diffusionpipe.planner.search.footprint import Footprint, are_hosts
from diffusionpipe.planner.search.tables import Tables
from diffusionpipe.units import Seconds


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Estimates candidates for one setting; what several of them share is made once."""

    setting: Setting

    @cached_property
    def tables(self) -> Tables:
        """What the candidates share."""
        return Tables(setting=self.setting)

    @cached_property
    def footprint(self) -> Footprint:
        """Their memory."""
        return Footprint(tables=self.tables)

    def question(
        self,
        arrangement: Arrangement,
        microbatches: int,
        *,
        replicas: tuple[int, ...] = (1,),
        cap: Seconds = float("inf"),
        ignores_memory: bool = False,
        hosts: tuple[int, ...] | None = None,
        in_flight: int | None = None,
    ) -> Question:
        """What the dynamic program is asked: stages dearer than `cap` are left out, and those that do not fit.

        A stage keeps `in_flight` micro-batches, None for those of 1F1B.
        """
        ground, table, units = self.tables.ground(arrangement), self.tables.table, arrangement.units
        samples = self.tables.unit_samples(arrangement, microbatches)
        fastest = max(ground.speeds)
        sums = {r: table.sums(samples / r, microbatches) for r in replicas}
        both = {r: [f + b for f, b in zip(sums[r].forward, sums[r].backward, strict=True)] for r in replicas}
        work = [min(r * both[r][i] for r in replicas) for i in range(self.tables.num_layers + 1)]

        def stage(first: int, stop: int, position: int, count: int, stages: int) -> StageTime | None:
            running = sums[count]
            speed = min(ground.speeds[position : position + count])
            forward = (running.forward[stop] - running.forward[first]) / speed
            backward = (running.backward[stop] - running.backward[first]) / speed
            if forward + backward > cap:
                return None
            if not ignores_memory:
                held = self.footprint.stage_bytes(
                    first,
                    stop,
                    samples / count,
                    microbatches,
                    in_flight or min(stages, microbatches),
                    is_host=are_hosts(hosts, position, count),
                )
                if held > min(ground.memories[position : position + count]):
                    return None
            return forward, backward, self.reduction(ground, first, stop, position, count)

        def link(cut: int, position: int, senders: int, receivers: int) -> LinkTime:
            way = ground.link(position - senders, senders, position, receivers)
            amount = samples / min(senders, receivers)
            forward, backward = table.crossing[cut]
            return (
                way.transfer(round(amount * forward)),
                way.transfer(round(amount * backward)) if backward else 0.0,
            )

        def longest(first: int, count: int) -> int:
            limit = (cap * fastest + both[count][first]) * (1 + 1e-12)
            return max(first + 1, bisect_right(both[count], limit) - 1)

        return Question(
            num_layers=self.tables.num_layers,
            num_devices=units,
            max_stages=min(units, self.tables.num_layers),
            replicas=replicas,
            stage=stage,
            link=link,
            reach=lambda layers, devices: work[layers] <= cap * devices * fastest * (1 + 1e-12),
            longest=longest,
        )

    def partitions(
        self,
        arrangement: Arrangement,
        microbatches: int,
        objective: Objective,
        *,
        replicas: tuple[int, ...] = (1,),
        slack: float = 1.3,
        limit: Seconds = float("inf"),
        width: int = 6,
        ignores_memory: bool = False,
        hosts: tuple[int, ...] | None = None,
        in_flight: int | None = None,
    ) -> tuple[Partition, ...]:
        """Good partitions, best first.

        The dearest stage allowed starts at `slack` times the even share and is doubled until something is found, but
        never beyond `limit`.
        """
        sums = self.tables.table.sums(self.tables.unit_samples(arrangement, microbatches) / max(replicas), microbatches)
        layers = [
            sums.forward[i + 1] - sums.forward[i] + sums.backward[i + 1] - sums.backward[i]
            for i in range(self.tables.num_layers)
        ]
        ground = self.tables.ground(arrangement)
        even = (sums.forward[-1] + sums.backward[-1]) * max(replicas) / sum(ground.speeds)
        everything = (sums.forward[-1] + sums.backward[-1]) * max(replicas) / min(ground.speeds)
        cap = min(limit, slack * max(even, max(layers) / max(ground.speeds)))
        while True:
            question = self.question(
                arrangement,
                microbatches,
                replicas=replicas,
                cap=cap,
                ignores_memory=ignores_memory,
                hosts=hosts,
                in_flight=in_flight,
            )
            found = best_partitions(question, objective, width=width)
            if found or cap >= min(limit, 2 * everything):
                return found
            cap = min(limit, 2 * cap)

    def reduction(self, ground: Ground, first: int, stop: int, position: int, count: int) -> Seconds:
        """Time of the sum of these layers' gradients over all holders."""
        return self._summed(ground, first, stop, range(position, position + count))

    def estimate(self, candidate: Candidate, *, head: Seconds = 0.0) -> Estimate:
        """Simulated with messages in about the order in which they will queue; one group stands for all.

        `head` is what the first stage does before each of its forwards besides.
        """
        blocks = self.tables.block_starts(candidate)
        flows = self.tables.table.flows(blocks)
        structure = self.structure(candidate, tuple((pair, bool(flow[1])) for pair, flow in flows.items()))
        ground = self.tables.ground(candidate.arrangement)
        samples = self.tables.unit_samples(candidate.arrangement, candidate.microbatches)
        slowest = [min(ground.speeds[unit] for unit in units) for units in structure.holders]
        stages, reduces, busy = [], [], [0.0] * candidate.arrangement.units
        spans = list(zip(blocks, (*blocks[1:], self.tables.num_layers), strict=True))
        summed = [self._summed(ground, *span, units) for span, units in zip(spans, structure.holders, strict=True)]
        for place in structure.places:
            (first, stop), part = spans[place.block], samples * place.part
            sums, weight_grads = self.tables.table.sums(part, place.microbatches), self.tables.weight_grads(part)
            speed = slowest[place.block]
            forward = (sums.forward[stop] - sums.forward[first] + (0.0 if place.block else head)) / speed
            backward = (sums.backward[stop] - sums.backward[first]) / speed
            weight_grad = (weight_grads[stop] - weight_grads[first]) / speed
            busy[place.unit] += place.microbatches * (forward + backward)
            stages.append((forward, backward, backward - weight_grad, weight_grad))
            reduces.append(summed[place.block])
        edges = []
        for producer, consumer, part in structure.meetings:
            source, target = structure.places[producer], structure.places[consumer]
            link = ground.link(source.unit, 1, target.unit, 1)
            forward, backward = flows[source.block, target.block]
            there = link.transfer(round(samples * part * forward))
            back = link.transfer(round(samples * part * backward)) if backward else 0.0
            edges.append((there, back))
        pipeline = structure.compiled.queued(stages, edges, reduces)
        held = self.footprint.held(candidate)
        return Estimate(
            pipeline=pipeline,
            busy=sum(busy) / candidate.arrangement.units,
            frozen=self.tables.frozen_seconds,
            filled=self._filled(candidate, pipeline, busy),
            held=held,
            overflow=self.footprint.overflow(candidate, held),
        )

    def _summed(self, ground: Ground, first: int, stop: int, units: Sequence[int]) -> Seconds:
        """Time of the sum of a block's gradients over all that hold it."""
        num_bytes = (
            self.tables.table.trained[stop] - self.tables.table.trained[first]
        ) * self.setting.workload.gradient_bytes
        rate, holders = ground.reduction(units)
        return rate.seconds(num_bytes, holders) if num_bytes else 0.0

    def _filled(self, candidate: Candidate, pipeline: Seconds, busy: Sequence[Seconds]) -> Seconds:
        """The iteration if its hosts took the frozen work into all their waits."""
        arrangement = candidate.arrangement
        hosts = range(arrangement.units) if candidate.hosts is None else candidate.hosts
        rows = -(-self.setting.workload.batch // (arrangement.data_parallel * len(hosts)))
        speeds = {host: self.tables.ground(arrangement).speeds[host] for host in hosts}
        return idle_level(pipeline, busy, len(hosts) * self.tables.encoding(rows), speeds)

    def structure(self, candidate: Candidate, pairs: tuple[Pair, ...]) -> Structure:
        """The candidate's schedule with edges between the blocks that `pairs` name; each is made once."""
        return self._structure(
            candidate.orders or candidate.schedule,
            candidate.workers,
            candidate.microbatches,
            candidate.replicas,
            candidate.buckets,
            pairs,
            candidate.arrangement.data_parallel > 1,
        )

    @cached_property
    def _structure(self) -> Callable[..., Structure]:
        return lru_cache(maxsize=256)(_structure)


def _structure(
    schedule: Schedule | str,
    workers: int,
    microbatches: int,
    replicas: tuple[int, ...],
    buckets: int,
    pairs: tuple[Pair, ...],
    is_data_parallel: bool,
) -> Structure:
    if isinstance(schedule, str):
        schedule = generated(schedule, workers, microbatches, lcm(*replicas))
    return structure_of(schedule, replicas, buckets, pairs, is_data_parallel)
