"""The common part of the families: the places of stages, and the check of sizes.

A pipe is a way through the workers, in forward order. Its stage at position k holds block `first_block` + k of the
model in every shape. So several pipes hold copies of the same blocks, or, with other first blocks, several backbones.

    linear(4)    0 1 2 3                  one stage on each worker
    loop(4, 2)   0 1 2 3 0 1 2 3          interleaved: worker s mod p
    wave(4, 2)   0 1 2 3 3 2 1 0          a V: turns round at the ends, where nothing is sent
    wave(4, 3)   0 1 2 3 3 2 1 0 0 1 2 3
    reversed     3 2 1 0                  Chimera's second pipe is tuple(reversed(linear(4)))
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Action, Edge, Op, Pipeline, Placement, Schedule, Stage, compute_action

FORWARD = frozenset({Op.F})
TRAIN = frozenset({Op.F, Op.B})
SPLIT = frozenset({Op.F, Op.I, Op.W})
"""The ops of backwards in two parts: the gradient of the inputs first, the gradient of the weights when there is time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """One pipeline of a family's schedule: the workers of its stages, its micro-batches, ops and blocks."""

    workers: tuple[int, ...]
    """The worker of every stage, in forward order."""
    microbatches: tuple[int, ...]
    """The number of samples of each micro-batch."""
    ops: frozenset[Op] = TRAIN
    """The ops that each stage does for each micro-batch."""
    model: str = ""
    """The name of the backbone."""
    first_block: int = 0
    """The number of its backbone's first block; the stage at position k holds block `first_block` + k."""


def linear(num_workers: int) -> tuple[int, ...]:
    """The worker of each stage, by stage, with one stage on each worker: 0, 1, 2, ..."""
    return tuple(range(num_workers))


def loop(num_workers: int, chunks: int) -> tuple[int, ...]:
    """The worker of each stage, by stage: `chunks` times down the workers, 0, 1, ..., 0, 1, ..."""
    return linear(num_workers) * chunks


def wave(num_workers: int, chunks: int) -> tuple[int, ...]:
    """The worker of each stage, by stage: down the workers, up again, and so on, `chunks` ways; two are a V."""
    down = linear(num_workers)
    return tuple(worker for chunk in range(chunks) for worker in (down if chunk % 2 == 0 else reversed(down)))


def schedule_of(name: str, pipes: Sequence[Pipe], orders: Sequence[Sequence[Action]]) -> Schedule:
    """The schedule of these orders, one per worker, over these pipes.

    Stages are numbered through: the first pipe's in forward order, then the second pipe's. Pipes with copies of the
    same blocks share the batch: the samples of the second pipe's micro-batches follow the first pipe's.
    """
    stages: list[Stage] = []
    pipelines: list[Pipeline] = []
    taken: dict[int, int] = {}  # by first block: samples of the batch that pipes have taken
    for pipe in pipes:
        first = len(stages)
        stages += [Stage(worker=worker, weights=block) for block, worker in enumerate(pipe.workers, pipe.first_block)]
        ids = range(first, len(stages))
        pipelines.append(
            Pipeline(
                stages=tuple(ids),
                microbatches=pipe.microbatches,
                ops=pipe.ops,
                edges=tuple(Edge(producer=stage, consumer=stage + 1) for stage in ids[:-1]),
                model=pipe.model,
                first_sample=taken.get(pipe.first_block, 0),
            )
        )
        taken[pipe.first_block] = taken.get(pipe.first_block, 0) + sum(pipe.microbatches)
    return Schedule(
        name=name,
        placement=Placement(stages=tuple(stages), pipelines=tuple(pipelines)),
        orders=tuple(tuple(order) for order in orders),
    )


def chain(
    name: str, orders: Sequence[Sequence[Action]], *, microbatches: Sequence[int], ops: frozenset[Op]
) -> Schedule:
    """The schedule of these orders, one for each worker, over a chain with one stage on each worker.

    `microbatches`: the samples of each micro-batch.
    """
    pipe = Pipe(workers=linear(len(orders)), microbatches=tuple(microbatches), ops=ops)
    return schedule_of(name, [pipe], orders)


def forwards(stage: int, start: int, stop: int) -> list[Action]:
    """The forwards of a stage on the micro-batches `start`, ..., `stop` - 1."""
    return [compute_action(stage, Op.F, microbatch) for microbatch in range(start, stop)]


def backwards(stage: int, start: int, stop: int) -> list[Action]:
    """The whole backwards of a stage on the micro-batches `start`, ..., `stop` - 1."""
    return [compute_action(stage, Op.B, microbatch) for microbatch in range(start, stop)]


def require_positive(**sizes: int) -> None:
    """Raise an error that names all sizes below 1; return None if there are none.

    Raises:
        ConfigError: some size is below 1.
    """
    wrong = [f"{name}={size}" for name, size in sizes.items() if size < 1]
    if wrong:
        raise ConfigError(
            f"a schedule cannot be made with {', '.join(wrong)}; each of {', '.join(sizes)} must be at least 1"
        )
