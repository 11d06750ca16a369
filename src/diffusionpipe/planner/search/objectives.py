"""The functions that published planners minimise, as objectives of the dynamic program.

Legend: stages s = 1, ..., S in forward order; F_s, B_s forward and backward of one micro-batch; c_s forward plus
backward transfer between stages s and s + 1; R_s the reduction of the gradients of stage s; M micro-batches.
"""

from dataclasses import dataclass

from diffusionpipe.planner.search.dynamic_program import Numbers, PricedLink, PricedStage
from diffusionpipe.units import Seconds

ROUNDED = 1 - 1e-9
"""The factor of a bound that is made of running sums, which rounding may have made too large by less than the rest."""


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The objective of DiffusionPipe's planner: (M + 2 S - 2) T0 + T_gap for S stages and M micro-batches.

    Tian et al., MLSys 2024; reconstructed. F, B: forward and backward of a stage, R its reduction, c a transfer both
    ways.

        T0      the largest of all F_s + B_s and all c_s: each link counts as one more stage
        T_gap   max over s of max(0, R_s - sum over j < s of (B_j + backward transfer j)): what of a reduction is left
                when the backwards that come after it are done

    A bound for orders that count links as stages; plain 1F1B over slow links can take longer. So it only selects what
    is then simulated.
    """

    num_microbatches: int

    def prepend(self, rest: Numbers | None, stage: PricedStage, link: PricedLink) -> Numbers:
        """The numbers (T0, T_gap) of the suffix `rest` with one more stage before it."""
        forward, backward, reduce, *_ = stage
        if rest is None:
            return forward + backward, reduce
        slowest = max(rest[0], forward + backward, link[0] + link[1])
        return slowest, max(reduce, rest[1] - backward - link[1])

    def value(self, numbers: Numbers, num_stages: int) -> Seconds:
        """The time T^max of a partition with these numbers, in seconds."""
        return (self.num_microbatches + 2 * num_stages - 2) * numbers[0] + max(0.0, numbers[1])


@dataclass(frozen=True, slots=True)
class PlanningBound:
    """SPP's objective, a bound of the time: (1 + (4 S - 4) / M) M W + A for S stages and M micro-batches.

    Luo et al., "Efficient Pipeline Planning for Expedited Distributed DNN Training", INFOCOM 2022. W is the largest of
    all F_s + B_s and all c_s, A the longest reduction, which overlaps nothing.
    """

    num_microbatches: int

    def prepend(self, rest: Numbers | None, stage: PricedStage, link: PricedLink) -> Numbers:
        """The numbers (W, A) of the suffix `rest` with one more stage before it."""
        forward, backward, reduce, *_ = stage
        if rest is None:
            return forward + backward, reduce
        return max(rest[0], forward + backward, link[0] + link[1]), max(rest[1], reduce)

    def value(self, numbers: Numbers, num_stages: int) -> Seconds:
        """SPP's bound of a partition with these numbers, in seconds."""
        return (self.num_microbatches + 4 * num_stages - 4) * numbers[0] + numbers[1]


