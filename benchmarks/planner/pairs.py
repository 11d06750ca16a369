"""Seconds to cut two backbones at once: `planner/search/opposed_partition.py` on drawn layers."""

import random
import time
from dataclasses import dataclass
from itertools import accumulate

from diffusionpipe.planner.search.constants import WIDTH
from diffusionpipe.planner.search.dynamic_program import LinkTime, StageTime
from diffusionpipe.planner.search.opposed_partition import bounded_pairs, first_pairs
from diffusionpipe.planner.search.pair_objectives import OppositeLoads, OppositePath
from diffusionpipe.planner.search.two_sided import TwoSidedQuestion
from diffusionpipe.units import Seconds

LAYERS, DEVICES, MICROBATCHES = (27, 30), 8, (8, 8)
REPLICAS = ((1,), (1, 2, 3, 4, 5, 6, 7))
NUM_DRAWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The longest of some questions by each objective."""

    replicas: tuple[int, ...]
    """How many devices a block may have."""
    loads: Seconds
    path: Seconds


def measure() -> list[Cut]:
    """Without replicas and with them."""
    return [
        Cut(
            replicas=replicas,
            loads=max(_seconds(seed, replicas, is_path=False) for seed in range(NUM_DRAWN)),
            path=max(_seconds(seed, replicas, is_path=True) for seed in range(NUM_DRAWN)),
        )
        for replicas in REPLICAS
    ]


def _seconds(seed: int, replicas: tuple[int, ...], *, is_path: bool) -> Seconds:
    question = drawn_question(seed, LAYERS, DEVICES, replicas)
    started = time.process_time()
    if is_path:
        first_pairs(question, OppositePath(MICROBATCHES), width=2)
    else:
        bounded_pairs(question, OppositeLoads(MICROBATCHES), width=WIDTH)
    return time.process_time() - started


def drawn_question(
    seed: int, num_layers: tuple[int, int], devices: int, replicas: tuple[int, ...]
) -> TwoSidedQuestion:  # fmt: skip
    """Layers like a U-Net's: times and weights of their own, replicas that gain less than they cost."""
    rng = random.Random(seed)
    layers = [[(rng.uniform(0.5, 2), rng.uniform(1, 4), rng.uniform(0, 1)) for _ in range(n)] for n in num_layers]
    sums = [[list(accumulate((one[k] for one in own), initial=0)) for k in range(3)] for own in layers]
    crossing = [[rng.uniform(0, 0.02) for _ in range(n + 1)] for n in num_layers]

    def stage(backbone: int, first: int, stop: int, position: int, count: int) -> StageTime:
        f, b, w = (own[stop] - own[first] for own in sums[backbone])
        return f / count**0.9, b / count**0.9, w * (1 - 0.5 / count)

    def link(backbone: int, cut: int, position: int, senders: int, receivers: int) -> LinkTime:
        seconds = crossing[backbone][cut] / min(senders, receivers)
        return seconds, seconds

    first, second = ([f + b for f, b in zip(own[0], own[1], strict=True)] for own in sums)
    return TwoSidedQuestion(
        num_layers=num_layers,
        num_devices=devices,
        replicas=replicas,
        stage=stage,
        link=link,
        cap=float("inf"),
        work=(first, second),
    )
