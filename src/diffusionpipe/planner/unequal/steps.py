"""Orders and simulates steps of micro-batches of unequal tokens, each with the price of its own size.

A schedule has one price for all micro-batches of a stage. So micro-batches that are alike, of one size and number of
samples, get stages and a pipeline of their own over the same workers and blocks:

    cells       2 x 1024     3 x 768     2 x 1024                pipeline 0: 0F0 and 0F1     pipeline 1: 2F0
    one chain   0F0          0F1         0F2
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import le

from diffusionpipe.costs import Costs, Link, StageCosts
from diffusionpipe.ir import Action, Edge, Schedule, Timeline, compute_action
from diffusionpipe.ir.cells import Cell
from diffusionpipe.passes import connect
from diffusionpipe.planner.unequal.cut import best_cut
from diffusionpipe.schedules.building.shapes import Pipe, linear, schedule_of
from diffusionpipe.schedules.families.dynapipe import adaptive_orders
from diffusionpipe.schedules.families.one_f_one_b import one_f_one_b
from diffusionpipe.simulator import simulate
from diffusionpipe.units import Bytes, Seconds

Orders = Sequence[Sequence[Action]]
"""The actions of each worker on a chain of stages, stage s on worker s; micro-batch m is the step's cell number m."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The costs of micro-batches of every size on a chain of stages, and the workers' memory limits."""

    stages: Callable[[Cell], tuple[StageCosts, ...]]
    """A micro-batch (size, samples) -> the costs of each stage."""
    num_stages: int
    limits: tuple[Bytes, ...]
    """The activations that each worker may hold at once, in the bytes of `stages`."""
    crossing: Callable[[int], tuple[Bytes, ...]] = lambda size: ()
    """Number of a size -> the bytes of a sample between each stage and the next; () for none."""
    link: Link = field(default_factory=Link)
    """The link between all workers."""

    def price(self, size: int, samples: int) -> Seconds:
        """The time of a micro-batch's forward and backward on its slowest stage, in the unit of `stages`."""
        return max(own.forward + own.backward for own in self.stages(Cell(size, samples)))

    def room(self, size: int) -> int:
        """The most samples of a micro-batch of this size with which 1F1B keeps to the limits of all workers.

        1F1B holds as many micro-batches on a stage as there are stages from it to the end.
        """
        own = self.stages(Cell(size, 1))
        each = [
            limit // ((self.num_stages - stage) * costs.activation)
            for stage, (costs, limit) in enumerate(zip(own, self.limits, strict=True))
            if costs.activation
        ]
        return min(each, default=2**20)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnequalStep:
    """One training step: its micro-batches, the actions of each worker in order, and the simulated timeline."""

    cells: tuple[Cell, ...]
    """The micro-batches, as (number of the size, samples)."""
    orders: tuple[tuple[Action, ...], ...]
    timeline: Timeline

    @property
    def time(self) -> Seconds:
        """The time of the step's iteration, in the unit of the prices."""
        return self.timeline.makespan

    @property
    def peaks(self) -> tuple[Bytes, ...]:
        """The most bytes of activations that each worker holds, by worker."""
        return tuple(map(self.timeline.peak_memory, range(self.timeline.num_workers)))


def best_step(counts: Sequence[int], prices: Prices) -> UnequalStep:
    """The fastest step with `counts[i]` samples of size i, cut into micro-batches and ordered.

    Raises:
        ValueError: there is no sample, or one does not fit in memory alone.
    """
    sizes = [size for size, count in enumerate(counts) for _ in range(count)]
    if not sizes:
        raise ValueError("a step without samples has no micro-batches")
    return ordered(best_cut(sizes, prices.price, prices.room, prices.num_stages), prices)


def ordered(cells: Sequence[Cell], prices: Prices) -> UnequalStep:
    """The step with these micro-batches in the fastest of several orders that keep to the memory limits."""
    steps = (simulated(own, orders, prices) for own, orders in _candidates(cells, prices))
    # Never empty: with the cut's `room` 1F1B keeps to the limits.
    able = [step for step in steps if all(map(le, step.peaks, prices.limits))]
    return min(able, key=lambda step: step.time)