@dataclass(frozen=True, slots=True)
class PivotLatency:
    """DAPPLE's objective, the latency L = Tw + Ts + Te around a pivot stage Q; links count as stages.

    Fan et al., PPoPP 2021, section 4.

        Tw   sum of F_a, a <= Q                    warm-up until Q has done its first forward
        Ts   (M - 1) (F_Q + B_Q)                   steady phase
        Te   max over s of R_s + what is left:     sum of B_a, s <= a <= Q, for s <= Q
                                                   minus the sum of B_a, Q < a < s, for s > Q

    The pivot is the stage that makes L largest, the exact form of the paper's rule, which compares neighbours without
    the reductions. The ending of stage s > Q follows from the order of its last backward; the paper's own sum also
    subtracts B_Q and B_s, and would let a lone stage end before its last backward.
    """

    num_microbatches: int

    def prepend(self, rest: Numbers | None, stage: PricedStage, link: PricedLink) -> Numbers:
        """The numbers (L, path, ending) of the suffix `rest` with one more stage before it.

        `path` is the longest way to the first stage and back, `ending` the longest reduction after the first stage.
        """
        forward, backward, reduce, *_ = stage
        if rest is not None:
            rest = self._before(rest, link[0], link[1], None)
        return self._before(rest, forward, backward, reduce)

    def _before(self, rest: Numbers | None, forward: Seconds, backward: Seconds, reduce: Seconds | None) -> Numbers:
        """The numbers of the suffix `rest` with a stage before it or, if `reduce` is None, with a link before it."""
        steady = (self.num_microbatches - 1) * (forward + backward)
        never = float("-inf")
        own = never if reduce is None else reduce
        latency, path, ending = rest or (never, never, never)
        return (
            max(
                # The pivot is one of the stages after this one, and so is the stage whose reduction ends last.
                forward + latency,
                # The pivot is one of the stages after this one, this one's reduction ends last.
                forward + path + backward + own,
                forward + steady + max(backward + own, ending),  # this stage is the pivot
            ),
            forward + backward + max(path, steady),
            max(own, ending - backward),
        )

    def value(self, numbers: Numbers, num_stages: int) -> Seconds:
        """The latency L of a partition with these numbers, in seconds."""
        return numbers[0]


@dataclass(frozen=True, slots=True)
class Before:
    """Lower bounds of the seconds of the layers before a suffix for one micro-batch, for any cuts and replicas."""

    forward: Seconds
    """The time of the layers' forwards one after the other on the fastest devices."""
    both: Seconds
    """The time of the layers' forwards and backwards one after the other on the fastest devices."""
    dearest: Seconds
    """The seconds of the forward and backward of their slowest stage."""
    num_stages: int
    """The most stages that the layers can make; 0: no layer is before the suffix."""


