"""`diffusionpipe report`: runs and plans as one page, a file that opens without a network."""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusionpipe.errors import ConfigError, DiffusionPipeError
from diffusionpipe.ir import Plan
from diffusionpipe.ir.files import read_plan
from diffusionpipe.timing.legal import check_plan
from diffusionpipe.trainer.recipe import PLAN
from diffusionpipe.trainer.reporting.metrics import METRICS
from diffusionpipe.version import __version__
from diffusionpipe.workflows.report.figures import Json, absent, number, percent
from diffusionpipe.workflows.report.metrics import (
    Metrics,
    curves_of,
    late_batches,
    learning_of,
    progress_of,
    speed_of,
    step_in_words,
    usual,
)
from diffusionpipe.workflows.report.plan import PlanPage, page_of_file, reason_of
from diffusionpipe.workflows.report.recipe import LEFT_OUT, rows_of
from diffusionpipe.workflows.report.run_files import RunFiles
from diffusionpipe.workflows.report.run_folder import check_run, of_a_recipe
from diffusionpipe.workflows.report.samples import MOST

FORMAT = {"format": "diffusionpipe-report", "version": 1}
_ENDED = "ended.json"
_PATH = re.compile(r"(?<![\w.:/<])(?:~|[A-Za-z]:)?[/\\][\w.@+%-]+(?:[/\\][\w.@+%-]+)*[/\\]?")
_RELATIVE = re.compile(r"(?<![\w.:/<])[\w.@+%-]+(?:[/\\][\w.@+%-]+)+[/\\]?")
_LISTED = re.compile(r"[^'\"\[\],]*[/\\][^'\"\[\],]*")
"""A path in a value of a recipe or in a list of values."""
_WITH_PATHS = ("data", "made_with")
"""Keys of a page's items in which a word with a slash is a path."""
_NO_RECIPES: Json = {"of": [], "rows": []}
_SLOW = 1.1
"""A measured step is called slower than predicted from this factor on."""


def report_of(sources: Sequence[Path], *, is_shared: bool = False) -> Json:
    """The data of a page about these run folders and plan files, in their order.

    `is_shared`: whether paths, host and user names are left out.

    Raises:
        ConfigError: a source is neither a run folder nor a plan file.
        FileFormatError: a plan file cannot be read.
    """
    # All sources share the room of one page.
    most = MOST // len(sources)
    runs = {place: RunFiles(source) for place, source in enumerate(sources) if source.is_dir()}
    items = [_run(runs[place], most) if place in runs else _plan(source) for place, source in enumerate(sources)]
    found = {place: files.recipe() for place, files in runs.items()}
    recipes = {place: recipe for place, recipe in found.items() if isinstance(recipe, dict) and recipe}
    report = _report(items, _recipes(recipes), is_shared=is_shared)
    return _shared(report, [*map(str, sources), *_paths_in(recipes.values())]) if is_shared else report


def _recipes(recipes: Mapping[int, Mapping[str, object]]) -> Json:
    """The page's part about recipes: "of", the numbers of the items that have one, and "rows", their keys and values.

    `recipes`: number of an item -> its recipe's values by key.
    """
    return {"of": list(recipes), "rows": rows_of(list(recipes.values()))}


def _run(files: RunFiles, most: int) -> Json:
    folder = files.folder
    check_run(folder)
    metrics, recipe = files.metrics(), files.recipe()
    known = recipe if isinstance(recipe, dict) else {}
    has_ended = (folder / _ENDED).exists()
    is_running = not has_ended and _is_running(folder)
    speed, curves = dict(speed_of(metrics)), [*curves_of(metrics), *files.memory()]
    page, parts = files.of_documents("plan", lambda: _plan_and_parts(folder / PLAN))
    return {
        "kind": "run",
        "name": folder.resolve().name,
        "place": str(folder),
        "model": _model_of(known),
        "state": _state(metrics.last, has_ended=has_ended, is_running=is_running),
        "progress": progress_of(metrics, known, is_running=is_running),
        "learning": learning_of(metrics),
        "speed": speed or absent(metrics.problem or "no line has the time of a step"),
        "slowness": _slowness(page, metrics),
        "curves": curves or absent(metrics.problem or f"{METRICS} has no numbers"),
        "batch": known.get("training.batch"),
        "samples": files.samples(most),
        "data": files.data(),
        "recipe": None if isinstance(recipe, dict) else absent(recipe),
        "notes": _notes(metrics.unreadable),
        **parts,
    }


