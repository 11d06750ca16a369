"""A run held against its prediction after its first steps: the corrected profile, the figures, perhaps a better layout.

Rank 0 does this once, between two steps. The search for another layout runs in a process of its own (`replanning`).
"""

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from diffusionpipe.units import Bytes, Seconds
from diffusionpipe.workflows.training.expectation import loading_in
from diffusionpipe.workflows.training.expected_step import note_unjudged

if TYPE_CHECKING:
    from diffusionpipe.costs import Cluster
    from diffusionpipe.ir.recorded import Recorded
    from diffusionpipe.planner import Setting
    from diffusionpipe.planner.correction.causes import LoadingTimes
    from diffusionpipe.planner.correction.correct import Correction
    from diffusionpipe.trainer.recipe import Recipe
    from diffusionpipe.trainer.setup.start import Start
    from diffusionpipe.workflows.training.replanning import Replanning

logger = logging.getLogger(__name__)

PROFILE = "profile.corrected.json"
CLUSTER = "cluster.corrected.json"
PLAN = "plan.suggested.json"
ERRORS = "logs/replanning.err"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a run was started: recipe, overrides, number of ranks, device."""

    recipe: Path
    overrides: Sequence[str]
    ranks: int
    device: str = "auto"

    def with_plan(self, plan: Path, recipe: "Recipe") -> str:
        """The shell command that resumes the run with a plan file; keys of the recipe that the plan sets are unset."""
        from diffusionpipe.trainer.recipe.pipeline_section import PLANNED

        given = recipe.pipeline.given((*PLANNED, "replan"))
        # The plan file states these sizes, and both together are refused.
        taken = [f"pipeline.{key}={'[]' if key in ('replicas', 'splits') else 'none'}" for key in given]
        words = ["diffusionpipe", "train", str(self.recipe), *self.overrides, f"pipeline.plan={plan}", *taken]
        options = ["--device", self.device] if self.device != "auto" else []
        return shlex.join([*words, "--ranks", str(self.ranks), *options, "--resume", "latest"])


class CheckReport(Protocol):
    """Shows the results of a run's check of its prediction."""

    def corrected(self, found: "Correction", profile: Path, stages: Mapping[int, int]) -> None:
        """Show the correction of the predicted step, and the file of the corrected profile.

        `stages`: stage of the placement -> its number in the description of the run.
        """

    def not_judged(self, steps: tuple[int, int], why: str) -> None:
        """Show why the prediction was not judged by these steps, (first, last)."""


class RunCheck:
    """Rank 0's check of the predicted step by measured ones, a `PredictionMonitor`.

    Mutable: it remembers the correction, and the search that it has started.
    """

    def __init__(self, report: CheckReport, command: Command) -> None:
        self._report, self._command = report, command
        self._start: Start | None = None
        self._search: Replanning | None = None
        self.correction: Correction | None = None

    def begin(self, start: "Start") -> None:
        """Remember the plan, profile and recipe of the run that begins; see `PredictionMonitor`."""
        self._start = start

    def check(self, recorded: "Recorded", memory: Sequence[Bytes]) -> Mapping[str, float]:
        """Correct the profile by the recorded steps, write it and the cluster, and start a search for a better layout.

        Returns the predicted, the measured and the corrected step, in seconds, by their names in the metrics. `memory`:
        usable bytes of each device. See `PredictionMonitor`.
        """
        from diffusionpipe.costs.files import write_cluster, write_profile
        from diffusionpipe.planner.correction.correct import correct
        from diffusionpipe.workflows.planning.used_devices import allowed_of
        from diffusionpipe.workflows.training.run_facts import numbers_of_stages

        assert self._start is not None, "a run is announced before its first step"
        start = self._start
        folder = start.recipe.run.folder
        setting = setting_of_run(start)
        self.correction = found = correct(setting, start.plan, recorded, loading_times(start, setting, recorded))
        first, last = recorded.steps
        origin = f"profile.json of {folder}, corrected by its steps {first} to {last}"
        profile = replace(found.setting.profile, origin=origin)
        write_profile(profile, folder / PROFILE)
        devices = tuple(
            replace(device, memory=min(device.memory, usable))
            for device, usable in zip(found.setting.cluster.devices, memory, strict=True)
        )
        usable_cluster = replace(found.setting.cluster, devices=devices)
        write_cluster(allowed_of(usable_cluster, start.recipe.pipeline.memory), folder / CLUSTER)
        self._report.corrected(found, folder / PROFILE, numbers_of_stages(start.plan))
        self._start_search(start, found)
        return {
            "predicted_step_s": found.predicted.step,
            "measured_step_s": found.measured.step,
            "corrected_step_s": found.corrected.step,
        }

    def give_up(self, steps: tuple[int, int], others: float) -> None:
        """Show and note why the prediction is not judged: other programs used the cores; see `PredictionMonitor`.

        `steps`: first and last. `others`: the share of the cores that they used.
        """
        from diffusionpipe.trainer.course.counted_steps import used_text

        why = used_text(others)
        if self._start is not None:
            note_unjudged(self._start.recipe.run.folder, f"steps {steps[0]} to {steps[1]}: {why}")
        self._report.not_judged(steps, why)

    def _start_search(self, start: "Start", found: "Correction") -> None:
        from diffusionpipe.trainer.model.workload import samples_drawn_together, workload_of
        from diffusionpipe.workflows.planning.recipe_setting import given_of
        from diffusionpipe.workflows.training.replanning import Replanning, Request, training_of

        recipe, folder = start.recipe, start.recipe.run.folder
        if not recipe.pipeline.is_replanned or recipe.models:
            return
        if why := _hindrance(start, found.setting.cluster):
            logger.info("replan=never reason=%s", why)
            return
        request = Request(
            profile=str(folder / PROFILE),
            cluster=str(folder / CLUSTER),
            plan=str(folder / PLAN),
            training=training_of(workload_of(recipe, start.model)),
            given=given_of(recipe),
            fill=recipe.pipeline.fill if recipe.pipeline.is_searched else None,
            sample_batch=samples_drawn_together(recipe),
            step=found.corrected.step,
            parent=os.getpid(),
        )
        # An earlier start's suggestion is not for this correction.
        (folder / PLAN).unlink(missing_ok=True)
        (folder / ERRORS).parent.mkdir(exist_ok=True)
        try:
            self._search = Replanning(request, folder / ERRORS)
        except OSError as error:
            logger.warning("replan=failed reason=%s", error.strerror)

    def look(self) -> None:
        """Show the layout that the search has found, once it has ended; see `PredictionMonitor`."""
        if self._search is None or not self._search.is_over():
            return
        # The result is shown once.
        search, self._search = self._search, None
        assert self._start is not None, "a run is announced before its first step"
        assert self.correction is not None, "the search came after the check"
        folder, present = self._start.recipe.run.folder, self.correction.corrected.step
        try:
            found = search.result()
        except OSError as error:
            logger.warning("replan=failed reason=%s errors=%s", error, folder / ERRORS)
            return
        if found is None:
            logger.info("replan=no_change: no other layout would be more than 5 %% faster by %s", folder / PROFILE)
            return
        command = self._command.with_plan(folder / PLAN, self._start.recipe)
        logger.warning("%s", suggestion_text(found.sizes, found.step, present, command))

    def close(self) -> None:
        """End a search that is still under way; see `PredictionMonitor`."""
        if self._search is not None:
            self._search.stop()
            self._search = None
            logger.info("replan=unfinished: training was over before the search for another layout")


