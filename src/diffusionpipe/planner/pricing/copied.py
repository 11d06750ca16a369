"""Times the copies of weights from host memory to a worker's device, one after the other.

    copies     [ layer 1 ]      [ layer 2 ]  [ layer 3 ]          a copy begins with the layer before it:
    compute    [0 ]  F F F F F  [1 ]         [2 ] F F F F F [3 ]  there is room for two layers

So compute between two fills hides the copy of the second one's first layer. `HostWeights` of
`runtime/weights/host_weights.py` asks the same `Staging` for the place of a layer, so both begin a copy at one moment.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from diffusionpipe.costs import Profile
from diffusionpipe.holding.staging import Staging
from diffusionpipe.units import Seconds


@dataclass(frozen=True, kw_only=True)
class CopiedProfile(Profile):
    """A profile whose frozen layers take the time of their copy from the host if that is longer than their compute."""

    arriving: Mapping[str, Seconds]
    """Frozen layer with weights -> the seconds of copying them from the host."""

    def forward(self, name: str, batch: float) -> Seconds:
        """The seconds of a layer's forward for `batch` samples, or of its copy if that is longer; 0 for no samples."""
        return max(self.computing(name, batch), self.arriving.get(name, 0.0) if batch else 0.0)

    def computing(self, name: str, batch: float) -> Seconds:
        """The seconds of a layer's forward for `batch` samples if its parameters are on the device."""
        return super().forward(name, batch)


def computing(profile: Profile, name: str, samples: float) -> Seconds:
    """The seconds of a layer's forward for `samples` samples in any profile, without waits for its parameters."""
    return profile.computing(name, samples) if isinstance(profile, CopiedProfile) else profile.forward(name, samples)


@dataclass(slots=True)
class _End:
    """The times of one of the two ends of the staging memory, each with room for a layer; they change as layers run."""

    ready: Seconds = 0.0
    """The second at which the copy of the layer to this end is over."""
    done: Seconds = 0.0
    """The second at which the layer at this end has run."""


@dataclass(slots=True)
class CopyStream:
    """The copies of weights from host memory on one worker, one after the other; its time advances as layers run."""

    copies: Mapping[str, Seconds]
    """Layer with weights -> the seconds of its copy."""
    _free: Seconds = 0.0
    _staging: Staging[_End] = field(default_factory=lambda: Staging(_End(), _End()))

    def start(self, layer: str | None, now: Seconds) -> None:
        """Begin the copy of `layer` as soon as there is room, from `now` on; None, or a layer there, is ignored.

        A layer without weights is ignored too.
        """
        if layer is None or layer not in self.copies:
            return
        end = self._staging.place(layer)
        if end is not None:
            end.ready = self._free = max(self._free, end.done, now) + self.copies[layer]

    def ready(self, layer: str) -> Seconds:
        """The second from which `layer` can run, because its copy is over; 0 for a layer that was not started."""
        end = self._staging.end_of(layer)
        return 0.0 if end is None else end.ready

    def run(self, layer: str, now: Seconds, seconds: Seconds, following: str | None) -> Seconds:
        """Run the layer for `seconds` seconds from `now` on, or from the end of its copy; return the second of its end.

        `following` is the layer with weights that runs next, whose copy begins meanwhile; None: there is none.
        """
        if layer not in self.copies:
            return now + seconds
        self.start(layer, now)
        end = self._staging.run(layer)
        self.start(following, now)
        end.done = max(now, end.ready) + seconds
        return end.done


def times_with_copies(
    steps: Sequence[Seconds | Sequence[tuple[str, Seconds]]], copies: Mapping[str, Seconds]
) -> Iterator[Seconds]:
    """The seconds of each fill of a worker, waits for weights included, if its order is repeated.

    Args:
        steps: the worker's order: seconds of each compute, and for each fill its (layer, seconds without waits).
        copies: layer with weights -> the seconds of its copy.

    Waits of compute for other workers are left out. With them more copies are hidden, so fills may take less.
    """
    fills = [step for step in steps if isinstance(step, Sequence)]
    weighted = [name for fill in fills for name, _ in fill if name in copies]
    stream, now, found = CopyStream(copies), 0.0, list[Seconds]()
    for _ in range(2):  # the second time the first layers are on their way
        found, number = [], 0
        for step in steps:
            if not isinstance(step, Sequence):
                now += step
                continue
            start = now
            for name, seconds in step:
                if name in copies:
                    number += 1  # after the last layer the first one is next, of the following iteration
                now = stream.run(name, now, seconds, weighted[number % len(weighted)] if weighted else None)
            found.append(now - start)
    return iter(found)
