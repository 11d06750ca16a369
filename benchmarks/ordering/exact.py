"""The best order that there is, by constraint programming: what the search is held against.

    start[x, k]    of letter x of micro-batch k

    no two actions of a rank at a time                                     no_overlap
    start[x, k] >= end[x, k - 1]                                           micro-batches in turn, see `problem`
    start[x, k] >= end[what it waits for, k] + transfer                    precedence
    at every moment  sum of what is held <= limit, on every rank           cumulative; where a stage is alone and holds
                                                                           all until W: F of k + K after W of k

    minimise  the last end, or the largest (last end - first start) of a rank

As everywhere in `ordering`, every rank starts as early as it can, so for the window the first starts are known: the way
down. Small cases only: seconds up to four ranks and eight micro-batches. Needs OR-tools (the extra "exact").
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from diffusionpipe.errors import ConfigError
from diffusionpipe.ordering.bounds import Ways, lower_bound
from diffusionpipe.ordering.evaluation import changes_of
from diffusionpipe.ordering.problem import Letters, Problem
from diffusionpipe.units import Seconds

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """What the solver found."""

    value: int
    """The objective, in the problem's units of time."""
    bound: int
    """What nothing can beat; the value where it is proven."""
    is_proven: bool
    orders: Letters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A model being written down."""

    problem: Problem
    model: "CpModel"
    starts: dict[tuple[int, int], "IntVar"]
    horizon: int

    def end(self, letter: int, k: int) -> "IntVar":
        """The end of an action, a linear expression."""
        return self.starts[letter, k] + self.problem.durations[letter]


def exact_order(problem: Problem, *, time_limit: Seconds = 60.0, num_threads: int = 1) -> Optimum:
    """The best order, or the best found within the time.

    Raises:
        ConfigError: nothing was found within the time, or OR-tools is missing.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise ConfigError(f"the exact solver needs OR-tools ({error}); pip install ortools") from error
    model = cp_model.CpModel()
    m, durations = problem.num_microbatches, problem.durations
    horizon = m * (sum(durations) + sum(problem.lags))
    keys = [(letter, k) for letter in range(len(durations)) for k in range(m)]
    starts = {key: model.new_int_var(0, horizon, "") for key in keys}
    written = _Model(problem=problem, model=model, starts=starts, horizon=horizon)
    _precedence_rows(written)
    for rank in range(problem.num_ranks):
        _rank_rows(written, rank)
    objective = model.new_int_var(lower_bound(problem), horizon, "")
    _objective_rows(written, objective)
    model.minimize(objective)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit
    solver.parameters.num_workers = num_threads
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise ConfigError(f"no order within {time_limit} s ({solver.status_name(status)}); ask for a smaller case")
    orders = []
    for rank in range(problem.num_ranks):
        own = [key for key in keys if problem.rank[key[0] // 3] == rank]
        orders.append(tuple(x for x, _ in sorted(own, key=lambda key: (solver.value(starts[key]), key[1], key[0]))))
    return Optimum(
        value=round(solver.objective_value),
        bound=round(solver.best_objective_bound),
        is_proven=status == cp_model.OPTIMAL,
        orders=tuple(orders),
    )


def _precedence_rows(written: _Model) -> None:
    problem, model, starts = written.problem, written.model, written.starts
    for (letter, k), start in starts.items():
        if letter % 3:
            model.add(start >= written.end(letter - 1, k))
        before = problem.waits_for[letter]
        if before >= 0:
            model.add(start >= written.end(before, k) + problem.lags[letter])
        if k:
            model.add(start >= written.end(letter, k - 1))


def _rank_rows(written: _Model, rank: int) -> None:
    problem, model, starts = written.problem, written.model, written.starts
    m, limit, stages = problem.num_microbatches, problem.limits[rank], problem.stages_of(rank)
    own, changes = [key for key in starts if key[0] // 3 in stages], changes_of(problem)
    model.add_no_overlap([model.new_fixed_size_interval_var(starts[x, k], problem.durations[x], "") for x, k in own])
    first = 3 * stages[0]
    if len(stages) == 1 and changes[first] > 0 == changes[first + 1]:
        room = limit // changes[first]
        for k in range(m - room):
            model.add(starts[first, k + room] >= written.end(first + 2, k))
        return
    intervals, demands = [], []
    for stage in stages:
        for k in range(m):
            for last in (3 * stage + 1, 3 * stage + 2):
                length = model.new_int_var(0, written.horizon, "")
                start = starts[3 * stage, k]
                intervals.append(model.new_interval_var(start, length, written.end(last, k), ""))
                demands.append(-changes[last])
    model.add_cumulative(intervals, demands, limit)


def _objective_rows(written: _Model, objective: "IntVar") -> None:
    problem, ways = written.problem, Ways(written.problem)
    for rank in range(problem.num_ranks):
        stages = problem.stages_of(rank)
        begin = ways.arrival[stages[0]] if problem.is_window else 0
        if problem.is_window:
            written.model.add(written.starts[3 * stages[0], 0] == begin)
        for stage in stages:
            written.model.add(objective >= written.end(3 * stage + 2, problem.num_microbatches - 1) - begin)