def _candidates(cells: Sequence[Cell], prices: Prices) -> Iterator[tuple[tuple[Cell, ...], Orders]]:
    """(micro-batches in a sequence, orders of the workers) of each step that is worth simulating.

    Long micro-batches come first, last or in the middle, each by the adaptive schedule and by 1F1B. Another step takes
    the sizes one after the other, each in 1F1B of its own: no worker then holds two sizes at once, and the step is not
    slower than one step for each size.
    """
    long_first = tuple(sorted(cells, key=lambda cell: (-prices.price(*cell), cell)))
    # In the third order short ones are at both ends, long ones in the middle.
    for own in dict.fromkeys((long_first, long_first[::-1], (*long_first[::-1][::2], *long_first[::2]))):
        held = [[prices.stages(cell)[stage].activation for cell in own] for stage in range(prices.num_stages)]
        yield own, adaptive_orders(held, prices.limits)
        yield own, one_f_one_b(prices.num_stages, len(own)).orders
    by_size = tuple(sorted(cells, key=lambda cell: (cell.size, -cell.samples)))
    if len({cell.size for cell in cells}) > 1:
        yield by_size, _one_after_the_other(by_size, prices.num_stages)


def _one_after_the_other(cells: Sequence[Cell], num_stages: int) -> Orders:
    orders: list[list[Action]] = [[] for _ in range(num_stages)]
    first = 0
    for size in dict.fromkeys(cell.size for cell in cells):
        count = sum(cell.size == size for cell in cells)
        for worker, own in enumerate(one_f_one_b(num_stages, count).orders):
            orders[worker] += [numbered(action, action.stage, range(first, first + count)) for action in own]
        first += count
    return orders


def numbered(action: Action, stage: int, number_of: Mapping[int, int] | Sequence[int]) -> Action:
    """The same compute action on stage `stage`, with micro-batch `number_of[m]` in place of m."""
    assert action.microbatch is not None
    return compute_action(stage, action.op, number_of[action.microbatch])


def simulated(cells: Sequence[Cell], orders: Orders, prices: Prices) -> UnequalStep:
    """The step with these micro-batches and orders, with its simulated timeline."""
    schedule, costs = mixed(cells, orders, prices)
    return UnequalStep(cells=tuple(cells), orders=tuple(map(tuple, orders)), timeline=simulate(schedule, costs))


def mixed(cells: Sequence[Cell], orders: Orders, prices: Prices) -> tuple[Schedule, Costs]:
    """(schedule of a step in which equal micro-batches share a pipeline, costs of that schedule)."""
    alike = list(dict.fromkeys(cells))
    # The number of a micro-batch counts the ones before it that are alike.
    number_of = {place: cells[:place].count(cell) for place, cell in enumerate(cells)}

    def placed(action: Action) -> Action:
        assert action.microbatch is not None
        pipe = alike.index(cells[action.microbatch])
        return numbered(action, pipe * prices.num_stages + action.stage, number_of)

    pipes = [
        Pipe(workers=linear(prices.num_stages), microbatches=(cell.samples,) * cells.count(cell)) for cell in alike
    ]
    schedule = schedule_of("unequal", pipes, [[placed(action) for action in own] for own in orders])
    sizes: dict[str, Bytes] = {}
    for pipe, cell in enumerate(alike):
        first, crossing = pipe * prices.num_stages, prices.crossing(cell.size)
        sizes |= {_crossing(pipe, stage): num_bytes for stage, num_bytes in enumerate(crossing)}
        edges = [
            Edge(
                producer=first + stage,
                consumer=first + stage + 1,
                tensors=(_crossing(pipe, stage),),
                gradients=(_crossing(pipe, stage),),
            )
            for stage in range(prices.num_stages - 1)
        ]
        schedule = connect(schedule, edges, pipeline=pipe)
    costs = tuple(own for cell in alike for own in prices.stages(cell))
    return schedule, Costs(stages=costs, tensor_bytes=sizes, link=prices.link)


def _crossing(pipe: int, stage: int) -> str:
    """The name, "PIPE.STAGE", of the tensors that a stage of a pipeline sends to the next stage."""
    return f"{pipe}.{stage}"
