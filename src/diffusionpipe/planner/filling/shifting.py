"""Packs fills that may delay compute if that does not lengthen the iteration, so that short waits become one."""

from collections.abc import Sequence
from dataclasses import dataclass

from diffusionpipe.planner.filling.fill_queue import FillQueue
from diffusionpipe.planner.filling.shares import CLOSE, Case, Packing, Visits, bound_of, in_proportion
from diffusionpipe.timing import Times
from diffusionpipe.timing.clock import ends_with_rooms
from diffusionpipe.units import Seconds


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits within which fills may delay compute."""

    least_use: float
    """The least part of a fill that must be inside the wait if the fill delays compute."""
    is_eager: bool
    """Whether a wait takes as much work as the limits allow; else only one piece more than fits into it."""
    target: float
    """Delayed compute must still allow an iteration of this time: 0 is the lower bound, 1 the best time so far."""


USUAL = (
    Policy(0.2, True, 0.2),
    Policy(0.05, False, 0.2),
    Policy(0.05, True, 0.6),
    Policy(0.2, False, 0.2),
    Policy(0.5, True, 0.6),
    Policy(0.2, False, 1.0),
)
"""The policies that are tried for every case. None does well everywhere; these complement each other on random
cases."""
FURTHER = tuple(
    Policy(least_use, is_eager, target)
    for least_use in (0.5, 0.2, 0.05, 0.01)
    for is_eager in (False, True)
    for target in (0.2, 0.6, 1.0)
)
"""The policies that are tried where the usual ones end far from the bound."""
ROUNDS = 4
"""The number of shares that are tried for one policy."""


def pack_shifted(case: Case, shares: tuple[int, ...], chunk: int, policy: Policy, makespan: Seconds) -> Packing:
    """The packing that fills each wait and lets fills end after it, within the limits of a policy.

    Events are timed in an order in which they can happen, so the effect of a delay on others is known when their own
    waits are filled. No action starts after its latest start for an iteration of time `makespan`, so only work that is
    left at a worker's end can exceed it. `shares`: the samples of each worker.
    """
    graph = case.graph
    # `makespan` may be a bound that no compute reaches.
    latest = graph.times.latest_starts(max(makespan, graph.makespan))
    queues = [case.queue(worker, share, chunk) for worker, share in enumerate(shares)]

    def decide(event: int, room: int, free: Seconds, ready: Seconds) -> Seconds:
        worker, position = graph.place_of[room]
        queue = queues[worker]
        if free >= ready or queue.is_empty:
            return 0.0
        # The room's work may last until the latest start of the action after it.
        return _fill(queue, position, ready - free, latest[event] - free, policy)

    ends = ends_with_rooms(
        graph.graph,
        graph.durations,
        decide,
        room_before=graph.action_behind,
        waking=graph.waking,
        issues=graph.issues,
    )
    return _packing(case, shares, chunk, queues, ends)


def _fill(queue: FillQueue, position: int, wait: Seconds, slack: Seconds, policy: Policy) -> Seconds:
    """Fill a wait, and perhaps more time after it, and return the seconds of the fills.

    `wait`: the seconds until the compute could start. `slack`: the seconds until its latest start.
    """
    if policy.is_eager:
        # So much that at least `least_use` of it is inside the wait.
        return queue.fill(position, max(wait, min(slack, wait / policy.least_use)))
    taken = queue.fill(position, wait)
    rest, slack = wait - taken, slack - taken
    return taken + (queue.exceed(position, rest, min(slack, rest / policy.least_use)) if slack > rest > 0 else 0.0)


def _packing(
    case: Case,
    shares: tuple[int, ...],
    chunk: int,
    queues: list[FillQueue],
    ends: list[Seconds],
) -> Packing:
    graph = case.graph
    drained = [
        ends[tail] + queue.drain(places[-1])
        for tail, queue, places in zip(graph.graph.tails, queues, graph.places, strict=True)
    ]
    return Packing(
        shares=shares,
        chunk=chunk,
        pieces=tuple(queue.pieces for queue in queues),
        ends=tuple(drained),
        used=tuple(queue.used for queue in queues),
        makespan=max(*drained, max(ends)),
        is_shifted=graph.is_shifted(Times(graph=graph.graph, ends=ends)),
    )


def shifted_packings(case: Case, packing: Packing, policies: Sequence[Policy], visits: Visits) -> list[Packing]:
    """The packings that delay compute, by each policy, from the packing's shares and then with ever more equal ends.

    The search ends early if a packing comes close to the bound, or when the budget of visits is used up.
    """
    found: list[Packing] = []
    best, bound = packing.makespan, bound_of(case, packing)
    shares_of = dict.fromkeys(policies, packing.shares)
    tried: set[tuple[Policy, tuple[int, ...]]] = set()
    for _ in range(ROUNDS):
        for policy, shares in shares_of.items():
            if visits.left <= 0 or best <= bound * CLOSE:
                return found
            if (policy, shares) in tried:
                continue
            tried.add((policy, shares))
            visits.left -= len(case.graph.graph)
            trial = pack_shifted(case, shares, packing.chunk, policy, bound + policy.target * (best - bound))
            found.append(trial)
            best = min(best, trial.makespan)
            equal = _with_equal_ends(case, trial)
            shares_of[policy] = equal if (policy, equal) not in tried else _with_one_moved(case, trial)
    return found


def _with_one_moved(case: Case, packing: Packing) -> tuple[int, ...]:
    """The samples of each worker after one was moved from the host that ends last to the host that waits longest."""
    shares = list(packing.shares)
    waits = {worker: packing.makespan - case.graph.busy[worker] - packing.used[worker] for worker in case.hosts}
    source = max((worker for worker in case.hosts if shares[worker]), key=lambda worker: packing.ends[worker])
    shares[source] -= 1
    # -1: not back to the one that gave it.
    shares[max(waits, key=lambda worker: waits[worker] if worker != source else -1.0)] += 1
    return tuple(shares)


def _with_equal_ends(case: Case, packing: Packing) -> tuple[int, ...]:
    """The samples of each worker with which all hosts would end together.

    It is an estimate: a sample more or less moves a host's end by the sample's time.
    """
    rate = case.seconds_a_sample(min(packing.chunk, max(packing.shares)))
    ends = [packing.ends[worker] for worker in case.hosts]
    speeds = [case.options.speed(worker) for worker in case.hosts]
    level = max(case.graph.makespan, sum(e * v for e, v in zip(ends, speeds, strict=True)) / sum(speeds))
    wanted = [0.0] * case.graph.num_workers
    for worker, end, speed in zip(case.hosts, ends, speeds, strict=True):
        wanted[worker] = max(0.0, packing.shares[worker] + (level - end) * speed / rate)
    return tuple(in_proportion(wanted, case.batch))
