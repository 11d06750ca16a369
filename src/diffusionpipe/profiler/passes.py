"""Times of layers from passes through many of them, so that each finds the caches as training leaves them.

    cast       a, b, c               copies of the weights, where autocast reads such
    forward    a ──> b ──> c         each layer on what the one before it has just written
    backward   a <── b <── c         then the whole backward of each, or every other time its input gradient alone
    probe      a ──> b ──> c         forwards without gradients, of probed layers (`schedules/several/probes.py`)

A layer that is run again and again by itself reads its weights and inputs from the nearest cache; on a CPU with one
thread that makes a small U-Net look up to 10 % faster than it is. All ranks of a job may measure at once, because in
training they share memory and caches too; `Agree` keeps them in step.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import sqrt

from torch import Tensor

from diffusionpipe.costs import HostTimes
from diffusionpipe.profiler.clock import Clock, Took, middle, spread
from diffusionpipe.profiler.layer_run import LayerRun, split_backward
from diffusionpipe.units import Seconds

ENOUGH: Seconds = 0.025
"""The least time that all passes together take, divided by the number of layers."""
STEADY = 0.005
"""The relative error of the median pass above which passes take `MOST` in place of `ENOUGH`."""
MOST: Seconds = 0.05
"""The time after which passes end even if their times differ, divided by the number of layers."""
MAX_REPEATS = 25
"""The most passes of each kind."""

Agree = Callable[[float], float]
"""A function that every rank calls with a value, and that returns the largest of them when all have called it."""


def alone(value: float) -> float:
    """The value itself. It is the `Agree` of a rank that measures without others."""
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """The median seconds of one layer's forward, I, W and cast, scaled to add up to the median of a whole pass."""

    forward: Seconds
    """The time of the forward."""
    forward_spread: Seconds
    """Half the distance between the quartiles of the times of the forward."""
    backward_spread: Seconds
    """Half the distance between the quartiles of the times of the whole backward."""
    input_grad: Seconds
    """The time of I."""
    weight_grad: Seconds
    """The time of W."""
    cast: Seconds
    """The time of copying the layer's weights to autocast's type; 0 without copies."""
    host: HostTimes
    """The median times in which the host issues the work; the times above are the device's."""
    forward_only: Seconds | None = None
    """The time of a forward without gradients; None if it was not measured."""


@dataclass(slots=True)
class _Trials:
    """The measured times of one layer, by kind of work; each pass appends to them."""

    casts: list[Took] = field(default_factory=list)
    """Times of copying the weights."""
    forwards: list[Took] = field(default_factory=list)
    """Times of forwards."""
    input_grads: list[Took] = field(default_factory=list)
    """Times of gradients of the inputs alone."""
    wholes: list[Took] = field(default_factory=list)
    """Times of whole backwards."""
    probes: list[Took] = field(default_factory=list)
    """Times of forwards without gradients."""

    def all(self) -> Iterator[Took]:
        """All measured times of the layer, of every kind of work."""
        return chain(self.casts, self.forwards, self.input_grads, self.wholes, self.probes)


_Round = Mapping[str, _Trials]
"""Layer -> its times in one pass with whole backwards, one with input gradients alone, and one of probes."""


def time_passes(
    runs: Sequence[LayerRun],
    clock: Clock,
    repeats: int,
    agree: Agree = alone,
    *,
    probed: Collection[str] = (),
) -> dict[str, LayerTimes]:
    """Layer -> its times, measured in passes through all layers one after the other.

    `runs`: the layers with inputs of earlier runs; in each pass a layer that reads an output of another of them gets
    the new output. At least `repeats` passes are made with whole backwards and as many with input gradients alone.
    Passes in which the device waited for its host do not count, as long as there are others. `agree` keeps ranks that
    measure at the same time in step. `probed`: layers whose forwards without gradients are timed too.
    """
    rounds: list[tuple[_Round, bool]] = []
    spent: Seconds = 0.0
    for number in range(MAX_REPEATS):
        if number >= repeats and agree(spent) >= _needed(rounds, agree) * len(runs):
            break
        agree(0.0)
        found = {run.layer.name: _Trials() for run in runs}
        clock.was_late = False
        for is_whole in (True, False):
            _pass(runs, clock, found, is_whole=is_whole)
        _probe([run for run in runs if run.layer.name in probed], clock, found)
        rounds.append((found, clock.was_late))
        spent += sum(took.device + took.host for trial in found.values() for took in trial.all())
    counting = [found for found, was_late in rounds if not was_late] or [found for found, _ in rounds]
    trials = {run.layer.name: _together([found[run.layer.name] for found in counting]) for run in runs}
    strain = _Strain(
        forward=_longer([_device(trial.forwards) for trial in trials.values()]),
        whole=_longer([_device(trial.wholes) for trial in trials.values()]),
        input_grad=_longer([_device(trial.input_grads) for trial in trials.values()]),
        probe=_longer([_device(trial.probes) for trial in trials.values()]),
    )
    return {run.layer.name: _times(run, trials[run.layer.name], strain) for run in runs}


def _needed(rounds: Sequence[tuple[_Round, bool]], agree: Agree) -> Seconds:
    """The seconds for each layer that are measured at least, over all passes: `ENOUGH`, or `MOST` if rounds differ.

    `rounds`: (what was measured, whether the backward was whole) of each round so far. `agree`: makes the spread of
    their times the same on all ranks.
    """
    wholes = [sum(took.device for trial in found.values() for took in trial.all()) for found, _ in rounds]
    usual = middle(wholes)
    # The error of the median, about the spread over the square root of the count, as a part of the median.
    return MOST if agree(spread(wholes) / sqrt(len(wholes)) / usual if usual else 0.0) > STEADY else ENOUGH