def _plan(path: Path) -> Json:
    if not path.exists():
        raise ConfigError(f"there is no run folder and no plan file {path}; check the path")
    if remedy := of_a_recipe(path):
        raise ConfigError(f"{path} is neither a run folder nor a plan file; {remedy}")
    plan = read_plan(path)
    check_plan(plan, source=path)
    return {**_item(page_of_file(plan, path), path.name), "place": str(path)}


def _item(page: PlanPage, name: str) -> Json:
    """The page's item about a plan without a run; `name`: its title."""
    return {
        "kind": "plan",
        "name": name,
        "made_with": list(page.plan.made_with),
        "slowness": _slowness(page, Metrics(())),
        "notes": [],
        **_parts(page, ""),
    }


def _plan_and_parts(path: Path) -> tuple[PlanPage | None, Json]:
    page, problem = _plan_page(path)
    return page, _parts(page, problem)


def _plan_page(path: Path) -> tuple[PlanPage | None, str]:
    """(plan of a run for its page, ""), or (None, reason why there is none); the rest of the page does not need it."""
    if not path.exists():
        return None, f"there is no {path.name}; a run writes it before its first step"
    try:
        plan: Plan = read_plan(path)
        check_plan(plan, source=path)
    except DiffusionPipeError as error:
        return None, reason_of(error)
    return page_of_file(plan, path, is_run=True), ""


def _parts(page: PlanPage | None, problem: str) -> dict[str, object]:
    if page is None:
        missing = absent(problem)
        return {"layout": None, "predicted": None} | dict.fromkeys(
            ("alternatives", "timeline", "causes", "memory", "stages"), missing
        )
    return {
        "layout": page.title(),
        "predicted": page.step(),
        "alternatives": page.alternatives,
        "timeline": page.timelines(),
        "causes": page.causes or absent("the times of a step are not known: there is no profile and no timeline"),
        "memory": page.memory(),
        "stages": page.stages(),
    }


def _slowness(page: PlanPage | None, metrics: Metrics) -> Json:
    """The page's verdict whether a step takes longer than predicted, with the largest causes of lost time.

    It has "word", "mood" and "text" as `_verdict`, and the "ratio" of measured to predicted step if both are known.
    """
    measured = usual(metrics, "step_s")
    causes = page.causes if page is not None else []
    predicted = page.step() if page is not None else None
    found: dict[str, object] = {"word": "", "mood": "none", "text": []}
    text: list[object] = []
    if measured is not None and predicted is not None:
        ratio = measured[0] / float(str(predicted["value"]))
        key = f"{measured[1]} / predicted step"
        text += ["A step takes ", number(ratio, METRICS, key, digits=3), " times the predicted time. "]
        text += page.step_in_words() if page is not None else []
        is_slow = ratio > _SLOW
        found |= {"word": "Slower than predicted" if is_slow else "As fast as predicted"}
        found |= {"mood": "warn" if is_slow else "good", "ratio": ratio}
        if is_slow and (grown := _grown(causes)):
            text += [f"Most of the difference: {grown[0]['name']} takes ", grown[0]["time"], " in place of "]
            text += [grown[1]["time"], " a rank. Devices were slower than when they were measured, or not alone. "]
        if ratio < 1 / _SLOW:
            found |= {"word": "Faster than predicted"}
    elif measured is not None:
        found |= {"word": "Nothing to compare with", "mood": "none"}
        text += step_in_words(metrics)
    elif predicted is not None:
        found |= {"word": "Predicted", "mood": "none"}
    if late := late_batches(metrics):
        found |= {"word": "It waits for its data", "mood": "warn"}
        text += late
    parts = [part for part in _list(causes[0]["parts"]) if part["wait"]] if causes else []
    if parts:
        parts.sort(key=lambda part: -part["part"])
        waiting = sum(part["part"] for part in parts)
        first = causes[0]
        file = parts[0]["share"]["file"]
        text += ["Ranks wait for ", percent(waiting, file, "mean(waits) / step"), f" of the {first['source']} step"]
        text += [", most of it for ", parts[0]["name"], " (", parts[0]["time"], " a rank)."]
    elif causes:
        text += [f"No rank waits in the {causes[0]['source']} step."]
    return found | {"text": text}


