"""Whether a cache of encoders' results pays: a step with it and without, and the step from which the run has gained.

    pass over the data         1           2              3
    seconds gained a step   - writing   + gain x read   + gain x read ...      read: the share of results that are there

A tensor of which each sample has v results, drawn evenly, is there with a probability of 1 - (1 - 1 / v)^k after k
passes. The others are written then. Reading is the data workers' work, beside training.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from diffusionpipe.units import Bytes, Seconds
from diffusionpipe.workflows.telling import SILENCE, Telling

if TYPE_CHECKING:
    from pathlib import Path

    from diffusionpipe.costs import LayerProfile, Profile
    from diffusionpipe.ir import Plan
    from diffusionpipe.planner import Setting
    from diffusionpipe.trainer.recipe import Recipe
    from diffusionpipe.trainer.setup.caching import Cacheable, CacheVerdict

MOST_PASSES = 1000
"""The passes over the data for which it is computed whether a cache pays; after them it counts as never paying."""
_PROBE: Bytes = 4 * 2**20
_PROBES = 5
_NOTHING: Seconds = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptShare:
    """One tensor that a cache keeps: the seconds to compute a result, its bytes, and the number of results a sample."""

    seconds: Seconds
    """Seconds in which its layers compute a result for one sample."""
    size: Bytes
    """Bytes of a result."""
    variants: float
    """The mean number of different results of a sample, such as one for each of its captions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The seconds of a run's step without a cache, with one, and while it is written, and when it pays."""

    size: Bytes
    """Bytes of all results that the cache would keep."""
    filled: Seconds
    """Seconds of a step in which the frozen layers run for all samples."""
    cached: Seconds
    """Seconds of a step for which the cache has all results."""
    writing: Seconds
    """Seconds that are added to a step whose results are all written."""
    pays: int | None
    """The first step after which the run has gained; None: it never gains."""

    @property
    def gain(self) -> float:
        """The share of a step that a full cache saves, from 0 to 1."""
        return 1 - self.cached / self.filled


def break_even(shares: Sequence[KeptShare], *, gain: Seconds, writing: Seconds, steps_of_pass: float) -> int | None:
    """The first step after which the seconds gained outweigh the seconds of writing; None within `MOST_PASSES` passes.

    `gain`: seconds gained by a step that reads all results. `writing`: seconds added to a step that writes all.
    `steps_of_pass`: the steps in which each sample is seen once.

    >>> one = KeptShare(seconds=1.0, size=1, variants=1.0)
    >>> break_even([one], gain=0.5, writing=0.25, steps_of_pass=100)
    150
    """
    if gain <= 0:
        return None
    seconds, size = sum(one.seconds for one in shares), sum(one.size for one in shares)
    balance = 0.0
    for number in range(MOST_PASSES):
        # With one result for each sample: 0 ** 0 is 1, so all are missing in the first pass and none later.
        missing = [(1 - 1 / one.variants) ** number for one in shares]
        read = sum(one.seconds * (1 - part) for one, part in zip(shares, missing, strict=True)) / seconds
        written = sum(one.size * part for one, part in zip(shares, missing, strict=True)) / size
        rate = gain * read - writing * written
        # The pass in which the balance turns; the rate is even within a pass.
        if balance + rate * steps_of_pass > 0:
            return ceil(number * steps_of_pass + max(0.0, -balance) / rate)
        balance += rate * steps_of_pass
    return None


def worth_of(found: "Cacheable", plan: "Plan", setting: "Setting", rate: float) -> Worth:
    """The worth of a cache for a run by this plan, on a disk that is written with `rate` bytes a second."""
    from diffusionpipe.holding import DEVICE

    filled = _step(plan, setting)
    workload = replace(setting.workload, encoders=DEVICE)  # layers that do not run are not copied either
    without = replace(setting, profile=_without(setting.profile, found.spared), workload=workload)
    cached = min(filled, _step(plan, without))
    shares = shares_of(found, setting.profile)
    # A step writes the results of its whole batch to one folder.
    writing = plan.batch * sum(one.size for one in shares) / rate
    return Worth(
        size=found.size,
        filled=filled,
        cached=cached,
        writing=writing,
        pays=break_even(
            shares, gain=filled - cached, writing=writing, steps_of_pass=max(1.0, found.num_samples / plan.batch)
        ),
    )