def _pass(runs: Sequence[LayerRun], clock: Clock, trials: Mapping[str, _Trials], *, is_whole: bool) -> None:
    """Run and time all casts, one forward through all layers and one backward; the times are added to `trials`.

    `is_whole`: whether the backward is whole, or has input gradients alone.
    """
    written: dict[str, Tensor] = {}
    begun: list[tuple[LayerRun, tuple[Tensor, ...]]] = []
    for run in runs:
        if run.weights:
            trials[run.layer.name].casts.append(clock.apart(run.cast)[1])
    for given in runs:
        run = _fed(given, written)
        outputs, took = clock.apart(run.forward)
        trials[run.layer.name].forwards.append(took)
        written.update(zip(run.layer.writes, (output.detach() for output in outputs), strict=True))
        begun.append((run, outputs))
    # Outputs are held by `begun` alone, so that each backward frees them as in training.
    written.clear()
    while begun:
        run, outputs = begun.pop()
        starts, gradients = run.gradients_like(outputs)
        del outputs
        if not starts or not (is_whole or run.differentiable):
            continue
        gradient = partial(run.backward if is_whole else run.input_grad, starts, gradients)
        trial = trials[run.layer.name]
        (trial.wholes if is_whole else trial.input_grads).append(clock.apart(gradient)[1])


def _probe(runs: Sequence[LayerRun], clock: Clock, trials: Mapping[str, _Trials]) -> None:
    """Run and time one forward without gradients through these layers; the times are added to `trials`.

    Each layer reads the outputs that the layers before it have just written.
    """
    written: dict[str, Tensor] = {}  # until its last reader, as in a stage
    last = {name: index for index, run in enumerate(runs) for name in run.layer.reads}
    for index, given in enumerate(runs):
        run = replace(given, reads={name: written.get(name, own.detach()) for name, own in given.reads.items()})
        outputs, took = clock.apart(partial(run.forward, keeps=False))
        trials[run.layer.name].probes.append(took)
        written |= dict(zip(run.layer.writes, outputs, strict=True))
        written = {name: tensor for name, tensor in written.items() if last.get(name, 0) > index}


def _fed(run: LayerRun, written: Mapping[str, Tensor]) -> LayerRun:
    """The layer's run with its inputs replaced by the outputs in `written`, which earlier layers of the pass wrote."""
    reads = {
        name: written[name].detach().requires_grad_(tensor.requires_grad) if name in written else tensor
        for name, tensor in run.reads.items()
    }
    return replace(run, reads=reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strain:
    """For each kind of pass, its median time divided by the sum of the medians of its layers.

    In every pass some layer takes longer than usual, but seldom the same, so that no layer's median shows it.
    """

    forward: float
    """The factor of forwards."""
    whole: float
    """The factor of whole backwards."""
    input_grad: float
    """The factor of backwards with input gradients alone."""
    probe: float
    """The factor of forwards without gradients."""


def _longer(layers: Sequence[Sequence[Seconds]]) -> float:
    """The median time of a pass divided by the sum of its layers' median times; 1 without any time.

    `layers`: for each layer its times, pass by pass.
    """
    timed = [times for times in layers if times]
    medians = sum(middle(times) for times in timed)
    return middle([sum(one) for one in zip(*timed, strict=True)]) / medians if medians > 0 else 1.0


def _together(trials: Sequence[_Trials]) -> _Trials:
    """The times of a layer from several rounds in one object."""
    return _Trials(
        casts=[took for trial in trials for took in trial.casts],
        forwards=[took for trial in trials for took in trial.forwards],
        input_grads=[took for trial in trials for took in trial.input_grads],
        wholes=[took for trial in trials for took in trial.wholes],
        probes=[took for trial in trials for took in trial.probes],
    )


def _device(found: Sequence[Took]) -> list[Seconds]:
    return [took.device for took in found]


def _times(run: LayerRun, trial: _Trials, strain: _Strain) -> LayerTimes:
    def split(whole: Seconds, input_grad: Seconds) -> tuple[Seconds, Seconds]:
        return split_backward(whole, input_grad, has_inputs=bool(run.differentiable), is_trained=bool(run.trained))

    def host(found: Sequence[Took]) -> Seconds:
        return middle([took.host for took in found]) if found else 0.0

    def device(found: Sequence[Took]) -> Seconds:
        return middle(_device(found)) if found else 0.0

    input_grad, weight_grad = split(device(trial.wholes) * strain.whole, device(trial.input_grads) * strain.input_grad)
    host_input_grad, host_weight_grad = split(host(trial.wholes), host(trial.input_grads))
    return LayerTimes(
        forward=device(trial.forwards) * strain.forward,
        forward_spread=spread(_device(trial.forwards)),
        backward_spread=spread(_device(trial.wholes)),
        input_grad=input_grad,
        weight_grad=weight_grad,
        forward_only=device(trial.probes) * strain.probe if trial.probes else None,
        cast=device(trial.casts),
        host=HostTimes(forward=host(trial.forwards), input_grad=host_input_grad, weight_grad=host_weight_grad),
    )


def least_host(found: Sequence[HostTimes]) -> HostTimes:
    """The least forward, input and weight gradient times of the host.

    Longer times contain waits until the device accepts more work.
    """
    return HostTimes(
        forward=min(host.forward for host in found),
        input_grad=min(host.input_grad for host in found),
        weight_grad=min(host.weight_grad for host in found),
    )
