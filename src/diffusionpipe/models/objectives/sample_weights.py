"""Weights of samples in the loss, of sets of pictures and of parts of pictures: one more raw input of the last layer.

    prediction, target, loss_weight ─┐
    sample_weight (B,) or (B, 1, h, w) ┴─ loss of each sample

One number multiplies the sample's loss. A mask multiplies the error of each latent before the mean over all latents,
so a latent has the same weight in every picture, however much of the picture is masked.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.objective import Objective, loss_layer

SAMPLE_WEIGHT = "sample_weight"
"""The name of the raw input with the weights: a number for each sample, or for each latent of each sample."""


def with_sample_weights(graph: LayerGraph, *, is_masked: bool) -> LayerGraph:
    """The graph, changed so that its last layer multiplies the loss by the new raw input "sample_weight".

    The input is a number for each sample, shape (B,), or with `is_masked` for each latent, shape (B, 1, h, w).

    Raises:
        ModelError: `is_masked`, and the loss is more than the error of a picture's latents.
    """
    last, noise = graph.layers[-1], next(spec for spec in graph.inputs if spec.name == "noise")
    plain = loss_layer()
    # An unchanged last layer is the plain loss, whose error has the shape of a mask.
    if is_masked and (last.run is not plain.run or len(noise.shape) != 3):
        raise ModelError(
            "data.loss_mask: this model's loss is more than the error of a picture's latents (it is of clips, states "
            "variances or reads its own estimate); remove loss_mask"
        )
    shape = (1, *noise.shape[1:]) if is_masked else ()
    run = _run_masked if is_masked else partial(_run_weighted, last.run)
    return replace(
        graph,
        layers=(*graph.layers[:-1], replace(last, reads=(*last.reads, SAMPLE_WEIGHT), run=run)),
        inputs=(*graph.inputs, TensorSpec(name=SAMPLE_WEIGHT, shape=shape)),
    )


def _run_weighted(run: Callable[..., tuple[Tensor, ...]], objective: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    *read, weight = tensors
    loss, *others = run(objective, *read)  # an estimate, where the denoiser reads its own
    return (loss * weight.to(loss.dtype), *others)


def _run_masked(
    objective: nn.Module, prediction: Tensor, target: Tensor, weight: Tensor, mask: Tensor
) -> tuple[Tensor, ...]:
    assert isinstance(objective, Objective)
    return (objective.loss(prediction, target, weight, mask),)