def suggestion_text(sizes: str, step: Seconds, present: Seconds, command: str) -> str:
    """A sentence for the user on a faster layout, its step beside the present one, and the command that uses it."""
    return (
        f"Another layout would be {present / step - 1:.0%} faster by the corrected profile: {sizes}, "
        f"{step * 1000:.1f} ms a step instead of {present * 1000:.1f} ms. To use it, stop this run with Ctrl-C, "
        f"which saves a checkpoint, and continue it with: {command}"
    )


def setting_of_run(start: "Start") -> "Setting":
    """The planner's setting of the run: its plan's sizes, with the profile and the cluster in the run's folder."""
    from diffusionpipe.costs.files import read_profile
    from diffusionpipe.planner.from_profile import setting_of
    from diffusionpipe.workflows.training.run_facts import cluster_of_run

    folder, plan = start.recipe.run.folder, start.plan
    profile, cluster = read_profile(folder / "profile.json"), cluster_of_run(folder)
    return setting_of(profile, plan.mesh, plan.batch, checkpointed=plan.checkpointed, cluster=cluster)


def loading_times(start: "Start", setting: "Setting", recorded: "Recorded") -> "LoadingTimes":
    """(predicted, measured) seconds by which data workers lengthen a step of the run, as `LoadingTimes`.

    The measured ones follow from the workers' processor time.
    """
    from diffusionpipe.costs.loading import exactly
    from diffusionpipe.planner import predicted_timeline
    from diffusionpipe.planner.correction.causes import LoadingTimes

    timeline = predicted_timeline(setting.profile, start.plan, setting.cluster)
    predicted = loading_in(start.loading, start.plan, timeline.makespan, timeline.bubble)
    # Not recorded: the correction then takes loading as predicted.
    if predicted is None or start.loading is None or not recorded.loading:
        return LoadingTimes(predicted=predicted.usual if predicted is not None else 0.0)
    used = replace(start.loading, batches=tuple(exactly(seconds) for seconds in recorded.loading))
    measured = loading_in(used, start.plan, timeline.makespan, timeline.bubble)
    return LoadingTimes(predicted=predicted.usual, measured=measured.usual if measured is not None else 0.0)


def _hindrance(start: "Start", cluster: "Cluster") -> str:
    """The reason, for the log, why no other layout can be searched for; "" if one can."""
    if start.plan.mesh.num_ranks < 2:
        return "one_rank"
    # A cluster with one node lacks the slower links between the machines.
    if len(set(start.hosts)) > 1 and len(set(cluster.nodes)) == 1:
        return "links_between_nodes_not_measured; a run in a new folder measures them"
    return ""
