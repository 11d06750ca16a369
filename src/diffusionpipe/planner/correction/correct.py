"""Compares the prediction of a run with its recorded times, and corrects the setting by them.

    recorded ──> times of actions, waits   ──> layers of each block and fill      (computing)
             ──> what is longer after waits ──> waking
             ──> arrivals, ends            ──> links, gradient sums               (transfers)
             ──> step - iteration          ──> update
    what no action explains: all layers by one factor, until the simulated iteration is the measured one

The last part is there because ranks wait for the slower one of each moment: an iteration of median actions is shorter
than the median iteration. `causes` says how much of the step each correction explains.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

from diffusionpipe.costs import Costs
from diffusionpipe.ir import Op, Plan
from diffusionpipe.ir.recorded import Recorded
from diffusionpipe.planner.correction.causes import Cause, LoadingTimes, causes_of
from diffusionpipe.planner.correction.computing import by_layers, fitted, strained
from diffusionpipe.planner.correction.observations import (
    Key,
    Observation,
    extras,
    observations_of,
    price,
    times_of,
)
from diffusionpipe.planner.correction.transfers import (
    Crossing,
    GradientSums,
    corrected_link,
    corrected_pair,
    corrected_sum,
    crossings,
    sums_of,
)
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import costs_of, time_to_update, update_time
from diffusionpipe.simulator import simulate
from diffusionpipe.units import Seconds

ROUNDS = 4
"""The number of rounds in which all layers are stretched until the iteration takes its measured time."""
STRAIN = 1.25
"""The largest factor by which all layers are stretched or shrunk for a time that no action explains."""
SLOWEST_WAKING = 5.0
"""The largest factor by which the table of waking, the extra times after waits, is multiplied."""
LEAST_UPDATE = 0.05
"""The least part of a measured update that counts for parameters; the rest is the agreement of the ranks."""
NO_LOADING = LoadingTimes()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """The predicted and the measured seconds of one op of one stage, for one micro-batch."""

    op: Op
    stage: int
    """Number of the stage in the placement."""
    predicted: Seconds
    measured: Seconds

    @property
    def error(self) -> float:
        """Measured / predicted - 1, above 0 where the compute took longer than predicted; 0 without a prediction."""
        return self.measured / self.predicted - 1.0 if self.predicted else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTimes:
    """The seconds of a step's parts: the iteration, the update after it, and the delay by data workers."""

    iteration: Seconds
    update: Seconds
    loading: Seconds = 0.0
    """The seconds that data workers add, in a prediction; 0 in measured and corrected times, whose other parts contain
    it."""

    @property
    def step(self) -> Seconds:
        """The time of the iteration, the update and the data workers together, in seconds."""
        return self.iteration + self.update + self.loading


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The predicted and the measured times of a run, their causes, and the setting that predicts the measured ones."""

    setting: Setting
    """The setting after the correction, which predicts the measured times."""
    predicted: IterationTimes
    measured: IterationTimes
    corrected: IterationTimes
    causes: tuple[Cause, ...]
    """Why the step took longer or shorter, the largest cause first."""
    stages: tuple[StageTime, ...]
    layers: tuple[tuple[str, float], ...]
    """The factor of each layer's forward, the largest error first."""
    unexplained: float
    """The part by which the iteration took longer than its corrected actions explain; 0.1 is a tenth longer."""
    recorded: Recorded
    """The recording by which the setting was corrected."""


def correct(setting: Setting, plan: Plan, recorded: Recorded, loading: LoadingTimes = NO_LOADING) -> Correction:
    """The predicted and the measured times of a run, with the setting corrected so that it predicts the measured ones.

    The plan was predicted with `setting`; `loading` is the time that data workers added besides. Memory is not
    corrected.
    """
    before, observations = _costs(setting, plan), observations_of(recorded)
    # Times without waking need the table, and the table needs times: first with the predicted one, then with the
    # corrected.
    waking = _waking(observations, times_of(observations, before.waking), before)
    times = times_of(observations, waking)
    found, sums = crossings(plan, recorded, before), sums_of(plan, recorded, before)
    profile = by_layers(replace(setting.profile, waking=waking), plan, recorded.layers)
    fit = _with_links(replace(setting, profile=profile), plan, found, sums)
    fit = fitted(fit, plan, times)
    unexplained = recorded.iteration / simulate(plan.train, _costs(fit, plan)).makespan - 1.0
    # Causes are explained before all layers are stretched: the stretch is the part that nothing explains.
    explained, fit = fit, _strained(fit, plan, recorded.iteration)
    measured = IterationTimes(iteration=recorded.iteration, update=max(0.0, recorded.step - recorded.iteration))
    fit = _with_update(fit, plan, measured.update)
    predicted = replace(predicted_step(setting, plan), loading=loading.predicted)
    causes = causes_of(
        setting,
        explained,
        plan,
        iteration=measured.iteration,
        update=measured.update - predicted.update,
        loading=loading,
        busy=_busy(observations),
    )
    return Correction(
        setting=fit,
        predicted=predicted,
        measured=measured,
        corrected=predicted_step(fit, plan),
        causes=causes,
        stages=tuple(_stages(times, before)),
        layers=_layers(setting, fit),
        unexplained=unexplained,
        recorded=recorded,
    )


