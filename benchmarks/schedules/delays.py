"""What messages and late wake-ups take on this machine, and the makespan that follows from it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from time import perf_counter

import torch.distributed as dist

from benchmarks.schedules.torch_stages import WIDTH
from benchmarks.throughput.chains import our_schedule
from diffusionpipe.costs import Costs, StageCosts, TensorSpec
from diffusionpipe.ir import Action, Schedule, Span
from diffusionpipe.ir.flows import TIMED_OPS, flows
from diffusionpipe.runtime.comm.transport import ProcessTransport
from diffusionpipe.runtime.rehearsals.virtual import virtual_executor
from diffusionpipe.timing import ends_of, graph_of, prices_of
from diffusionpipe.timing.work import Compute, Encode, Transfer
from diffusionpipe.units import Seconds

TENSORS = {
    "input": TensorSpec(name="input", shape=(WIDTH,)),
    "hidden": TensorSpec(name="hidden", shape=(WIDTH,), needs_gradient=True),
    "loss": TensorSpec(name="loss", shape=(), needs_gradient=True),
}
WAIT: Seconds = 0.020
"""Of the actions whose delay is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Samples, of all ranks together.

    rank 0   F==========~s      ~ by how much an action takes longer than its wait: it wakes up late, and then the
    rank 1              mmmmF   executor has its own work (s: sends, receives) before the next action (`actions`)
                                m from then until a rank that waits for the message goes on (`messages`)
    """

    actions: tuple[Seconds, ...]
    messages: tuple[Seconds, ...]


def calibration(num_ranks: int) -> Schedule:
    """What delays are measured on: 1F1B at m = 2p."""
    return our_schedule("1f1b", num_ranks, 2 * num_ranks)


def trace(rank: int, num_ranks: int, transport: ProcessTransport, *, repeats: int) -> list[tuple[Span, ...]]:
    """This rank's spans of so many iterations on the clock that all processes share; every rank calls this."""
    schedule = calibration(num_ranks)
    costs = Costs(stages=(StageCosts(forward=WAIT, backward=WAIT),) * num_ranks)
    executor = virtual_executor(schedule, rank, costs=costs, tensors=TENSORS, transport=transport, inputs=("input",))
    found = []
    for _ in range(repeats + 1):
        dist.barrier()
        begin = perf_counter()
        executor.run()
        spans, _ = executor.recording.spans()
        found.append(tuple(replace(span, start=begin + span.start, end=begin + span.end) for span in spans))
    return found[1:]


def delays_of(schedule: Schedule, iterations: Iterable[Sequence[Sequence[Span]]]) -> Delays:
    """The delays in iterations of a schedule all of whose actions wait WAIT; each iteration: spans of every rank."""
    actions: list[Seconds] = []
    messages: list[Seconds] = []
    for ranks in iterations:
        starts: dict[Action, Seconds] = {}
        free: dict[Action, Seconds] = {}  # when the rank is ready for the next action
        free_before: dict[Action, Seconds] = {}
        for spans in ranks:
            last: Action | None = None
            for span in spans:
                if span.action.op in TIMED_OPS:
                    free_before[span.action] = free[last] if last else float("-inf")
                    last = span.action
                    starts[last] = span.start
                if last:
                    free[last] = span.end
        actions += [free[action] - start - WAIT for action, start in starts.items()]
        for flow in flows(schedule):
            (producer,) = flow.producers
            if free_before[flow.consumer] < free[producer]:  # the reader waited
                messages.append(max(0.0, starts[flow.consumer] - free[producer]))
    return Delays(actions=tuple(actions), messages=tuple(messages))


def predicted(schedule: Schedule, costs: Costs, delays: Delays, *, num_draws: int) -> Seconds:
    """The median makespan over so many draws: every action and every message takes a delay of its own."""
    graph = graph_of(schedule)
    prices = prices_of(graph.works, costs)

    def makespan(random: Random) -> Seconds:
        durations: list[Seconds] = []
        for index in graph.work:
            match graph.works[index]:
                case Compute() | Encode():
                    durations.append(prices[index] + random.choice(delays.actions))
                case Transfer():
                    durations.append(random.choice(delays.messages))
                case _:
                    durations.append(0)
        return max(ends_of(graph, durations))

    return median(makespan(Random(i)) for i in range(num_draws))
