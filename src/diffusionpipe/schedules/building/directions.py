"""Pipes in several directions over the same workers, merged slot by slot.

Every micro-batch goes down its pipe with a forward in each slot of time and comes back at once with a backward in each:
at position k of n it has its forward in slot t + k and its backward in slot t + 2n - 1 - k, if it enters in slot t. A
pipe takes a micro-batch every second slot, so it leaves free what another pipe with the opposite parity needs.

    pipe 0 1 2 3, micro-batches in slots 0, 2      pipe 3 2 1 0, the same, in small letters
    worker 0   F0 .  F1 .  .  .  .  B0 .  B1       F0 .  F1 f0 b0 f1 b1 B0 .  B1
    worker 1   .  F0 .  F1 .  .  B0 .  B1 .        .  F0 f0 F1 f1 B0 b0 B1 b1 .       and so on
"""

from collections.abc import Sequence

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Action, Op, Schedule, compute_action
from diffusionpipe.schedules.building.shapes import Pipe, require_positive, schedule_of


def merged(
    name: str, ways: Sequence[tuple[int, ...]], num_workers: int, num_microbatches: int, microbatch_size: int
) -> Schedule:
    """The schedule of several pipes in different directions, merged slot by slot; they share out the micro-batches.

    `ways` are the workers of each pipe, in forward order.

    A unit of `num_workers` micro-batches is shared equally by the pipes. Units follow one another by as many slots as a
    worker works for one of them; so they interlock. The last one may have fewer micro-batches, which are shared out as
    evenly as possible.

    Trusts that `ways` never need one worker twice in a slot; asserts it.
    """
    per_unit = num_workers // len(ways)
    num_positions = len(ways[0])
    slots: list[dict[int, Action]] = [{} for _ in range(num_workers)]
    pipes = [
        Pipe(workers=way, microbatches=(microbatch_size,) * count)
        for way, count in zip(ways, shared_out(num_microbatches, len(ways)), strict=True)
    ]
    for number, pipe in enumerate(pipes):
        for microbatch in range(len(pipe.microbatches)):
            unit, index = divmod(microbatch, per_unit)
            start = 2 * (unit * num_positions + index)  # a pipe takes one every second slot
            for position, worker in enumerate(pipe.workers):
                stage = number * num_positions + position
                for op, slot in ((Op.F, start + position), (Op.B, start + 2 * num_positions - 1 - position)):
                    assert slot not in slots[worker], (worker, slot)
                    slots[worker][slot] = compute_action(stage, op, microbatch)
    return schedule_of(name, pipes, [[actions[slot] for slot in sorted(actions)] for actions in slots])


def shared_out(num_microbatches: int, num_pipes: int) -> list[int]:
    """The number of micro-batches of each pipe, as even as possible; the first pipes have more.

    >>> shared_out(7, 2)
    [4, 3]
    """
    fewest, rest = divmod(num_microbatches, num_pipes)
    return [fewest + (pipe < rest) for pipe in range(num_pipes)]


def require_directions(num_workers: int, num_microbatches: int, microbatch_size: int, directions: int = 2) -> None:
    """Raise an error for sizes that pipes in several directions cannot have; return None for others.

    Raises:
        ConfigError: a size is below 1, the workers are odd, the directions do not fit the workers, or there are fewer
            micro-batches than directions.
    """
    require_positive(num_workers=num_workers, num_microbatches=num_microbatches, microbatch_size=microbatch_size)
    problems = []
    if num_workers % 2:
        problems.append(
            f"{num_workers} workers cannot be shared by two directions; use an even number, such as {num_workers + 1}"
        )
    elif directions < 2 or directions % 2 or num_workers % directions:
        fitting = ", ".join(str(n) for n in range(2, num_workers + 1, 2) if num_workers % n == 0)
        problems.append(f"{directions} directions do not fit {num_workers} workers; use one of {fitting}")
    if num_microbatches < directions:
        problems.append(
            f"{num_microbatches} micro-batches are too few for {directions} directions, because each direction "
            "needs one; use at least "
            f"{directions}"
        )
    if problems:
        raise ConfigError("\n".join(problems))
