"""Chimera: two pipelines in opposite directions, whose waits are each other's work."""

from collections.abc import Iterator

from diffusionpipe.ir import Action, Op, Schedule
from diffusionpipe.schedules.building.directions import merged, require_directions, shared_out
from diffusionpipe.schedules.building.shapes import Pipe, backwards, forwards, linear, schedule_of


def chimera(num_workers: int, num_microbatches: int, microbatch_size: int = 1, *, directions: int = 2) -> Schedule:
    """The Chimera schedule: half of the micro-batches run down the workers and half run up, merged slot by slot.

    Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines", SC 2021,
    https://arxiv.org/abs/2107.06925, sections 3.1 to 3.3; more micro-batches than workers as "direct concatenation",
    section 3.5; 4, 6, ... directions as in section 3.6, where pipe i of f begins i p / f workers further down.

    With p stages of equal times, m micro-batches, d directions, and free communication:

        time, B = F             2m + 2p/d - 2 in units of F, where p divides m
        bubble                  (p - 2) / (2m + p - 2) of it for two directions
        time, B = 2F, m = p     3m + 2p - 4 for two directions: a bubble of (p - 2) / (3/2 m + p - 2)
        activations in flight   p/2 + 1 on the outer to p on the middle workers at most
        weights                 d copies of the model, on each worker d stages

    With B = 2F and more micro-batches than workers, the units do not interlock without waits. The bubble is then larger
    than the formula; `chimera_doubling` removes these waits.

    `passes.reduce_gradients` sums the gradients of the copies, each as soon as its worker has it. The paper calls this
    eager synchronisation.

    Any number of micro-batches from `directions` up works. If p does not divide it, the last unit is smaller, and the
    first pipes may have one more than the others. Time runs to the right; stages 0 to 3 run down, 4 to 7 up:

    >>> for order in chimera(4, 4).orders:
    ...     print(*order)
    0F0 0F1 7F0 7B0 7F1 7B1 0B0 0B1
    1F0 6F0 1F1 6F1 6B0 1B0 6B1 1B1
    5F0 2F0 5F1 2F1 2B0 5B0 2B1 5B1
    4F0 4F1 3F0 3B0 3F1 3B1 4B0 4B1

    Raises:
        ConfigError: the workers are odd or no multiple of `directions`, or a pipe would have no micro-batch.
    """
    require_directions(num_workers, num_microbatches, microbatch_size, directions)
    down = [_from(linear(num_workers), number * 2 * num_workers // directions) for number in range(directions // 2)]
    up = [tuple(num_workers - 1 - worker for worker in way) for way in down]
    return merged("chimera", [*down, *up], num_workers, num_microbatches, microbatch_size)


def _from(workers: tuple[int, ...], first: int) -> tuple[int, ...]:
    return workers[first:] + workers[:first]


def chimera_doubling(num_workers: int, num_microbatches: int, microbatch_size: int = 1) -> Schedule:
    """Chimera with pairs of forwards: two micro-batches of a pipe run forward together, as long as one backward.

    "Forward doubling" of the paper's section 3.5, which draws the order of its unit. Here three rules make the order
    slot by slot; a slot has room for two forwards or one backward. Backwards come first. Deep stages come before
    shallow ones. Stage s of a pipe never has more than p - s unfinished pairs. If 2p divides m, the time is the paper's
    (tested up to p = 16):

        time, B = 2F            at most 3m + 2p - 4 in units of F where 2p divides m; else at most 2p more
        bubble                  (p - 2) / (3/2 m + p - 2) of it where 2p divides m
        activations in flight   2p at most, twice as many as `chimera`
        weights                 2 copies of the model, on each worker 2 stages

    The paper's "backward halving" cuts a micro-batch in two for its backward. In our terms a micro-batch is the input
    of one backward, so this is the same order, for twice as many micro-batches of half the size.

    Any number of micro-batches from 2 up works; the last pair of a pipe may be a single one.

    >>> for order in chimera_doubling(2, 4).orders:
    ...     print(*order)
    0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1
    2F0 2F1 1F0 1F1 1B0 1B1 2B0 2B1

    Raises:
        ConfigError: the workers are odd, or there is only one micro-batch.
    """
    require_directions(num_workers, num_microbatches, microbatch_size)
    down = linear(num_workers)
    counts = shared_out(num_microbatches, 2)
    pipes = [
        Pipe(workers=way, microbatches=(microbatch_size,) * count)
        for way, count in zip((down, down[::-1]), counts, strict=True)
    ]
    return schedule_of("chimera-doubling", pipes, _Doubling(pipes).orders())


class _Doubling:
    """The state of one run of the three rules. A stage's arrivals are the slots from which it may do its next work."""

    def __init__(self, pipes: list[Pipe]) -> None:
        self.depth = len(pipes[0].workers)
        num_stages = len(pipes) * self.depth
        self.counts = [len(pipe.microbatches) for pipe in pipes for _ in pipe.workers]
        self.forward = [0] * num_stages  # micro-batches whose forward is over
        self.backward = [0] * num_stages
        # The second pipe runs up, so worker w has its stage at position depth - 1 - w.
        self.stages_of = [[self.depth + self.depth - 1 - worker, worker] for worker in range(self.depth)]

    def orders(self) -> list[list[Action]]:
        """The order of each worker, by the three rules, slot after slot."""
        found: list[list[Action]] = [[] for _ in range(self.depth)]
        while any(done < count for done, count in zip(self.backward, self.counts, strict=True)):
            # For all workers before anything is counted: a result can be read from the next slot on.
            chosen = [next(self._possible(worker), []) for worker in range(self.depth)]
            assert any(chosen), "the rules leave every worker waiting"
            for order, actions in zip(found, chosen, strict=True):
                for action in actions:
                    order.append(action)
                    (self.forward if action.op is Op.F else self.backward)[action.stage] += 1
        return found

    def _possible(self, worker: int) -> Iterator[list[Action]]:
        """The actions that the worker could do in this slot, the best first: one backward, or one or two forwards."""
        deep_first = sorted(self.stages_of[worker], key=lambda stage: -(stage % self.depth))
        for stage in deep_first:
            done = self.backward[stage]
            if done < self._arrived_gradients(stage):
                yield backwards(stage, done, done + 1)
        for stage in deep_first:
            done = self.forward[stage]
            stop = min(done + 2, self.counts[stage])
            # Pairs whose forwards have begun, a single one included, less those whose backwards are both done.
            begun = (done + 1) // 2 - self.backward[stage] // 2
            if done < stop <= self._arrived_activations(stage) and begun < self.depth - stage % self.depth:
                yield forwards(stage, done, stop)

    def _arrived_activations(self, stage: int) -> int:
        return self.forward[stage - 1] if stage % self.depth else self.counts[stage]

    def _arrived_gradients(self, stage: int) -> int:
        is_last = stage % self.depth == self.depth - 1
        return self.forward[stage] if is_last else self.backward[stage + 1]
