"""Random legal orders and layouts: families, rules, searched orders, any legal order at all, W moved.

An order is legal if there is a moment for every action behind all that it waits for. So any sequence of all actions of
all workers in which each stands behind what it waits for gives legal orders: those of each worker, in this sequence.
"""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from kit.strategies import sized

from diffusionpipe.ir import Action, Op, Schedule
from diffusionpipe.ordering import Goal, HalfStage, Instance, Placing, search
from diffusionpipe.ordering import schedule_of as schedule_of_answer
from diffusionpipe.planner import Layout
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.schedules.building.shapes import SPLIT, TRAIN, Pipe, linear, loop, schedule_of, wave
from diffusionpipe.schedules.files.rules import schedule_by_rules
from diffusionpipe.schedules.files.rules_text import rules_from_text

SOURCES = ("family", "family, W moved", "rules", "searched", "any order")
FAMILIES = tuple(REGISTRY)


def random_schedule(random: Random, source: str, number: int) -> Schedule:
    """Orders from one source; `number` takes families by turns."""
    match source:
        case "family":
            return _family(random, FAMILIES[number % len(FAMILIES)])
        case "family, W moved":
            split = [name for name in FAMILIES if _splits(name)]
            return _moved(random, _family(random, split[number % len(split)]))
        case "rules":
            return _by_rules(random)
        case "searched":
            return _searched(random)
    return _any_order(random)


def _splits(name: str) -> bool:
    schedule = sized(REGISTRY[name], 2, 4)
    return any(action.op is Op.W for _, action in schedule.actions())


def _family(random: Random, name: str) -> Schedule:
    return sized(REGISTRY[name], random.randint(1, 3), random.randint(2, 6))


def _by_rules(random: Random) -> Schedule:
    ranks, microbatches = random.randint(1, 3), random.randint(2, 6)
    ops = random.choice([["F", "B"], ["F", "I", "W"]])
    random.shuffle(ops)
    lines = [
        f"stages: {random.choice(['chain', 'loop 2', 'wave 2', 'wave 3'])}",
        f"priority: {' '.join(ops)}",
        f"limit: {random.choice(['none', 'ranks * chunks', 'ranks * chunks + 1', '2 * ranks * chunks'])}",
    ]
    if random.random() < 0.5:
        lines.append(f"meanwhile: {random.choice(ops)}")
    return schedule_by_rules(rules_from_text("\n".join(lines), source="rules"), ranks, microbatches)


def _searched(random: Random) -> Schedule:
    ranks = random.randint(2, 3)
    halves = tuple(
        HalfStage(
            forward=random.randint(1, 3),
            input_grad=random.randint(1, 3),
            weight_grad=random.randint(1, 3),
            activation=4,
            kept_after_input_grad=2,
        )
        for _ in range(2 * ranks)
    )
    placing = random.choice([Placing.V, Placing.V, Placing.LOOP, Placing.LINEAR])
    limit = (4 * random.randint(2 * ranks, 4 * ranks),) * ranks
    return schedule_of_answer(
        search(
            Instance(
                ranks=ranks,
                microbatches=random.randint(3, 6),
                placement=placing,
                stages=halves,
                comm=random.randint(0, 2),
                memory_limit=limit,
                objective=Goal.MAKESPAN,
                seconds=0.02,
            )
        )
    )


def _any_order(random: Random) -> Schedule:
    """Any legal order over any way through the workers; now and then all forwards, or all W, come as late as can be."""
    workers, count = random.randint(1, 3), random.randint(2, 5)
    ops = SPLIT if random.random() < 0.8 else TRAIN
    ways = random.choice(
        [
            [wave(workers, 2)],
            [wave(workers, 2)],
            [wave(workers, 3)],
            [loop(workers, 2)],
            [linear(workers)],
            [linear(workers), linear(workers)[::-1]],
            [tuple(random.randrange(workers) for _ in range(random.randint(workers, workers + 3)))],
        ]
    )
    ways = [way if set(way) == set(range(workers)) else (*range(workers), *way) for way in ways]
    pipes = [Pipe(workers=way, microbatches=(1,) * count, ops=ops) for way in ways]
    home = _homes(pipes)
    return schedule_of("any order", pipes, _sequence(random, home, _needs(home)))


