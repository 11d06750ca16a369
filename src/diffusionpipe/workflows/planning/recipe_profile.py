"""The profile of a recipe's model for a cluster: read and checked, computed, or measured here."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from diffusionpipe.costs import Cluster, ModelGraph, Profile
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.devices import DEVICES, device_rates
from diffusionpipe.costs.files import (
    ANY_CPU,
    check_device,
    check_kept,
    check_model,
    has_device,
    kept_warning,
    read_profile,
)
from diffusionpipe.costs.graph import frozen_store
from diffusionpipe.costs.operations import OperationReport
from diffusionpipe.errors import ConfigError, DataError
from diffusionpipe.holding.sizes import profile_of_sizes, smallest_of
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.profiler import analytic_profile, profile_model
from diffusionpipe.profiler.decoding import decoding_of_graph
from diffusionpipe.profiler.layer_operations import computed_operations, measured_operations
from diffusionpipe.profiler.measured import device_name, package_versions
from diffusionpipe.schedules.several.opposed import JOINT
from diffusionpipe.schedules.traits import is_split
from diffusionpipe.trainer.data.sizes.patches import shares_of
from diffusionpipe.trainer.model.decisions import has_bfloat16
from diffusionpipe.trainer.model.members import RecipeModels, build_model
from diffusionpipe.trainer.recipe import Recipe, RecipePrecision, decided, load_recipe
from diffusionpipe.trainer.recipe.model_section import FrozenDtype
from diffusionpipe.units import Seconds
from diffusionpipe.workflows.data_report import report_on_recipe
from diffusionpipe.workflows.device import chosen_device
from diffusionpipe.workflows.planning.profile_cache import ProfileKey, cache_folder, cached_profile
from diffusionpipe.workflows.planning.recipe_setting import decided_for
from diffusionpipe.workflows.planning.stated_model import counted_key, known_rates, said_of
from diffusionpipe.workflows.telling import SILENCE, Telling

LARGEST = 128


def read_profile_of(recipe: Recipe, cluster: Cluster, path: Path, tell: Telling = SILENCE) -> Profile:
    """The profile in a file, checked to be of the recipe's model and precision and of a device of the cluster.

    Raises:
        FileFormatError: it cannot be read, or belongs to another model or device.
        ConfigError: it has another precision.
    """
    profile = read_profile(path)
    check_device(profile, cluster, source=str(path))
    recipe = _as_profiled(recipe, profile)
    precision = recipe.training.precision.value
    if profile.precision != precision:
        raise ConfigError(
            f"{path} is a profile in {profile.precision}, but the recipe trains in {precision}; profile again, or set "
            f"training.precision = {profile.precision}"
        )
    # A computed profile is described on the CPU, since its device need not be here.
    device = "cpu" if profile.source == "analytic" else profile.device_type
    model = _opened(recipe, device, tell).model
    check_model(profile, model, source=str(path))
    schedule = recipe.pipeline.schedule
    if schedule is not None and schedule not in JOINT and is_split(schedule):
        check_kept(profile, source=str(path))
    elif schedule is None and (warning := kept_warning(profile, source=str(path))):
        tell.say(f"warning: {warning}")
    return profile


def _opened(recipe: Recipe, device: str, tell: Telling) -> RecipeModels:
    """The models of a recipe on the meta device, described as they run on `device`; shows progress by sample size."""
    with tell.progress("reading the model", is_timed=False) as report:
        return build_model(recipe, device, report)


def _as_profiled(recipe: Recipe, profile: Profile) -> Recipe:
    """The recipe with the profile's precision and its storage of frozen weights, where the recipe says "auto"."""
    if recipe.model.frozen_dtype is FrozenDtype.AUTO and not recipe.models:
        stored = frozen_store(profile.graph)
        model = recipe.model.model_copy(update={"frozen_dtype": FrozenDtype(stored) if stored else None})
        recipe = recipe.model_copy(update={"model": model})
    if recipe.training.precision is RecipePrecision.AUTO:
        return decided(recipe, has_bfloat16=profile.precision == "bfloat16")
    return recipe


def profile_of_file(recipe: Path, overrides: Sequence[str], cluster: str | None, tell: Telling = SILENCE) -> Profile:
    """The profile of the recipe in a file, some of whose keys are changed; a kept one is used.

    `cluster`: a name or a file; None for the cluster that the recipe names.

    Raises:
        RecipeError: the file or a changed key is wrong.
        ConfigError: no cluster is named, or as `make_profile_of`.
    """
    loaded = load_recipe(recipe, overrides)
    name = cluster or loaded.pipeline.cluster
    if name is None:
        raise ConfigError("give --profile, or --model and --cluster as they were given to `plan`")
    return make_profile_of(loaded, load_cluster(name), uses_cache=True, tell=tell)


