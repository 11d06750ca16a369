"""Two backbones over the same workers: in opposite directions, in the same direction, or one after the other.

    opposite   a0 b0 B0 A0 a1 b1 B1 A1     a, A: forward and backward of the first backbone's micro-batches, b, B: of
               b0 a0 A0 B0 b1 a1 A1 B1     the second's, F = 1, B = 2: two workers that never wait
    together   a0 a1 A0 b0 A1 b1 B0 B1
               .  a0 A0 a1 A1 b0 B0 b1 B1  the same work in the same direction

Tian et al., "DiffusionPipe: Training Large Diffusion Models with Efficient Pipelines", MLSys 2024, run the two
backbones of a cascaded model in opposite directions, in Chimera's order (see `chimera`). Chimera's two pipes are
copies of one model; these are two models, so no weights are doubled and no gradients are summed.

Backbones have stages of their own times and micro-batches of their own numbers, so their slots do not interlock. The
orders here come from list scheduling with those times. The worker that is free starts

    deepest        the action with the shortest way left: begun work is ended
    critical       the action with the longest way left, where every later micro-batch of its backbone makes the way
                   longer by a part of F + B of the dearest stage

Of the orders by these rules the shortest is taken. Stage s of p holds at most p - s + `slack` micro-batches; 1F1B has
no slack. With free communication and F = 1, B = 2 (`one_f_one_b`, m and n micro-batches, bubbles in units of F):

    one after the other    3 (m + n + 2 p - 2)
    together               3 (m + n + p - 1)
    opposite               never longer than together; 3 (m + n) if m = n = p = 2; 3 (m + n) + 3 if m = n = p = 4

With backbones of unequal work the direction matters little: the one with more work is a pipeline by itself for part of
the time. Its own number of micro-batches matters more.
"""

from collections.abc import Callable, Iterator, Sequence

from diffusionpipe.ir import Action, Op, Schedule, compute_action
from diffusionpipe.schedules.building.list_scheduling import ListSchedule, StageTimes, list_schedule
from diffusionpipe.schedules.building.shapes import Pipe, linear, schedule_of
from diffusionpipe.units import Seconds

Urgency = Callable[[Action], tuple[Seconds, ...]]
JOINT = ("opposed", "together")
"""The names of schedules that run several backbones at once; a family's name means one backbone after the other, each
in that family."""
PACES = (0.5, 1)
"""The parts of F + B by which each later micro-batch makes the way longer in the rule "critical", tried one by one.
With one part more, orders are hardly shorter."""


def facing(first: Pipe, second: Pipe) -> tuple[Pipe, Pipe]:
    """Both pipes, the second with its workers in reverse order, so that it runs the other way."""
    return first, Pipe(
        workers=second.workers[::-1],
        microbatches=second.microbatches,
        ops=second.ops,
        model=second.model,
        first_block=second.first_block,
    )


def pipe_of(model: str, workers: Sequence[int], microbatches: Sequence[int], first_block: int = 0) -> Pipe:
    """The pipe of a backbone with one stage on each of these workers.

    `microbatches`: the number of samples of each micro-batch.
    """
    return Pipe(workers=tuple(workers), microbatches=tuple(microbatches), model=model, first_block=first_block)


def opposed(num_workers: int, microbatches: tuple[int, int]) -> Schedule:
    """The schedule of two backbones in opposite directions, the first one down the workers; stages have equal times.

    `microbatches`: the number of micro-batches of each backbone, which have one sample.

    >>> for order in opposed(2, (2, 2)).orders:
    ...     print(*order)
    0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1
    2F0 1F0 1B0 2B0 2F1 1F1 1B1 2B1
    """
    down = linear(num_workers)
    pipes = facing(
        pipe_of("first", down, (1,) * microbatches[0]),
        pipe_of("second", down, (1,) * microbatches[1], first_block=num_workers),
    )
    return ordered("opposed", pipes, [StageTimes()] * 2 * num_workers)


def ordered(name: str, pipes: Sequence[Pipe], times: Sequence[StageTimes], *, slack: int = 0) -> Schedule:
    """The shortest of the schedules that list scheduling makes of these pipes by three rules of urgency.

    `times` has one entry for each stage of each pipe. `slack`: micro-batches by which a stage may hold more than in
    1F1B.
    """
    found = (_listed(pipes, urgency, times, slack) for urgency in _urgencies(pipes, times))
    return schedule_of(name, pipes, min(found, key=lambda one: one.makespan).orders)


def in_turn(name: str, pipes: Sequence[Pipe], times: Sequence[StageTimes]) -> Schedule:
    """The schedule in which each worker does all work of the first pipe, as 1F1B, before any of the next.

    `times` has one entry for each stage of each pipe.

    >>> down = linear(2)
    >>> pipes = [pipe_of("first", down, (1, 1)), pipe_of("second", down, (1,), first_block=2)]
    >>> for order in in_turn("in turn", pipes, [StageTimes()] * 4).orders:
    ...     print(*order)
    0F0 0F1 0B0 0B1 2F0 2B0
    1F0 1B0 1F1 1B1 3F0 3B0
    """
    orders: list[list[Action]] = [[] for _ in range(1 + max(worker for pipe in pipes for worker in pipe.workers))]
    first = 0
    for pipe in pipes:
        own = times[first : first + len(pipe.workers)]
        # Backwards first, and as many forwards as 1F1B holds: together that is 1F1B's order.
        alone = _listed([pipe], lambda action: (int(action.op is Op.F), action.microbatch or 0), own, 0)
        for order, actions in zip(orders, alone.orders, strict=False):
            order += [compute_action(action.stage + first, action.op, action.microbatch or 0) for action in actions]
        first += len(pipe.workers)
    return schedule_of(name, pipes, orders)


def _listed(pipes: Sequence[Pipe], urgency: Urgency, times: Sequence[StageTimes], slack: int) -> ListSchedule:
    limits = [
        min(len(pipe.microbatches), len(pipe.workers) - position + slack)
        for pipe in pipes
        for position in range(len(pipe.workers))
    ]
    return list_schedule(pipes, urgency, times=times, limits=limits)


def _urgencies(pipes: Sequence[Pipe], times: Sequence[StageTimes]) -> Iterator[Urgency]:
    """The urgencies of the module's rules for these pipes: "deepest", then "critical" with each of `PACES`."""
    left: dict[tuple[int, Op], Seconds] = {}  # from the start of an action to the end of its micro-batch
    last: list[tuple[int, Seconds]] = []  # by stage: the last micro-batch of its backbone, F + B of its dearest stage
    first = 0
    for pipe in pipes:
        stages = range(first, first + len(pipe.workers))
        # From the last action of a micro-batch to its first: the sum so far is the way that is left.
        way = [(stage, Op.B) for stage in stages] + [(stage, Op.F) for stage in reversed(stages)]
        total: Seconds = 0
        for stage, op in way:
            total += times[stage].of(op)
            left[stage, op] = total
        dearest = max(times[stage].forward + times[stage].backward for stage in stages)
        last += [(len(pipe.microbatches) - 1, dearest)] * len(stages)
        first += len(stages)

    def deepest(action: Action) -> tuple[Seconds, ...]:
        return left[action.stage, action.op], action.microbatch or 0

    def critical(pace: float) -> Urgency:
        def urgency(action: Action) -> tuple[Seconds, ...]:
            microbatch, dearest = last[action.stage]
            # The least urgency comes first, so the longest way is negative.
            return (-left[action.stage, action.op] - pace * dearest * (microbatch - (action.microbatch or 0)),)

        return urgency

    yield deepest
    for pace in PACES:
        yield critical(pace)
