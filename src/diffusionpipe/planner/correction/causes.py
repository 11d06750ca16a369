"""Finds the causes why a step took longer or shorter than predicted, in seconds that add up to the difference.

The corrections of a setting are made one after the other, and after each the iteration is simulated:

    as predicted ──> encoding ──> forwards ──> backwards ──> starts after waits ──> messages ──> sums ──> measured
                 12 ms        3 ms         ...                                                       rest

The time that each adds is its cause. So 10 ms of a stage that is not on the critical path do not add 10 ms to the step.
Data workers delay the work of ranks meanwhile: their time is taken off the compute, in proportion to its time, and is a
cause of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from diffusionpipe.costs import LayerProfile
from diffusionpipe.ir import Op, Plan
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.simulator import simulate
from diffusionpipe.units import Seconds

FORWARDS, BACKWARDS, ENCODING = "forwards", "backwards", "encoding"
INPUT_GRADS, WEIGHT_GRADS = "input gradients", "weight gradients"
LOADING, UPDATE = "loading", "update"
NAMES: Mapping[Op, str] = {
    Op.F: FORWARDS,
    Op.B: BACKWARDS,
    Op.I: INPUT_GRADS,
    Op.W: WEIGHT_GRADS,
    Op.ENCODE: ENCODING,
}
REST = "waiting for the slowest rank of each moment"
"""The name of the cause of time that no action explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One reason why a step took longer or shorter than predicted, with its seconds."""

    name: str
    seconds: Seconds
    """Seconds by which the cause made the step longer; negative: shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingTimes:
    """The time that data workers added to a step, measured and predicted."""

    predicted: Seconds = 0.0
    measured: Seconds | None = None
    """The measured time; None if it could not be measured: then the predicted time counts."""


def causes_of(
    before: Setting,
    after: Setting,
    plan: Plan,
    *,
    iteration: Seconds,
    update: Seconds,
    loading: LoadingTimes,
    busy: Mapping[Op, Seconds],
) -> tuple[Cause, ...]:
    """The causes of the difference of a step from its prediction, the largest first; their seconds add up to it.

    Args:
        before: the setting with which the plan was predicted.
        after: the same setting after all corrections except the stretch of all layers that no action explains.
        plan: the plan that ran.
        iteration: the measured seconds of an iteration.
        update: the seconds by which the update took longer than predicted.
        loading: the time that data workers added to a step.
        busy: op -> the measured seconds of compute, which data workers delay.
    """
    found: dict[str, Seconds] = {}
    last = _iteration(before, plan)
    for name, setting in _corrections(before, after, plan):
        now = _iteration(setting, plan)
        found[name], last = now - last, now
    found[REST] = iteration - last
    added = loading.predicted if loading.measured is None else loading.measured
    for op, seconds in busy.items():
        found[NAMES[op]] = found.get(NAMES[op], 0.0) - added * seconds / sum(busy.values())
    found |= {LOADING: added - loading.predicted, UPDATE: update}
    causes = [Cause(name=name, seconds=seconds) for name, seconds in found.items() if seconds]
    return tuple(sorted(causes, key=lambda cause: (-abs(cause.seconds), cause.name)))


def _corrections(before: Setting, after: Setting, plan: Plan) -> Iterator[tuple[str, Setting]]:
    """(name of a cause, the setting with this correction and all corrections before it), one correction at a time."""
    setting, frozen = before, frozenset(before.graph.frozen_layers)
    is_split = any(action.op is Op.I for order in plan.train.orders for action in order)

    def with_layers(names: tuple[str, ...], *, of_frozen: bool) -> Setting:
        def corrected(old: LayerProfile, new: LayerProfile) -> LayerProfile:
            return replace(old, **{name: getattr(new, name) for name in names})

        layers = [
            corrected(old, new) if (new.name in frozen) is of_frozen else old
            for old, new in zip(setting.profile.layers, after.profile.layers, strict=True)
        ]
        return replace(setting, profile=replace(setting.profile, layers=tuple(layers)))

    setting = with_layers(("forward", "forward_only", "cast"), of_frozen=True)
    yield ENCODING, setting
    setting = with_layers(("forward", "forward_only", "cast"), of_frozen=False)
    yield FORWARDS, setting
    setting = with_layers(("input_grad",) if is_split else ("input_grad", "weight_grad"), of_frozen=False)
    yield INPUT_GRADS if is_split else BACKWARDS, setting
    if is_split:
        setting = with_layers(("weight_grad",), of_frozen=False)
        yield WEIGHT_GRADS, setting
    setting = replace(setting, profile=replace(setting.profile, waking=after.profile.waking))
    yield "starts after waits", setting
    as_before = before.cluster
    cluster = replace(after.cluster, intra_reduce=as_before.intra_reduce, inter_reduce=as_before.inter_reduce)
    # Sums keep their old rates here, so that their part is a cause of its own.
    setting = replace(setting, cluster=cluster, profile=replace(setting.profile, link=after.profile.link))
    yield "waiting for messages", setting
    yield "waiting for gradient sums", replace(setting, cluster=after.cluster, profile=after.profile)


def _iteration(setting: Setting, plan: Plan) -> Seconds:
    return simulate(plan.train, costs_of(plan.train, plan.blocks, plan.mesh, setting)).makespan
