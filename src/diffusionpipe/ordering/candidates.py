"""Attempts at a problem without improving them: published families, list schedules of rules, families cut down."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from random import Random
from typing import TypeAlias

from diffusionpipe.ordering.blocks import block_orders
from diffusionpipe.ordering.bounds import lower_bound
from diffusionpipe.ordering.construction import Builder, Rule
from diffusionpipe.ordering.evaluation import ends_of, figures_of, fits
from diffusionpipe.ordering.families import family_orders
from diffusionpipe.ordering.problem import Letters, Problem
from diffusionpipe.ordering.pulling import pulled
from diffusionpipe.ordering.templates import Template, drawn_rule, rule_of, templates_of

MAX_DRAWN = 400
DRAWN_LETTERS = 60_000
"""The most letters in all orders of rules that are drawn at random, of which there are at most `MAX_DRAWN`."""
PROXY = 3
"""The number of micro-batches for each rank on which templates are compared, if the problem has more."""
NUM_COMPARED = 14
NUM_FULL = 3
"""The number of templates that are built in full, after `NUM_COMPARED` are compared on fewer micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateOrders:
    """The sequences of letters of all ranks, with their origin and the objective that they reach."""

    value: int
    """The objective, in the problem's units."""
    orders: Letters
    name: str
    """The origin of the orders: a family, a template or a block; with "+" at its end if they were improved."""


Families: TypeAlias = Callable[[], Sequence[CandidateOrders]]
"""A function that generates the orders of the published families for a placement, when they are needed."""


def families_of(problem: Problem) -> list[CandidateOrders]:
    """The orders of the published families that have the problem's placement, with their objective; equal ones once.

    Some may need more memory than the problem has.
    """
    names: dict[Letters, str] = {}
    for name, orders in family_orders(problem):
        names.setdefault(orders, name)  # the first family's name for orders that several give
    return [_evaluated(problem, orders, name) for orders, name in names.items()]


def candidates_of(problem: Problem, families: Sequence[CandidateOrders]) -> Iterator[CandidateOrders]:
    """Orders that fit into memory: families that fit, templates, families cut down to what fits, then drawn rules.

    `families` are the ones of `families_of`. The drawn rules are the same in every run.
    """
    builder = Builder(problem)
    best = inf
    for family in families:
        if fits(problem, family.orders):
            best = min(best, family.value)
            yield family
    for template in _selected(problem):
        built = _built(builder, rule_of(problem, template), template.name)
        assert built is not None  # only a limit `below` makes it None
        best = min(best, built.value)
        yield built
    for family in families:
        # A family that is not faster than the best, with more memory than there is, will not be faster when it is cut
        # down.
        if family.value < best and not fits(problem, family.orders):
            cut_down = _built(builder, _rule_like(problem, family.orders), family.name)
            assert cut_down is not None
            yield cut_down
    random = Random(0)
    for _ in range(min(MAX_DRAWN, DRAWN_LETTERS // problem.num_actions)):
        drawn = _built(builder, drawn_rule(problem, random), "search drawn")
        assert drawn is not None
        yield drawn


def best_block(problem: Problem) -> CandidateOrders | None:
    """The best of the repeated building blocks that fit, after squeezing; None if none fits."""
    blocks = [squeezed(problem, _evaluated(problem, orders, "search block")) for orders in block_orders(problem)]
    return min(blocks, key=lambda block: block.value, default=None)


def best_candidate(problem: Problem, families: Families) -> CandidateOrders:
    """The best of the templates and the families, cut down where they do not fit, after squeezing; without drawn rules.

    For large problems. Families are generated after the templates, and only if no template reaches the lower bound,
    which is returned as it is.
    """
    target = lower_bound(problem)
    best: CandidateOrders | None = None
    for attempt in _attempts(problem, families):
        if found := attempt(best.value if best else inf):
            best = found
            if best.value <= target:  # no order can be shorter
                return best
    assert best is not None
    return squeezed(problem, best)


def squeezed(problem: Problem, candidate: CandidateOrders) -> CandidateOrders:
    """The candidate with squeezed orders, if they reach a smaller objective; else the candidate itself."""
    value, orders = pulled(problem, candidate.orders)
    return (
        CandidateOrders(value=value, orders=orders, name=improved_name(candidate))
        if value < candidate.value
        else candidate
    )


def improved_name(candidate: CandidateOrders) -> str:
    """The candidate's name with one "+" at its end, which says that its orders were improved."""
    return f"{candidate.name.rstrip('+')}+"


def _attempts(problem: Problem, families: Families) -> Iterator[Callable[[float], CandidateOrders | None]]:
    """The attempts at the problem: templates, then the families that fit into memory, then the others cut down.

    Each is a function of a limit that returns a candidate whose objective is below the limit, or None.
    """
    builder = Builder(problem)
    for template in _selected(problem):
        yield partial(_built, builder, rule_of(problem, template), template.name)
    too_large = []
    for family in families():
        if fits(problem, family.orders):
            yield partial(_as_it_is, family)
        else:
            too_large.append(family)
    for family in too_large:
        yield partial(_cut_down, problem, builder, family)


def _built(builder: Builder, rule: Rule, name: str, below: float = inf) -> CandidateOrders | None:
    built = builder.build(rule, below=below)
    return CandidateOrders(value=built.value, orders=built.orders, name=name) if built else None


def _as_it_is(family: CandidateOrders, below: float) -> CandidateOrders | None:
    return family if family.value < below else None


def _cut_down(problem: Problem, builder: Builder, family: CandidateOrders, below: float) -> CandidateOrders | None:
    """Orders like the family's that fit into memory, as its own do not; None if the objective is not below `below`."""
    if family.value >= below:
        return None
    return _built(builder, _rule_like(problem, family.orders), family.name, below)


def _selected(problem: Problem) -> Sequence[Template]:
    """All templates for the problem; if it has many micro-batches, only the `NUM_FULL` that are best with fewer."""
    # The proxy may hold as much as before, as far as its few micro-batches need it.
    templates, few = templates_of(problem), PROXY * problem.num_ranks
    if problem.num_microbatches <= few:
        return templates
    limits = tuple(min(limit, few * problem.needs(rank)) for rank, limit in enumerate(problem.limits))
    proxy = replace(problem, num_microbatches=few, limits=limits)
    builder = Builder(proxy)
    values: dict[Template, int] = {}
    for template in templates[:NUM_COMPARED]:
        # As good as the third best so far, or it is not selected: building ends as soon as that is clear.
        below = sorted(values.values())[NUM_FULL - 1] if len(values) >= NUM_FULL else inf
        if built := builder.build(rule_of(proxy, template), below=below):
            values[template] = built.value
    return sorted(values, key=lambda template: values[template])[:NUM_FULL]


def _rule_like(problem: Problem, orders: Letters) -> Rule:
    """The rule in which the key of each action is its start in these orders, so that earlier ones are more urgent."""
    ends = ends_of(problem, orders)
    assert ends is not None
    keys = [
        [end - duration for end in ends_of_letter]
        for ends_of_letter, duration in zip(ends, problem.durations, strict=True)
    ]
    return Rule(keys=keys, patience=0, leads=[problem.num_microbatches] * problem.num_ranks)


def _evaluated(problem: Problem, orders: Letters, name: str) -> CandidateOrders:
    figures = figures_of(problem, orders)
    assert figures is not None, name
    return CandidateOrders(value=figures.window if problem.is_window else figures.makespan, orders=orders, name=name)