def _grown(causes: list[Json]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """(measured, predicted) part of a step: the kind of computing that took most seconds more than predicted.

    None where either timeline is missing, or where this difference is smaller than all waits together.
    """
    if {str(cause["source"]) for cause in causes} != {"measured", "predicted"}:
        return None
    measured, predicted = ({part["name"]: part for part in _list(cause["parts"])} for cause in causes)
    waits = sum(part["time"]["value"] for part in measured.values() if part["wait"])
    pairs = [(part, predicted[name]) for name, part in measured.items() if name in predicted and not part["wait"]]
    if not pairs:
        return None
    most = max(pairs, key=lambda pair: float(pair[0]["time"]["value"] - pair[1]["time"]["value"]))
    return most if most[0]["time"]["value"] - most[1]["time"]["value"] > waits else None


def _list(value: object) -> list[dict[str, Any]]:
    assert isinstance(value, list)
    return value


def _model_of(recipe: Mapping[str, object]) -> str:
    path = str(recipe.get("model.path", ""))
    rank = recipe.get("lora.rank", "none")
    name = re.split(r"[/\\]", path.rstrip("/\\"))[-1] if path else ""
    return name + (f", adapters of rank {rank}" if name and rank != "none" else "")


def _state(last: int, *, has_ended: bool, is_running: bool) -> str:
    if has_ended:
        return "finished"
    if is_running:
        return "running"
    return "stopped before its last step" if last else "not begun"


def _is_running(folder: Path) -> bool:
    """Whether a job holds the lock of the run folder; a job of another machine may hold it though it has died."""
    from diffusionpipe.trainer.launching.run_lock import is_held

    return is_held(folder)


def _notes(unreadable: int) -> list[str]:
    if not unreadable:
        return []
    lines = "line cannot be read and is" if unreadable == 1 else "lines cannot be read and are"
    killed = "a run that is killed leaves its last line half written"
    return [f"{METRICS}: {unreadable} {lines} left out; {killed}."]


def _shared(report: Mapping[str, Any], paths: Sequence[str]) -> Json:
    """The report without paths, host and user names; captions of samples stay as they are.

    Relative paths look like rates ("samples/s") and names ("loss/unet"). So only these are hidden: `paths`, all that a
    plan was made with, and all in the lines about the data.
    """
    names = [*_names_here(), *paths]
    # Longest first, so that a name goes before a part of it. Names of one or two letters would hide words.
    hide = _hiding(sorted({name for name in names if len(name) > 2}, key=len, reverse=True))
    items = []
    for item in report["items"]:
        kept = {key: value for key, value in item.items() if key not in ("samples", "place")}
        kept |= {key: _everywhere(kept[key], _without_relative) for key in _WITH_PATHS if key in kept}
        items.append(_everywhere(kept, hide) | {key: item[key] for key in ("samples",) if key in item})
    rows = [
        row | {"values": [hide(LEFT_OUT if "/" in value or "\\" in value else value) for value in row["values"]]}
        for row in report["recipes"]["rows"]
    ]
    return {**report, "items": items, "recipes": {**report["recipes"], "rows": rows}}


def _paths_in(recipes: Iterable[Mapping[str, object]]) -> list[str]:
    """The relative and absolute paths in the values of recipes, also in lists of values; `recipes`: values by key."""
    values = [value for recipe in recipes for value in recipe.values() if isinstance(value, str)]
    return [path.rstrip("/\\") for value in values for path in _LISTED.findall(value)]


def _without_relative(text: str) -> str:
    return _RELATIVE.sub(LEFT_OUT, text)


def _names_here() -> list[str]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a name for its user
        user = ""
    host = socket.gethostname()
    return [user, Path.home().name, host, host.partition(".")[0]]


def _hiding(names: Sequence[str]) -> Callable[[str], str]:
    words = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in names)) if names else None

    def hide(text: str) -> str:
        text = _PATH.sub(LEFT_OUT, text)
        return words.sub(LEFT_OUT, text) if words else text

    return hide


