"""A plan as data of a page: its layout and the reason for it, its step in time and memory, predicted and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

from diffusionpipe.errors import DiffusionPipeError
from diffusionpipe.ir import COMPUTE_OPS, Op, Plan, Timeline
from diffusionpipe.ir.own_schedules import in_one_table
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE
from diffusionpipe.planner.from_profile import UNKNOWN_MEMORY
from diffusionpipe.timing.sends import waits_of_step
from diffusionpipe.viz import palette
from diffusionpipe.viz.waits import WAITS, RankTimes, times_of_ranks
from diffusionpipe.workflows.planning.alternatives_file import alternatives_file, read_alternatives
from diffusionpipe.workflows.planning.prediction_file import prediction_file
from diffusionpipe.workflows.report.figures import Json, absent, count, figure, number, percent, seconds, size
from diffusionpipe.workflows.report.timeline import Actions, TimelineSource, timeline_data
from diffusionpipe.workflows.training.expected_step import EXPECTED, ExpectedStep, read_expected
from diffusionpipe.workflows.training.run_facts import ranks_of_worker, ranks_text
from diffusionpipe.workflows.training.run_timeline import timeline_title

if TYPE_CHECKING:
    from diffusionpipe.ir.alternatives import Alternatives
    from diffusionpipe.workflows.planning.times import PlanTimes

T = TypeVar("T")
MEASURED = "timeline.json"
_NAMED = 5
"""The most waits that are listed one by one."""


@dataclass(frozen=True, kw_only=True)
class PlanPage:
    """A plan with its predicted and measured timelines, for a page; a text in place of one says why it is missing."""

    plan: Plan
    file: str
    """The name of the plan file, to which the numbers of the plan lead."""
    predicted: PlanTimes | str
    """The predicted times, or the reason why there are none."""
    source: str
    """The names of the files from which the prediction is made."""
    actual: Timeline | str
    """The measured timeline, or the reason why there is none."""
    alternatives: Json
    """The page's part about the layouts that the search compared."""
    fullest: Json | None = None
    """The page's part about memory for a plan without profile and cluster: the fullest device, kept by the search."""
    announced: ExpectedStep | None = None
    """The step that the run announced, with its loading, which the other files do not have."""

    @property
    def times(self) -> PlanTimes | None:
        """The predicted times of the plan; None if there are none."""
        return None if isinstance(self.predicted, str) else self.predicted

    @property
    def measured(self) -> Timeline | None:
        """The measured timeline of this plan; None if there is none."""
        return None if isinstance(self.actual, str) else self.actual

    def title(self) -> str:
        """The layout of the plan and its sizes, as a text."""
        return timeline_title(self.plan, self.measured)

    def step(self) -> Json | None:
        """The predicted seconds of a step, as a number for the page; None where no times are known.

        They are the seconds that the run announced; for a plan without a run, its iteration and update.
        """
        if self.announced is not None:
            return seconds(self.announced.step, EXPECTED, "iteration + update + loading")
        times = self.times
        if times is None or times.axis.name != "ms":
            return None
        proposal = times.proposal
        if proposal is None:
            return seconds(times.timeline.step, self.source, "step of the timeline")
        return seconds(proposal.step, self.source, "iteration + update, simulated")

    def step_in_words(self) -> list[str | Json]:
        """The announced step with its parts as a sentence, and why the run did not judge it; [] without it."""
        if self.announced is None:
            return []
        text: list[str | Json] = ["Predicted are "]
        for place, name in enumerate(("iteration", "update", "loading")):
            words = {"iteration": " for the iteration", "update": " for the update", "loading": " for loading"}[name]
            text += [", " * bool(place), seconds(getattr(self.announced, name), EXPECTED, name), words]
        text.append(". ")
        if self.announced.unjudged:
            text.append(f"The run did not judge its prediction by its {self.announced.unjudged}. ")
        return text

    def timelines(self) -> Json:
        """The page's part with the predicted and the measured step on one axis, and the layers of their actions."""
        graph = self.times.setting.graph if self.times and self.times.setting else None
        measured, plan = (None, self.plan) if self.measured is None else _in_one_table(self.measured, self.plan)
        actions, found, notes = Actions(plan, graph), [], []
        if self.times is not None:
            is_timed = self.times.axis.name == "ms"
            file = self.source if is_timed else self.file
            source = TimelineSource(name="predicted", file=file, unit="ms" if is_timed else "units")
            found.append(timeline_data(self.times.timeline, plan, source, actions, self._names()))
            more = f"; give `diffusionpipe plan show` {self.times.missing}" if self.times.missing else ""
            notes.append(f"Predicted: {self.times.source}{more}.")
        else:
            notes.append(f"Predicted: {self.predicted}.")
        if measured is not None and (not found or found[0]["unit"] == "ms"):
            source = TimelineSource(name="measured", file=MEASURED)
            found.append(timeline_data(measured, plan, source, actions, {}))
        elif isinstance(self.actual, str):
            notes.append(f"Measured: {self.actual}.")
        if not found:
            return absent(" ".join(notes))
        return {
            "timelines": found,
            "kinds": actions.kinds,
            "actions": actions.rows,
            "stages": actions.stages(),
            "fills": actions.fills(),
            "messages": actions.messages(),
            "notes": notes,
        }

    def _names(self) -> dict[int, str]:
        """Worker of the prediction -> the names of the ranks that are this worker: "ranks 0, 2, ..., 6"."""
        return {worker: ranks_text(ranks_of_worker(self.plan, worker)) for worker in range(self.plan.mesh.pipeline)}

    @cached_property
    def causes(self) -> list[Json]:
        """The page's rows on how each rank uses the time of a step, computing or waiting: measured, and predicted."""
        found = []
        if self.measured is not None:
            names = {rank: f"rank {rank}" for rank in range(self.measured.num_workers)}
            found.append(_causes(self.measured, self.plan, ("measured", MEASURED), names))
        if self.times is not None and self.times.axis.name == "ms":
            names = self._names()
            found.append(_causes(self.times.timeline, self.plan, ("predicted", self.source), names))
        return found

    def memory(self) -> Json:
        """The page's part with each worker's predicted peak memory by kind, and its ranks' smallest device memory.

        Where memory is not predicted, the reason.
        """
        times = self.times
        if times is None or times.proposal is None or times.setting is None:
            if self.fullest is not None:
                return self.fullest
            if times is None:
                return absent(f"memory is not known: {self.predicted}")
            return absent(
                "the memory of a step is not known: put the profile.json and the cluster.json from which the plan was "
                "made beside it"
            )
        devices, rows = times.setting.cluster.devices, []
        names = self._names()
        for worker, use in enumerate(times.proposal.memory):
            ranks = ranks_of_worker(self.plan, worker)
            room = min(devices[rank].memory for rank in ranks)
            rows.append(
                {
                    "name": names[worker],
                    "total": size(use.total, "profile.json, plan.json", f"peak memory of {names[worker]}"),
                    "room": _room(room, "cluster.json", f"devices[{ranks[0]}].memory"),
                    "items": [
                        {"kind": kind.replace("_", " ")}
                        | size(held, "profile.json, plan.json", f"{kind} of {names[worker]}")
                        for kind, held in use.items().items()
                        if held
                    ],
                }
            )
        return {"rows": rows, "workload": times.workload}

    def stages(self) -> list[Json]:
        """The page's row for each trained stage: its rank, layers, parameters and mean times."""
        from diffusionpipe.planner.search.naming import stages_of_plan

        measured, predicted = _means(self.measured, self.plan), _means(self._timed(), self.plan)
        graph = self.times.setting.graph if self.times and self.times.setting else None
        parameters = Actions(self.plan, graph)
        found = []
        for place, stage in enumerate(stages_of_plan(self.plan)):
            layers = [name for block in stage.blocks for name in self.plan.blocks[block]]
            held = sum(parameters.parameters(self.plan.blocks[block]) for block in stage.blocks)
            row: dict[str, object] = {
                "stage": figure(str(place), place, self.file, "train.placement.stages"),
                "ranks": self._names()[stage.worker],
                "layers": count(len(layers), self.file, f"len(blocks{list(stage.blocks)})"),
                "first": layers[0],
                "last": layers[-1],
                "parameters": count(held, "profile.json", f"parameters of stage {place}") if held else None,
            }
            for name, means, file in (("predicted", predicted, self.source), ("measured", measured, MEASURED)):
                for kind in ("forward", "backward"):
                    value = means.get((kind, stage.worker, stage.blocks))
                    row[f"{kind}_{name}"] = seconds(value, file, f"mean {kind} of stage {place}") if value else None
            found.append(row)
        return found

    def _timed(self) -> Timeline | None:
        return self.times.timeline if self.times is not None and self.times.axis.name == "ms" else None


