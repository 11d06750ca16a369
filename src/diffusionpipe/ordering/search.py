"""The search itself: placements, memory levels, candidates, improvement."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, inf
from random import Random

from diffusionpipe.errors import ConfigError
from diffusionpipe.ordering.answer import Answer, answer_of
from diffusionpipe.ordering.bounds import lower_bound
from diffusionpipe.ordering.construction import Builder, Rule
from diffusionpipe.ordering.evaluation import ends_of, figures_of, fits
from diffusionpipe.ordering.families import family_orders
from diffusionpipe.ordering.improvement import Improver, Round
from diffusionpipe.ordering.instance import Instance, Number, Placing
from diffusionpipe.ordering.problem import Letters, Problem, exact, number_of, problem_of
from diffusionpipe.ordering.templates import Template, drawn_rule, rule_of, templates_of

LETTERS_PER_SECOND = 2_500_000
"""What a slow core simulates, with all that the search does besides."""
MAX_LETTERS = 6_000_000
"""What the improvement of one placement at one memory level simulates at most, however long it may take;"""
MAX_SQUARE = 1_200_000_000
"""and this divided by the actions, so that large problems take no longer than small ones."""
ROUND = 5_000
"""Steps of a round of improvement."""
MIN_ROUND = 800
"""Below so many steps improvement is not worth a start."""
MAX_ROUNDS = 8
MAX_DRAWN = 400
DRAWN_LETTERS = 60_000
"""Rules that are drawn at random for small problems: that many, and that many letters at most."""
STEP = 60
"""What a step costs besides the simulation, in letters."""
HEAT = 1.0
"""Starting temperature in mean durations of an action."""
FEW_RANKS = 4
FEW_STEPS = 8
"""With at most so many ranks, room for each number of micro-batches up to the other is a memory level."""
PROXY = 3
"""Templates are compared on this many micro-batches a rank, if there are more."""
NUM_COMPARED = 14
NUM_FULL = 3
"""So many are compared then, and so many of those are built in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Sequences and what they reach."""

    value: int
    """The objective, in the problem's units."""
    orders: Letters
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best of a placement."""

    problem: Problem
    best: Candidate


def search(instance: Instance) -> Answer:
    """The best orders found for the instance, and how good they can be at most.

    For each placement, from the most memory to the least,

        the published families that stand there and fit           families.py
        list schedules of several templates and of the families   construction.py, templates.py
        improved by simulated annealing                           improvement.py

    A memory level whose lower bound is no better than what is known is left out; nothing is lost by that. So the answer
    is the best over all levels below the limit. Neither chance nor the clock decides anything: random numbers have
    fixed seeds, and `instance.seconds` caps a number of evaluations.

    Raises:
        ConfigError: some rank has too little memory for one micro-batch.
    """
    problems = _problems(instance)
    bound = min(lower_bound(problem) for problem in problems)
    found: Found | None = None
    for problem in problems:
        if found and found.best.value <= bound:
            break
        families = _families(problem)
        for level in _levels(instance, problem):
            if found and found.best.value <= max(bound, lower_bound(level)):
                continue
            best = _best_at(level, families, instance.seconds)
            if found is None or best.value < found.best.value:
                found = Found(problem=problem, best=best)
    assert found is not None
    return answer_of(found.problem, found.best.orders, lower_bound=bound, family=found.best.name)


def _problems(instance: Instance) -> list[Problem]:
    """One for each placement that fits.

    Raises:
        ConfigError: none does.
    """
    wanted = [p for p in Placing if p is not Placing.ANY] if instance.placement is Placing.ANY else [instance.placement]
    problems = [problem_of(instance, placing) for placing in wanted]
    fitting = [problem for problem in problems if not list(_shortages(problem))]
    if not fitting:
        lines = [line for problem in problems for line in _shortages(problem)]
        raise ConfigError("\n".join(["memory_limit: no order fits, not even one micro-batch at a time", *lines]))
    return fitting


def _families(problem: Problem) -> list[Candidate]:
    """The published families that stand on the placement, equal ones once."""
    names: dict[Letters, str] = {}
    for name, orders in family_orders(problem):
        names.setdefault(orders, name)
    return [_candidate(problem, orders, name) for orders, name in names.items()]


def _shortages(problem: Problem) -> Iterator[str]:
    for rank in range(problem.num_ranks):
        if problem.limits[rank] < problem.needs(rank):
            need, have = (number_of(x, problem.memory_scale) for x in (problem.needs(rank), problem.limits[rank]))
            yield f"rank {rank} has {have}; with placement {problem.placing} it needs at least {need}"


def _levels(instance: Instance, problem: Problem) -> list[Problem]:
    """The problem, and the same with less memory: limits in the same proportion, down to room for one micro-batch.

    The steps depend on nothing but that proportion and the number of ranks. So of two instances whose limits are in
    proportion and on a step, the one with more memory has all levels of the other.
    """
    p, m = problem.num_ranks, problem.num_microbatches
    needs = [problem.needs(rank) for rank in range(p)]
    given = [Fraction(m)] * p
    if instance.memory_limit is not None:
        scale = problem.memory_scale
        given = [
            exact(limit) * scale / need if need else Fraction(m)
            for limit, need in zip(instance.memory_limit, needs, strict=True)
        ]
    least = min(given)
    levels = {_quantized(problem, problem.limits): None}
    for step in sorted(_steps(p, m), reverse=True):
        if step < least:
            limits = [min(int(step * part / least * need), m * need) for part, need in zip(given, needs, strict=True)]
            levels[_quantized(problem, limits)] = None
    return [replace(problem, limits=limits) for limits in levels]


def _steps(num_ranks: int, num_microbatches: int) -> set[int]:
    """Micro-batches that there is room for at the levels: with few ranks each of the first ones, else a few."""
    p, m = num_ranks, num_microbatches
    steps = range(1, FEW_STEPS + 1) if p <= FEW_RANKS else (1, -(-p // 2), p)
    return {step for step in (*steps, 2 * p, m) if step <= m}


def _quantized(problem: Problem, limits: Sequence[int]) -> tuple[int, ...]:
    """The most that can be held at all within the limits."""
    found = []
    for rank, limit in enumerate(limits):
        amounts = [amount for s in problem.stages_of(rank) for amount in (problem.activation[s], problem.kept[s])]
        unit = gcd(*amounts)
        found.append(limit // unit * unit if unit else limit)
    return tuple(found)


def _best_at(problem: Problem, families: Sequence[Candidate], seconds: Number) -> Candidate:
    """The best order within the problem's memory.

    What is tried is the same for any number of seconds, only more or less of it.
    """
    target = lower_bound(problem)
    best: dict[Letters, Candidate] = {}
    for candidate in _candidates(problem, families):
        if candidate.value <= target:
            return candidate
        best.setdefault(candidate.orders, candidate)
    ranked = sorted(best.values(), key=lambda candidate: candidate.value)
    return _improved(problem, ranked, target, seconds)


def _candidates(problem: Problem, families: Sequence[Candidate]) -> Iterator[Candidate]:
    """The families that fit, orders of our own, and the families cut down to what fits."""
    builder = Builder(problem)
    best = inf
    for family in families:
        if fits(problem, family.orders):
            best = min(best, family.value)
            yield family
    for template in _selected(problem):
        built = _candidate(problem, builder.build(rule_of(problem, template)), template.name)
        best = min(best, built.value)
        yield built
    for family in families:
        if family.value < best and not fits(problem, family.orders):
            yield _candidate(problem, builder.build(_rule_like(problem, family.orders)), family.name)
    random = Random(0)
    for _ in range(min(MAX_DRAWN, DRAWN_LETTERS // problem.num_actions) if _is_improvable(problem) else 0):
        yield _candidate(problem, builder.build(drawn_rule(problem, random)), "search drawn")


def _is_improvable(problem: Problem) -> bool:
    """Whether it is small enough for more than the templates."""
    return _round_length(problem) >= MIN_ROUND


def _round_length(problem: Problem) -> int:
    return min(ROUND, _most_letters(problem) // (2 * (problem.num_actions + STEP)))


def _most_letters(problem: Problem) -> int:
    return min(MAX_LETTERS, MAX_SQUARE // problem.num_actions)


def _selected(problem: Problem) -> Sequence[Template]:
    """All templates, or if there are many micro-batches those that are best with fewer."""
    templates, few = templates_of(problem), PROXY * problem.num_ranks
    if problem.num_microbatches <= few:
        return templates
    limits = tuple(min(limit, few * problem.needs(rank)) for rank, limit in enumerate(problem.limits))
    proxy = replace(problem, num_microbatches=few, limits=limits)
    builder = Builder(proxy)
    values = {t: _candidate(proxy, builder.build(rule_of(proxy, t)), t.name).value for t in templates[:NUM_COMPARED]}
    return sorted(values, key=lambda template: values[template])[:NUM_FULL]


def _rule_like(problem: Problem, orders: Letters) -> Rule:
    """The rule by which everything is as urgent as it is early in these orders."""
    ends = ends_of(problem, orders)
    assert ends is not None
    keys = [
        [end - duration for end in ends_of_letter]
        for ends_of_letter, duration in zip(ends, problem.durations, strict=True)
    ]
    return Rule(keys=keys, patience=0, leads=[problem.num_microbatches] * problem.num_ranks)


def _improved(problem: Problem, ranked: Sequence[Candidate], target: int, seconds: Number) -> Candidate:
    """The best after rounds of improvement: in turn of the best so far, and of the next of the other candidates."""
    best = ranked[0]
    cost = problem.num_actions + STEP
    length = _round_length(problem)
    left = int(min(_most_letters(problem), float(seconds) * LETTERS_PER_SECOND)) // cost
    if not _is_improvable(problem):
        return best
    improver, heat = Improver(problem), HEAT * sum(problem.durations) / len(problem.durations)
    for number in range(MAX_ROUNDS):
        start = best if number % 2 == 0 else ranked[min((number + 1) // 2, len(ranked) - 1)]
        options = Round(steps=length, temperature=heat, seed=number, target=target)
        found = improver.anneal(start.orders, options, max_steps=left)
        left -= found.steps
        if found.value < best.value:
            best = Candidate(value=found.value, orders=found.orders, name=f"{start.name.rstrip('+')}+")
        if left <= 0 or best.value <= target:
            break
    return best


def _candidate(problem: Problem, orders: Letters, name: str) -> Candidate:
    figures = figures_of(problem, orders)
    assert figures is not None, name
    return Candidate(value=figures.window if problem.is_window else figures.makespan, orders=orders, name=name)
