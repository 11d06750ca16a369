"""Orders over a V built action by action, so that no worker waits longer in all than the others have to.

The greedy construction of V-ZB (Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024,
https://arxiv.org/abs/2405.15362), after its description. Every worker has two legs of the V, `down` and `up`.

    warm-up         F go down and up again; while the first micro-batch is on its way back, more of them go down
    alternation     F of `down` and F of `up` in turn, until every worker has as many as the one before it
    rounds          each worker does an I, then an F, both of the leg that is further along if it can
    W               where an F needs its memory, where a whole W fits into a wait, and where a wait would make the
                    worker's window longer than the longest so far

Equal times; p = 3, m = 5; F, I, W of `down`, f, i, w of `up`:

    0 | F F F F F f i w f i w f i w I W f i w I W f i I w I W I W W . .
    1 | . F F F f F f i w f i w F I W f i w I W f i I i I w I W w W W .
    2 | . . F f F f F f i w F I W f i w F I W f i I i I i I w W w W w W

Then it is done again with what is known of it: a worker whose window was shorter than the longest one may wait for the
difference. That is repeated while it helps.

Differences from the paper: windows are compared instead of waits, which is the same where all workers have equally much
to do; so each stage may have its own costs. And each worker may have its own memory, from one micro-batch up: an F of
`down` always leaves room for one of `up`, so no worker ever waits for memory for ever.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, product

from diffusionpipe.ir import Action
from diffusionpipe.schedules.building.split_work import Network, SplitWork, network_of

_NOT_YET = -1
_MOST_REPEATS = 4
_MOST_ORDERS = 2
_F, _I, _W = range(3)


def greedy_orders(work: SplitWork) -> list[list[list[Action]]]:
    """The orders of a V by the variants with the shortest and the second shortest windows: by variant, then by worker.

    The shortest comes first. There is one if all variants are equal.

    They are complete and keep to the limits, for any limits and costs; `SplitWork` has refused limits below one
    micro-batch. The other two variants are hardly ever better, squeezed or not. Cost: about 15 microseconds for each
    action.
    """
    network = network_of(work)
    built = sorted((_built(network, variant) for variant in _VARIANTS), key=lambda one: max(one.windows))
    different = {tuple(one.starts): one.orders for one in built}  # variants often give the same orders
    return [
        [[network.action(number) for number in order] for order in orders]
        for orders in islice(different.values(), _MOST_ORDERS)
    ]


@dataclass(frozen=True, slots=True)
class _Variant:
    """A variant of the construction: the actions, besides I of `down`, before which a W keeps a window short."""

    fills_before_forward: bool
    """Whether a W comes before an F for this."""
    fills_before_up: bool
    """Whether a W comes before an I of `up` for this."""


_VARIANTS = tuple(_Variant(*choice) for choice in product((True, False), repeat=2))


def _built(network: Network, variant: _Variant) -> "_Construction":
    """The construction with the shortest window of a series: each is made with the windows of the one before.

    The series ends when a construction is not shorter than the one before.
    """
    best = _constructed(network, variant, [0] * len(network.limits))
    for _ in range(_MOST_REPEATS):
        longest = max(best.windows)
        again = _constructed(network, variant, [longest - window for window in best.windows])
        if max(again.windows) >= longest:
            break
        best = again
    return best


def _constructed(network: Network, variant: _Variant, may_wait: Sequence[int]) -> "_Construction":
    """A construction with complete orders; `may_wait`: by how many ticks each worker's window may exceed its work."""
    construction = _Construction(network, variant, may_wait)
    construction.warm_up()
    construction.alternate()
    construction.go_round()
    construction.fill_the_end()
    return construction