def page_of_file(plan: Plan, plan_file: Path, *, is_run: bool = False) -> PlanPage:
    """The plan of a file with the timelines in files beside it, for a page; `is_run`: it is in the folder of a run."""
    predicted = _found_or_reason(lambda: _found(plan, plan_file))
    is_file = not isinstance(predicted, str) and predicted.proposal is None
    kept = read_alternatives(plan_file, plan)
    return PlanPage(
        plan=plan,
        file=plan_file.name,
        predicted=predicted,
        source=prediction_file(plan_file).name if is_file else "profile.json, cluster.json, plan.json",
        actual=_found_or_reason(lambda: _measured(plan_file.with_name(MEASURED))),
        fullest=None if isinstance(kept, str) else _fullest(kept, alternatives_file(plan_file).name),
        announced=read_expected(plan_file.parent) if is_run else None,
        alternatives=absent(kept) if isinstance(kept, str) else layouts_of(kept, alternatives_file(plan_file).name),
    )


def _fullest(kept: Alternatives, file: str) -> Json | None:
    """The page's part about memory, with the chosen layout's fullest device; None where the search has kept none.

    `file`: the name of the file of alternatives.
    """
    for place, one in enumerate(kept.layouts):
        if one.is_chosen and one.items:
            # The overflow says how much the device lacks, or below 0 how much is free.
            key, room = f"layouts[{place}]", one.memory - one.overflow
            row = {
                "name": "fullest device",
                "total": size(one.memory, file, f"{key}.memory"),
                "room": _room(room, file, f"{key}.memory - {key}.overflow"),
                "items": [
                    {"kind": item.kind.replace("_", " ")} | size(item.size, file, f"{key}.items[{number}].size")
                    for number, item in enumerate(one.items)
                ],
            }
            return {"rows": [row], "workload": ""}
    return None


