"""Orders for any way through the workers, made by running it: whoever is free takes the most urgent action it can."""

from collections.abc import Sequence

from diffusionpipe.ir import Action, Op, Schedule
from diffusionpipe.schedules.building.shapes import Pipe, schedule_of


def greedy(pipes: Sequence[Pipe], *, wait: int = 2) -> Schedule:
    """Backwards before forwards before weight gradients; a weight gradient waits for `wait` others at most.

    Every action takes one tick. Any number of stages may stand on a worker, in any shape.
    """
    todo = dict(_actions(pipes))
    before = {action: [b for b in _before(pipes, action) if b in todo] for action in todo}
    orders: list[list[Action]] = [[] for _ in range(1 + max(w for pipe in pipes for w in pipe.workers))]
    done: set[Action] = set()
    while todo:
        chosen = []
        for worker, order in enumerate(orders):
            ready = [a for a, home in todo.items() if home == worker and done.issuperset(before[a])]
            if ready:
                action = min(ready, key=lambda a: _urgency(a, sum(r.op is Op.W for r in ready) > wait))
                chosen.append(action)
                order.append(action)
        assert chosen, "stuck"
        done.update(chosen)
        for action in chosen:
            del todo[action]
    return schedule_of("greedy", pipes, orders)


def _actions(pipes: Sequence[Pipe]) -> list[tuple[Action, int]]:
    found, first = [], 0
    for pipe in pipes:
        for position, worker in enumerate(pipe.workers):
            for microbatch in range(len(pipe.microbatches)):
                stage = first + position
                found += [(Action(stage=stage, op=op, microbatch=microbatch), worker) for op in sorted(pipe.ops)]
        first += len(pipe.workers)
    return found


def _before(pipes: Sequence[Pipe], action: Action) -> list[Action]:
    """What an action waits for, were all stages a chain; those of it that do not exist are left to the caller."""
    firsts, first = [], 0
    for pipe in pipes:
        firsts.append((first, first + len(pipe.workers) - 1))
        first += len(pipe.workers)
    start, last = next(ends for ends in firsts if ends[0] <= action.stage <= ends[1])

    def at(stage: int, op: Op) -> Action:
        return Action(stage=stage, op=op, microbatch=action.microbatch)

    match action.op:
        case Op.F:
            return [at(action.stage - 1, Op.F)] if action.stage > start else []
        case Op.W:
            return [at(action.stage, Op.I)]
        case op:
            return [at(action.stage, Op.F), *([at(action.stage + 1, op)] if action.stage < last else [])]


def _urgency(action: Action, is_late: bool) -> tuple[int, int, int]:
    assert action.microbatch is not None
    rank = {Op.B: 1, Op.I: 1, Op.F: 2, Op.W: 0 if is_late else 3}[action.op]
    return rank, action.microbatch, -action.stage