@dataclass(frozen=True, slots=True)
class LeastOneForwardOneBackward:
    """An objective close to the least time of 1F1B, transfers included; longer suffixes never have smaller numbers.

    It fails to be a bound where a skip over several stages goes past the links between them, which count it. Such cuts
    are seldom the best ones.

    The numbers of a suffix of k stages count from the moment at which its first micro-batch comes to its first stage:

        path    of one micro-batch through all of them and back, with transfers
        end     until the last backward of the first stage is done, the largest of
                    M (F + B) and its waits                 the first stage computes all micro-batches (`_alone`)
                    path + (ceil(M / k) - 1) path           it has at most k of them under way at a time
                    F + transfer + end of the stages after it + transfer + B
                    F + M transfers + path of the stages after it + B, and the same with the transfers back
        total   until all sums of gradients are done: the sums of a stage begin with its last backward, if it is in
                buckets

    1F1B reaches it but for queues of messages. It contains what slow links cost: round trips that few micro-batches
    hide. The last number is k, the same for all suffixes that the dynamic program compares.
    """

    num_microbatches: int

    def prepend(self, rest: Numbers | None, stage: PricedStage, link: PricedLink) -> Numbers:
        """The numbers (total, end, path, stages) of the suffix `rest` with one more stage before it."""
        # A micro-batch may pass through the fastest replica, which takes `ease` of the time; the slowest replica sets
        # the pace.
        forward, backward, reduce, ease = stage if len(stage) == 4 else (*stage, 1.0)
        both, count = forward + backward, self.num_microbatches
        late = reduce - backward if reduce > backward else 0.0
        if rest is None:
            end = count * both
            return end + late, end, both * ease, 1.0
        total, end, path, stages = rest
        ahead, back, ahead_one, back_one = link if len(link) == 4 else (*link, *link)
        once, between = both * ease, ahead_one + back_one
        own = once + between + path
        turns = -(-count // int(stages + 1)) - 1
        end = max(
            _alone(forward, backward, between + path, count, int(stages + 1)),
            own + turns * own,
            once + between + end,
            once + path + count * ahead,
            once + path + count * back,
        )
        return max(forward * ease + ahead_one + total, end + late), end, own, stages + 1

    def value(self, numbers: Numbers, num_stages: int) -> Seconds:
        """The seconds until all work of a partition with these numbers is done, the sums of gradients included."""
        return numbers[0]

    def least(self, numbers: Numbers, num_stages: int, before: Before) -> Seconds:
        """A lower bound in seconds of all partitions that end in this suffix; `before` describes the layers before.

        The layers before it add their forwards to its total, forwards and backwards to its end and to its path. The
        slowest of their stages computes all micro-batches, and waits for the path through the suffix and the others.
        """
        total, end, path, _ = numbers
        if not before.num_stages:
            return total
        once, count, most = before.both + path, self.num_microbatches, num_stages + before.num_stages
        turns = -(-count // most)
        steady = _least_alone(before.dearest, once - before.dearest, count, most)
        return ROUNDED * max(before.forward + total, before.both + end, turns * once, steady)


def _alone(forward: Seconds, backward: Seconds, beyond: Seconds, count: int, most: int) -> Seconds:
    """The least time in which 1F1B computes `count` micro-batches on a stage of these times.

    `beyond`: the seconds in which a micro-batch passes the stages after it and comes back. `most`: how many are under
    way at a time. Until the first one is back, the stage does the forwards of the others under way; while the last one
    is away, it does their backwards:

        F1 F2 F3  wait  B1 F4 B2 F5 B3  wait  B4  wait  B5
           |- beyond -|         |------ beyond ------|
    """
    if count > most:
        others = most - 1
        return count * (forward + backward) + max(0.0, beyond - others * forward) + max(0.0, beyond - others * backward)
    # All forwards come first, so both waits may be the same one.
    first_back = forward + max(beyond, (count - 1) * forward)
    return max(first_back + count * backward, count * forward + beyond + backward)


def _least_alone(both: Seconds, beyond: Seconds, count: int, most: int) -> Seconds:
    """The least of `_alone` over all stages whose forward and backward take `both` seconds together."""
    if count > most:
        return count * both + max(0.0, 2 * beyond - (most - 1) * both)
    return max(count * both, beyond + (count + 1) / 2 * both)


@dataclass(frozen=True, slots=True)
class LeastInAnyOrder:
    """An objective below the time of a chain of stages in any order, with whole or split backwards.

    Each stage computes all micro-batches after the first one came to it, and a link carries them one after the other:
    the tensors that the layer before the cut writes for the layer after it. Sums of gradients may overlap all
    backwards.
    """

    num_microbatches: int

    def prepend(self, rest: Numbers | None, stage: PricedStage, link: PricedLink) -> Numbers:
        """The seconds of the suffix `rest` with one more stage before it, from the arrival of its first micro-batch."""
        forward, backward, reduce, ease = stage if len(stage) == 4 else (*stage, 1.0)
        count = self.num_microbatches
        own = count * (forward + backward) + max(0.0, reduce - count * backward)
        if rest is None:
            return (own,)
        ahead, back = link[-2:]  # what passes directly: a skip over several stages takes no time of the links between
        return (max(own, forward * ease + ahead + rest[0], forward * ease + count * max(ahead, back)),)

    def value(self, numbers: Numbers, num_stages: int) -> Seconds:
        """The time of the whole chain with these numbers, in seconds."""
        return numbers[0]

    def least(self, numbers: Numbers, num_stages: int, before: Before) -> Seconds:
        """A lower bound in seconds of all partitions that end in this suffix: the forwards before it come on top."""
        return ROUNDED * (numbers[0] + before.forward) if before.num_stages else numbers[0]


@dataclass(frozen=True, slots=True)
class Fullest:
    """An objective that makes the largest number of a stage small: with `Questions.room`, the bytes that it lacks."""

    def prepend(self, rest: Numbers | None, stage: PricedStage, link: PricedLink) -> Numbers:
        """The largest number of the suffix `rest` with one more stage before it."""
        return (stage[0],) if rest is None else (max(rest[0], stage[0]),)

    def value(self, numbers: Numbers, num_stages: int) -> Seconds:
        """The largest number of a stage of the partition."""
        return numbers[0]