def _room(room: int, file: str, key: str) -> Json | None:
    """A device's memory as a number for the page, from a key of a file; None if it is not known."""
    return None if room >= UNKNOWN_MEMORY else size(room, file, key)


def layouts_of(kept: Alternatives, file: str) -> Json:
    """The page's part about the layouts that the search compared: the verdict, the remarks, and a row for each layout.

    `file`: the name of the file that they are from.
    """
    rows = []
    fastest = min((one.step for one in kept.layouts if one.is_chosen), default=0.0)
    for place, one in enumerate(kept.layouts):
        key = f"layouts[{place}]"
        rows.append(
            {
                "name": one.name,
                "sizes": one.sizes,
                "found": one.found,
                "chosen": one.is_chosen,
                "near": one.found != "other" and not one.is_chosen and 0 < one.step <= fastest * (1 + NEAR_TIE),
                "fits": one.overflow <= 0,
                "step": seconds(one.step, file, f"{key}.step"),
                "times": number(one.step / fastest, file, f"{key}.step / step of the chosen", digits=3)
                if fastest
                else None,
                "rate": number(one.samples_per_second, file, f"{key}.samples_per_second"),
                "idle": percent(one.bubble, file, f"{key}.bubble"),
                "memory": size(one.memory, file, f"{key}.memory"),
                "lack": size(one.overflow, file, f"{key}.overflow") if one.overflow > 0 else None,
            }
        )
    return {
        "why": kept.verdict,
        "remarks": list(kept.remarks),
        "rows": rows,
        "estimated": count(kept.estimated, file, "estimated"),
        "simulated": count(kept.simulated, file, "simulated"),
    }


def _found_or_reason(find: Callable[[], T | str]) -> T | str:
    """The result of `find`, or the first lines of the error that it raises, one of ours."""
    try:
        return find()
    except DiffusionPipeError as error:
        return reason_of(error)


def reason_of(error: DiffusionPipeError) -> str:
    """The first two lines of an error's text, joined to one."""
    return " ".join(line.strip() for line in str(error).splitlines()[:2])


def _found(plan: Plan, plan_file: Path) -> PlanTimes:
    from diffusionpipe.ir import Phase
    from diffusionpipe.workflows.planning.times import found_times

    times = found_times(plan, plan_file, needs_recipe=False)
    if times.proposal is None or not times.proposal.update:
        return times
    start = times.timeline.makespan
    workers = range(times.timeline.num_workers)
    phases = (Phase(worker=one, name="update", start=start, end=start + times.proposal.update) for one in workers)
    return replace(times, timeline=replace(times.timeline, update=tuple(phases)))


