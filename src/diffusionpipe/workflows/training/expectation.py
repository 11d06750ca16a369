"""The expectation of a run before its first step: time and memory, as far as its layers are known."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from diffusionpipe.costs.loading import Spread, added_by
from diffusionpipe.holding.memory import Trait
from diffusionpipe.units import Bytes, Seconds

if TYPE_CHECKING:
    from diffusionpipe.costs import Cluster, ModelGraph, Profile
    from diffusionpipe.costs.loading import JobDataWorkers
    from diffusionpipe.holding.memory import MemoryUse
    from diffusionpipe.ir import Plan
    from diffusionpipe.planner import Setting
    from diffusionpipe.trainer.recipe import Recipe
    from diffusionpipe.trainer.setup.start import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The predicted times and memory of a run's step; times are None where the layers were not measured."""

    iteration: Seconds | None
    update: Seconds | None
    loading: Spread | None = None
    """The estimated time by which data workers lengthen a step, with its bounds; None where they do not."""
    memory: tuple[Bytes, ...]
    """Memory of each worker at its peak, in training or while it validates, draws or decodes."""
    has_activations: bool
    """Whether `memory` has activations and messages in it; else it is only the memory that is used all the time."""
    decoding: str = ""
    """How samples are decoded, in words; "" where none are, and where the layers were not measured."""

    @property
    def step(self) -> Seconds | None:
        """The predicted seconds of a step: iteration, update, and usual delay by data workers; None if not measured."""
        if self.iteration is None:
            return None
        return self.iteration + (self.update or 0.0) + (self.loading.usual if self.loading is not None else 0.0)


def loading_in(workers: "JobDataWorkers | None", plan: "Plan", iteration: Seconds, bubble: float) -> Spread | None:
    """The seconds by which data workers lengthen a step; None if they do not.

    `iteration`, `bubble`: its length in seconds and its idle share.
    """
    if workers is None:
        return None
    found = added_by(workers, iteration=iteration, bubble=bubble, copies=plan.mesh.data_parallel)
    return found if found.most else None


def expectation_of(start: "Start") -> Expectation:
    """The prediction for a run: by its own profile and cluster, or by the file beside its plan.

    Without either only memory is predicted, from the shapes of parameters.
    """
    from diffusionpipe.costs.files import read_profile
    from diffusionpipe.planner import predicted_period, predicted_timeline
    from diffusionpipe.planner.mixed import mean_step
    from diffusionpipe.planner.pricing.stage_costs import update_time
    from diffusionpipe.trainer.recipe.size_rules import run_of
    from diffusionpipe.workflows.planning.prediction_file import read_prediction
    from diffusionpipe.workflows.training.run_facts import cluster_of_run

    recipe, plan, folder = start.recipe, start.plan, start.recipe.run.folder
    if recipe.pipeline.is_profiled:
        profile = read_profile(folder / "profile.json")
        cluster = cluster_of_run(folder)
        memory, decoding = _peaks(start, profile, cluster)
        if plan.train.lead:
            period = predicted_period(profile, plan, cluster)  # in nearly all of which ranks compute
            return Expectation(
                iteration=period,
                update=None,
                loading=loading_in(
                    start.loading, plan, period, 0.0
                ),  # without a flush ranks compute nearly all the time
                memory=memory,
                has_activations=True,
                decoding=decoding,
            )
        timeline = predicted_timeline(profile, plan, cluster)
        iteration = timeline.makespan
        if profile.sizes:  # steps that mix sizes take longer than ones of the mean size
            iteration = max(iteration, mean_step(profile, plan, run_of(recipe), cluster))
        return Expectation(
            iteration=iteration,
            update=update_time(plan.train, plan.blocks, profile, plan.mesh) or None,
            loading=loading_in(start.loading, plan, iteration, timeline.bubble),
            memory=memory,
            has_activations=True,
            decoding=decoding,
        )
    # Without a measurement only the planner's own file beside the plan has times.
    read = read_prediction(recipe.pipeline.plan_file, plan) if recipe.pipeline.plan_file is not None else None
    uses = _memory(start, unmeasured(start.model, recipe.training.precision.value), None)
    return Expectation(
        iteration=read.makespan if read is not None else None,
        update=None,
        loading=loading_in(start.loading, plan, read.makespan, read.bubble) if read is not None else None,
        memory=tuple(use.having(Trait.COUNTED) for use in uses),
        has_activations=False,
    )


