"""Better orders out of good ones, quickly: actions pulled back and forth in time (`schedules.building.squeeze`)."""

from diffusionpipe.ordering.evaluation import figures_of, fits
from diffusionpipe.ordering.families import stage_costs
from diffusionpipe.ordering.problem import Letters, Problem
from diffusionpipe.schedules.building.split_work import Network, SplitWork, network_of
from diffusionpipe.schedules.building.squeeze import squeezed


def pulled(problem: Problem, orders: Letters) -> tuple[int, Letters]:
    """(objective in ticks, orders) of the best orders that squeezing gives, or of `orders` if none are better.

    Cost: about 10 microseconds for each action.
    """
    network = _network(problem)
    shown = ((times[problem.is_window], starts) for times, starts in squeezed(network, _numbers(problem, orders)))
    starts = min(shown, key=lambda pair: pair[0])[1]
    found = _letters(network, starts)
    # The network rounds a duration of 0 up, so its times can mislead.
    value, reached = _value(problem, orders), _value(problem, found)
    return (reached, found) if reached < value and fits(problem, found) else (value, orders)


def _value(problem: Problem, orders: Letters) -> int:
    figures = figures_of(problem, orders)
    assert figures is not None, "the orders wait for each other in a circle"
    return figures.window if problem.is_window else figures.makespan


def _network(problem: Problem) -> Network:
    work = SplitWork(
        workers=problem.rank,
        num_microbatches=problem.num_microbatches,
        costs=tuple(stage_costs(problem)),
        latency=max(problem.lags),
        limits=problem.limits,
    )
    return network_of(work)


def _numbers(problem: Problem, orders: Letters) -> list[list[int]]:
    """The orders with the network's numbers of their actions in place of letters, by rank."""
    counts = [0] * len(problem.durations)
    numbered = []
    for order in orders:
        numbers = []
        for letter in order:
            numbers.append(letter * problem.num_microbatches + counts[letter])
            counts[letter] += 1
        numbered.append(numbers)
    return numbered


def _letters(network: Network, starts: list[int]) -> Letters:
    """The actions of each rank, as letters with stages (`Letters`), in the order of their starts.

    `starts`: the start of each action in ticks, by its number in the network.
    """
    orders: list[list[int]] = [[] for _ in network.limits]
    for number in sorted(range(len(starts)), key=starts.__getitem__):
        letter = number // network.num_microbatches
        orders[network.workers[letter]].append(letter)
    return tuple(map(tuple, orders))
