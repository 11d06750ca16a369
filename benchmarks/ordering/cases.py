"""Instances: every kind of costs, sizes, memory below, at and above that of 1F1B, with and without transfers."""

from collections.abc import Iterator
from random import Random

from diffusionpipe.ordering import Goal, HalfStage, Instance, Placing

KINDS = ("even", "10:12:8", "12:22:9", "noise 15 %", "heavy ends", "uneven", "half kept")
SIZES = ((2, 2), (2, 4), (2, 8), (3, 3), (3, 6), (4, 2), (4, 4), (4, 6), (4, 8))
MEMORY = (0.5, 0.75, 1, 1.5, 2)
"""In activations of p micro-batches, what 1F1B needs."""
SHARE = 0.25
"""Of all combinations, drawn."""
SEED = 7
"""Of the draw that the project was developed with; others ask whether it holds elsewhere too."""


def half_stages(kind: str, num: int, random: Random) -> tuple[HalfStage, ...]:
    """Costs of `num` half-stages, whole numbers."""
    match kind:
        case "even":
            return (_half(2, 2, 2),) * num
        case "10:12:8" | "half kept":
            return (_half(10, 12, 8, *((2, 1) if kind == "half kept" else (1, 1))),) * num
        case "12:22:9":
            return (_half(12, 22, 9),) * num
        case "noise 15 %":
            return tuple(_half(*(round(t * random.uniform(0.85, 1.15)) for t in (20, 24, 16))) for _ in range(num))
        case "heavy ends":
            return (_half(14, 14, 12), *(_half(10, 12, 8),) * (num - 2), _half(22, 26, 18))
        case _:
            return tuple(_half(random.randint(4, 20), random.randint(4, 24), random.randint(3, 18)) for _ in range(num))


def instance(
    kind: str,
    size: tuple[int, int],
    *,
    placing: Placing,
    memory: float | None,
    random: Random,
    has_comm: bool,
    objective: Goal = Goal.MAKESPAN,
) -> Instance:
    """One instance; its limit has room for whole micro-batches (linear) or halves."""
    ranks, microbatches = size
    stages = half_stages(kind, 2 * ranks, random)
    activation = stages[0].activation
    unit = 2 if placing is Placing.LINEAR else 1
    halves = None if memory is None else max(2, int(2 * ranks * memory) // unit * unit)
    return Instance(
        ranks=ranks,
        microbatches=microbatches,
        placement=placing,
        stages=stages,
        comm=max(1, int(stages[0].forward) // 5) if has_comm else 0,
        memory_limit=None if halves is None else (halves * activation,) * ranks,
        objective=objective,
        seconds=10,
    )


def small_cases(count: int | None = None, *, seed: int = SEED) -> Iterator[tuple[str, Instance]]:
    """(kind, instance) of up to four ranks and eight micro-batches; the same in every run with this seed."""
    random, found = Random(seed), []
    for kind in KINDS:
        for size in SIZES:
            for placing in (Placing.LINEAR, Placing.V):
                for memory in MEMORY:
                    for has_comm in (False, True):
                        objective = Goal.MAKESPAN if random.random() < 0.7 else Goal.WINDOW
                        if random.random() < SHARE:
                            case = instance(
                                kind, size, placing=placing, memory=memory, random=random, has_comm=has_comm,
                                objective=objective,
                            )  # fmt: skip
                            found.append((kind, case))
    random.shuffle(found)
    yield from found[:count]


def _half(forward: int, input_grad: int, weight_grad: int, activation: int = 1, kept: int = 1) -> HalfStage:
    return HalfStage(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        activation=activation,
        kept_after_input_grad=kept,
    )
