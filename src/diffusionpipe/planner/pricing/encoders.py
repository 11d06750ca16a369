"""The memory that frozen layers need on a worker, and the choice of workers that hold them for all."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from diffusionpipe.costs import ModelGraph
from diffusionpipe.holding.memory import forward_bytes
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import encoder_bytes
from diffusionpipe.units import Bytes


def encode_chunks_of(setting: Setting) -> Mapping[str, int]:
    """Frozen component -> samples that go through it at a time: the workload's number, halved while memory is short.

    At most an eighth of the smallest device's memory is used: a VAE takes two gibibytes for each picture of 1024 x 1024
    in float32.
    """
    room = min(device.memory for device in setting.cluster.devices) // 8
    found = {}
    for component, layers in components_of(setting.graph).items():
        chunk = setting.workload.encode_chunk
        while chunk > 1 and frozen_workspace(setting, layers, chunk) > room:
            chunk //= 2
        found[component] = chunk
    return found


def components_of(graph: ModelGraph) -> Mapping[str, Sequence[str]]:
    """Frozen component -> its frozen layers, in order."""
    found: dict[str, list[str]] = {}
    frozen = set(graph.frozen_layers)
    for layer in graph.layers:
        if layer.name in frozen:
            found.setdefault(layer.component, []).append(layer.name)
    return found


def frozen_workspace(setting: Setting, layers: Sequence[str], chunk: int) -> Bytes:
    """The largest memory in bytes of these frozen layers while `chunk` samples run through them."""
    return forward_bytes(setting.profile, layers, chunk)


Room = tuple[Bytes, Bytes]
"""(bytes left on a worker without the frozen layers, bytes that are free besides whenever frozen layers run there)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The bytes that the frozen layers need on a worker that runs them, for each size of chunk."""

    weights: Bytes
    """Bytes of the layers' weights on the device."""
    running: Mapping[int, Bytes]
    """Samples that go through the layers together, descending -> bytes of tensors while they run."""

    def of(self, chunk: int, kept: Bytes, unused: Bytes) -> Bytes:
        """The bytes that encoding takes of a worker, in chunks of `chunk` samples, with `kept` bytes held for others.

        `unused`: bytes that are free besides while the layers run; as many bytes of running do not count.
        """
        return self.weights + kept + max(0, self.running[chunk] - unused)

    def hosts_and_chunk(
        self, rooms: Iterable[Sequence[Room]], others: Sequence[Bytes], batch: int
    ) -> tuple[tuple[int, ...] | None, int]:
        """(workers that can hold the frozen layers, None for all; the most samples that may go through together).

            free of 24 GB     worker 0   3     encoders with a chunk of 16: 14 GB,  of 1: 10 GB
            beside training   worker 1   11    so worker 1 encodes everything, one sample at a time

        It takes as many workers as possible, then the largest chunk that fits. If no worker has room, it is all workers
        with chunks of one sample: the memory of the plan then shows how much is missing.

        Args:
            rooms: the room of each worker, in one or several ways of counting it, the most cautious one first.
            others: bytes of a sample that each worker holds only because it encodes it.
            batch: samples to encode.
        """
        num_workers, rooms = len(others), list(rooms)
        for count in range(num_workers, 0, -1):
            rows = 2 * -(-batch // count)  # of this batch and of the next one
            # All chunks in the most cautious way of counting come before a bolder way: messages may still be more than
            # expected.
            for way, chunk in product(rooms, self.running):
                hosts = tuple(
                    worker
                    for worker, (free, unused) in enumerate(way)
                    if self.of(chunk, rows * others[worker], unused) <= free
                )
                if len(hosts) >= count:
                    return (None if count == num_workers else hosts), chunk
        return None, 1


def needs_of(setting: Setting, batch: int) -> Needs:
    """The bytes that the setting's frozen layers need to encode `batch` samples, for chunks that halve down to 1."""
    chunks = [min(setting.workload.encode_chunk, batch)]
    while chunks[-1] > 1:
        chunks.append(chunks[-1] // 2)
    layers = setting.graph.frozen_layers
    return Needs(
        weights=encoder_bytes(setting), running={chunk: frozen_workspace(setting, layers, chunk) for chunk in chunks}
    )


def kept_for_others(graph: ModelGraph, own: Collection[str]) -> Bytes:
    """The bytes of a sample's raw inputs and frozen outputs that a worker holds only because it encodes it.

    `own`: the tensors that the worker's stages read anyway, which do not count.
    """
    held = {*graph.inputs, *graph.frozen_outputs(graph.backbone_layers)}
    return sum(graph.tensor(name).num_bytes for name in held.difference(own))


def host_sets(memories: Sequence[Bytes]) -> tuple[tuple[int, ...], ...]:
    """Sets of units that may hold the encoders for all units: with half of the units, a quarter, ..., one.

    Of each size they are the last units (1F1B keeps least on them), the first ones, and those with most memory.
    `memories`: the bytes of each unit.

    >>> host_sets([24, 24, 16, 16])
    ((2, 3), (0, 1), (3,), (0,))
    """
    units, found = len(memories), dict[tuple[int, ...], None]()
    count = units // 2
    while count:
        roomiest = sorted(range(units), key=lambda unit: -memories[unit])[:count]
        for hosts in (range(units - count, units), range(count), sorted(roomiest)):
            found[tuple(hosts)] = None
        count //= 2
    return tuple(found)