def make_profile_of(recipe: Recipe, cluster: Cluster, *, uses_cache: bool, tell: Telling = SILENCE) -> Profile:
    """The profile of a recipe's model for the cluster's device: computed if that is a known one, else measured here.

    `uses_cache`: whether a kept profile will do.

    Raises:
        ConfigError: the device is neither known nor here.
    """
    rates, recipe = known_rates(cluster), decided_for(recipe, cluster)
    device = "cpu" if rates is not None else _device_here(cluster)
    sizes, precision = _batch_sizes(recipe, cluster), recipe.training.precision.value
    if rates is not None:
        # Refuses the arithmetic before a model is opened, which takes long.
        device_rates(rates.name, precision=precision)
    opened = _opened(recipe, device, tell)

    def found(graph: LayerGraph, model: ModelGraph) -> Profile:
        def make() -> Profile:
            with tell.progress("profiling") as report:
                if rates is not None:
                    return analytic_profile(
                        graph, model, device=rates.name, precision=precision, batch_sizes=sizes, progress=report
                    )
                return profile_model(
                    graph, model, device=device, precision=precision, batch_sizes=sizes, progress=report
                )

        if rates is not None:
            key = counted_key(model, precision, sizes, rates)
        else:
            key = ProfileKey(
                model=model,
                precision=precision,
                batch_sizes=sizes,
                device=device_name(torch.device(device)),
                rates=None,
                versions=package_versions(),
            )
        profile, path = cached_profile(key, make, cache_folder(os.environ) if uses_cache else None)
        named = said_of(rates) if rates is not None else profile.device
        tell.say(f"profile: {profile.source}, {named}, {precision}{f', kept as {path}' if path else ''}")
        return profile

    return _over_sizes(opened, found, tell)


def _over_sizes(opened: RecipeModels, found: Callable[[LayerGraph, ModelGraph], Profile], tell: Telling) -> Profile:
    """One profile of a model for all sizes of its samples; `found` makes the profile of one size."""
    profile = found(opened.graph, opened.model)
    if not opened.others:
        return profile
    models, graphs = (opened.model, *opened.others), opened.graph.of_sizes
    shares, least = _shares(opened, tell), smallest_of(models)
    return profile_of_sizes(profile, found(graphs[least], models[least]) if least else profile, models, shares)


def _shares(opened: RecipeModels, tell: Telling) -> tuple[float, ...]:
    """The part of the samples that has each size of the model: by headers of the data, or the recipe's for patches.

    Where the data cannot be read, every size counts alike.
    """
    recipe, graphs = opened.recipe, opened.graph.of_sizes
    if recipe.data.patches is not None:
        tell.say(f"patches: a step has one of {len(graphs)} sizes; times are the mean over steps")
        return shares_of(recipe.data.patches.share_whole, len(graphs))
    try:
        assignment = report_on_recipe(recipe, tell=tell).use.sizes
    except DataError as error:  # it may lie on another machine
        tell.say(f"note: {error}; every size is counted alike")
        shares: tuple[float, ...] = (1 / len(graphs),) * len(graphs)
    else:
        assert assignment is not None, "the recipe has sizes"
        shares = assignment.parts([graph.size for graph in graphs])
    tell.say(f"sizes: {len(graphs)}; times are the mean over pictures, and there is room for the largest")
    return shares


def measured_profile(
    recipe: Path,
    overrides: Sequence[str],
    sizes: Sequence[int],
    *,
    device: str,
    repeats: int,
    time_budget: Seconds,
    tell: Telling = SILENCE,
) -> Profile:
    """Measure a recipe's model at these batch sizes on this machine; returns its profile.

    Args:
        recipe: the recipe's file.
        overrides: "key.path=value".
        sizes: the batch sizes, in samples.
        device: "auto", "cpu" or "cuda".
        repeats: the least number of measurements of each layer.
        time_budget: after these seconds no larger batch size is measured.
        tell: shows the progress.

    Raises:
        ConfigError: the recipe or its model is wrong, or the device is not here.
    """
    loaded, place = load_recipe(recipe, overrides), chosen_device(device)
    loaded = decided(loaded, has_bfloat16=has_bfloat16(place))
    opened = _opened(loaded, place.type, tell)

    def found(graph: LayerGraph, model: ModelGraph) -> Profile:
        with tell.progress("profiling") as report:
            return profile_model(
                graph,
                model,
                batch_sizes=tuple(sizes),
                device=place.type,
                precision=loaded.training.precision.value,
                repeats=repeats,
                time_budget=time_budget,
                progress=report,
            )

    profile = _over_sizes(opened, found, tell)
    return replace(profile, decoding=decoding_of_graph(opened.graph))


