"""Samples of several sizes as tenants of the ledger: the maximum of memory and the mean of time.

A rank has room for the largest sample, and a step takes the mean time of its samples. Layers are measured at two sizes,
the one with the most work and the one with the least. The times of the others lie between, by counted operations:

    time of a layer      ______/o  largest         operations grow with tokens, of attention with their square,
                     o--'                          so times lie on a line over operations, not over pixels
                 smallest    size 1   size 0
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from diffusionpipe.costs.graph import LayerSpec, ModelGraph
from diffusionpipe.costs.profile import LayerProfile, Profile, ProfiledSize
from diffusionpipe.units import Bytes


def smallest_of(models: Sequence[ModelGraph]) -> int:
    """The index in `models` of the model with the fewest operations; each model is the same one at another sample size.

    Layers without counted operations count with the bytes that they write.
    """
    return min(range(len(models)), key=lambda number: sum(_work(models[number], one) for one in models[number].layers))


def profile_of_sizes(
    largest: Profile, smallest: Profile, models: Sequence[ModelGraph], shares: Sequence[float]
) -> Profile:
    """The profile of samples of several sizes: times are means over the samples, bytes are maxima over the sizes.

    Args:
        largest: the layers at the first size.
        smallest: the layers at the size of `smallest_of`, at any batch sizes.
        models: the model at each size.
        shares: the part of samples that have each size; they add up to 1.
    """
    least = models[smallest_of(models)]
    layers = []
    for layer in largest.layers:
        work = [_work(model, model.layer(layer.name)) for model in models]
        low, high = _work(least, least.layer(layer.name)), work[0]
        # 0 at the smallest size, 1 at the first. A layer may do less than at the smallest size, which counts as 0;
        # where its work is the same at both ends, it takes the time of the first.
        places = [max(0.0, (own - low) / (high - low)) if high != low else 1.0 for own in work]
        written = [_written(model, model.layer(layer.name)) for model in models]
        # The first size has the most operations; another one may still write more bytes.
        most = max(written) / written[0] if written[0] else 1.0
        layers.append(_joined(largest, smallest, layer, places, shares, most))
    crossing = [_crossing(model) for model in models]
    sizes = [ProfiledSize(share=share, crossing=own / crossing[0]) for share, own in zip(shares, crossing, strict=True)]
    return replace(largest, layers=tuple(layers), sizes=tuple(sizes))


def at_size(profile: Profile, number: int) -> Profile:
    """The profile of samples that all have the size with this index; its bytes are still the maxima of all sizes."""
    return replace(
        profile,
        layers=tuple(_scaled(layer, layer.by_size[number]) for layer in profile.layers),
        sizes=(replace(profile.sizes[number], share=1.0),),
    )


def _joined(
    largest: Profile,
    smallest: Profile,
    layer: LayerProfile,
    places: Sequence[float],
    shares: Sequence[float],
    most: float,
) -> LayerProfile:
    """The layer's profile over all sizes: mean times, the largest bytes, and its relative time at each size.

    Args:
        largest: the profile of all layers at the largest size.
        smallest: the profile of all layers at the smallest size.
        layer: the layer's profile at the largest size.
        places: the position of the layer's work between the two, by size: 0 at the smallest, 1 at the largest.
        shares: the part of samples that have each size, by size.
        most: the most bytes that the layer writes at any size, as a factor of its bytes at the largest.
    """
    mean = sum(place * share for place, share in zip(places, shares, strict=True))
    name, sizes = layer.name, largest.batch_sizes

    def times(own: Sequence[float], other: Callable[[str, float], float]) -> tuple[float, ...]:
        # A layer without such times has an empty tuple, which stays empty; else both have an entry for each batch size.
        ends = [(other(name, batch), value) for batch, value in zip(sizes, own, strict=bool(own))]
        # Noise may make the smallest size the slower one. A place above 1 on such a falling line would lead below both
        # times.
        return tuple(max(low + mean * (value - low), min(low, value)) for low, value in ends)

    def peaks(own: Sequence[Bytes], other: Callable[[str, float], Bytes]) -> tuple[Bytes, ...]:
        ends = [(other(name, batch), value) for batch, value in zip(sizes, own, strict=bool(own))]
        return tuple(max(low, round(most * value)) for low, value in ends)

    found = replace(
        layer,
        forward=times(layer.forward, smallest.forward),
        input_grad=times(layer.input_grad, smallest.input_grad),
        weight_grad=times(layer.weight_grad, smallest.weight_grad),
        forward_only=times(layer.forward_only, smallest.forward_only),
        activation=peaks(layer.activation, smallest.activation),
        workspace=peaks(layer.workspace, smallest.workspace),
        drawing=peaks(layer.drawing, smallest.drawing),
        kept=peaks(layer.kept, smallest.kept),
    )
    # How much longer the largest size takes is about the same for any number of samples; the middle one is asked.
    batch = len(sizes) // 2
    low = sum(ask(name, sizes[batch]) for ask in (smallest.forward, smallest.input_grad, smallest.weight_grad))
    high = layer.forward[batch] + layer.input_grad[batch] + layer.weight_grad[batch]
    own = [max(low + place * (high - low), min(low, high)) for place in places]
    whole = sum(one * share for one, share in zip(own, shares, strict=True))
    return replace(found, by_size=tuple(one / whole for one in own))


def _scaled(layer: LayerProfile, factor: float) -> LayerProfile:
    def of(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(factor * value for value in values)

    return replace(
        layer,
        forward=of(layer.forward),
        input_grad=of(layer.input_grad),
        weight_grad=of(layer.weight_grad),
        forward_only=of(layer.forward_only),
        by_size=(1.0,),
    )


def _work(model: ModelGraph, layer: LayerSpec) -> float:
    """The operations of a layer for one sample, or the bytes that it writes where no operations were counted."""
    return layer.flops or _written(model, layer)


def _written(model: ModelGraph, layer: LayerSpec) -> Bytes:
    return sum(model.tensor(name).num_bytes for name in layer.writes)


def _crossing(model: ModelGraph) -> float:
    """The bytes that a trained layer of the model writes for one sample, on average over these layers."""
    trained = set(model.backbone_layers)
    return fmean(_written(model, layer) for layer in model.layers if layer.name in trained)
