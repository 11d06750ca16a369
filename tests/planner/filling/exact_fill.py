"""The best fill that there is, by integer programming: what the tests hold `plan_fills` against.

For each host w, place k in its order and layer l
    n[w, k, l]   samples that run layer l there            T       the time of the iteration, minimised
    y[w, k, l]   pieces in which they do                   s[w]    samples of the host;   t[a] start of event a

    sum_k n[w, k, l] = s[w],  sum_w s[w] = batch,  n <= chunk * y
    sum_{k' <= k} n[w, k', l + 1] <= sum_{k' <= k} n[w, k', l]                no sample skips a layer
    t[a] >= t[b] + time of b + sum_l (fixed_l * y + slope_l * n)              a waits for b; the fills if b is a room
    T    >= every end, with the fills at the end of each order

Exact for times that are affine in the samples, and without time for a fill itself. Small cases only: seconds for two or
three workers with a handful of layers and samples. Needs scipy (the extra "exact"), whose HiGHS solves it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from diffusionpipe.costs import Costs
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Schedule
from diffusionpipe.planner.filling.fill_queue import Piece
from diffusionpipe.planner.filling.fills import FillPlan, case_of, plan_of
from diffusionpipe.planner.filling.frozen_layers import FillOptions, FrozenLayers
from diffusionpipe.planner.filling.shares import Case, Packing
from diffusionpipe.units import Seconds

Terms = list[tuple[int, float]]
"""(column, coefficient)."""


class _Program:
    """A mixed-integer program being written down, row by row."""

    def __init__(self) -> None:
        self.upper: list[float] = []
        self.is_integer: list[bool] = []
        self.rows: list[tuple[Terms, float, float]] = []

    def variable(self, *, upper: float = inf, is_integer: bool = False) -> int:
        """A new variable from 0 up."""
        self.upper.append(upper)
        self.is_integer.append(is_integer)
        return len(self.upper) - 1

    def require(self, terms: Terms, low: float, high: float = inf) -> None:
        """Let the sum of the terms lie between the two."""
        self.rows.append((terms, low, high))

    def minimise(self, column: int, time_limit: Seconds) -> list[float]:
        """The values that minimise one variable.

        Raises:
            ConfigError: no proven optimum within the time.
        """
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        data = [(c, r, i) for i, (terms, _, _) in enumerate(self.rows) for r, c in terms]
        values, columns, rows = zip(*data, strict=True)
        matrix = coo_array((values, (rows, columns)), shape=(len(self.rows), len(self.upper))).tocsr()
        low, high = [row[1] for row in self.rows], [row[2] for row in self.rows]
        objective = np.zeros(len(self.upper))
        objective[column] = 1
        result = milp(
            objective,
            constraints=LinearConstraint(matrix, low, high),
            integrality=np.array(self.is_integer, dtype=int),
            bounds=Bounds(0, np.array(self.upper)),
            options={"time_limit": time_limit, "mip_rel_gap": 1e-6},
        )
        if result.status != 0:
            raise ConfigError(f"no optimum within {time_limit} s ({result.message}); ask for a smaller case")
        return [float(value) for value in result.x]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """The columns of one host."""

    share: int
    counts: dict[tuple[int, int], int]
    """(place, layer) -> n."""
    calls: dict[tuple[int, int], int]
    """(place, layer) -> y."""


def exact_fill(
    schedule: Schedule,
    costs: Costs,
    frozen: FrozenLayers,
    options: FillOptions | None = None,
    *,
    time_limit: Seconds = 60.0,
) -> FillPlan:
    """The fill with the least iteration time; chunks have at most the largest size of the options.

    Raises:
        ConfigError: times are not affine in the samples, fills have an overhead, scipy is missing, or the case is too
            large for the time.
        ScheduleError: the schedule has fills or messages already.
    """
    case = case_of(schedule, costs, frozen, options)
    fixed, slope = _affine(case)
    program = _Program()
    makespan = program.variable()
    starts = [program.variable() for _ in range(len(case.graph.graph))]
    hosts = {worker: _host(program, case, worker) for worker in case.hosts}
    program.require([(host.share, 1.0) for host in hosts.values()], case.batch, case.batch)
    _time_rows(program, case, makespan, starts, hosts, fixed, slope)
    try:
        values = program.minimise(makespan, time_limit)
    except ImportError as error:
        raise ConfigError(f"the exact solver needs scipy ({error}); pip install scipy") from error
    pieces = [
        _pieces(case, hosts[worker], values) if worker in hosts else [] for worker in range(case.graph.num_workers)
    ]
    shares = [round(values[hosts[w].share]) if w in hosts else 0 for w in range(case.graph.num_workers)]
    return plan_of(case, _packing(case, shares, pieces, values[makespan]))


def _affine(case: Case) -> tuple[list[Seconds], list[Seconds]]:
    """Each layer's time of no and of one more sample."""
    forward, layers = case.frozen.forward, range(case.frozen.num_layers)
    slope = [forward(layer, 2) - forward(layer, 1) for layer in layers]
    fixed = [forward(layer, 1) - slope[layer] for layer in layers]
    last = [forward(layer, case.batch) - fixed[layer] - slope[layer] * case.batch for layer in layers]
    if case.options.overhead or any(abs(error) > 1e-9 * forward(i, case.batch) for i, error in enumerate(last)):
        raise ConfigError("the exact solver takes times that are affine in the samples, and fills without overhead")
    return fixed, slope


