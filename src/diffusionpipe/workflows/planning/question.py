"""The question of `diffusionpipe plan`, as a recipe or options put it to the planner; its answer, and the plan file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.workflows.planning.stated_model import profile_of
from diffusionpipe.workflows.telling import SILENCE

if TYPE_CHECKING:
    from diffusionpipe.costs import Cluster
    from diffusionpipe.ir.versions import Versions
    from diffusionpipe.planner.choosing.asking import Asking
    from diffusionpipe.planner.choosing.batches import BatchPlan
    from diffusionpipe.planner.choosing.chosen import Choice
    from diffusionpipe.planner.choosing.combined import Change
    from diffusionpipe.planner.pricing.setting import Setting
    from diffusionpipe.planner.rivals.simulated import Rival
    from diffusionpipe.trainer.recipe import Recipe
    from diffusionpipe.workflows.planning.stated_model import StatedModel
    from diffusionpipe.workflows.telling import Telling


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """A question to the planner: the training and cluster, the batches, and the recipe or model that states them."""

    setting: Setting
    fill: bool | None = None
    """Whether frozen work fills bubbles; None leaves it to the planner."""
    sample_batch: int = 0
    """The rows that go through the denoiser at a time when the recipe's run draws; 0 if it draws nothing."""
    versions: Versions | None = None
    """The kind of weights (flushed, stashed, ...) that the recipe asks for; None without a recipe."""
    recipe: Recipe | None = None
    model: StatedModel | None = None
    """The model that the options state, if they do."""
    optimizer: str = "AdamW"
    options: tuple[str, ...] = ()
    """The options that name profile and devices, as a plan file holds them."""
    batches: tuple[int, ...] = ()
    """The batches that are asked about; () leaves them to the planner."""
    may_recompute: bool = False
    """Whether the planner may have all layers recomputed."""
    used: tuple[int, ...] = ()
    """The ranks of the cluster that are planned for; () for all."""


def cluster_of(name: str | None, of_recipe: str | None = None) -> Cluster:
    """The cluster of this name or file; if `name` is None, the cluster `of_recipe`, which the recipe names.

    Raises:
        ConfigError: none is named, or it is not known.
    """
    from diffusionpipe.costs.clusters import load_cluster, shipped_clusters
    from diffusionpipe.errors import ConfigError

    if name is None and of_recipe is None:
        raise ConfigError(
            "--cluster: this option is missing; give a cluster file, cards such as rtx3090x4, or one of "
            f"{', '.join(shipped_clusters())}"
        )
    return load_cluster(name or str(of_recipe))


def question_of_recipe(
    recipe: Path,
    overrides: Sequence[str],
    *,
    cluster: str | None,
    profile: Path | None,
    uses_cache: bool,
    writes: bool,
    tell: Telling,
) -> PlanQuestion:
    """The question how to train a recipe with overrides on a cluster; None: on the cluster that the recipe names.

    Without a file `profile`, it computes or measures the model's layers, or reads a kept profile if `uses_cache`.
    `writes`: whether the plan is to be written to a file.

    Raises:
        ConfigError: the recipe, the cluster or the profile is wrong, or there is nothing to write.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.ir.versions import Versions
    from diffusionpipe.trainer.model.workload import samples_drawn_together
    from diffusionpipe.trainer.recipe import load_recipe
    from diffusionpipe.workflows.planning.origin import options_made_with
    from diffusionpipe.workflows.planning.recipe_profile import make_profile_of, read_profile_of
    from diffusionpipe.workflows.planning.recipe_setting import check_search, decided_for, may_recompute, setting_of
    from diffusionpipe.workflows.planning.used_devices import used_of

    loaded = load_recipe(recipe, overrides)
    if writes and loaded.pipeline.versions is not Versions.FLUSHED:
        raise ConfigError(
            f'--out: a plan has a flush, and the recipe trains without one (pipeline.versions = "'
            f'{loaded.pipeline.versions}"); leave out --out, or give pipeline.versions=flushed'
        )
    whole = cluster_of(cluster, loaded.pipeline.cluster)
    chosen = used_of(whole, loaded.pipeline.use, source="pipeline.use")
    check_search(loaded, chosen.num_ranks)
    loaded = loaded if profile else decided_for(loaded, whole)
    found = (
        read_profile_of(loaded, whole, profile, tell)
        if profile
        else make_profile_of(loaded, whole, uses_cache=uses_cache, tell=tell)
    )
    used = tuple(sorted(loaded.pipeline.use))
    origin = cluster or loaded.pipeline.cluster
    return PlanQuestion(
        setting=setting_of(loaded, found, chosen),
        used=used,
        options=options_made_with(profile=profile, recipe=recipe, overrides=overrides, cluster=origin, used=used),
        fill=loaded.pipeline.fill,
        sample_batch=samples_drawn_together(loaded),
        recipe=loaded,
        optimizer=loaded.optimizer.name,
        may_recompute=may_recompute(loaded),
        versions=loaded.pipeline.versions,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedTraining:
    """A training as options of a command state it, in place of a recipe: batch, recomputed layers, optimizer."""

    batch: int | None
    """Samples of a step; None: one for each device."""
    checkpoint: Sequence[str] | None
    """Patterns of the layers to recompute, or "none". None leaves them to the planner."""
    has_ema: bool
    optimizer: str
    gradients: str | None = None
    """The type in which gradients of weights in bfloat16 are summed; None: float32."""
    is_drawn: bool = False
    """Whether drawing is asked about in place of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedPlace:
    """The devices that options of a command name: cluster, used ranks, and memory of each."""

    cluster: str | None
    """The name or file of the cluster; None if no option names one."""
    used: tuple[int, ...]
    """The ranks to use; () for all."""
    memory: float | None
    """GiB of each device; None for all that training may use."""


