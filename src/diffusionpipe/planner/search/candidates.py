"""Candidates for a plan, and how they are judged: first by the partition's objective, then by a quick simulation."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import lcm

from diffusionpipe.ir import Schedule
from diffusionpipe.planner.assembly.buckets import bucket_starts
from diffusionpipe.planner.assembly.build import Layout
from diffusionpipe.planner.assembly.structure import Holding, Pair, Structure, generated, holding_of, structure_of
from diffusionpipe.planner.filling.shares import idle_level
from diffusionpipe.planner.pricing.arrangement import Arrangement, Ground
from diffusionpipe.planner.pricing.encoders import components_of, encode_chunks_of, frozen_workspace
from diffusionpipe.planner.pricing.layer_table import LayerTable
from diffusionpipe.planner.pricing.offload import encoder_bytes
from diffusionpipe.planner.pricing.stage_costs import Setting, frozen_time
from diffusionpipe.planner.search.dynamic_program import (
    LinkTime,
    Objective,
    Partition,
    Question,
    StageTime,
    best_partitions,
)
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Everything that makes a plan but its fills."""

    arrangement: Arrangement
    schedule: str
    microbatches: int
    starts: tuple[int, ...]
    """First layer of each block, before buckets; schedules with one stage on each worker have a block for each."""
    replicas: tuple[int, ...]
    """Units in place of each worker of the schedule; all 1 where a worker has several stages."""
    buckets: int = 1
    hosts: tuple[int, ...] | None = None
    """Units that hold the frozen layers, where memory lets not all of them do so; None for all. The filler asks the
    memory itself and may find more."""
    orders: Schedule | None = None
    """Orders made for this candidate; `schedule` is then what they are called. None: those of the family."""
    sharded: bool = False
    """Whether the data-parallel copies hold their parameters in parts. Such a candidate is never estimated, but
    simulated in full (see `planner.sharded`)."""

    @property
    def workers(self) -> int:
        """Workers of the schedule, each of which stands for one or more units."""
        return len(self.replicas)

    def layout(self, setting: Setting) -> Layout:
        """The layout that `build_plan` makes the plan of."""
        names = setting.graph.backbone_layers
        return Layout(
            batch=setting.workload.batch,
            stages=self.workers,
            microbatches=self.microbatches,
            schedule=self.schedule,
            orders=self.orders,
            replicas=self.replicas,
            data_parallel=self.arrangement.data_parallel,
            adjacent=self.arrangement.adjacent,
            encode_chunk=setting.workload.encode_chunk,
            encode_chunks=tuple(encode_chunks_of(setting).items()),
            splits=tuple(names[start] for start in self.starts[1:]),
            checkpointed=setting.workload.checkpointed,
            buckets=self.buckets,
            sharded=self.sharded,
            offload_frozen=setting.workload.offload_frozen,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a quick simulation says of a candidate."""

    pipeline: Seconds
    """The iteration without the frozen work: forwards, backwards, reductions."""
    busy: Seconds
    """Mean time that a unit computes in it."""
    frozen: Seconds
    """Frozen work of a rank's equal share."""
    filled: Seconds
    """Iteration time that no filling can beat, and a good one comes close to."""
    held: tuple[Bytes, ...]
    """Peak memory of each unit."""
    overflow: Bytes
    """By how much the fullest device's memory is exceeded; negative: what is left."""

    @property
    def serial(self) -> Seconds:
        """Iteration time with the frozen work before the pipeline."""
        return self.frozen + self.pipeline


@dataclass(frozen=True, kw_only=True)
class Judge:
    """Estimates candidates for one setting; what several of them share is made once."""

    setting: Setting

    @cached_property
    def table(self) -> LayerTable:
        """Sums over the trained part's layers."""
        return LayerTable(profile=self.setting.profile, workload=self.setting.workload)

    @cached_property
    def num_layers(self) -> int:
        """Of the trained part."""
        return len(self.table.names)

    @cached_property
    def ground(self) -> Callable[[Arrangement], Ground]:
        """An arrangement on the setting's cluster; each is made once."""
        return lru_cache(maxsize=None)(lambda a: Ground(arrangement=a, cluster=self.setting.cluster))

    @cached_property
    def frozen_bytes(self) -> Bytes:
        """Of the frozen components on every rank that runs them."""
        return encoder_bytes(self.setting)

    @cached_property
    def _encoders(self) -> list[tuple[Sequence[str], int]]:
        """Layers of each frozen component, and the samples that go through them at a time."""
        chunks = encode_chunks_of(self.setting)
        return [(layers, chunks[name]) for name, layers in components_of(self.setting.graph).items()]

    @cached_property
    def frozen_workspace(self) -> Bytes:
        """The most that one frozen layer needs while a chunk runs through it."""
        rows = -(-self.setting.workload.batch // self.setting.cluster.num_ranks)
        return max(
            (frozen_workspace(self.setting, layers, min(rows, chunk)) for layers, chunk in self._encoders), default=0
        )

    @cached_property
    def frozen_seconds(self) -> Seconds:
        """Frozen work of one rank's equal share, in chunks, on the slowest device."""
        cluster = self.setting.cluster
        rows = -(-self.setting.workload.batch // cluster.num_ranks)
        return self.encoding(rows) / min(device.speed for device in cluster.devices)

    @cached_property
    def encoding(self) -> Callable[[int], Seconds]:
        """Frozen work of so many samples, in chunks, on a device of speed 1."""
        profile = self.setting.profile

        def seconds(rows: int) -> Seconds:
            total = 0.0
            for layers, chunk in self._encoders:
                whole, rest = divmod(rows, chunk)
                total += whole * frozen_time(profile, layers, chunk) + frozen_time(profile, layers, rest)
            return total

        return lru_cache(maxsize=None)(seconds)

    @cached_property
    def weight_grads(self) -> Callable[[float], tuple[Seconds, ...]]:
        """Running sums of the layers' weight gradients for so many samples, for schedules that split the backward."""
        profile, names = self.setting.profile, self.table.names

        def sums(samples: float) -> tuple[Seconds, ...]:
            return tuple(accumulate((profile.weight_grad(name, samples) for name in names), initial=0.0))

        return lru_cache(maxsize=None)(sums)

    def unit_samples(self, arrangement: Arrangement, microbatches: int) -> float:
        """Samples of a micro-batch of one group: those of a stage of one unit."""
        return self.setting.workload.batch / (arrangement.data_parallel * microbatches)

    def fits_evenly(self, candidate: Candidate) -> bool:
        """Whether micro-batches and replicas cut the batch at whole samples."""
        parts = candidate.arrangement.data_parallel * candidate.microbatches * lcm(*candidate.replicas)
        return self.setting.workload.batch % parts == 0

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
        ground, table, units = self.ground(arrangement), self.table, arrangement.units
        samples = self.unit_samples(arrangement, microbatches)
        fastest = max(ground.speeds)
        sums = {r: table.sums(samples / r, microbatches) for r in replicas}
        both = {r: [f + b for f, b in zip(sums[r].forward, sums[r].backward, strict=True)] for r in replicas}
        work = [min(r * both[r][i] for r in replicas) for i in range(self.num_layers + 1)]

        def stage(first: int, stop: int, position: int, count: int, stages: int) -> StageTime | None:
            running = sums[count]
            speed = min(ground.speeds[position : position + count])
            forward = (running.forward[stop] - running.forward[first]) / speed
            backward = (running.backward[stop] - running.backward[first]) / speed
            if forward + backward > cap:
                return None
            if not ignores_memory:
                held = self.stage_bytes(
                    first,
                    stop,
                    samples / count,
                    microbatches,
                    in_flight or min(stages, microbatches),
                    is_host=_are_hosts(hosts, position, count),
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
            num_layers=self.num_layers,
            num_devices=units,
            max_stages=min(units, self.num_layers),
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
        sums = self.table.sums(self.unit_samples(arrangement, microbatches) / max(replicas), microbatches)
        layers = [
            sums.forward[i + 1] - sums.forward[i] + sums.backward[i + 1] - sums.backward[i]
            for i in range(self.num_layers)
        ]
        ground = self.ground(arrangement)
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
        table, workload = self.table, self.setting.workload
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

    def estimate(self, candidate: Candidate, *, head: Seconds = 0.0) -> Estimate:
        """Simulated with messages in about the order in which they will queue; one group stands for all.

        `head` is what the first stage does before each of its forwards besides.
        """
        blocks = self.block_starts(candidate)
        flows = self.table.flows(blocks)
        structure = self.structure(candidate, tuple((pair, bool(flow[1])) for pair, flow in flows.items()))
        ground = self.ground(candidate.arrangement)
        samples = self.unit_samples(candidate.arrangement, candidate.microbatches)
        slowest = [min(ground.speeds[unit] for unit in units) for units in structure.holders]
        stages, reduces, busy = [], [], [0.0] * candidate.arrangement.units
        spans = list(zip(blocks, (*blocks[1:], self.num_layers), strict=True))
        summed = [self._summed(ground, *span, units) for span, units in zip(spans, structure.holders, strict=True)]
        for place in structure.places:
            (first, stop), part = spans[place.block], samples * place.part
            sums, weight_grads = self.table.sums(part, place.microbatches), self.weight_grads(part)
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
        held = self.held(candidate)
        return Estimate(
            pipeline=pipeline,
            busy=sum(busy) / candidate.arrangement.units,
            frozen=self.frozen_seconds,
            filled=self._filled(candidate, pipeline, busy),
            held=held,
            overflow=self._overflow(candidate, held),
        )

    def _summed(self, ground: Ground, first: int, stop: int, units: Sequence[int]) -> Seconds:
        """Time of the sum of a block's gradients over all that hold it."""
        num_bytes = (self.table.trained[stop] - self.table.trained[first]) * self.setting.workload.gradient_bytes
        rate, holders = ground.reduction(units)
        return rate.seconds(num_bytes, holders) if num_bytes else 0.0

    def _filled(self, candidate: Candidate, pipeline: Seconds, busy: Sequence[Seconds]) -> Seconds:
        """The iteration if its hosts took the frozen work into all their waits."""
        arrangement = candidate.arrangement
        hosts = range(arrangement.units) if candidate.hosts is None else candidate.hosts
        rows = -(-self.setting.workload.batch // (arrangement.data_parallel * len(hosts)))
        speeds = {host: self.ground(arrangement).speeds[host] for host in hosts}
        return idle_level(pipeline, busy, len(hosts) * self.encoding(rows), speeds)

    def block_starts(self, candidate: Candidate) -> tuple[int, ...]:
        """First layer of each block: stages cut into buckets of about equal gradients, as `build_plan` cuts them."""
        if candidate.buckets == 1:
            return candidate.starts
        trained = self.table.trained
        stops = (*candidate.starts[1:], self.num_layers)
        return tuple(
            first + start
            for first, stop in zip(candidate.starts, stops, strict=True)
            for start in bucket_starts([trained[i + 1] - trained[i] for i in range(first, stop)], candidate.buckets)
        )

    def fits(self, candidate: Candidate) -> bool:
        """Whether it fits in memory, without the simulation of an estimate."""
        return self._overflow(candidate, self.held(candidate)) <= 0

    def _overflow(self, candidate: Candidate, held: Sequence[Bytes]) -> Bytes:
        memories = self.ground(candidate.arrangement).memories
        return max(one - memory for one, memory in zip(held, memories, strict=True))

    def held(self, candidate: Candidate) -> tuple[Bytes, ...]:
        """Peak memory of each unit."""
        samples = self.unit_samples(candidate.arrangement, candidate.microbatches)
        holding = self._holding(candidate.orders or candidate.schedule, candidate.workers, candidate.microbatches)
        spans = list(zip(candidate.starts, (*candidate.starts[1:], self.num_layers), strict=True))
        held: list[Bytes] = []
        for worker, count in enumerate(candidate.replicas):
            is_host = _are_hosts(candidate.hosts, len(held), count)
            own = [(*spans[block], microbatches) for block, microbatches in holding.blocks[worker]]
            held += [self.unit_bytes(own, holding.peaks[worker], samples / count, is_host=is_host)] * count
        return tuple(held)

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

    @cached_property
    def _holding(self) -> Callable[[Schedule | str, int, int], Holding]:
        return lru_cache(maxsize=1024)(_holding)


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


def _holding(schedule: Schedule | str, workers: int, microbatches: int) -> Holding:
    return holding_of(generated(schedule, workers, microbatches, 1) if isinstance(schedule, str) else schedule)


def _are_hosts(hosts: tuple[int, ...] | None, unit: int, count: int) -> bool:
    """Whether one of these units holds the frozen layers."""
    return hosts is None or any(unit <= host < unit + count for host in hosts)
