"""The profile of a job, with all ranks at work at the same time: kept from an earlier run, or measured now."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Protocol

from torch import nn

from diffusionpipe.costs import Cluster, ModelGraph, Profile
from diffusionpipe.costs.files import read_profile, write_profile
from diffusionpipe.holding.rest import RESTS
from diffusionpipe.holding.sizes import profile_of_sizes, smallest_of
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.profiler import profile_job
from diffusionpipe.profiler.analytic import with_kept
from diffusionpipe.profiler.measured import device_name
from diffusionpipe.runtime.comm.exchange import form_of, optional
from diffusionpipe.runtime.job.agreement import from_first
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.model.members import RecipeModels, rounding_of, trained_dtype
from diffusionpipe.trainer.model.parameter_groups import has_average
from diffusionpipe.trainer.optim.ema import Ema
from diffusionpipe.trainer.optim.gradient_norm import clip_alone
from diffusionpipe.trainer.optim.optimizer import Group, build_optimizer
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.reporting.screen import Screen
from diffusionpipe.trainer.setup.start import places
from diffusionpipe.units import Seconds

logger = logging.getLogger(__name__)

PROFILE = "profile.json"

PROFILE_BUDGET: Seconds = 60.0
"""The time for measuring the layers at the start of a run; when it is over, larger batch sizes are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The key of a measurement of layers by all ranks: model, precision, batch sizes, devices and kind of update."""

    model: ModelGraph
    """The model whose layers are measured."""
    precision: str
    """The arithmetic of the layers, as the recipe names it."""
    batch_sizes: tuple[int, ...]
    """The numbers of samples with which each layer is measured, ascending."""
    ranks: tuple[str, ...]
    """The number of its node, from 0, and the device of each rank: all ranks run at once, and send to each other."""
    update: str
    """The kind of update: optimizer, its arguments, whether it clips and averages; JSON."""


class ProfileCache(Protocol):
    """The methods of a store for profiles of several runs, which the caller of a run hands in; only rank 0 uses it."""

    def find(self, measurement: Measurement) -> Profile | None:
        """The profile that an earlier run has kept for this measurement, None if there is none.

        Raises:
            ConfigError: the profile cannot be read.
        """
        ...

    def keep(self, measurement: Measurement, profile: Profile) -> None:
        """Stores the profile under this measurement, so that later runs find it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measuring:
    """The settings with which the layers of a job are measured, if no profile of them is kept."""

    recipe: Recipe
    job: Job
    shelf: ProfileCache | None
    """The store of kept profiles; None to measure always."""
    screen: Screen
    """The screen on which the progress is shown."""
    links: Cluster | None
    """The cluster of the job with measured links; None: no links are measured yet."""
    budget: Seconds
    """The time for measuring."""

    def found(self, graph: LayerGraph, model: ModelGraph) -> Profile:
        """The profile of a model from the store, or measured now by all ranks at once; every rank calls it."""
        measurement = _measurement(model, self.recipe, self.job)
        shelf = self.shelf
        kept = from_first(lambda: None if shelf is None else shelf.find(measurement), optional(form_of(Profile)))
        sizes, num_layers = measurement.batch_sizes, len(graph.layers)
        if kept is not None:
            logger.info("measured=before batch_sizes=%s", _listed(kept.batch_sizes))
            return kept
        logger.info("measuring layers=%d batch_sizes=%s budget_s=%.0f", num_layers, _listed(sizes), self.budget)
        started = perf_counter()
        with self.screen.work("measuring layers", is_timed=True, budget=self.budget) as work:
            work.show(0, 1, {"layer": f"0/{num_layers}", "batch_size": f"{sizes[0]}"})
            profile = profile_job(
                self.job,
                graph,
                model,
                batch_sizes=sizes,
                precision=measurement.precision,
                time_budget=self.budget,
                make_update=partial(update_of, self.recipe),
                links=self.links,
                progress=lambda done, total: work.show(done, total, layer_words(done, total, num_layers, sizes)),
            )
        if self.job.membership.rank == 0 and shelf is not None:
            shelf.keep(measurement, profile)
        logger.info("measured layers=%d measure_layers_s=%.1f", num_layers, perf_counter() - started)
        return profile


def agree_on_profile(
    opened: RecipeModels,
    job: Job,
    shares: Sequence[float],
    *,
    shelf: ProfileCache | None,
    screen: Screen,
    links: Cluster | None,
) -> Profile:
    """The profile of the model's layers on the devices of a job; every rank calls it and all get the same.

    It comes from an earlier start of the run, from the store `shelf`, or all ranks measure it at once. It is kept in
    the run's folder and read again, so that a resumed run has the same plan and continues bit for bit.

    Args:
        opened: the models of the recipe.
        job: the job.
        shares: the fraction of the samples that has each of the model's sizes; then two sizes are measured
            (`profile_of_sizes`). () for one size.
        shelf: the store of kept profiles; None to measure always.
        screen: shows the progress.
        links: the measured cluster of this job, if there is one.

    Raises:
        ConfigError: on every rank, if a kept profile cannot be read or a layer does not fit into memory.
    """
    recipe, graph, model = opened.recipe, opened.graph, opened.model
    path = recipe.run.folder / PROFILE
    kept = from_first(lambda: _kept_profile(path, graph, model, recipe, job), optional(form_of(Profile)))
    if kept is not None:
        return kept
    models = (model, *opened.others)
    least = smallest_of(models) if shares else 0
    measuring = _Measuring(
        recipe=recipe,
        job=job,
        shelf=shelf,
        screen=screen,
        links=links,
        budget=PROFILE_BUDGET / (2 if least else 1),  # two sizes of samples are measured one after the other
    )
    profile = measuring.found(graph, model)
    if opened.others and shares:
        smallest = measuring.found(graph.of_sizes[least], models[least]) if least else profile
        profile = profile_of_sizes(profile, smallest, models, shares)
    if job.membership.rank == 0:
        write_profile(profile, path)
        logger.info("profile=%s", path)
    return profile


