"""The search itself: placements, memory levels, candidates, improvement."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

from diffusionpipe.errors import ConfigError
from diffusionpipe.ordering.answer import Answer, answer_of
from diffusionpipe.ordering.bounds import lower_bound
from diffusionpipe.ordering.candidates import (
    CandidateOrders,
    Families,
    best_block,
    best_candidate,
    candidates_of,
    families_of,
    improved_name,
    squeezed,
)
from diffusionpipe.ordering.improvement import Improver, Round
from diffusionpipe.ordering.instance import Instance, Number, Placing
from diffusionpipe.ordering.levels import levels
from diffusionpipe.ordering.problem import Letters, Problem, number_of, problem_of

LETTERS_PER_SECOND = 2_500_000
"""The number of letters that a slow core simulates in a second, with all other work of the search."""
MAX_LETTERS = 6_000_000
"""The most letters that the improvement of one placement at one memory level simulates, however long it may take."""
MAX_SQUARE = 1_200_000_000
"""A second limit of the letters: this number divided by the number of actions. So large problems take no longer than
small ones."""
ROUND = 5_000
"""Steps of a round of improvement."""
MIN_ROUND = 800
"""The fewest steps of a round of improvement; with fewer, a round does not pay."""
MAX_ROUNDS = 8
STEP = 60
"""The cost of a step besides the simulation, in letters."""
HEAT = 1.0
"""Starting temperature in mean durations of an action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementBest:
    """The best candidate of one placement, with the problem that it solves."""

    problem: Problem
    best: CandidateOrders


def search(instance: Instance, *, max_levels: int | None = None) -> Answer:
    """The best orders found for the instance, with a bound that no order can beat.

    `max_levels`: the number of each placement's levels of memory that are looked at, the roomiest first. None: all;
    with fewer, more memory may give a worse answer.

    For each placement, the most promising first, and the levels of memory from the most to the least (levels.py),

        the published families of this placement that fit           candidates.py, families.py
        list schedules of several templates and of the families   construction.py, templates.py
        the best of them squeezed                                 pulling.py
        improved by simulated annealing, if it is small           improvement.py
        or building blocks of a V, squeezed, if it is small       blocks.py

    A memory level whose lower bound does not beat the best known order is left out; nothing is lost by that. So the
    answer is the best over all levels below the limit. Neither chance nor the clock decides anything: random numbers
    have fixed seeds, and `instance.seconds` caps a number of evaluations.

    Raises:
        ConfigError: some rank has too little memory for one micro-batch.
    """
    problems = sorted(_problems(instance), key=lower_bound)
    bound = lower_bound(problems[0])
    found: PlacementBest | None = None
    for problem in problems:
        families = cache(partial(families_of, problem))
        for level in levels(instance, problem)[:max_levels]:
            # No order within this level can beat the best one.
            if found and found.best.value <= max(bound, lower_bound(level)):
                continue
            best = _best_at(level, families, instance.seconds)
            if found is None or best.value < found.best.value:
                found = PlacementBest(problem=problem, best=best)
    assert found is not None
    return answer_of(found.problem, found.best.orders, lower_bound=bound, family=found.best.name)


def _problems(instance: Instance) -> list[Problem]:
    """The problems of the instance, one for each wanted placement that fits into memory.

    Raises:
        ConfigError: no placement fits.
    """
    wanted = [p for p in Placing if p is not Placing.ANY] if instance.placement is Placing.ANY else [instance.placement]
    problems = [problem_of(instance, placing) for placing in wanted]
    fitting = [problem for problem in problems if not list(_shortages(problem))]
    if not fitting:
        lines = [line for problem in problems for line in _shortages(problem)]
        raise ConfigError("\n".join(["memory_limit: no order fits, not even one micro-batch at a time", *lines]))
    return fitting


def _shortages(problem: Problem) -> Iterator[str]:
    for rank in range(problem.num_ranks):
        if problem.limits[rank] < problem.needs(rank):
            need, have = (number_of(x, problem.memory_scale) for x in (problem.needs(rank), problem.limits[rank]))
            yield f"rank {rank} has {have}; with placement {problem.placing} it needs at least {need}"


def _best_at(problem: Problem, families: Families, seconds: Number) -> CandidateOrders:
    """The best orders found within the problem's memory; `seconds` is the effort of the improvement.

    It depends on nothing else, so that more memory never gives a worse answer. The attempts are the same for any number
    of seconds, only more or fewer of them.
    """
    if not _is_improvable(problem):
        return best_candidate(problem, families)
    target = lower_bound(problem)
    best: dict[Letters, CandidateOrders] = {}
    for candidate in candidates_of(problem, families()):
        if candidate.value <= target:
            return candidate
        best.setdefault(candidate.orders, candidate)
    ranked = sorted(best.values(), key=lambda candidate: candidate.value)
    block = best_block(problem)
    if block and block.value <= target:
        return block
    # Improvement does not start from a block: recorded orders got longer where one took the place of another start.
    improved = _improved(problem, ranked, target, seconds)
    return block if block and block.value < improved.value else improved


def _is_improvable(problem: Problem) -> bool:
    """Whether the problem is small enough to be improved by simulated annealing."""
    return _round_length(problem) >= MIN_ROUND


def _round_length(problem: Problem) -> int:
    return min(ROUND, _most_letters(problem) // (2 * (problem.num_actions + STEP)))  # at least two rounds must fit


def _most_letters(problem: Problem) -> int:
    return min(MAX_LETTERS, MAX_SQUARE // problem.num_actions)


def _improved(problem: Problem, ranked: Sequence[CandidateOrders], target: int, seconds: Number) -> CandidateOrders:
    """The best orders after rounds of improvement, which start alternately from the best and the next of `ranked`.

    They end at the objective `target`. The best candidate is squeezed too, before and not after, so that more seconds
    never give a worse answer.
    """
    best = squeezed(problem, ranked[0])
    cost = problem.num_actions + STEP
    length = _round_length(problem)
    # In steps; each simulates all letters once.
    left = int(min(_most_letters(problem), float(seconds) * LETTERS_PER_SECOND)) // cost
    improver, heat = Improver(problem), HEAT * sum(problem.durations) / len(problem.durations)
    for number in range(MAX_ROUNDS):
        start = best if number and number % 2 == 0 else ranked[min((number + 1) // 2, len(ranked) - 1)]
        options = Round(steps=length, temperature=heat, seed=number, target=target)
        found = improver.anneal(start.orders, options, max_steps=left)
        left -= found.steps
        if found.value < best.value:
            best = CandidateOrders(value=found.value, orders=found.orders, name=improved_name(start))
        if left <= 0 or best.value <= target:
            break
    return best
