"""Times of layers from passes through many of them, so that each finds the caches as training leaves them.

    cast       a, b, c               copies of the weights, where autocast reads such
    forward    a ──> b ──> c         each layer on what the one before it has just written
    backward   a <── b <── c         then the whole backward of each, or every other time its input gradient alone

A layer that is run again and again by itself reads its weights and inputs from the nearest cache; on a CPU with one
thread that makes a small U-Net look up to 10 % faster than it is. All ranks of a job may measure at once, because in
training they share memory and caches too; `Agree` keeps them in step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from diffusionpipe.profiler.clock import Clock, middle, spread
from diffusionpipe.profiler.layer_run import LayerRun, split_backward
from diffusionpipe.units import Seconds

ENOUGH: Seconds = 0.05
"""Passes are made beyond `repeats` until they have taken this long for each of their layers,"""
MAX_REPEATS = 25
"""or this often."""

Agree = Callable[[float], float]
"""The largest of the values that all ranks give; returns when all have."""


def alone(value: float) -> float:
    """`Agree` of a rank that measures by itself."""
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Medians over the passes, so much longer that they add up to the median of a whole pass."""

    forward: Seconds
    forward_spread: Seconds
    input_grad: Seconds
    weight_grad: Seconds
    cast: Seconds


@dataclass(slots=True)
class _Trials:
    """All times of one layer. Mutable: grows with every pass."""

    casts: list[Seconds] = field(default_factory=list)
    forwards: list[Seconds] = field(default_factory=list)
    input_grads: list[Seconds] = field(default_factory=list)
    wholes: list[Seconds] = field(default_factory=list)


def time_passes(runs: Sequence[LayerRun], clock: Clock, repeats: int, agree: Agree = alone) -> dict[str, LayerTimes]:
    """Times of layers that follow each other, by name.

    `runs` are on inputs from before; a layer that reads what another of them writes gets it anew in every pass. At
    least `repeats` passes are made with whole backwards and as many with input gradients alone.
    """
    trials = {run.layer.name: _Trials() for run in runs}
    spent: Seconds = 0.0
    for number in range(MAX_REPEATS):
        if number >= repeats and agree(spent) >= ENOUGH * len(runs):
            break
        agree(0.0)
        spent += _pass(runs, clock, trials, is_whole=True) + _pass(runs, clock, trials, is_whole=False)
    strain = _Strain(
        forward=_longer([trial.forwards for trial in trials.values()]),
        whole=_longer([trial.wholes for trial in trials.values()]),
        input_grad=_longer([trial.input_grads for trial in trials.values()]),
    )
    return {run.layer.name: _times(run, trials[run.layer.name], strain) for run in runs}


def _pass(runs: Sequence[LayerRun], clock: Clock, trials: Mapping[str, _Trials], *, is_whole: bool) -> Seconds:
    """All casts, one forward through all layers and one backward; returns what they took."""
    written: dict[str, Tensor] = {}
    begun: list[tuple[LayerRun, tuple[Tensor, ...]]] = []
    spent: Seconds = 0.0
    for run in runs:
        if run.weights:
            seconds = clock.time(run.cast)[1]
            trials[run.layer.name].casts.append(seconds)
            spent += seconds
    for given in runs:
        run = _fed(given, written)
        outputs, seconds = clock.time(run.forward)
        trials[run.layer.name].forwards.append(seconds)
        spent += seconds
        written.update(zip(run.layer.writes, (output.detach() for output in outputs), strict=True))
        begun.append((run, outputs))
    written.clear()
    while begun:
        run, outputs = begun.pop()
        starts, gradients = run.gradients_like(outputs)
        del outputs
        if not starts or not (is_whole or run.differentiable):
            continue
        gradient = partial(run.backward if is_whole else run.input_grad, starts, gradients)
        seconds = clock.time(gradient)[1]
        trial = trials[run.layer.name]
        (trial.wholes if is_whole else trial.input_grads).append(seconds)
        spent += seconds
    return spent


def _fed(run: LayerRun, written: Mapping[str, Tensor]) -> LayerRun:
    """The run on what earlier layers of this pass have written."""
    reads = {
        name: written[name].detach().requires_grad_(tensor.requires_grad) if name in written else tensor
        for name, tensor in run.reads.items()
    }
    return replace(run, reads=reads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strain:
    """By how much the median pass is longer than the medians of its layers together.

    In every pass some layer takes longer than usual, but seldom the same, so that no layer's median shows it.
    """

    forward: float
    whole: float
    input_grad: float


def _longer(layers: Sequence[Sequence[Seconds]]) -> float:
    """The factor, from the times of layers, pass by pass; 1 where there is nothing to tell it from."""
    timed = [times for times in layers if times]
    medians = sum(middle(times) for times in timed)
    return middle([sum(one) for one in zip(*timed, strict=True)]) / medians if medians > 0 else 1.0


def _times(run: LayerRun, trial: _Trials, strain: _Strain) -> LayerTimes:
    input_grad, weight_grad = split_backward(
        middle(trial.wholes) * strain.whole if trial.wholes else 0.0,
        middle(trial.input_grads) * strain.input_grad if trial.input_grads else 0.0,
        has_inputs=bool(run.differentiable),
        is_trained=bool(run.trained),
    )
    return LayerTimes(
        forward=middle(trial.forwards) * strain.forward,
        forward_spread=spread(trial.forwards),
        input_grad=input_grad,
        weight_grad=weight_grad,
        cast=middle(trial.casts) if trial.casts else 0.0,
    )
