"""The result of the search, and the schedule that it is."""

from dataclasses import dataclass
from math import ceil

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.ir import Action, Edge, Op, Pipeline, Placement, Schedule, Stage, compute_action
from diffusionpipe.ordering.evaluation import figures_of
from diffusionpipe.ordering.instance import Instance, Number, Placing
from diffusionpipe.ordering.problem import Letters, Problem, home_of, number_of, placed_stages

OPS = (Op.F, Op.I, Op.W)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The orders that the search found, with their times, memory and lower bound, in the units of the instance."""

    placement: Placing
    """The placement of the half-stages, one of the three of `Placing`."""
    makespan: Number
    """The time from 0 to the last end, if everything starts as early as the orders let it."""
    window: Number
    """The largest time from the first start to the last end of one rank, at the same starts."""
    bubble: float
    """The share of the objective's time in which a rank is idle, on average over the ranks."""
    peak_memory: tuple[Number, ...]
    """The most activation memory that each rank holds, in the instance's unit."""
    orders: tuple[tuple[Action, ...], ...]
    """The actions of each rank in order, by rank, over the stages of the placement: p whole (linear) or 2p
    half-stages."""
    lower_bound: Number
    """A bound of the objective that no order can beat."""
    optimal: bool
    """Whether the objective is proven to be the least possible."""
    family: str
    """The origin of the orders: a published family, or the search's own rule; "+" if they were improved."""


def answer_of(problem: Problem, orders: Letters, *, lower_bound: int, family: str) -> Answer:
    """The answer with these orders, which must be legal, and their figures.

    `orders` and `lower_bound` are in the problem's letters and units; `family` is the origin of the orders.
    """
    figures = figures_of(problem, orders)
    assert figures is not None, "the orders wait for each other in a circle"
    value = figures.window if problem.is_window else figures.makespan
    work = sum(problem.work(rank) for rank in range(problem.num_ranks))
    return Answer(
        placement=problem.placing,
        makespan=number_of(figures.makespan, problem.time_scale),
        window=number_of(figures.window, problem.time_scale),
        # Without the ranks' waits before and after a window, where it is the objective.
        bubble=1 - work / (problem.num_ranks * value) if value else 0.0,
        peak_memory=tuple(number_of(peak, problem.memory_scale) for peak in figures.peaks),
        orders=tuple(actions_of(order) for order in orders),
        lower_bound=number_of(lower_bound, problem.time_scale),
        optimal=value == lower_bound,
        family=family,
    )


def actions_of(letters: tuple[int, ...]) -> tuple[Action, ...]:
    """The actions of a rank, F, I and W with their micro-batches, from its sequence of letters."""
    counts: dict[int, int] = {}
    actions = []
    for letter in letters:
        microbatch = counts.get(letter, 0)
        counts[letter] = microbatch + 1
        actions.append(compute_action(letter // 3, OPS[letter % 3], microbatch))
    return tuple(actions)


def schedule_of(answer: Answer, *, microbatch_size: int = 1) -> Schedule:
    """The answer as a schedule of compute actions over a chain of stages, with ops F, I and W."""
    rank = home_of(answer.placement, len(answer.orders))
    # F, I and W of each stage and micro-batch.
    num_microbatches = sum(len(order) for order in answer.orders) // (3 * len(rank))
    pipeline = Pipeline(
        stages=tuple(range(len(rank))),
        microbatches=(microbatch_size,) * num_microbatches,
        ops=frozenset(OPS),
        edges=tuple(Edge(producer=stage, consumer=stage + 1) for stage in range(len(rank) - 1)),
    )
    stages = tuple(Stage(worker=worker, weights=stage) for stage, worker in enumerate(rank))
    return Schedule(
        name=f"search-{answer.placement}",
        placement=Placement(stages=stages, pipelines=(pipeline,)),
        orders=answer.orders,
    )


def costs_of(instance: Instance, placing: Placing) -> Costs:
    """The costs of the instance's stages in a placement, as `simulator.simulate` takes them.

    Memory that is not a whole number is rounded up, because bytes are whole.
    """
    return Costs(
        stages=tuple(
            StageCosts(
                forward=stage.forward,
                backward=stage.input_grad + stage.weight_grad,
                input_grad=stage.input_grad,
                weight_grad=stage.weight_grad,
                activation=ceil(stage.activation),
                kept_after_input_grad=ceil(stage.kept_after_input_grad),
            )
            for stage in placed_stages(instance, placing)
        ),
        link=Link(latency=instance.comm),
    )