class _Construction:
    """Orders under construction. A worker's leg is named by the letter of its F; its I and W are the next two.

    A W is placed as soon as there is a reason for it, and the rest at the end:

        [1] an F needs the memory that it gives back
        [2] it fits into a wait as a whole
        [3] the wait would make the worker's window longer than the longest so far: always before I of `down`, and by
            the variant before F and before I of `up`
    """

    def __init__(self, network: Network, variant: _Variant, may_wait: Sequence[int]) -> None:
        p, letters = len(network.limits), len(network.workers)
        self.network, self.variant = network, variant
        self.workers = range(p)
        # Stages are numbered down and up: worker w has stages w and 2 p - 1 - w, each with the letters of F, I and W.
        self.down, self.up = range(0, 3 * p, 3), range(letters - 3, 3 * p - 3, -3)
        """The letter of F on the way down, and of F on the way up, by worker."""
        self.starts = [_NOT_YET] * network.size
        self.orders: list[list[int]] = [[] for _ in self.workers]
        self.counts = [0] * letters
        """The number of actions of each letter that are placed, by letter."""
        self.clocks = [0] * p
        self.held = [0] * p
        self.waiting: list[deque[int]] = [deque() for _ in self.workers]  # the oldest first
        """The W actions whose I are placed and which are not placed themselves, by worker."""
        # At least 1: `SplitWork` refuses limits below one micro-batch.
        self.leads = [self._lead(worker) for worker in self.workers]
        self.windows = [self._work(worker) for worker in self.workers]
        """The length of each worker's window so far, all its work and its waits, by worker, in ticks."""
        self.allowed = [work + wait for work, wait in zip(self.windows, may_wait, strict=True)]
        """The window that each worker may have even if it is the longest so far, by worker, in ticks."""

    def _lead(self, worker: int) -> int:
        """The most micro-batches that a worker may hold between their F of `down` and of `up`."""
        acquires = self.network.acquires
        down, up = acquires[self.down[worker]], acquires[self.up[worker]]
        return (self.network.limits[worker] - up) // down if down else self.network.num_microbatches

    def _work(self, worker: int) -> int:
        durations = self.network.durations
        return self.network.num_microbatches * sum(
            sum(durations[leg : leg + 3]) for leg in (self.down[worker], self.up[worker])
        )

    def warm_up(self) -> None:
        """Place all F of the first micro-batch, and more F of `down` while no worker on the way up waits for them."""
        for leg in self.down:
            self._forward(leg)
        for worker in reversed(self.workers):
            can_go_on = True
            while can_go_on and self._has_time_for_more(worker):
                can_go_on = all(self._forward(leg) for leg in self.down[: worker + 1])
            self._forward(self.up[worker])

    def _has_time_for_more(self, worker: int) -> bool:
        """Whether another F of `down` fits before the first one of `up`, and leaves memory for the alternation."""
        down, up = self.down[worker], self.up[worker]
        arrival = self._ready(up)
        assert arrival is not None, "the first micro-batch always has room"
        reserved = (worker + 1) * (self.network.acquires[down] + self.network.acquires[up])
        has_room = self.held[worker] + reserved <= self.network.limits[worker]
        return has_room and self.clocks[worker] + self.network.durations[down] <= arrival

    def alternate(self) -> None:
        """Place F of `down` and F of `up` in turn, until every worker has as many of both as the worker before it."""
        legs = (self.down, self.up)
        for worker in self.workers[1:]:
            num_failed = 0
            while num_failed < len(legs) and self._is_behind(worker):
                placed = [self._forward(leg) for leg in reversed(legs[0][worker:])]
                num_failed = 0 if any(placed) else num_failed + 1
                legs = legs[::-1]

    def _is_behind(self, worker: int) -> bool:
        """Whether the worker has fewer F in all than the worker before it, or not more F of `up`."""
        (down, up), (down_before, up_before) = (
            (self.counts[self.down[one]], self.counts[self.up[one]]) for one in (worker, worker - 1)
        )
        return down + up < down_before + up_before or up <= up_before < self.network.num_microbatches

    def go_round(self) -> None:
        """Place an I and an F on each worker, round after round, until no I is left."""
        ends = [leg + _I for leg in (*self.down, *self.up)]
        while any(self.counts[end] < self.network.num_microbatches for end in ends):
            before = sum(map(len, self.orders))
            self._backwards()
            self._forwards()
            assert sum(map(len, self.orders)) > before, "some worker can always go on"

    def fill_the_end(self) -> None:
        """Place the W that are left at the end of each worker's order."""
        for worker in self.workers:
            while self.waiting[worker]:
                self._fill(worker)

    def _backwards(self) -> None:
        """Place an I on each worker: of `down` if one can be placed when the round begins, else of `up`."""
        m, counts = self.network.num_microbatches, self.counts
        is_down = [
            self._ready(down + _I) is not None or counts[up + _I] == m
            for down, up in zip(self.down, self.up, strict=True)
        ]
        for worker in reversed(self.workers):
            if is_down[worker]:
                self._backward(self.down[worker])
        for worker in self.workers:
            if not is_down[worker]:
                self._backward(self.up[worker])

    def _forwards(self) -> None:
        """Place an F on each worker: of `up` if one can be placed, else of `down`."""
        for worker in self.workers:
            up = self.up[worker]
            self._forward(up if self._ready(up) is not None else self.down[worker])

    def _backward(self, leg: int) -> None:
        """Place the next I of the leg if it can be placed; its W waits from then on."""
        ready = self._ready(leg + _I)
        if ready is None:
            return
        worker = self.network.workers[leg]
        is_filled = self.variant.fills_before_up or leg == self.down[worker]
        self._fill_wait(worker, ready, is_kept_short=is_filled)
        self._place(leg + _I, ready)
        self.waiting[worker].append(leg + _W)

    def _forward(self, leg: int) -> bool:
        """Place the next F of the leg, after the W whose memory it needs [1]; returns False if it cannot be placed."""
        ready, worker = self._ready(leg), self.network.workers[leg]
        down, up = self.down[worker], self.up[worker]
        if ready is None or (leg == down and self.counts[down] - self.counts[up] >= self.leads[worker]):
            return False
        most = self.network.limits[worker] - self.network.acquires[leg]
        while self.held[worker] > most and self.waiting[worker]:
            self._fill(worker)  # [1]
        if self.held[worker] > most:
            return False
        self._fill_wait(worker, ready, is_kept_short=self.variant.fills_before_forward)
        self._place(leg, ready)
        return True

    def _fill_wait(self, worker: int, until: int, *, is_kept_short: bool) -> None:
        """Place W into a worker's wait, which ends at `until`: as many as fit in it [2].

        With `is_kept_short` one more is placed if the rest of the wait would make the window too long [3].
        """
        waiting = self.waiting[worker]
        while waiting and self.clocks[worker] + self.network.durations[waiting[0]] <= until:
            self._fill(worker)  # [2]
        allowed = max(*self.windows, self.allowed[worker])
        if waiting and is_kept_short and self.windows[worker] + until - self.clocks[worker] > allowed:
            self._fill(worker)  # [3]

    def _fill(self, worker: int) -> None:
        self._place(self.waiting[worker].popleft(), 0)

    def _ready(self, letter: int) -> int | None:
        """The tick at which the inputs of the letter's next action are there.

        None if an action that it waits for is not placed, or no action of the letter is left.
        """
        if self.counts[letter] == self.network.num_microbatches:
            return None
        number = letter * self.network.num_microbatches + self.counts[letter]
        ready = 0
        for offset, least in self.network.waits[letter]:
            before = self.starts[number + offset]
            if before == _NOT_YET:
                return None
            ready = max(ready, before + least)
        return ready

    def _place(self, letter: int, ready: int) -> None:
        network, worker = self.network, self.network.workers[letter]
        number = letter * network.num_microbatches + self.counts[letter]
        start = max(ready, self.clocks[worker])
        if self.orders[worker]:
            self.windows[worker] += start - self.clocks[worker]  # a window begins with the first action
        self.starts[number] = start
        self.clocks[worker] = start + network.durations[letter]
        self.held[worker] += network.acquires[letter] - network.releases[letter]
        self.counts[letter] += 1
        self.orders[worker].append(number)