def layer_words(done: int, total: int, num_layers: int, sizes: Sequence[int]) -> dict[str, object]:
    """The words for a screen, "layer" ("12/59") and "batch_size", when `done` of `total` of a measurement is done.

    {} after the last layer. The batch sizes `sizes` are measured one after the other, and each layer counts as many
    times as the batch has samples.
    """
    for size in sizes if done < total else ():
        if 0 < done <= num_layers * size:
            return {"layer": f"{done // size}/{num_layers}", "batch_size": f"{size}"}
        done -= num_layers * size
    return {}


def _listed(sizes: Sequence[int]) -> str:
    return ",".join(map(str, sizes))


def _measurement(model: ModelGraph, recipe: Recipe, job: Job) -> Measurement:
    """The key of the measurement that this job needs for a model; every rank calls it."""
    hosts, devices = places(job)
    nodes = list(dict.fromkeys(hosts))
    chosen = recipe.pipeline.sizes
    # A search cuts the batch in ways not known yet: a rank has about its equal share of the samples at a time, or less.
    parts = len(hosts) if recipe.pipeline.is_searched else chosen.microbatches * chosen.data_parallel
    most = max(1, recipe.training.batch // parts, min(recipe.training.batch, chosen.encode_chunk))
    update = {
        **recipe.optimizer.model_dump(mode="json", include={"name", "arguments", "rest", "states"}),
        "clips": recipe.training.clip_norm is not None,
        "averages": has_average(recipe.groups()),
        "average": recipe.training.ema_states.value,
        "rounding": None if trained_dtype(recipe) is None else recipe.training.rounding.value,
    }
    return Measurement(
        model=model,
        precision=recipe.training.precision.value,
        batch_sizes=(*(size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size < most), most),
        ranks=tuple(f"node {nodes.index(host)}: {device}" for host, device in zip(hosts, devices, strict=True)),
        update=json.dumps(update, sort_keys=True),
    )


def _kept_profile(path: Path, graph: LayerGraph, model: ModelGraph, recipe: Recipe, job: Job) -> Profile | None:
    """The profile in the file of an earlier start of the run; None if there is none for this model and device."""
    if not path.exists():
        return None
    profile = read_profile(path)
    if _is_of(profile, model, recipe, job):
        if not profile.counts_kept:  # of an earlier version: its times stay
            logger.info("profile=%s counted=what_split_backwards_keep", path)
            profile = with_kept(profile, graph)
            write_profile(profile, path)
        return profile
    logger.warning("profile=%s measured_again=True reason=of_another_model_or_device", path)
    return None


def has_other_profile(model: ModelGraph, recipe: Recipe, job: Job) -> bool:
    """Whether the run's folder holds a profile of another model, precision or device than this job's."""
    path = recipe.run.folder / PROFILE
    return path.exists() and not _is_of(read_profile(path), model, recipe, job)


def _is_of(profile: Profile, model: ModelGraph, recipe: Recipe, job: Job) -> bool:
    """Whether a profile belongs to this model, the recipe's precision and the job's device."""
    is_same_model = profile.graph == model and profile.precision == recipe.training.precision.value
    return is_same_model and profile.device == device_name(job.device)


def update_of(recipe: Recipe, parameters: Mapping[str, nn.Parameter]) -> Callable[[], None]:
    """A function that updates the parameters as a step of the recipe does, to measure its time.

    It computes the gradient norm, clips, steps the optimizer and updates the average. `parameters`: by name.
    """
    names = dict(parameters)
    settings = recipe.optimizer
    rest = settings.rest

    def group_of(name: str) -> Group:
        if rest is not None and names[name].ndim < 2:  # nearly all that belong to it
            return Group("rest", rest.arguments, optimizer=rest.name)
        return Group("", settings.arguments, is_flat=rest is not None)

    optimizer = build_optimizer(
        settings.name, names, settings.learning_rate, settings.arguments, group_of, rounding_of(recipe)
    )
    if optimizer is not None:
        optimizer.rest(RESTS[settings.states])
    ema = None
    if has_average(recipe.groups()):
        ema = Ema(names, dict.fromkeys(names, 0.9), recipe.training.ema_states)  # all decays take as long
    clip_norm, listed = recipe.training.clip_norm, list(names.values())

    def update() -> None:
        clip_alone(listed, clip_norm)
        if optimizer is not None:
            optimizer.step()
        if ema is not None:
            ema.update(1)

    return update
