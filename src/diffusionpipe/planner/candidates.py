"""Candidates for a plan, and how they are judged: first by the partition's objective, then by a quick simulation."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from math import lcm

from diffusionpipe.ir import Edge
from diffusionpipe.passes import connect, reduce_gradients, replicate
from diffusionpipe.planner.arrangement import Arrangement, Ground
from diffusionpipe.planner.buckets import bucket_starts, subdivide
from diffusionpipe.planner.build import Layout
from diffusionpipe.planner.compiled import Compiled, compiled
from diffusionpipe.planner.dynamic_program import LinkTime, Objective, Partition, Question, StageTime, best_partitions
from diffusionpipe.planner.encoders import encode_chunk_of, frozen_workspace
from diffusionpipe.planner.fill_shares import idle_level
from diffusionpipe.planner.layer_table import LayerTable
from diffusionpipe.planner.stage_costs import Setting, frozen_parameters, frozen_time
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import activations_in_flight
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Everything that makes a plan but its fills."""

    arrangement: Arrangement
    schedule: str
    microbatches: int
    starts: tuple[int, ...]
    """First layer of each stage."""
    replicas: tuple[int, ...]
    """Units of each stage."""
    buckets: int = 1
    hosts: tuple[int, ...] | None = None
    """Units that hold the frozen layers, where memory lets not all of them do so; None for all. The filler asks the
    memory itself and may find more."""
    sharded: bool = False
    """Whether the data-parallel copies hold their parameters in parts. Such a candidate is never estimated, but
    simulated in full (see `planner.sharded`)."""

    def layout(self, setting: Setting) -> Layout:
        """The layout that `build_plan` makes the plan of."""
        names = setting.graph.backbone_layers
        return Layout(
            batch=setting.workload.batch,
            stages=len(self.starts),
            microbatches=self.microbatches,
            schedule=self.schedule,
            replicas=self.replicas,
            data_parallel=self.arrangement.data_parallel,
            adjacent=self.arrangement.adjacent,
            encode_chunk=encode_chunk_of(setting),
            splits=tuple(names[start] for start in self.starts[1:]),
            checkpointed=setting.workload.checkpointed,
            buckets=self.buckets,
            sharded=self.sharded,
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
        """Of the frozen components that every rank holds."""
        graph = self.setting.graph
        return frozen_parameters(graph, graph.frozen_layers) * self.setting.workload.frozen_bytes

    @cached_property
    def frozen_workspace(self) -> Bytes:
        """The most that one frozen layer needs while a chunk runs through it."""
        rows = -(-self.setting.workload.batch // self.setting.cluster.num_ranks)
        return frozen_workspace(self.setting, min(rows, encode_chunk_of(self.setting)))

    @cached_property
    def frozen_seconds(self) -> Seconds:
        """Frozen work of one rank's equal share, in chunks, on the slowest device."""
        cluster = self.setting.cluster
        rows = -(-self.setting.workload.batch // cluster.num_ranks)
        return self.encoding(rows) / min(device.speed for device in cluster.devices)

    @cached_property
    def encoding(self) -> Callable[[int], Seconds]:
        """Frozen work of so many samples, in chunks, on a device of speed 1."""
        layers, chunk = self.setting.graph.frozen_layers, encode_chunk_of(self.setting)

        def seconds(rows: int) -> Seconds:
            whole, rest = divmod(rows, chunk)
            profile = self.setting.profile
            return whole * frozen_time(profile, layers, chunk) + frozen_time(profile, layers, rest)

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
        sums = {r: table.sums(samples / r) for r in replicas}
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
        sums = self.table.sums(self.unit_samples(arrangement, microbatches) / max(replicas))
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
        num_bytes = (self.table.trained[stop] - self.table.trained[first]) * self.setting.workload.gradient_bytes
        rate, holders = ground.reduction(position, count)
        return rate.seconds(num_bytes, holders) if num_bytes else 0.0

    def stage_bytes(
        self, first: int, stop: int, samples: float, microbatches: int, in_flight: int, *, is_host: bool = True
    ) -> Bytes:
        """Peak memory of a rank that holds these layers, but for its message buffers; a host also encodes."""
        table, workload = self.table, self.setting.workload
        rows = samples * microbatches
        return (
            (table.trained[stop] - table.trained[first]) * workload.bytes_per_trained
            + (table.frozen[stop] - table.frozen[first]) * workload.frozen_bytes
            + is_host * self.frozen_bytes
            + in_flight * table.activation(first, stop, samples)
            + max(is_host * self.frozen_workspace, table.workspace(first, stop, samples))
            + round(rows * table.frozen_reads[first][stop])
        )

    def estimate(self, candidate: Candidate, *, head: Seconds = 0.0) -> Estimate:
        """Simulated with messages in about the order in which they will queue; one group stands for all.

        `head` is what the first stage does before each of its forwards besides.
        """
        blocks = self.block_starts(candidate)
        flows = self.table.flows(blocks)
        structure = self._structure(
            candidate.schedule,
            len(candidate.starts),
            candidate.microbatches,
            candidate.replicas,
            candidate.buckets,
            tuple((pair, bool(flow[1])) for pair, flow in flows.items()),
            candidate.arrangement.data_parallel > 1,
        )
        ground, samples = (
            self.ground(candidate.arrangement),
            self.unit_samples(candidate.arrangement, candidate.microbatches),
        )
        counts = [count for count in candidate.replicas for _ in range(candidate.buckets)]
        unit_of_stage = list(accumulate(candidate.replicas, initial=0))
        places = [unit_of_stage[block // candidate.buckets] for block in range(len(blocks))]
        stops = (*blocks[1:], self.num_layers)
        stages, reduces, busy = [], [], [0.0] * candidate.arrangement.units
        for block, (first, stop) in enumerate(zip(blocks, stops, strict=True)):
            sums = self.table.sums(samples / counts[block])
            speed = min(ground.speeds[places[block] : places[block] + counts[block]])
            forward = (sums.forward[stop] - sums.forward[first] + (0.0 if block else head)) / speed
            backward = (sums.backward[stop] - sums.backward[first]) / speed
            reduce = self.reduction(ground, first, stop, places[block], counts[block])
            for unit in range(places[block], places[block] + counts[block]):
                busy[unit] += candidate.microbatches * (forward + backward)
            weight_grads = self.weight_grads(samples / counts[block])
            weight_grad = (weight_grads[stop] - weight_grads[first]) / speed
            stages += [(forward, backward, backward - weight_grad, weight_grad)] * counts[block]
            reduces += [reduce] * counts[block]
        first_stage = list(accumulate(counts, initial=0))
        edges = []
        unit_of = [places[b] + i for b, count in enumerate(counts) for i in range(count)]
        for producer, consumer in structure.edges:
            a, b = bisect_right(first_stage, producer) - 1, bisect_right(first_stage, consumer) - 1
            link = ground.link(unit_of[producer], 1, unit_of[consumer], 1)
            amount = samples * _meeting(producer - first_stage[a], counts[a], consumer - first_stage[b], counts[b])
            forward, backward = flows[a, b]
            there = link.transfer(round(amount * forward))
            back = link.transfer(round(amount * backward)) if backward else 0.0
            edges.append((there, back))
        pipeline = structure.queued(stages, edges, reduces)
        held = self._held(candidate, samples)
        return Estimate(
            pipeline=pipeline,
            busy=sum(busy) / candidate.arrangement.units,
            frozen=self.frozen_seconds,
            filled=self._filled(candidate, pipeline, busy),
            held=held,
            overflow=max(one - memory for one, memory in zip(held, ground.memories, strict=True)),
        )

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

    def _held(self, candidate: Candidate, samples: float) -> tuple[Bytes, ...]:
        """Peak memory of each unit."""
        in_flight = _in_flight(candidate.schedule, len(candidate.starts), candidate.microbatches)
        stops = (*candidate.starts[1:], self.num_layers)
        held: list[Bytes] = []
        for stage, (first, stop) in enumerate(zip(candidate.starts, stops, strict=True)):
            count = candidate.replicas[stage]
            is_host = _are_hosts(candidate.hosts, len(held), count)
            held += [
                self.stage_bytes(
                    first, stop, samples / count, candidate.microbatches, in_flight[stage], is_host=is_host
                )
            ] * count
        return tuple(held)

    @cached_property
    def _structure(self) -> Callable[..., Compiled]:
        return lru_cache(maxsize=256)(_compile)


def _are_hosts(hosts: tuple[int, ...] | None, unit: int, count: int) -> bool:
    """Whether one of these units holds the frozen layers."""
    return hosts is None or any(unit <= host < unit + count for host in hosts)


def _meeting(i: int, num_senders: int, j: int, num_receivers: int) -> float:
    """The part of a micro-batch that replica i of the senders and replica j of the receivers have in common."""
    start = max(i / num_senders, j / num_receivers)
    return max(0.0, min((i + 1) / num_senders, (j + 1) / num_receivers) - start)


def _compile(
    name: str,
    num_stages: int,
    microbatches: int,
    replicas: tuple[int, ...],
    buckets: int,
    pairs: tuple[tuple[tuple[int, int], bool], ...],
    is_data_parallel: bool,
) -> Compiled:
    schedule = subdivide(REGISTRY[name](num_stages, microbatches, lcm(*replicas)), buckets)
    edges = [
        Edge(producer=a, consumer=b, tensors=("x",), gradients=("x",) if has_gradient else ())
        for (a, b), has_gradient in pairs
    ]
    schedule = connect(schedule, edges)
    if max(replicas) > 1:
        schedule = replicate(schedule, [count for count in replicas for _ in range(buckets)])
    return compiled(reduce_gradients(schedule, is_data_parallel))


@lru_cache(maxsize=1024)
def _in_flight(name: str, num_stages: int, microbatches: int) -> tuple[int, ...]:
    return activations_in_flight(REGISTRY[name](num_stages, microbatches))
