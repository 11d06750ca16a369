"""Rules for building orders, the most useful first.

A template says when each action of micro-batch k is wanted: k periods after the action of micro-batch 0, whose forwards
are stretched over `forward` times their way down, whose input gradients over `backward` times their way back, and whose
weight gradients come `delay` periods later. A stretch makes a rank take more micro-batches ahead; a long delay makes
weight gradients the work of a rank when there is nothing else, or when its memory is full. `lead` keeps room for the
later of a rank's two stages, which decides most where there is little memory.

The list was chosen greedily: each template is the one that shortened the orders of a set of cases the most, given those
before it. `python -m benchmarks.ordering` measures the result of all of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from random import Random

from diffusionpipe.ordering.bounds import Ways
from diffusionpipe.ordering.construction import Rule
from diffusionpipe.ordering.problem import Problem

NEVER = 100
"""A delay that no order reaches."""
FIRST = -inf
"""The value of `Template.backward` with which input gradients are always the most urgent."""


@dataclass(frozen=True, slots=True)
class Template:
    """The numbers of one rule: stretches of the ways, delay of weight gradients, patience, share of memory."""

    forward: float
    """The stretch of forwards: the factor by which their earliest starts are multiplied."""
    backward: float
    """The stretch of input gradients: the factor of their earliest starts after the last stage's; or `FIRST`."""
    delay: float
    """The periods by which weight gradients are wanted after their input gradients."""
    patience: float
    """The patience of the rule, 0 to 1, see `Rule`."""
    lead: float = inf
    """The share of the activations for which a rank has room that may be between its stages; inf for as many as fit."""
    slope: float = 0
    """The part by which `lead` falls from the first rank to the last: 0 for equal shares, 1 for nearly nothing."""

    @property
    def name(self) -> str:
        """The template's name, with its stretches and its delay: "search 1:2:100"."""
        return f"search {self.forward:g}:{self.backward:g}:{self.delay:g}"


LINEAR = (
    Template(1, 2, NEVER, 0.5),
    Template(1, 1, 4, 0.5),
    Template(0, 2, NEVER, 0),
    Template(2, 2, NEVER, 0),
    Template(-1, 2, NEVER, 0.5),
    Template(1, 2, 4, 0.5),
    Template(2, 2, 0, 0),
    Template(0, 1, NEVER, 0.5),
    Template(3, 2, NEVER, 0.5),
    Template(3, 1, NEVER, 0.5),
)
"""The templates that are tried for ranks with one stage."""

TWO_STAGES = (
    Template(1, 2, NEVER, 0, 0.5),
    Template(0, 2, NEVER, 0, 0.6, 0.5),
    Template(3, 1, NEVER, 0.5, 0.75, 0.5),
    Template(-1, 2, NEVER, 0, 0.5),
    Template(1, 2, NEVER, 0, 0.5, 1),
    Template(3, 1, NEVER, 0, 0.9),
    Template(2, 2, NEVER, 0.5, 0.6, 0.5),
    Template(-1, 0, 0, 0, 0.6, 0.5),
    Template(2, FIRST, NEVER, 0, 0.6, 0.5),
    Template(3, 2, 2, 0.5, 0.75, 1),
    Template(0, 2, NEVER, 0, 0.4, 0.5),
    Template(3, 0, 0, 0, 0.5, 0.5),
    Template(-1, 2, 0, 0.5, 0.5),
    Template(0, 2, NEVER, 0, 0.6),
    Template(1, 2, NEVER, 0, 0.6),
    Template(-1, 1, 4, 0.5, 0.75),
    Template(3, 2, NEVER, 0, 0.5, 1),
    Template(0, 2, 0, 0.5, 0.6),
    Template(1, FIRST, NEVER, 0, 0.5),
    Template(3, 2, NEVER, 0.5),
    Template(2, 2, NEVER, 0.5, 0.5, 1),
    Template(-1, FIRST, 0, 0, 0.5, 1),
    Template(2, 2, 0, 0, 0.25),
    Template(-1, FIRST, 0, 0, 0.75, 0.5),
)
"""The templates that are tried for ranks with two stages."""

DRAWN_FORWARD = (-1.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0)
DRAWN_BACKWARD = (FIRST, 0.0, 0.5, 1.0, 1.5, 2.0)
DRAWN_DELAYS = (0.0, 0.5, 1.0, 2.0, 4.0, float(NEVER))
DRAWN_PATIENCE = (0.0, 0.0, 0.5, 1.0)
SHIFT = 0.5
"""The most by which `drawn_rule` shifts the times of a letter's actions, in periods."""


def templates_of(problem: Problem) -> tuple[Template, ...]:
    """The templates for the problem's placement, with one or two stages a rank, the most useful first."""
    return LINEAR if problem.num_stages == problem.num_ranks else TWO_STAGES


def rule_of(problem: Problem, template: Template) -> Rule:
    """The rule that a template gives with the problem's times and memory."""
    ways, m = Ways(problem), problem.num_microbatches
    # The least time in which the busiest rank ends a micro-batch.
    period = max(problem.work(rank) for rank in range(problem.num_ranks)) / m
    # The way back begins where the way down ends, so its keys are counted on from there.
    turn = template.forward * ways.arrival[-1]
    keys: list[list[float]] = []
    for stage in range(problem.num_stages):
        forward = template.forward * ways.arrival[stage]
        if template.backward == FIRST:
            backward, weights = FIRST, 0.0
        else:
            backward = weights = turn + template.backward * (ways.gradient[stage] - ways.gradient[-1])
        wanted = forward, backward, weights + template.delay * period
        keys += [[start + k * period for k in range(m)] for start in wanted]
    return Rule(keys=keys, patience=template.patience, leads=tuple(_leads(problem, template)))


def drawn_rule(problem: Problem, random: Random) -> Rule:
    """A rule drawn with `random`: a random template, with a lead for each rank and a shift for each letter."""
    template = Template(
        random.choice(DRAWN_FORWARD),
        random.choice(DRAWN_BACKWARD),
        random.choice(DRAWN_DELAYS),
        random.choice(DRAWN_PATIENCE),
    )
    rule = rule_of(problem, template)
    period = max(problem.work(rank) for rank in range(problem.num_ranks)) / problem.num_microbatches
    keys = []
    for letter_keys in rule.keys:
        # The difference of two draws: small shifts are likelier than large ones, to either side.
        shift = (random.random() - random.random()) * period * SHIFT
        keys.append([key + shift for key in letter_keys])
    leads = []
    for rank in range(problem.num_ranks):
        activation = problem.activation[problem.stages_of(rank)[0]]
        room = problem.limits[rank] // activation if activation else problem.num_microbatches
        leads.append(1 + int(random.random() * max(1, room)))
    return Rule(keys=keys, patience=template.patience, leads=leads)


def _leads(problem: Problem, template: Template) -> Iterator[int]:
    m, p = problem.num_microbatches, problem.num_ranks
    for rank in range(p):
        activation = problem.activation[problem.stages_of(rank)[0]]
        if template.lead == inf or not activation:
            yield m
        else:
            room = problem.limits[rank] / activation * template.lead
            yield max(1, round(room * (1 - template.slope * rank / p)))