def question_of_model(
    source: StatedModel | Path | None, training: StatedTraining, place: StatedPlace, *, uses_cache: bool, tell: Telling
) -> PlanQuestion:
    """The question how to train a stated model, or the model of a profile's file, on a cluster.

    Raises:
        ConfigError: the cluster or the profile is wrong, or the cluster's device is not known.
        ModelError: there is no such model, or it cannot be cut.
    """
    from diffusionpipe.workflows.planning.origin import options_made_with
    from diffusionpipe.workflows.planning.stated_model import StatedModel
    from diffusionpipe.workflows.planning.stated_setting import check_gradients, stated_setting
    from diffusionpipe.workflows.planning.used_devices import allowed_of, used_of

    check_gradients(training.gradients, rounds=not isinstance(source, StatedModel) or source.has_narrow_weights)
    whole = cluster_of(place.cluster)
    profile = profile_of(source, whole, uses_cache=uses_cache, may_split=not training.is_drawn, tell=tell)
    machines = allowed_of(used_of(whole, place.used, source="--use"), place.memory)
    setting = stated_setting(
        profile,
        machines,
        training.batch or machines.num_ranks,
        checkpoint=tuple(one for one in training.checkpoint or () if one != "none"),
        has_ema=training.has_ema,
        optimizer=training.optimizer,
        gradients=training.gradients,
    )
    model, file = (source, None) if isinstance(source, StatedModel) else (None, source)
    return PlanQuestion(
        setting=setting,
        used=place.used,
        may_recompute=training.checkpoint is None,
        model=model,
        optimizer=training.optimizer,
        options=options_made_with(model=model, profile=file, cluster=place.cluster, used=place.used),
    )


