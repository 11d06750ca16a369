"""Fits the times of layers so that a plan's actions take their measured times.

A recording has the time of each stage, and mostly the time of each layer's forward. Layers first get their own
factors; then all layers of a block get factors that make the price of the block's actions equal to the measured time.
The parts of a price besides its layers, such as messages and recomputation, stay, so that is done a few times.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from diffusionpipe.costs import LayerProfile, Profile
from diffusionpipe.ir import Op, Plan
from diffusionpipe.ir.recorded import LayerTime
from diffusionpipe.planner.correction.observations import Key, price
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.units import Seconds

ROUNDS = 6
"""The number of rounds of the fit to stages and fills; each leaves a small part of the error before it."""
LEAST, MOST = 0.02, 50.0
"""The smallest and the largest factor of a time in one round."""
APART = 1.3
"""A layer whose forward is off by this factor more than its block is off in its backward too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """The factors by which the times of one layer are multiplied."""

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    forward_only: float | None = None
    """Factor of the forward in probes; None: the factor of `forward`."""


def scaled(profile: Profile, factors: Mapping[str, Factors]) -> Profile:
    """The profile with the times of each layer multiplied by its factors, at all batch sizes.

    A layer with a `forward_only` factor gets its own times for probes, even if the profile had none.
    """
    none = Factors()
    return replace(
        profile, layers=tuple(_scaled_layer(layer, factors.get(layer.name, none)) for layer in profile.layers)
    )


def _scaled_layer(layer: LayerProfile, factors: Factors) -> LayerProfile:
    def times(values: Sequence[Seconds], factor: float) -> tuple[Seconds, ...]:
        return tuple(value * factor for value in values)

    is_probed = factors.forward_only is not None
    probes = (layer.forward_only or layer.forward) if is_probed else layer.forward_only
    return replace(
        layer,
        forward=times(layer.forward, factors.forward),
        forward_only=times(probes, factors.forward if factors.forward_only is None else factors.forward_only),
        input_grad=times(layer.input_grad, factors.input_grad),
        weight_grad=times(layer.weight_grad, factors.weight_grad),
        forward_spread=times(layer.forward_spread, factors.forward),
        backward_spread=times(layer.backward_spread, factors.weight_grad),
        cast=layer.cast * factors.forward,
    )


def by_layers(profile: Profile, plan: Plan, layers: Sequence[LayerTime]) -> Profile:
    """The profile after the forward times of its layers were multiplied by measured / predicted of single layers.

    `layers`: the recorded times of single layers' forwards. A layer that is off by more than 1.3 times the median of
    its block gets a factor for its backward too.
    """
    frozen = set(profile.graph.frozen_layers)
    kept, probed = (
        [one for one in layers if (one.keeps or one.name in frozen) is is_kept] for is_kept in (True, False)
    )
    factors, probes = _ratios(kept, profile.forward), _ratios(probed, profile.forward_only)
    scales: dict[str, Factors] = {}
    for block in plan.blocks:
        known = {name: factors[name] for name in block if name in factors}
        usual = median(known.values()) if known else 1.0
        for name, factor in known.items():
            beside = factor / usual
            # The backward was not recorded layer by layer: a layer far from its block's others is expected to be so
            # there too.
            backward = beside if max(beside, 1 / beside) > APART else 1.0
            scales[name] = Factors(
                forward=factor, input_grad=backward, weight_grad=backward, forward_only=probes.get(name)
            )
    return scaled(profile, scales)


def _ratios(layers: Sequence[LayerTime], predict: Callable[[str, float], Seconds]) -> dict[str, float]:
    """Layer -> measured / predicted seconds of its forward, the median over the recorded numbers of samples."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in layers:
        if predicted := predict(one.name, one.samples):
            found[one.name].append(_limited(one.seconds / predicted))
    return {name: median(ratios) for name, ratios in found.items()}


def fitted(setting: Setting, plan: Plan, times: Mapping[Key, Seconds]) -> Setting:
    """The setting whose layer times are fitted so that the plan's actions take these measured seconds.

    `times`: (op, stage or fill) -> seconds. All layers of a block get the same factors.
    """
    for _ in range(ROUNDS):
        costs = costs_of(plan.train, plan.blocks, plan.mesh, setting)
        # A price of 0 has no factor.
        ratios = {key: _limited(seconds / price(key, costs)) for key, seconds in times.items() if price(key, costs) > 0}
        factors = _of_blocks(plan, ratios) | _of_fills(setting.profile, plan, ratios)
        setting = replace(setting, profile=scaled(setting.profile, factors))
    return setting


def _of_blocks(plan: Plan, ratios: Mapping[Key, float]) -> dict[str, Factors]:
    """Layer -> the factors of its times, for trained layers: means over all stages that hold its block.

    Stages of probes give the factor of the forward without gradients, all others the factor of the forward. `ratios`:
    (op, stage or fill) -> measured / predicted seconds.
    """
    placement = plan.train.placement
    found: dict[tuple[int, Op, bool], list[float]] = defaultdict(list)
    for (op, number), ratio in ratios.items():
        if op is not Op.ENCODE:
            found[placement.stages[number].weights, op, placement.pipeline_of(number).is_probe].append(ratio)
    means = {key: fmean(block_ratios) for key, block_ratios in found.items()}
    factors: dict[str, Factors] = {}
    for block in dict.fromkeys(block for block, _, _ in means):
        whole = means.get((block, Op.B, False), 1.0)
        one = Factors(
            forward=means.get((block, Op.F, False), 1.0),
            input_grad=means.get((block, Op.I, False), whole),
            weight_grad=means.get((block, Op.W, False), whole),
            forward_only=means.get((block, Op.F, True)),
        )
        factors |= dict.fromkeys(plan.blocks[block], one)
    return factors


def _of_fills(profile: Profile, plan: Plan, ratios: Mapping[Key, float]) -> dict[str, Factors]:
    """Frozen layer -> the factor of its forward: the mean of the fills that run it, weighted by its time in each.

    `ratios`: (op, stage or fill) -> measured / predicted seconds.
    """
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for slot, fill in enumerate(plan.train.fills):
        ratio = ratios.get((Op.ENCODE, slot))
        block = plan.blocks[plan.train.placement.stages[fill.stage].weights]
        for name in block[fill.layers.start : fill.layers.stop] if ratio is not None else ():
            weight = profile.forward(name, len(fill.samples))
            sums[name][0] += weight
            sums[name][1] += weight * (ratio or 1.0)
    return {name: Factors(forward=total / weight) for name, (weight, total) in sums.items() if weight > 0}


def strained(setting: Setting, factor: float) -> Setting:
    """The setting in which the forwards and backwards of all layers take `factor` times as long."""
    every = Factors(forward=factor, input_grad=factor, weight_grad=factor)
    names = [layer.name for layer in setting.profile.layers]
    return replace(setting, profile=scaled(setting.profile, dict.fromkeys(names, every)))


def _limited(ratio: float) -> float:
    return min(max(ratio, LEAST), MOST)