def _everywhere(value: Any, hide: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, dict):
        return {key: _everywhere(one, hide) for key, one in value.items()}
    return [_everywhere(one, hide) for one in value] if isinstance(value, list) else value


def report_page(sources: Sequence[Path], *, is_shared: bool = False) -> str:
    """The HTML of a page about these run folders and plan files, in their order.

    `is_shared`: whether paths, host and user names are left out.

    Raises:
        ConfigError: a source is neither a run folder nor a plan file.
        FileFormatError: a plan file cannot be read.
    """
    return html_of(report_of(sources, is_shared=is_shared))


def watched_report(files: RunFiles, refusals: Mapping[str, str]) -> Json:
    """The data of a page about one run that is watched.

    `refusals`: button -> the reason why it would do nothing, "" where it does something.

    Raises:
        ConfigError: it is not the folder of a run, or not yet.
    """
    item, recipe = _run(files, MOST), files.recipe()
    recipes = _recipes({0: recipe} if isinstance(recipe, dict) and recipe else {})
    return {**_report([item], recipes, is_shared=False), "watched": True, "refusals": refusals}


def waiting_report(folder: Path) -> Json:
    """The data of a page about a run that has not begun, or whose job measures and plans before its first step."""
    found = _report([], _NO_RECIPES, is_shared=False)
    return {**found, "watched": True, "waiting": folder.name, "preparing": _is_running(folder)}


def page_of_plan(page: PlanPage, name: str) -> str:
    """The HTML of a page about a plan that is in memory; `name`: its title."""
    return html_of(_report([_item(page, name)], _NO_RECIPES, is_shared=False))


def page_of_run(page: PlanPage, metrics: Metrics, name: str) -> str:
    """The HTML of a page about a run that is in memory: its numbers by step beside the plan. `name`: its title."""
    item = {
        **_item(page, name),
        "kind": "run",
        "progress": progress_of(metrics, {}, is_running=False),
        "learning": learning_of(metrics),
        "speed": dict(speed_of(metrics)) or absent("no step has been done yet"),
        "slowness": _slowness(page, metrics),
        "curves": curves_of(metrics) or absent("no step has been done yet"),
        "batch": page.plan.batch,
        "samples": absent("a run of dp.run draws nothing"),
    }
    kept = _everywhere(item, lambda text: text.replace(METRICS, "this run"))
    return html_of(_report([kept], _NO_RECIPES, is_shared=False))


def html_of(report: Json, *, is_watched: bool = False) -> str:
    """The HTML of the page with these data; `is_watched`: whether the page asks its server for newer data."""
    from diffusionpipe.viz.html_page import page_of

    names = ", ".join(str(item["name"]) for item in _list(report["items"]))
    text = json.dumps(report, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return page_of(text, title=names or "a run that has not begun", asks_server=is_watched)


def _report(items: list[Json], recipes: Json, *, is_shared: bool) -> Json:
    made_by = f"DiffusionPipe {__version__}"
    return {**FORMAT, "made_by": made_by, "shared": is_shared, "items": items, "recipes": recipes}