def worth_of_recipe(recipe: "Recipe", plan: "Plan", setting: "Setting", tell: Telling = SILENCE) -> "tuple[str, ...]":
    """Lines for the user about the worth of a cache for a recipe by this plan; reads the headers of its data.

    Raises:
        ConfigError: the data or the model cannot be read.
    """
    from diffusionpipe.trainer.model.members import build_model
    from diffusionpipe.trainer.recipe import with_values
    from diffusionpipe.trainer.setup.caching import cache_folder, cacheable, problem_of_cache
    from diffusionpipe.workflows.data_report import report_on_recipe

    report = report_on_recipe(recipe, tell=tell)
    # The steps may follow from epochs; the verdict needs their number.
    if recipe.training.steps != report.use.steps:
        recipe = with_values(recipe, {"training.steps": report.use.steps})
    opened = build_model(recipe, "cpu")
    found = cacheable(opened.graph, opened.model, recipe, report.train.dataset, report.use.sizes)
    problem = problem_of_cache(found, recipe)
    if problem is not None:
        return (f"cache: {problem}",)
    worth = worth_of(found, plan, setting, writing_rate(cache_folder(recipe)))
    return tuple(worth_lines(worth, found.encoded_anew, recipe.training.num_steps))


def verdict_of_run(recipe: "Recipe", plan: "Plan", found: "Cacheable") -> "CacheVerdict":
    """The verdict on a cache in a run whose layers are measured: lines about its worth, and why it would not pay.

    The latter is None if it pays. Only rank 0 calls it, which has the files.

    Raises:
        ConfigError: the profile in the run's folder cannot be read.
    """
    from diffusionpipe.costs.files import read_profile
    from diffusionpipe.trainer.setup.caching import CacheVerdict, cache_folder
    from diffusionpipe.workflows.training.expectation import setting_of_plan
    from diffusionpipe.workflows.training.run_facts import cluster_of_run

    folder, steps = recipe.run.folder, recipe.training.num_steps
    setting = setting_of_plan(recipe, plan, read_profile(folder / "profile.json"), cluster_of_run(folder))
    worth = worth_of(found, plan, setting, writing_rate(cache_folder(recipe)))
    lines = tuple(worth_lines(worth, found.encoded_anew, steps))
    why_not = None
    if worth.pays is None or worth.pays >= steps:
        why_not = f"a cache would not pay before the last step, {steps:,}"
    return CacheVerdict(lines=lines, why_not=why_not)


def shares_of(found: "Cacheable", profile: "Profile") -> list[KeptShare]:
    """The seconds, bytes and results a sample of each tensor that a cache keeps, by the layers' times in a profile."""
    return [
        KeptShare(
            seconds=sum(profile.forward(name, 1) for name in dict.fromkeys(layer.name for layer in kept.layers)),
            size=size,
            variants=variants,
        )
        for kept, size, variants in zip(found.kept, found.sizes, found.variants, strict=True)
    ]


def writing_rate(folder: "Path") -> float:
    """Bytes a second with which files are written below a folder, the median of some probes, of which none is left.

    Raises:
        OSError, ConfigError: nothing can be written there.
    """
    import torch

    from diffusionpipe.trainer.data.cache.files import existing, write_shard

    times, value = [], torch.zeros(_PROBE, dtype=torch.uint8)
    # The cache's folder may not exist yet; the folder above it is on the same disk.
    place = existing(folder)
    for number in range(_PROBES):
        start = perf_counter()
        path = write_shard(place, {f"probe {number}": value})
        times.append(perf_counter() - start)
        path.unlink()
    return _PROBE / median(times)


def worth_lines(worth: Worth, encoded_anew: Sequence[str], steps: int) -> Iterator[str]:
    """Yield lines for the user about the worth of a cache; `encoded_anew`: tensors that it does not keep."""
    when = "never pays" if worth.pays is None else f"pays from step {worth.pays:,} of {steps:,}"
    yield (
        f"cache: {worth.size / 2**30:.2f} GiB, filled while the first epoch trains, saves {100 * worth.gain:.1f} % of "
        f"a step ({worth.filled:.4g} to {worth.cached:.4g} s), {when}"
    )
    if encoded_anew:
        yield f"cache: encoded for each step: {'; '.join(encoded_anew)}"


def _step(plan: "Plan", setting: "Setting") -> Seconds:
    from diffusionpipe.planner.pricing.stage_costs import costs_of, update_time
    from diffusionpipe.simulator import simulate

    timeline = simulate(plan.train, costs_of(plan.train, plan.blocks, plan.mesh, setting))
    return timeline.makespan + update_time(plan.train, plan.blocks, setting.profile, plan.mesh)


def _without(profile: "Profile", layers: frozenset[str]) -> "Profile":
    """The profile with next to no time for these layers; the time of a layer in a profile is above 0."""
    return replace(profile, layers=tuple(_free(one) if one.name in layers else one for one in profile.layers))


def _free(layer: "LayerProfile") -> "LayerProfile":
    return replace(
        layer,
        forward=tuple(_NOTHING for _ in layer.forward),
        forward_only=tuple(_NOTHING for _ in layer.forward_only),
    )
