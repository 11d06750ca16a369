"""Time and memory of a stage's forward and backward, each way in turn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import thread_time

from torch import nn

from benchmarks.split.stages import WAYS, Case, Stage, build, stage_of
from benchmarks.throughput.ratios import Ratio, interleaved, median_ratio
from diffusionpipe.profiler.memory import LiveBytes
from diffusionpipe.units import Bytes, Seconds

DEPTH, WIDTH, TINY_REPEATS = 32, 8, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run the backward, beside the whole one."""

    seconds: tuple[Seconds, ...]
    """Medians of F and of each part of the backward, in CPU time of the thread, which other processes disturb least."""
    forward: Ratio
    backward: Ratio
    """All parts of it over B."""
    both: Ratio
    """F and the backward over F and B."""
    live: tuple[Bytes, ...]
    """Held after F and after each part of the backward: activations, what was put aside, gradients of inputs."""
    peak: Bytes
    """The most at any time, weights and their gradients left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a case came to."""

    case: Case
    num_parameters: int
    ways: dict[str, Way]
    failed: dict[str, str]
    """Ways that this stage does not survive, with their error."""


def measure(case: Case, num_rounds: int) -> Measured:
    """All ways on one stage, in turn, after one round to warm up."""
    stage = build(case)
    failed = {name: error for name in WAYS if (error := _error(stage, name))}
    times = _times(stage, [name for name in WAYS if name not in failed], num_rounds)
    return Measured(
        case=case,
        num_parameters=sum(parameter.numel() for parameter in stage.parameters),
        ways={name: _way(stage, name, times) for name in times},
        failed=failed,
    )


def seconds_per_layer(num_rounds: int) -> Seconds:
    """What a linear layer costs more in F, I and W than in F and B when there is next to nothing to compute."""
    stage = stage_of(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]), (1, WIDTH))
    times = _times(stage, ["whole", "split"], num_rounds * TINY_REPEATS)
    more = [sum(s) - sum(w) for s, w in zip(times["split"], times["whole"], strict=True)]
    return median(more) / DEPTH


def _error(stage: Stage, name: str) -> str:
    """The first line of the error with which a way ends, "" if it does not."""
    try:
        _run(stage, name)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        stage.forget()
    return ""


def _run(stage: Stage, name: str) -> list[Seconds]:
    forward, backward = WAYS[name](stage)
    times = [_cpu_seconds(part) for part in (forward, *backward)]
    stage.forget()
    return times


def _cpu_seconds(part: Callable[[], object]) -> Seconds:
    start = thread_time()
    part()
    return thread_time() - start


def _times(stage: Stage, names: Sequence[str], num_rounds: int) -> dict[str, list[list[Seconds]]]:
    times: dict[str, list[list[Seconds]]] = {name: [] for name in names}
    for name in names:
        _run(stage, name)
    for order in interleaved(names, num_rounds):
        for name in order:
            times[name].append(_run(stage, name))
    return times


def _way(stage: Stage, name: str, times: dict[str, list[list[Seconds]]]) -> Way:
    own, whole = times[name], times["whole"]
    live, peak = bytes_of(stage, name)
    return Way(
        seconds=tuple(median(column) for column in zip(*own, strict=True)),
        forward=median_ratio([t[0] for t in own], [t[0] for t in whole]),
        backward=median_ratio([sum(t[1:]) for t in own], [sum(t[1:]) for t in whole]),
        both=median_ratio([sum(t) for t in own], [sum(t) for t in whole]),
        live=live,
        peak=peak,
    )


def bytes_of(stage: Stage, name: str) -> tuple[tuple[Bytes, ...], Bytes]:
    """Bytes that live after each part of a way, and their peak, without what existed before."""
    live: list[Bytes] = []
    with LiveBytes() as gauge:
        forward, backward = WAYS[name](stage)
        gauge.restart_peak()
        for part in (forward, *backward):
            part()
            live.append(gauge.live)
        stage.forget()
        return tuple(live), gauge.peak