def answered(asked: PlanQuestion, asking: Asking, tell: Telling = SILENCE) -> tuple[list[BatchPlan], Choice]:
    """(plans for the batches that are asked about, choice to recommend: the one at the knee of the rates).

    Raises:
        ConfigError: nothing fits; with the ways out that there are, each as a command.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.planner.choosing.batches import BatchPlan, found_batches, knee_of, stated_batches, with_batch
    from diffusionpipe.planner.choosing.choice import choose

    setting, fill, may_recompute = asked.setting, asked.fill, asked.may_recompute
    try:
        with tell.progress("planning", is_timed=False):
            if len(asked.batches) == 1:
                choice = choose(setting, fill=fill, asking=asking, may_recompute=may_recompute)
                return [BatchPlan(batch=setting.workload.batch, choice=choice)], choice
            if asked.batches:
                tried = stated_batches(setting, asked.batches, fill=fill, may_recompute=may_recompute)
            else:
                tried = found_batches(setting, fill=fill, may_recompute=may_recompute)
            knee = knee_of(tried)
            if knee is None:
                least = with_batch(setting, min(asked.batches, default=1))
                # It raises, with the reason and the remedies.
                choose(least, fill=fill, asking=asking, may_recompute=may_recompute)
    except ConfigError as error:
        raise ConfigError("\n".join([str(error), *_ways(asked, asking, tell)])) from None
    assert knee is not None, "else the choice of the smallest batch has raised"
    assert knee.choice is not None, "a knee fits"
    return tried, knee.choice


def _ways(asked: PlanQuestion, asking: Asking, tell: Telling) -> Iterator[str]:
    """Lines that name changes with which a layout would fit, each followed by its command; none where none is found."""
    from diffusionpipe.costs.clusters import with_more_cards
    from diffusionpipe.planner.choosing.advice import recomputed
    from diffusionpipe.planner.choosing.combined import ways_out
    from diffusionpipe.planner.choosing.fewer import least_of
    from diffusionpipe.planner.choosing.rows import unit_of

    setting = asked.setting
    if least_of(setting) == float("inf"):  # the batch cannot be cut, whatever the memory
        return
    if asked.may_recompute:
        # Ways out begin where recomputing has saved all that it can.
        setting = recomputed(setting) or setting
    larger = with_more_cards(setting.cluster) if not asked.used else ()
    find = partial(ways_out, setting, larger=larger, batch=bool(asked.batches), smaller=_smaller(asked, tell))
    is_open = asked.model is not None or asked.recipe is not None
    # Layers of a profile cannot be changed; then a way with other layers at least says what to profile.
    for way in find() if is_open else find(layers=False) or find():
        unit, size = unit_of(way.nearest.use.total)
        words = ", ".join(change.words for change in way.changes)
        text = f"This fits, with {way.nearest.use.total / size:.1f} {unit} on the fullest device: {words}"
        options = [change.option for change in way.changes]
        command = asking.changed(options, [change.key for change in way.changes])
        yield from (
            (f"{text}:", f"  {command}") if command else (f"{text}; profile the model so, or name it by --model.",)
        )


def _smaller(asked: PlanQuestion, tell: Telling) -> list[Change]:
    """The changes to smaller pictures of the stated model or the recipe; [] where their side cannot change.

    The layers are profiled for a side only when its change is applied.
    """
    from diffusionpipe.planner.choosing.combined import Change
    from diffusionpipe.workflows.planning.stated_model import parts_of_side, smaller_sides

    model, recipe, sides = asked.model, asked.recipe, list[int]()
    if model is not None:
        sides = smaller_sides(model)
    elif recipe is not None and recipe.data.height is None and recipe.data.frames is None:
        sides = parts_of_side(recipe.data.resolution)

    def with_side(setting: Setting, side: int) -> Setting | None:
        from diffusionpipe.errors import ModelError
        from diffusionpipe.trainer.recipe import with_values
        from diffusionpipe.workflows.planning.recipe_profile import make_profile_of

        try:
            if model is not None:
                profile = profile_of(replace(model, resolution=side), setting.cluster, tell=tell)
            else:
                assert recipe is not None, "else there are no sides"
                smaller = with_values(recipe, {"data.resolution": side})
                profile = make_profile_of(smaller, setting.cluster, uses_cache=True, tell=tell)
        except ModelError:  # it takes no pictures of this side
            return None
        return replace(setting, profile=profile)

    return [
        Change(
            words=f"pictures of {side} pixels",
            option=("--resolution", str(side)),
            key=f"data.resolution={side}",
            apply=partial(with_side, side=side),
        )
        for side in sides
    ]


def write_answer(found: Choice | Rival, asked: PlanQuestion, out: Path) -> Path:
    """Write a plan file with the options that made it, and its prediction beside it; returns the latter's path."""
    from diffusionpipe.ir.files import write_plan
    from diffusionpipe.planner.rivals.simulated import Rival
    from diffusionpipe.workflows.planning.origin import keys_made_with
    from diffusionpipe.workflows.planning.prediction_file import write_prediction

    keys = keys_made_with(asked.setting if isinstance(found, Rival) else found.setting, optimizer=asked.optimizer)
    plan = replace(found.plan(sample_batch=asked.sample_batch), made_with=(*asked.options, *keys))
    write_plan(plan, out)
    return write_prediction(found.proposal.timeline, out)
