"""When weights that are kept in host memory are on the device: the copies of a worker, one after the other.

    copies     [ layer 1 ]      [ layer 2 ]  [ layer 3 ]          a copy begins with the layer before it:
    compute    [0 ]  F F F F F  [1 ]         [2 ] F F F F F [3 ]  there is room for two layers

So compute between two fills hides the copy of the second one's first layer. `HostWeights` of
`runtime/weights/host_weights.py` asks the same `Staging` where a layer comes to, so both begin a copy at one moment.
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
    """Frozen layer with weights -> the time of their copy."""

    def forward(self, name: str, batch: float) -> Seconds:
        """The seconds of a layer's forward for `batch` samples, or of its copy if that is longer; 0 for no samples."""
        return max(self.computing(name, batch), self.arriving.get(name, 0.0) if batch else 0.0)

    def computing(self, name: str, batch: float) -> Seconds:
        """The seconds of a layer's forward for `batch` samples if its parameters are there."""
        return super().forward(name, batch)


def computing(profile: Profile, name: str, samples: float) -> Seconds:
    """The seconds of a layer's forward for `samples` samples in any profile, without waits for its parameters."""
    return profile.computing(name, samples) if isinstance(profile, CopiedProfile) else profile.forward(name, samples)


@dataclass(slots=True)
class _End:
    """The times of one of the two ends of the staging memory. Mutable."""

    ready: Seconds = 0.0
    """The time at which the copy of the layer to this end is over, in seconds."""
    done: Seconds = 0.0
    """The time at which the layer at this end has run, in seconds."""


@dataclass(slots=True)
class CopyStream:
    """The copies of weights from host memory on one worker, one after the other; its time advances as layers run."""

    copies: Mapping[str, Seconds]
    """Layer with weights -> the time of its copy."""
    _free: Seconds = 0.0
    _staging: Staging[_End] = field(default_factory=lambda: Staging(_End(), _End()))

    def start(self, layer: str | None, now: Seconds) -> None:
        """Begin the copy of `layer` as soon as it has room, from `now` on; nothing if it is there or has no weights."""
        if layer is None or layer not in self.copies:
            return
        end = self._staging.place(layer)
        if end is not None:
            end.ready = self._free = max(self._free, end.done, now) + self.copies[layer]

    def ready(self, layer: str) -> Seconds:
        """The time in seconds from which a started layer can run; 0 for a layer that was not started."""
        end = self._staging.end_of(layer)
        return 0.0 if end is None else end.ready

    def run(self, layer: str, now: Seconds, seconds: Seconds, following: str | None) -> Seconds:
        """Run the layer for `seconds` seconds from `now` on, or from the end of its copy; return the time of its end.

        `following` is the layer with weights that runs next, whose copy begins meanwhile.
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
    """The seconds of each fill of a worker, waits for weights included, for an order that is repeated.

    Args:
        steps: in the worker's order the time of each compute, and the (layer, time without waits) of each fill.
        copies: layer with weights -> the time of its copy.

    Waits of compute for other workers are left out, so fills take at most that long.
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