def _peaks(start: "Start", profile: "Profile", cluster: "Cluster | None") -> tuple[tuple[Bytes, ...], str]:
    """(bytes that each worker holds at most in any phase of the run, a text on how samples are decoded)."""
    from diffusionpipe.planner.phases import phases_of
    from diffusionpipe.workflows.training.decoding_text import decoding_of_recipe, decoding_text, samples_shown

    uses, setting, recipe = _memory(start, profile, cluster), _setting(start, profile, cluster), start.recipe
    known, pictures = replace(profile, decoding=decoding_of_recipe(recipe)), samples_shown(recipe)
    lasting = [use.having(Trait.LASTING) for use in uses]
    # As if all devices were like the first one.
    room = setting.cluster.devices[0].memory - lasting[0]
    phases = phases_of(
        replace(setting, profile=known),
        start.plan,
        validates=start.held_out is not None,
        pictures=pictures,
        room=room,
    )
    peaks = (max(use.total, rest + phase.peak) for use, rest, phase in zip(uses, lasting, phases, strict=True))
    return tuple(peaks), decoding_text(known, pictures, room)


def _memory(start: "Start", profile: "Profile", cluster: "Cluster | None") -> "tuple[MemoryUse, ...]":
    from diffusionpipe.ir.unroll import unroll
    from diffusionpipe.planner.pricing.window_costs import window_memory
    from diffusionpipe.planner.search.proposal import predict

    plan, train, setting = start.plan, start.plan.train, _setting(start, profile, cluster)
    if not train.lead:
        return predict(setting, train, plan.blocks, plan.mesh).memory
    # With this number of batches the pipeline is full for a while.
    trained = predict(setting, unroll(train, 2 * train.lead + 2), plan.blocks, plan.mesh).memory
    encoding = predict(setting, plan.validate, plan.blocks, plan.mesh).memory
    # A window without fills has no encoders; those of the validation are the same.
    rows = predict(setting, unroll(train, 1), plan.blocks, plan.mesh).memory if plan.is_filled else encoding
    uses = [replace(use, frozen=own.frozen) for use, own in zip(trained, encoding, strict=True)]
    return window_memory(train, uses, [use.frozen_outputs for use in rows])


def _setting(start: "Start", profile: "Profile", cluster: "Cluster | None") -> "Setting":
    return setting_of_plan(start.recipe, start.plan, profile, cluster)


def setting_of_plan(recipe: "Recipe", plan: "Plan", profile: "Profile", cluster: "Cluster | None" = None) -> "Setting":
    """The planner's setting of a recipe trained by this plan on the cluster.

    Without a cluster it is a single machine whose memory is not known.
    """
    from diffusionpipe.holding.storage import storage_of
    from diffusionpipe.planner.from_profile import setting_of
    from diffusionpipe.trainer.model.workload import workload_of

    setting = setting_of(profile, plan.mesh, plan.batch, cluster=cluster)
    workload = workload_of(recipe, profile.graph)
    workload = replace(workload, checkpointed=plan.checkpointed, encoders=storage_of(plan.encoders))
    return replace(setting, workload=workload)


def unmeasured(model: "ModelGraph", precision: str) -> "Profile":
    """A profile of a model that was not measured: all layers take equal time and no memory.

    Parameters have their sizes in it.
    """
    from diffusionpipe.costs import LayerProfile, Profile

    # Times are not shown, so any will do, but a profile has no layer without one.
    equal = (1e-6,)
    layers = [
        LayerProfile(
            name=layer.name, forward=equal, input_grad=equal, weight_grad=equal, activation=(0,), workspace=(0,)
        )
        for layer in model.layers
    ]
    return Profile(
        graph=model,
        batch_sizes=(1,),
        layers=tuple(layers),
        device="unknown",
        device_type="cpu",
        precision=precision,
        source="analytic",
        versions=(),
    )