def computed_recipe_profile(
    recipe: Path, overrides: Sequence[str], sizes: Sequence[int], *, device: str, tell: Telling = SILENCE
) -> Profile:
    """The profile of a recipe's model at these batch sizes, computed for a known device.

    `overrides`: "key.path=value".

    Raises:
        ConfigError: the recipe or its model is wrong, or the device is not known.
    """
    loaded, known = load_recipe(recipe, overrides), device_rates(device)
    loaded = decided(loaded, has_bfloat16=known.has_bfloat16 and known.device_type == "cuda")
    precision = loaded.training.precision.value
    device_rates(device, precision=precision)  # a precision that it lacks is said before the model is built
    opened = _opened(loaded, "cpu", tell)

    def found(graph: LayerGraph, model: ModelGraph) -> Profile:
        with tell.progress("profiling") as report:
            return analytic_profile(
                graph, model, device=device, precision=precision, batch_sizes=tuple(sizes), progress=report
            )

    profile = _over_sizes(opened, found, tell)
    return replace(profile, decoding=decoding_of_graph(opened.graph))


def recipe_operations(
    recipe: Path, overrides: Sequence[str], *, analytic: str | None, device: str, repeats: int, tell: Telling = SILENCE
) -> OperationReport:
    """The times and work of the operations in a recipe's layers on one micro-batch.

    `analytic`: the known device for which they are computed; None: they are measured on `device` here.

    Raises:
        ConfigError: the recipe or its model is wrong, the device is not known, or it is not here.
    """
    known = device_rates(analytic) if analytic is not None else None
    place = None if known is not None else chosen_device(device)
    loaded = load_recipe(recipe, overrides)
    if known is not None:
        loaded = decided(loaded, has_bfloat16=known.has_bfloat16 and known.device_type == "cuda")
        device_rates(known.name, precision=loaded.training.precision.value)
    elif place is not None:
        loaded = decided(loaded, has_bfloat16=has_bfloat16(place))
    precision, sizes = loaded.training.precision.value, loaded.pipeline.sizes
    samples = max(1, loaded.training.batch // (sizes.microbatches * (loaded.pipeline.data_parallel or 1)))
    opened = _opened(loaded, "cpu" if place is None else place.type, tell)
    with tell.progress("profiling") as report:
        if known is not None:
            return computed_operations(
                opened.graph, opened.model, device=known.name, precision=precision, samples=samples, progress=report
            )
        assert place is not None
        return measured_operations(
            opened.graph,
            opened.model,
            device=place.type,
            precision=precision,
            samples=samples,
            repeats=repeats,
            progress=report,
        )


def _device_here(cluster: Cluster) -> str:
    """The kind of this machine's device that the cluster also has: "cuda" or "cpu".

    Raises:
        ConfigError: the cluster has neither.
    """
    here = {"cuda": torch.device("cuda")} if torch.cuda.is_available() else {}
    here["cpu"] = torch.device("cpu")
    for kind, device in here.items():
        if has_device(cluster, device_name(device), kind):
            return kind
    names = ", ".join(sorted({device.name for device in cluster.devices}))
    raise ConfigError(
        f"the layers cannot be profiled for the cluster {cluster.name}: its devices ({names}) are not on this "
        f"machine, which has {', '.join(map(device_name, here.values()))}, and not in the table of known devices "
        f"({', '.join(rates.title for rates in DEVICES.values())})\n"
        f'Run "diffusionpipe profile RECIPE" on such a device and give --profile, or use {ANY_CPU} as the device '
        "name in the cluster file."
    )


def _batch_sizes(recipe: Recipe, cluster: Cluster) -> tuple[int, ...]:
    """The batch sizes, in samples, to measure: powers of two up to the most samples of a micro-batch, and that number.

    It is a rank's equal share of the batch or, if that is larger, the chunk of frozen layers, and at most `LARGEST`.
    """
    share = -(-recipe.training.batch // cluster.num_ranks)
    most = min(LARGEST, max(share, recipe.pipeline.sizes.encode_chunk))
    # Times between measured sizes are interpolated, so each doubling has one.
    return tuple(sorted({1, most, *(2**i for i in range(1, 8) if 2**i < most)}))