def _measured(path: Path) -> Timeline | str:
    from diffusionpipe.ir.files import read_timeline

    if not path.exists():
        return f"there is no {path.name} beside the plan; a run writes it after its last step"
    return read_timeline(path)


def _in_one_table(timeline: Timeline, plan: Plan) -> tuple[Timeline, Plan]:
    """The timeline and the plan with one common table of messages and fills, which gives actions the same numbers."""
    found, train = in_one_table(timeline, plan.train)
    return found, replace(plan, train=train)


def _causes(timeline: Timeline, plan: Plan, source: tuple[str, str], names: Mapping[int, str]) -> Json:
    """The page's row of a timeline: the parts of its step, of all ranks together and of each, and the longest waits.

    `source`: ("measured" or "predicted", the timeline's file). `names`: worker of the timeline -> its name.
    """
    name, file = source
    awaited = waits_of_step(timeline, plan.train)
    timeline, plan = _in_one_table(timeline, plan)
    components = palette.components((timeline,), plan.train)
    colours = palette.work_colours(components)
    ranks = times_of_ranks(timeline, awaited, components)
    whole = timeline.step or 1.0
    kinds = list(dict.fromkeys(kind for one in ranks for kind in one.computing))
    parts = []
    for kind in kinds:
        spent = sum(one.computing.get(kind, 0.0) for one in ranks)
        parts.append(_part(kind, spent / len(ranks), whole, file, is_wait=False) | {"colour": colours[kind]})
    for cause in WAITS:
        spent = sum(one.by_cause().get(cause, 0.0) for one in ranks)
        if spent > 0:
            parts.append(_part(cause, spent / len(ranks), whole, file, is_wait=True))
    rows = [
        {
            "name": names.get(one.worker, f"rank {one.worker}"),
            "parts": [
                {"name": kind, "part": round(spent / whole, 6)} | seconds(spent, file, f"{kind}, rank {one.worker}")
                for kind, spent in {**one.computing, **one.by_cause()}.items()
            ],
        }
        for one in ranks
    ]
    return {
        "source": name,
        "step": seconds(timeline.step, file, "step of the timeline"),
        "parts": parts,
        "ranks": rows,
        "longest": list(_longest(ranks, file, names)),
    }


def _part(name: str, spent: float, whole: float, file: str, *, is_wait: bool) -> Json:
    return {
        "name": name,
        "wait": is_wait,
        "part": round(spent / whole, 6),
        "share": percent(spent / whole, file, f"mean({name}) / step"),
        "time": seconds(spent, file, f"mean({name})"),
    }


def _longest(ranks: Sequence[RankTimes], file: str, names: Mapping[int, str]) -> Iterator[Json]:
    waits = sorted((wait for one in ranks for wait in one.waits), key=lambda wait: -wait.seconds)[:_NAMED]
    for wait in waits:
        sender = "" if wait.sender is None else f", from {names.get(wait.sender, f'rank {wait.sender}')}"
        yield {
            "rank": names.get(wait.worker, f"rank {wait.worker}"),
            "before": wait.before,
            "cause": f"{wait.cause}{sender}",
            "time": seconds(wait.seconds, file, f"wait of rank {wait.worker} before {wait.before or 'the end'}"),
        }


def _means(timeline: Timeline | None, plan: Plan) -> dict[tuple[str, int, tuple[int, ...]], float]:
    """("forward" or "backward", worker, blocks) of each stage -> the mean seconds of these actions in a timeline.

    All buckets of the stage are added up; {} without a timeline.
    """
    from diffusionpipe.planner.search.naming import stages_of_plan

    if timeline is None:
        return {}
    spent: dict[tuple[str, int, int], list[float]] = {}
    placement = plan.train.placement
    for span in timeline.spans:
        if span.action.op in COMPUTE_OPS:
            stage = placement.stages[span.action.stage]
            kind = "forward" if span.action.op is Op.F else "backward"
            spent.setdefault((kind, stage.worker, stage.weights), []).append(span.end - span.start)
    found = {}
    for own in stages_of_plan(plan):
        for kind in ("forward", "backward"):
            times = [spent.get((kind, own.worker, block), []) for block in own.blocks]
            if all(times):
                # An input and a weight gradient of one micro-batch are one backward.
                split = 2 if kind == "backward" and plan.train.splits_backwards else 1
                found[kind, own.worker, own.blocks] = split * sum(fmean(one) for one in times)
    return found
