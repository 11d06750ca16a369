"""Cuts one worker's frozen work into pieces that fit into its waits."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from diffusionpipe.ir import Range
from diffusionpipe.passes import PlacedFill
from diffusionpipe.planner.filling.frozen_layers import FillOptions, FrozenLayers
from diffusionpipe.units import Seconds

Piece = tuple[int, int, int, int, int]
"""(position in the worker's order, first layer, layer after the last, first sample, sample after the last)."""

LEAST_GAIN = 0.25
"""A piece with only some of a chunk's samples must shorten the rest of the layer by at least this part of its time."""

LARGER = 1.25
"""A piece that is longer than its wait anyway may get longer by this factor, to take more samples along."""


@dataclass(slots=True)
class _Front:
    """A chunk of samples that all ran the layers before `layer`; its first `done` samples also ran this layer."""

    first: int
    size: int
    layer: int = 0
    done: int = 0


class FillQueue:
    """A queue of one worker's frozen work: samples in chunks of nearly equal size, each going through the layers.

        wait of 9        chunk 0: layers 0, 1, 2 and, of layer 3, the samples that still fit (a partial batch)
        wait of 3        chunk 0: not even one sample of layer 3 fits -> chunk 1: layer 0
        wait of 20       chunk 0: layer 3 on its other samples, layers 4, ... ; chunk 1: layers 1, 2, ...

    The oldest unfinished chunk goes first; a younger one takes what is left of a wait. Two bisections for each piece.
    """

    __slots__ = ("_fronts", "_frozen", "_open", "_overhead", "_speed", "_waiting", "pieces", "used")

    def __init__(self, frozen: FrozenLayers, options: FillOptions, *, worker: int, samples: int, chunk: int) -> None:
        self._frozen = frozen
        self._overhead = options.overhead
        self._open = options.open_chunks
        self._speed = options.speed(worker)
        self._waiting = list(equal_chunks(samples, chunk))[::-1]  # the next chunk is the last one of the list
        self._fronts: list[_Front] = []
        self.pieces: list[Piece] = []
        self.used = 0.0
        """Time of all pieces that were placed so far, in seconds."""
        self._refill()

    def _refill(self) -> None:
        while self._waiting and len(self._fronts) < self._open:
            self._fronts.append(_Front(*self._waiting.pop()))

    @property
    def is_empty(self) -> bool:
        """Whether all samples have gone through all layers."""
        return not self._fronts

    def fill(self, position: int, length: Seconds) -> Seconds:
        """Run pieces that fit into a wait of `length` seconds, before the action at `position`; return their time."""
        length *= self._speed
        used = 0.0
        i = 0
        while i < len(self._fronts) and used < length:
            front = self._fronts[i]
            used += self._advance(front, position, length - used)
            if front.layer == self._frozen.num_layers:
                del self._fronts[i]  # the next front takes its place in the list, so `i` stays
                self._refill()
            else:
                i += 1
        self.used += used / self._speed
        return used / self._speed

    def _advance(self, front: _Front, position: int, left: Seconds) -> Seconds:
        """Run as many layers of a chunk as fit into `left` seconds, and return the seconds used.

        Seconds are of a device of speed 1.
        """
        taken = 0.0
        if front.done:
            taken = self._part(front, position, left)
            if front.done:  # some of its samples are still left
                return taken
        running = self._frozen.running(front.size, self._overhead)
        is_start = self._frozen.starts_run[front.layer]
        # A fill that begins within a component has a start of its own, which `running` counts at the component's first
        # layer alone.
        offset = running[front.layer] - (0.0 if is_start else self._overhead)
        stop = bisect_right(running, left - taken + offset) - 1
        if stop > front.layer:
            self._emit(position, front, front.layer, stop, 0, front.size)
            front.layer = stop
            taken += running[stop] - offset
        if front.layer < self._frozen.num_layers and front.size > 1:
            taken += self._part(front, position, left - taken)
        return taken

    def _part(self, front: _Front, position: int, left: Seconds) -> Seconds:
        """Run the chunk's present layer on as many more samples as fit into `left` seconds; return the seconds used."""
        rest = front.size - front.done
        if self._piece(front, rest) <= left:
            count = rest
        else:
            low, count = 0, rest  # `low` samples fit, `count` do not
            while count - low > 1:
                middle = (low + count) // 2
                low, count = (middle, count) if self._piece(front, middle) <= left else (low, middle)
            count = low
            # The time by which the rest of the layer gets shorter.
            saved = self._piece(front, rest) - self._piece(front, rest - count) if count else 0.0
            if not count or saved < LEAST_GAIN * self._piece(front, count):
                return 0.0
        return self._run(front, position, count)

    def _run(self, front: _Front, position: int, count: int) -> Seconds:
        """Run the chunk's present layer on `count` more samples, and return the seconds used."""
        taken = self._piece(front, count)
        self._emit(position, front, front.layer, front.layer + 1, front.done, front.done + count)
        front.done += count
        if front.done == front.size:
            front.layer, front.done = front.layer + 1, 0
        return taken

    def _piece(self, front: _Front, count: int) -> Seconds:
        running = self._frozen.running(count)
        return self._overhead + running[front.layer + 1] - running[front.layer]

    def _emit(self, position: int, front: _Front, layer: int, stop: int, first: int, last: int) -> None:
        self.pieces.append((position, layer, stop, front.first + first, front.first + last))

    def exceed(self, position: int, length: Seconds, limit: Seconds) -> Seconds:
        """Run one piece that is longer than the wait but not than `limit` seconds; return its seconds, 0 for none.

        `fill` must have run before, so that not one sample of a layer fits into the wait. The shortest layer is taken,
        with as many more samples as cost little.
        """
        best, seconds = None, limit * self._speed
        for front in self._fronts:
            if (one := self._piece(front, 1)) <= seconds:
                best, seconds = front, one
        if best is None or length <= 0:
            return 0.0
        # Longer than the wait in any case, so it may take more samples along, up to the limit.
        allowed = min(seconds * LARGER, limit * self._speed)
        count = 1
        while count < best.size - best.done and self._piece(best, count + 1) <= allowed:
            count += 1
        taken = self._run(best, position, count) / self._speed
        if best.layer == self._frozen.num_layers:
            self._fronts.remove(best)
            self._refill()
        self.used += taken
        return taken

    def drain(self, position: int) -> Seconds:
        """Run all remaining work before the action at `position`, and return its seconds."""
        return self.fill(position, float("inf"))


def equal_chunks(samples: int, chunk: int) -> Iterator[tuple[int, int]]:
    """(first sample, size) of each of the fewest chunks of at most `chunk` samples; sizes differ by one at most."""
    count = -(-samples // chunk)
    for i in range(count):
        first = samples * i // count
        yield first, samples * (i + 1) // count - first


def placed(
    pieces: list[Piece], frozen: FrozenLayers, options: FillOptions, *, worker: int, first: int
) -> list[tuple[PlacedFill, Seconds]]:
    """(fill, its seconds) of a worker's pieces, each cut into fills that have layers of one component alone.

    `first` is the number in the batch of the worker's first sample.
    """
    found = []
    for position, layer, stop, start, end in pieces:
        for layers in frozen.split_at_runs(Range(layer, stop)):
            fill = PlacedFill(
                position=position,
                component=frozen.components[layers.start],
                layers=layers,
                samples=Range(first + start, first + end),
            )
            seconds = options.overhead + frozen.seconds(layers, end - start)
            found.append((fill, seconds / options.speed(worker)))
    return found
