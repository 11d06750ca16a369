"""The frozen layers as fills need them, and the options with which fills are planned."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.costs import Profile
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Range
from diffusionpipe.units import Seconds


@dataclass(frozen=True, kw_only=True)
class FrozenLayers:
    """The frozen layers as a chain with a time for every layer and number of samples.

    They are in an order in which they can run, so that any samples may go through them front to back.

        vae.0 vae.1 | noise | text.0 text.1 text.2        runs of one component; a fill never crosses their borders

    Times are remembered, so one object should serve all calls for a model.
    """

    components: tuple[str, ...]
    """The component of each layer."""
    forward: Callable[[int, int], Seconds]
    """(layer, samples) -> time on the profiled device; it must not fall with the samples."""
    _running: dict[tuple[int, Seconds], tuple[Seconds, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_layers(self) -> int:
        """The number of frozen layers of all components."""
        return len(self.components)

    @cached_property
    def runs(self) -> tuple[Range, ...]:
        """The ranges of neighbouring layers of one component, as long as possible, in order."""
        starts = [i for i, name in enumerate(self.components) if i == 0 or name != self.components[i - 1]]
        return tuple(Range(a, b) for a, b in zip(starts, [*starts[1:], self.num_layers], strict=True))

    @cached_property
    def starts_run(self) -> tuple[bool, ...]:
        """Whether each layer is the first of its component's run, by layer; one more entry, True, for the end."""
        starts = {run.start for run in self.runs}
        return (*(layer in starts for layer in range(self.num_layers)), True)

    def running(self, samples: int, overhead: Seconds = 0.0) -> tuple[Seconds, ...]:
        """The running sums of the layers' times: entry l has the seconds of layers 0, ..., l - 1 on `samples` samples.

        The layers of each run are one fill, and each fill takes `overhead` in addition.
        """
        key = samples, overhead
        if key not in self._running:
            times = (self.forward(layer, samples) + overhead * self.starts_run[layer] for layer in self._layers)
            self._running[key] = tuple(accumulate(times, initial=0.0))
        return self._running[key]

    @property
    def _layers(self) -> range:
        return range(self.num_layers)

    def seconds(self, layers: Range, samples: int) -> Seconds:
        """The seconds of these layers on `samples` samples, without overhead, on the profiled device."""
        running = self.running(samples)
        return running[layers.stop] - running[layers.start]

    def split_at_runs(self, layers: Range) -> tuple[Range, ...]:
        """The range of layers in parts, each of one component."""
        return tuple(common for run in self.runs if (common := layers.intersection(run)))


def frozen_layers(profile: Profile) -> FrozenLayers:
    """The frozen layers of a profiled model, in the order of its graph."""
    names = profile.graph.frozen_layers
    component_of = {layer.name: layer.component for layer in profile.graph.layers}
    return FrozenLayers(
        components=tuple(component_of[name] for name in names),
        forward=lambda layer, samples: profile.forward(names[layer], samples),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FillOptions:
    """The chunk sizes, workers and speeds with which fills are planned."""

    chunks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    """The numbers of samples that go through the layers together at most, each of which is tried."""
    max_chunk: int | None = None
    """The most samples in one fill that memory allows; None for no limit."""
    workers: tuple[int, ...] | None = None
    """Workers that hold the frozen layers; None for all."""
    speeds: tuple[float, ...] = ()
    """Speed of each worker relative to the profiled device; () for 1."""
    overhead: Seconds = 0.0
    """Time that each fill takes besides its layers."""
    open_chunks: int = 2
    """Chunks of one worker that may be unfinished at a time; their tensors between layers are held."""
    is_thorough: bool = True
    """Whether to search longer, also by delaying compute, if frozen work stays exposed."""

    def speed(self, worker: int) -> float:
        """The speed of a worker's device, 1 for the profiled device."""
        return self.speeds[worker] if self.speeds else 1.0

    def allowed_chunks(self, batch: int) -> tuple[int, ...]:
        """The chunk sizes to try, descending, limited by the batch and by `max_chunk`; equal ones once."""
        limit = min(batch, self.max_chunk or batch)
        return tuple(sorted({min(chunk, limit) for chunk in self.chunks}, reverse=True))


def check_options(options: FillOptions, frozen: FrozenLayers, num_workers: int) -> None:
    """Raise an error if the options do not fit the layers and workers; return None if they do.

    Raises:
        ConfigError: sizes below 1, unknown workers, a speed that is not positive, no frozen layers.
    """
    problems = []
    if not frozen.num_layers:
        problems.append(refusal(Feature.FILL, Feature.NO_ENCODERS))
    if not options.chunks or min(options.chunks) < 1 or (options.max_chunk is not None and options.max_chunk < 1):
        problems.append(f"chunks {options.chunks} of at most {options.max_chunk}: a chunk has at least 1 sample")
    if options.open_chunks < 1 or not options.overhead >= 0:
        problems.append(f"open_chunks={options.open_chunks}, overhead={options.overhead}: at least 1 and 0 are needed")
    if options.workers is not None and not (options.workers and set(options.workers) <= set(range(num_workers))):
        problems.append(f"workers {options.workers} hold the frozen layers; name some of 0 to {num_workers - 1}")
    if options.speeds and (len(options.speeds) != num_workers or not _are_positive(options.speeds)):
        problems.append(f"speeds {options.speeds} for {num_workers} workers; give each a positive one")
    if problems:
        raise ConfigError("\n".join(problems))


def _are_positive(values: Sequence[float]) -> bool:
    return all(value > 0 for value in values)