def predicted_step(setting: Setting, plan: Plan) -> IterationTimes:
    """The iteration and the update that a setting predicts for a plan's training, in seconds."""
    return IterationTimes(
        iteration=simulate(plan.train, _costs(setting, plan)).makespan,
        update=update_time(plan.train, plan.blocks, setting.profile, plan.mesh),
    )


def _costs(setting: Setting, plan: Plan) -> Costs:
    return costs_of(plan.train, plan.blocks, plan.mesh, setting)


def _waking(
    observations: Sequence[Observation], times: Mapping[Key, Seconds], costs: Costs
) -> tuple[tuple[Seconds, Seconds], ...]:
    """The table of waking, (wait, extra seconds after it), scaled so that it adds up to the measured extra seconds."""
    pairs = list(extras(observations, times, costs.waking))
    predicted, measured = (sum(column) for column in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    factor = min(max(measured / predicted, 0.0), SLOWEST_WAKING) if predicted > 0 else 1.0
    return tuple((wait, extra * factor) for wait, extra in costs.waking)


def _with_links(setting: Setting, plan: Plan, found: Sequence[Crossing], sums: GradientSums) -> Setting:
    """The setting with links and rates of gradient sums that give the measured times.

    The profile gets the corrected link and rate of one machine too. `found`: the messages with their times.
    """
    cluster, mesh = setting.cluster, plan.mesh

    def crosses(pair: tuple[int, int]) -> bool:
        return cluster.nodes[pair[0]] != cluster.nodes[pair[1]]

    kinds = {is_far: [one for one in found if crosses(one.pair) is is_far] for is_far in (False, True)}
    crossed: dict[tuple[int, int], list[Crossing]] = defaultdict(list)  # a link has one entry for both directions
    for one in found:
        crossed[min(one.pair), max(one.pair)].append(one)
    holders = [[mesh.rank(group, worker) for group in range(mesh.data_parallel)] for worker in range(mesh.pipeline)]
    is_far_sum = any(len({cluster.nodes[rank] for rank in ranks}) > 1 for ranks in holders)
    cluster = replace(
        cluster,
        pairs=tuple(
            corrected_pair(pair, crossed[pair.first, pair.second], kinds[crosses((pair.first, pair.second))])
            for pair in cluster.pairs
        ),
        intra=corrected_link(cluster.intra, kinds[False]),
        # A cluster of one node has no other messages to correct it by.
        inter=corrected_link(cluster.inter, kinds[len(set(cluster.nodes)) > 1]),
        intra_reduce=cluster.intra_reduce if is_far_sum else corrected_sum(cluster.intra_reduce, sums),
        inter_reduce=corrected_sum(cluster.inter_reduce, sums) if is_far_sum else cluster.inter_reduce,
    )
    profile = replace(setting.profile, link=cluster.intra, reduce=cluster.intra_reduce)
    return replace(setting, cluster=cluster, profile=profile)


def _strained(setting: Setting, plan: Plan, iteration: Seconds) -> Setting:
    """The setting with all layers stretched or shrunk, by `STRAIN` at most, until an iteration takes `iteration`."""
    total = 1.0
    for _ in range(ROUNDS):
        factor = iteration / simulate(plan.train, _costs(setting, plan)).makespan
        # Together the rounds stretch by no more than `STRAIN`.
        factor = min(max(factor, 1 / STRAIN / total), STRAIN / total)
        setting, total = strained(setting, factor), total * factor
    return setting


def _with_update(setting: Setting, plan: Plan, update: Seconds) -> Setting:
    """The setting in which the update takes `update` seconds; the same setting if its profile has no update."""
    profile, mesh = setting.profile, plan.mesh
    if not profile.update:
        return setting
    predicted, agreement = (
        update_time(plan.train, plan.blocks, profile, mesh),
        time_to_update(0, profile, mesh.num_ranks),
    )
    # The agreement of the ranks does not grow with parameters: only the rest is for them.
    left = max(update - agreement, LEAST_UPDATE * update)
    return replace(setting, profile=replace(profile, update=profile.update * left / (predicted - agreement)))


def _busy(observations: Sequence[Observation]) -> dict[Op, Seconds]:
    """Op -> the measured seconds of its actions, added up over all ranks."""
    found: dict[Op, Seconds] = defaultdict(float)
    for one in observations:
        found[one.action.op] += one.seconds
    return found


def _stages(times: Mapping[Key, Seconds], costs: Costs) -> Iterator[StageTime]:
    for (op, stage), seconds in times.items():
        if op is not Op.ENCODE:
            yield StageTime(op=op, stage=stage, predicted=price((op, stage), costs), measured=seconds)


def _layers(before: Setting, after: Setting) -> tuple[tuple[str, float], ...]:
    factors = [
        (old.name, sum(new.forward) / sum(old.forward))
        for old, new in zip(before.profile.layers, after.profile.layers, strict=True)
    ]
    return tuple(sorted(factors, key=lambda pair: (-abs(log(pair[1])), pair[0])))
