"""Computes a lower bound of the step of all plans of a setting, for any layout, order, buckets and fills.

A place is an arrangement of ranks and a number of micro-batches. Its bound is the least of the bounds of the kinds of
layouts. All of them take `places.least_time`, in which all devices work all the time. Beyond it

    copies          must fit in memory, whole or, sharded, in parts
    chains          a dynamic program with an objective that holds for every order of one stage on a unit
    several stages  each layer is on one unit, or none: the best of all ways to deal out the layers, where these are few
    two directions  each layer is on two units, so all of them must have room for the parameters twice
"""

from collections.abc import Iterable

from diffusionpipe.holding.memory import use_of
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.chains import replicas_of
from diffusionpipe.planner.search.constants import MOST_DEALT
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.units import Seconds

Place = tuple[Seconds, Arrangement, int]
"""(`least_time` of a place in seconds, its arrangement, its number of micro-batches)."""


def least_step(judge: Judge, places: Iterable[Place], reached: Seconds) -> Seconds:
    """A lower bound in seconds of the step of all plans at these places.

    `reached` is the step of a plan at one of them, or infinite.
    """
    least = reached
    for bound, arrangement, microbatches in sorted(places, key=lambda place: place[0]):
        if bound >= least:
            break
        least = min(least, max(bound, _least_of_place(judge, arrangement, microbatches, least)))
    return least


def is_step_possible(judge: Judge, places: Iterable[Place], step: Seconds) -> bool:
    """Whether `least_step` is below `step` seconds: some of these places may have a plan that takes less."""
    return any(
        bound < step and _least_of_place(judge, arrangement, microbatches, step) < step
        for bound, arrangement, microbatches in sorted(places, key=lambda place: place[0])
    )


def may_fit(setting: Setting) -> bool:
    """Whether all devices together have room for the trained parameters and states once; if not, no plan fits."""
    held = use_of(setting.table.held(0, len(setting.table.names)), frozen=setting.table.frozen_bytes[-1])
    return held.total <= sum(device.memory for device in setting.cluster.devices)


def _least_of_place(judge: Judge, arrangement: Arrangement, microbatches: int, limit: Seconds) -> Seconds:
    """A lower bound in seconds of all layouts at a place, `limit` at most; 0 if only the place's own bound is known."""
    if arrangement.units == 1:
        # 0: only the bound of the place itself is known.
        return 0.0 if copies_may_fit(judge, arrangement, microbatches) else limit
    found = [limit]
    given = judge.setting.given
    if given.allows_chains:
        found.append(_of_chains(judge, arrangement, microbatches, limit))
    if given.schedule is None or not given.allows_chains:
        # Two stages on each unit at least.
        if 2 * arrangement.units <= judge.tables.num_layers:
            found.append(_dealt_out(judge, arrangement, microbatches))
        # In two directions each unit has two stages: all parameters are there twice.
        if judge.footprint.may_fit(arrangement, times=2):
            found.append(0.0)
    return min(found)


def copies_may_fit(judge: Judge, arrangement: Arrangement, microbatches: int) -> bool:
    """Whether each device has room for a copy of the model, or its part of one, and one micro-batch's activations."""
    table, setting = judge.tables.table, judge.setting
    samples, parts = judge.tables.unit_samples(arrangement, microbatches), 1
    activations = table.activation(0, judge.tables.num_layers, samples)
    if setting.may_shard:
        parts = setting.cluster.num_ranks
    held = use_of(table.held(0, judge.tables.num_layers).part(parts), activations=activations)
    return held.total <= min(judge.tables.ground(arrangement).memories)


def _of_chains(judge: Judge, arrangement: Arrangement, microbatches: int, limit: Seconds) -> Seconds:
    """A lower bound in seconds of all layouts with one stage on each unit and any replicas; `limit` at most.

    0 for a model with branches: its stages may run beside each other.
    """
    if judge.tables.tree is not None:
        return 0.0  # stages beside each other need no longer than the place itself
    replicas = replicas_of(judge, arrangement, microbatches)
    if not replicas or not judge.footprint.may_fit(arrangement):
        return limit
    found = judge.questions.least_chains(arrangement, microbatches, replicas=replicas, limit=limit)
    return found[0].value if found else limit


def _dealt_out(judge: Judge, arrangement: Arrangement, microbatches: int) -> Seconds:
    """The seconds of the busiest unit in the best of all ways to give each layer to one unit.

    0 if there are too many ways to look at.
    """
    tables, speeds = judge.tables, judge.tables.ground(arrangement).speeds
    if len(speeds) ** tables.num_layers > MOST_DEALT:  # too many ways to look at
        return 0.0
    samples = tables.unit_samples(arrangement, microbatches)
    # The largest layers first: bad ways are left early.
    steps = sorted(tables.table.sums(samples).steps(), reverse=True)

    def deal(layer: int, loads: tuple[Seconds, ...], most: Seconds) -> Seconds:
        if layer == len(steps):
            return max(loads)
        for unit, speed in enumerate(speeds):
            load = loads[unit] + steps[layer] / speed
            if load < most:
                most = min(most, deal(layer + 1, (*loads[:unit], load, *loads[unit + 1 :]), most))
        return most

    # At first the time of all layers on the fastest unit.
    return microbatches * deal(0, (0.0,) * len(speeds), sum(steps) / max(speeds) * (1 + 1e-12))
