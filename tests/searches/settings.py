"""Random small settings: models of a few layers, a few devices, and what makes their plans hard to find."""

from dataclasses import dataclass, replace
from random import Random

from planner import synthetic

from diffusionpipe.costs import AllReduce, Cluster, Device, Link, Profile
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.units import Bytes

GIGABIT = 1e9 / 8
SPEEDS = (1.0, 1.0, 0.5, 1.5, 2.0, 3.0)
SLOW_GIGABITS = (1, 2.5, 5, 10)
FIRST_RAGGED = 300
"""The number of the first setting of a seed whose layers differ in everything."""
BATCHES = (4, 6, 8, 12, 16, 20, 24, 36, 48)
"""The batches of ragged settings; some cannot be shared equally by all devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A setting before its memory is known."""

    setting: Setting
    is_slow: bool
    """Whether its devices have links of at most 10 Gb/s."""
    is_unequal: bool
    """Whether its devices have different speeds."""
    is_frozen: bool
    """Whether it has frozen work that is worth filling in."""
    is_tight: bool
    """Whether its memory is to be cut so that at most half of the layouts fit."""


def drawn(seed: int, number: int) -> Drawn:
    """Case `number` of a seed. The hard kinds come in turns, so each occurs in a third of the cases.

    From `FIRST_RAGGED` on each layer has times and sizes of its own.
    """
    random = Random(f"{seed} {number}")
    is_frozen, is_slow = number % 2 == 0, number // 2 % 3 == 0
    is_unequal, is_tight = number // 6 % 3 == 0, number // 18 % 3 == 0
    layers, devices = random.randint(3, 7), random.randint(2, 4)
    if number >= FIRST_RAGGED:
        setting = Setting(
            profile=_ragged(random, layers, is_frozen=is_frozen),
            cluster=_cluster(random, devices, is_slow=is_slow, is_unequal=is_unequal),
            workload=synthetic.workload(random.choice(BATCHES)),
        )
        return Drawn(setting=setting, is_slow=is_slow, is_unequal=is_unequal, is_frozen=is_frozen, is_tight=is_tight)
    profile = synthetic.chain(
        [random.randint(1, 30) / 1000 for _ in range(layers)],
        parameters=[random.choice((1, 5, 20, 60)) * 10**6 for _ in range(layers)],
        elements=random.choice((10**4, 10**5, 10**6)),
        frozen=random.randint(2, 40) / 1000 if is_frozen else 0.0,
        overhead=random.choice((0.0, 0.0, 2e-3, 1e-2)),
    )
    setting = Setting(
        profile=profile,
        cluster=_cluster(random, devices, is_slow=is_slow, is_unequal=is_unequal),
        workload=synthetic.workload(random.choice([n for n in range(8, 49) if n % devices == 0])),
    )
    return Drawn(setting=setting, is_slow=is_slow, is_unequal=is_unequal, is_frozen=is_frozen, is_tight=is_tight)


def _ragged(random: Random, count: int, *, is_frozen: bool) -> Profile:
    """A chain whose layers have times, gradients, parameters and outputs of their own, some of them frozen.

    Times and sizes are drawn by their logarithms, so one layer may take a hundred times as long as the next one.
    """
    sketch = synthetic.Sketch(inputs=("raw",))
    for name in ("raw", "x"):
        sketch.tensor(name, 1000)
    seconds = 10 ** random.uniform(-2.7, -1.4) if is_frozen else 1e-9
    sketch.layer("encode", "vae", ["raw"], ["x"], seconds=seconds, parameters=8, trained=False, kept=0)
    hidden = "x"
    for i in range(count):
        name = "loss" if i == count - 1 else f"h{i}"
        written = sketch.tensor(name, round(10 ** random.uniform(2, 6)), grad=True, dtype="float32")
        seconds = 10 ** random.uniform(-3.5, -1.5)
        sketch.layer(
            f"layer{i}",
            "unet",
            [hidden],
            [written],
            seconds=seconds,
            parameters=round(10 ** random.uniform(2, 7.8)),
            trained=i == 0 or random.random() > 0.2,
            kept=random.uniform(0.5, 4),
            input_grad=i > 0,
        )
        forward, input_grad, weight_grad = sketch.times[-1]
        sketch.times[-1] = forward, input_grad * random.uniform(0.7, 1.3), weight_grad * random.uniform(0.3, 1.2)
        hidden = written
    return sketch.profile(overhead=random.choice((0.0, 0.0, 2e-4, 5e-3)))


def with_heavy_encoders(drawn: Drawn, seed: int, number: int) -> Setting:
    """The drawn setting with another model, whose frozen weights may fill a device; some can be in host memory."""
    random = Random(f"{seed} {number} heavy")
    layers = random.randint(3, 7)
    profile = synthetic.chain(
        [random.randint(1, 30) / 1000 for _ in range(layers)],
        parameters=[random.choice((1, 5, 20, 60)) * 10**6 for _ in range(layers)],
        elements=random.choice((10**4, 10**5, 10**6)),
        frozen=random.randint(2, 40) / 1000,
        frozen_parameters=random.choice((8, 20 * 10**6, 100 * 10**6, 300 * 10**6)),
        overhead=random.choice((0.0, 2e-3, 1e-2)),
    )
    bandwidth = random.choice((0, 0, 4e9, 25e9))
    cluster = drawn.setting.cluster
    devices = tuple(replace(device, host_bandwidth=bandwidth) for device in cluster.devices)
    return replace(drawn.setting, profile=profile, cluster=replace(cluster, devices=devices))


def with_memory(setting: Setting, memory: Bytes) -> Setting:
    """The setting with so much on each device."""
    devices = tuple(replace(device, memory=memory) for device in setting.cluster.devices)
    return replace(setting, cluster=replace(setting.cluster, devices=devices))


def with_devices(setting: Setting, ranks: tuple[int, ...]) -> Setting:
    """The setting on these devices alone."""
    cluster = setting.cluster
    nodes = [cluster.nodes[rank] for rank in ranks]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    own = replace(
        cluster,
        devices=tuple(cluster.devices[rank] for rank in ranks),
        nodes=tuple(numbers[node] for node in nodes),
    )
    return replace(setting, cluster=own)


def _cluster(random: Random, devices: int, *, is_slow: bool, is_unequal: bool) -> Cluster:
    speeds = [1.0] * devices
    while is_unequal and len(set(speeds)) == 1:
        speeds = [random.choice(SPEEDS) for _ in range(devices)]
    slow = random.choice(SLOW_GIGABITS) * GIGABIT if is_slow else 100 * GIGABIT
    per_node = random.choice((1, devices) if devices != 4 else (1, 2, 4)) if is_slow else devices
    fast = slow if per_node == devices else 200 * GIGABIT
    return Cluster(
        name="drawn",
        devices=tuple(Device(name="synthetic", memory=10**12, speed=speed) for speed in speeds),
        nodes=tuple(rank // per_node for rank in range(devices)),
        intra=Link(1e-5, fast),
        inter=Link(3e-5, slow),
        intra_reduce=AllReduce(latency=2e-5, bandwidth=fast),
        inter_reduce=AllReduce(latency=1e-4, bandwidth=slow),
    )