def _homes(pipes: Sequence[Pipe]) -> dict[Action, int]:
    """Every action of a schedule and its worker."""
    found, first = {}, 0
    for pipe in pipes:
        for place, worker in enumerate(pipe.workers):
            for number in range(len(pipe.microbatches)):
                for op in sorted(pipe.ops):
                    found[Action(stage=first + place, op=op, microbatch=number)] = worker
        first += len(pipe.workers)
    return found


def _needs(home: dict[Action, int]) -> dict[Action, list[Action]]:
    """What every action waits for in a chain of stages."""

    def needed(action: Action) -> list[Action]:
        stage, microbatch = action.stage, action.microbatch
        match action.op:
            case Op.F:
                wanted = [(stage - 1, Op.F)]
            case Op.W:
                wanted = [(stage, Op.I)]
            case op:
                wanted = [(stage, Op.F), (stage + 1, op)]
        all_of_them = [Action(stage=s, op=op, microbatch=microbatch) for s, op in wanted if s >= 0]
        return [one for one in all_of_them if one in home]

    return {action: needed(action) for action in home}


def _sequence(random: Random, home: dict[Action, int], needs: dict[Action, list[Action]]) -> list[list[Action]]:
    """A random sequence, worker by worker. Some draws like one op less than the others."""
    orders: list[list[Action]] = [[] for _ in range(1 + max(home.values()))]
    weight = {op: random.choice([0.05, 1, 1, 4]) for op in Op}
    done: set[Action] = set()
    left = list(home)
    while left:
        ready = [action for action in left if done.issuperset(needs[action])]
        action = random.choices(ready, [weight[one.op] for one in ready])[0]
        orders[home[action]].append(action)
        done.add(action)
        left.remove(action)
    return orders


def _moved(random: Random, schedule: Schedule) -> Schedule:
    """The schedule with each W anywhere behind its I; nothing waits for a W, so that is legal."""
    orders = []
    for order in schedule.orders:
        moved = [action for action in order if action.op is not Op.W]
        for action in (one for one in order if one.op is Op.W):
            start = moved.index(replace(action, op=Op.I)) + 1
            moved.insert(random.randint(start, len(moved)), action)
        orders.append(tuple(moved))
    return replace(schedule, name="W moved", orders=tuple(orders))


def random_layout(random: Random, schedule: Schedule, layers: Sequence[str]) -> Layout:
    """A layout with these orders, cuts anywhere and, now and then, replicas, copies, buckets and recomputed layers."""
    placement = schedule.placement
    num_blocks = 1 + max(stage.weights for stage in placement.stages)
    counts = sum(len(pipeline.microbatches) for pipeline in placement.pipelines)
    replicas: tuple[int, ...] = ()
    if random.random() < 0.2:
        replicas = tuple(random.randint(1, 2) for _ in range(schedule.num_workers))
    copies = random.choice([1, 1, 1, 2])
    if (sum(replicas) or schedule.num_workers) * copies > 6:
        replicas, copies = (), 1
    buckets = 2 if copies > 1 and 2 * num_blocks <= len(layers) and random.random() < 0.5 else 1
    places = sorted(random.sample(range(buckets, len(layers) - buckets + 1), num_blocks - 1)) if num_blocks > 1 else []
    size = (2 if replicas else 1) * random.randint(1, 2)
    again = random.choice([(), (), (), ("*",), (random.choice(layers),)])
    return Layout(
        batch=counts * size * copies,
        stages=schedule.num_workers,
        microbatches=counts,
        orders=schedule,
        splits=tuple(layers[place] for place in places),
        replicas=replicas,
        data_parallel=copies,
        buckets=buckets,
        checkpointed=again,
        encode_chunk=random.randint(1, 4),
    )
