"""What the frozen layers need where they run, and which ranks may hold them for all."""

from collections.abc import Mapping, Sequence

from diffusionpipe.costs import ModelGraph
from diffusionpipe.costs.memory import forward_bytes
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.units import Bytes


def encode_chunks_of(setting: Setting) -> Mapping[str, int]:
    """Frozen component -> samples that go through it at a time: those of the workload, halved while they need too much.

    Too much is an eighth of the smallest device: a VAE takes two gibibytes for each picture of 1024 x 1024 in float32.
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
    """The most that these frozen layers hold while so many samples run through them."""
    return forward_bytes(setting.profile, layers, chunk)


def host_sets(memories: Sequence[Bytes]) -> tuple[tuple[int, ...], ...]:
    """Units that may hold the encoders for all, given each one's memory: of half of them, a quarter, ..., one.

    The last ones (1F1B keeps least for them), the first ones, and the roomiest ones.

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
