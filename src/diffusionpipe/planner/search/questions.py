"""Makes the questions to the dynamic program for a setting, and gives the partitions that it answers with."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from operator import mul, sub

from diffusionpipe.costs import Link
from diffusionpipe.planner.pricing.arrangement import Arrangement, RankLayout
from diffusionpipe.planner.search.constants import SLACK, WIDTH
from diffusionpipe.planner.search.dynamic_program import (
    Numbers,
    Partition,
    PartitionObjective,
    PricedLink,
    PricedStage,
    Question,
    best_partitions,
)
from diffusionpipe.planner.search.footprint import Footprint, are_hosts
from diffusionpipe.planner.search.objectives import Before, LeastInAnyOrder, LeastOneForwardOneBackward
from diffusionpipe.planner.search.tables import Tables
from diffusionpipe.units import Seconds


@dataclass(frozen=True, kw_only=True)
class Questions:
    """The questions about one setting to the dynamic program that cuts layers into stages."""

    tables: Tables
    footprint: Footprint
    short: set[tuple[Arrangement, int]] = field(default_factory=set, repr=False, compare=False)
    """The places, (arrangement, micro-batches), at which a stage that was fast enough did not fit in memory; it grows
    with each question."""

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
        """The question of how to cut the layers over an arrangement's units into stages.

        Stages that take longer than `cap` seconds or do not fit in memory are left out. A stage keeps `in_flight`
        micro-batches, None for as many as 1F1B keeps. `replicas`: the numbers of devices that a stage may take.
        `hosts`: the units that encode; None for all.
        """
        ground, table, units = self.tables.ground(arrangement), self.tables.table, arrangement.units
        samples = self.tables.unit_samples(arrangement, microbatches)
        fastest = max(ground.speeds)
        sums = {r: table.sums(samples / r, microbatches) for r in replicas}
        both = {r: [f + b for f, b in zip(sums[r].forward, sums[r].backward, strict=True)] for r in replicas}
        work = [min(r * both[r][i] for r in replicas) for i in range(self.tables.num_layers + 1)]

        @cache
        def priced(first: int, stop: int, position: int, count: int, kept: int) -> PricedStage | None:
            running = sums[count]
            speeds = ground.speeds[position : position + count]
            speed = min(speeds)
            forward = (running.forward[stop] - running.forward[first]) / speed
            backward = (running.backward[stop] - running.backward[first]) / speed
            if forward + backward > cap:
                return None
            if not ignores_memory:
                is_host = are_hosts(hosts, position, count)
                held = self.footprint.stage_bytes(first, stop, samples / count, microbatches, kept, is_host=is_host)
                if held > min(ground.memories[position : position + count]):
                    self.short.add((arrangement, microbatches))
                    return None
            reduce = self.tables.reduction(ground, first, stop, range(position, position + count))
            return forward, backward, reduce, speed / max(speeds)

        # Stages on equal devices have one price: the first of such devices is asked.
        alike = _alike(ground, replicas, hosts)

        def stage(first: int, stop: int, position: int, count: int, stages: int) -> PricedStage | None:
            return priced(first, stop, alike[position, count], count, in_flight or min(stages, microbatches))

        def longest(first: int, count: int) -> int:
            limit = (cap * fastest + both[count][first]) * (1 + 1e-12)
            # One layer at least: `stage` refuses it if it is too long.
            return max(first + 1, bisect_right(both[count], limit) - 1)

        return Question(
            num_layers=self.tables.num_layers,
            num_devices=units,
            max_stages=min(units, self.tables.num_layers),
            replicas=replicas,
            stage=stage,
            link=self._link(ground, samples),
            reach=lambda layers, devices: work[layers] <= cap * devices * fastest * (1 + 1e-12),
            longest=longest,
        )

    def _link(self, ground: RankLayout, samples: float) -> Callable[[int, int, int, int], PricedLink]:
        """A function (cut, first unit after it, senders before it, receivers after it) -> times of the transfer."""
        table = self.tables.table

        @cache
        def priced(cut: int, way: Link, senders: int, receivers: int) -> PricedLink:
            forward, backward = table.crossing[cut]
            passed, returned = table.passed[cut]
            amount, least = samples / min(senders, receivers), samples / max(senders, receivers)
            return (
                way.transfer(round(amount * forward)),
                way.transfer(round(amount * backward)) if backward else 0.0,
                way.transfer(int(least * passed)) if passed else 0.0,  # rounded down, as a part of a bound
                way.transfer(int(least * returned)) if returned else 0.0,
            )

        def link(cut: int, position: int, senders: int, receivers: int) -> PricedLink:
            return priced(cut, ground.link(position - senders, senders, position, receivers), senders, receivers)

        return link

    def _limited(
        self,
        question: Question,
        place: tuple[Arrangement, int],
        least: Callable[[Numbers, int, Before], Seconds],
        limit: Seconds,
    ) -> Question:
        """The question that leaves out suffixes that lead only to partitions at or above `limit`.

        `least`: an objective's (numbers of a suffix, its stages, bounds of the layers before it) -> lower bound.
        """
        before = cache(self._before(*place, question.replicas))

        def is_hopeless(numbers: Numbers, num_stages: int, layers: int, devices: int) -> bool:
            return least(numbers, num_stages, before(layers, devices)) >= limit

        return replace(question, is_hopeless=is_hopeless)

    def _before(
        self, arrangement: Arrangement, microbatches: int, replicas: tuple[int, ...]
    ) -> Callable[[int, int], Before]:
        """A function (layers, devices) -> lower bounds of the times of the first layers on the first devices."""
        samples, fastest = (
            self.tables.unit_samples(arrangement, microbatches),
            max(self.tables.ground(arrangement).speeds),
        )
        sums = {r: self.tables.table.sums(samples / r, microbatches) for r in replicas}
        steps = list(zip(*(sums[r].steps() for r in replicas), strict=True))
        forwards = zip(*(map(sub, sums[r].forward[1:], sums[r].forward) for r in replicas), strict=True)
        forward = list(accumulate(map(min, forwards), initial=0.0))
        both = list(accumulate(map(min, steps), initial=0.0))
        dearest = list(accumulate(map(min, steps), max, initial=0.0))
        shared = list(accumulate((min(map(mul, replicas, step)) for step in steps), initial=0.0))

        def before(layers: int, devices: int) -> Before:
            if not layers:
                return Before(0.0, 0.0, 0.0, 0)
            return Before(
                forward=forward[layers] / fastest,
                both=both[layers] / fastest,
                # The slowest stage takes no less than the longest layer, and no less than an even share of the work.
                dearest=max(dearest[layers], shared[layers] / devices) / fastest,
                num_stages=min(layers, devices),
            )

        return before

    def chains(
        self,
        arrangement: Arrangement,
        microbatches: int,
        *,
        replicas: tuple[int, ...],
        limit: Seconds,
        hosts: tuple[int, ...] | None = None,
        is_lean: bool = False,
    ) -> tuple[Partition, ...]:
        """The partitions whose lower bound as 1F1B is below `limit` seconds, best first.

        `is_lean`: one micro-batch is under way at a time. `hosts`: the units that encode; None for all.
        """
        objective = LeastOneForwardOneBackward(1 if is_lean else microbatches)
        question = self.question(
            arrangement,
            microbatches,
            replicas=replicas,
            cap=limit / microbatches,  # a stage computes every micro-batch within the limit
            hosts=hosts,
            in_flight=1 if is_lean else None,
        )
        most = limit / microbatches if is_lean else limit  # one after the other, each has its part of the limit
        limited = self._limited(question, (arrangement, microbatches), objective.least, most)
        return best_partitions(limited, objective, width=WIDTH)

    def cuts(self, arrangement: Arrangement, microbatches: int, replicas: Sequence[int]) -> tuple[Partition, ...]:
        """The partitions into stages with these numbers of replicas, in this order, the least bound as 1F1B first.

        () if there are more stages than layers, or if none fits in memory.
        """
        own = set(zip(accumulate(replicas, initial=0), replicas, strict=False))  # (first unit, replicas) of each stage
        question = self.question(arrangement, microbatches, replicas=tuple(sorted(set(replicas))))

        def stage(first: int, stop: int, position: int, count: int, stages: int) -> PricedStage | None:
            return question.stage(first, stop, position, count, stages) if (position, count) in own else None

        return best_partitions(replace(question, stage=stage), LeastOneForwardOneBackward(microbatches), width=WIDTH)

    def least_chains(
        self, arrangement: Arrangement, microbatches: int, *, replicas: tuple[int, ...], limit: Seconds
    ) -> tuple[Partition, ...]:
        """The partitions with the least lower bound over all orders of one stage on a unit, best first.

        A stage that holds one micro-batch and encodes nothing must fit in memory.
        """
        objective = LeastInAnyOrder(microbatches)
        question = self.question(
            arrangement, microbatches, replicas=replicas, cap=limit / microbatches, hosts=(), in_flight=1
        )
        limited = self._limited(question, (arrangement, microbatches), objective.least, limit)
        return best_partitions(limited, objective, width=1)

    def room(self, arrangement: Arrangement, microbatches: int, *, in_flight: int | None = None) -> Question:
        """The question whose stages have, in place of times, the bytes that their unit lacks; negative: bytes left."""
        ground, samples = self.tables.ground(arrangement), self.tables.unit_samples(arrangement, microbatches)

        def stage(first: int, stop: int, position: int, count: int, stages: int) -> PricedStage:
            kept = in_flight or min(stages, microbatches)
            held = self.footprint.stage_bytes(first, stop, samples, microbatches, kept)
            return held - ground.memories[position], 0.0, 0.0

        return Question(
            num_layers=self.tables.num_layers,
            num_devices=arrangement.units,
            max_stages=arrangement.units,
            replicas=(1,),
            stage=stage,
            link=lambda cut, position, senders, receivers: (0.0, 0.0),
        )

    def partitions(
        self,
        arrangement: Arrangement,
        microbatches: int,
        objective: PartitionObjective,
        *,
        replicas: tuple[int, ...] = (1,),
        limit: Seconds = float("inf"),
        width: int = WIDTH,
        ignores_memory: bool = False,
        hosts: tuple[int, ...] | None = None,
        in_flight: int | None = None,
    ) -> tuple[Partition, ...]:
        """The best partitions of the layers over an arrangement's units, best first; () if none fits in memory.

        The longest allowed stage starts at `SLACK` times the even share and is doubled until something is found, but
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
        cap = min(limit, SLACK * max(even, max(layers) / max(ground.speeds)))
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
            if found or cap >= min(limit, 2 * everything):  # beyond that cap no stage is refused for its time
                return found
            cap = min(limit, 2 * cap)


def _alike(ground: RankLayout, replicas: tuple[int, ...], hosts: tuple[int, ...] | None) -> dict[tuple[int, int], int]:
    """(first unit, number) of units in a row -> the first unit of the first equal row.

    Rows are equal if they have equal devices, their gradient sums take equally long, and both or neither encode.
    """
    found, kinds = dict[tuple[int, int], int](), dict[object, int]()
    for count in replicas:
        for position in range(len(ground.speeds) - count + 1):
            own = slice(position, position + count)
            rate = ground.reduction(range(position, position + count))
            kind = ground.speeds[own], ground.memories[own], rate, are_hosts(hosts, position, count)
            found[position, count] = kinds.setdefault(kind, position)
    return found