def _host(program: _Program, case: Case, worker: int) -> _Host:
    chunk, layers = case.options.allowed_chunks(case.batch)[0], range(case.frozen.num_layers)
    places = case.graph.places[worker]
    keys = [(place, layer) for place in places for layer in layers]
    host = _Host(
        share=program.variable(upper=case.batch, is_integer=True),
        counts={key: program.variable(upper=case.batch, is_integer=True) for key in keys},
        calls={key: program.variable(upper=-(-case.batch // chunk), is_integer=True) for key in keys},
    )
    for key in keys:
        program.require([(host.calls[key], float(chunk)), (host.counts[key], -1.0)], 0)
    for layer in layers:
        all_places: Terms = [(host.counts[place, layer], 1.0) for place in places]
        program.require([*all_places, (host.share, -1.0)], 0, 0)
    for layer in layers[1:]:
        for i in range(len(places) - 1):
            before: Terms = [(host.counts[place, layer - 1], 1.0) for place in places[: i + 1]]
            program.require(before + [(host.counts[place, layer], -1.0) for place in places[: i + 1]], 0)
    return host


def _time_rows(
    program: _Program,
    case: Case,
    makespan: int,
    starts: Sequence[int],
    hosts: dict[int, _Host],
    fixed: Sequence[Seconds],
    slope: Sequence[Seconds],
) -> None:
    graph = case.graph

    def fills(event: int) -> Terms:
        """What is put into the event, if it is a host's room, with its sign turned."""
        worker, place = graph.place_of.get(event, (-1, -1))
        if worker not in hosts:
            return []
        host = hosts[worker]
        return [
            term
            for layer in range(case.frozen.num_layers)
            for term in ((host.counts[place, layer], -slope[layer]), (host.calls[place, layer], -fixed[layer]))
        ]

    for event in range(1, len(graph.graph)):
        for source in {graph.graph.first[event], graph.graph.second[event]}:
            program.require([(starts[event], 1.0), (starts[source], -1.0), *fills(source)], graph.durations[source])
        program.require([(makespan, 1.0), (starts[event], -1.0), *fills(event)], graph.durations[event])


def _pieces(case: Case, host: _Host, values: Sequence[float]) -> list[Piece]:
    """What the host runs: at each place layer by layer, the samples in order, in pieces of nearly equal size."""
    done = [0] * case.frozen.num_layers
    pieces = []
    for (place, layer), column in host.counts.items():
        count, calls = round(values[column]), max(1, round(values[host.calls[place, layer]]))
        borders = [done[layer] + count * i // calls for i in range(calls + 1)]
        pieces += [(place, layer, layer + 1, a, b) for a, b in pairwise(borders) if a < b]
        done[layer] += count
    return pieces


def _packing(case: Case, shares: Sequence[int], pieces: Sequence[list[Piece]], makespan: Seconds) -> Packing:
    return Packing(
        shares=tuple(shares),
        chunk=max((last - first for worker in pieces for *_, first, last in worker), default=1),
        pieces=tuple(pieces),
        ends=(makespan,) * len(shares),
        used=(),
        makespan=makespan,
        is_shifted=True,
    )
