"""Compares trained iterations with their predictions: `python -m benchmarks.prediction [--json] [--quick] [--out]`."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine
from benchmarks.prediction import training
from benchmarks.prediction.disturbed import disturbed_cases, sharing_case
from benchmarks.prediction.figures import Found, Pair, compare
from benchmarks.prediction.plans import plans_of
from benchmarks.prediction.planted import planted_cases
from diffusionpipe.planner import predicted_timeline
from diffusionpipe.runtime.job.local_ranks import LocalRanks, local_ranks
from diffusionpipe.viz.gantt import gantt

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
WIDE = {"block_out_channels": [64, 128], "norm_num_groups": 16}
"""Of the larger model's U-Net, four times the digits'."""
MODELS = ("digits", "wide", "self-conditioned")
PRELOAD = (
    "benchmarks.prediction.training",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "transformers.models.clip.modeling_clip",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prediction", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures instead of tables")
    parser.add_argument("--quick", action="store_true", help="the digits only, 10 steps of each plan")
    parser.add_argument("--profiles", type=int, help="only so many profiles in a row, and what each predicts")
    parser.add_argument("--planted", action="store_true", help="only planted errors, on ranks that wait")
    parser.add_argument("--disturbed", action="store_true", help="with --planted: the check beside another program")
    parser.add_argument("--model", choices=MODELS, help="one of the models; default: all")
    parser.add_argument("--out", type=Path, help="write a picture of the filled digits here, predicted above measured")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.disturbed and not arguments.planted:
        parser.error("--disturbed needs --planted: only ranks that wait take what is known")
    if arguments.disturbed:
        return _print_disturbed()
    if arguments.planted:
        return _print_planted()
    steps = 10 if arguments.quick else 100
    with TemporaryDirectory() as folder, Console(stderr=True).status("starting") as status:
        found = {}
        names = ("digits",) if arguments.quick else (arguments.model,) if arguments.model else MODELS
        for name, overrides in _models(Path(folder), names):
            with local_ranks(2, preload=PRELOAD) as ranks:
                if arguments.profiles is not None:
                    return _print_profiles(name, ranks, overrides, arguments.profiles)
                status.update(f"{name}: profile, training")
                found[name] = _measure(ranks, overrides, steps)
    if arguments.out is not None:
        filled = found["digits"]["filled"]
        gantt([("predicted", filled.predicted), ("measured", filled.measured)], arguments.out, title="digits, filled")
    if arguments.json:
        print(json.dumps({"machine": machine(), "models": _plain(found)}, indent=2))
    else:
        console = Console(highlight=False, width=180)
        for name, plans in found.items():
            console.print(_times(name, plans), _kinds(name, plans), _bytes(name, plans))
        console.print(machine())
    return None


def _print_profiles(model: str, ranks: LocalRanks, overrides: tuple[str, ...], count: int) -> None:
    """The iterations that several profiles, measured one after the other, predict of the same plans."""
    recipe = DIGITS / "recipe.toml"
    profiles = [ranks.run(training.measure_joint_profile, recipe, overrides)[0] for _ in range(count)]
    table = _table(f"{model}: iterations by {count} profiles in a row, ms", "", *map(str, range(1, count + 1)), "apart")
    for name, plan in plans_of(profiles[0]).items():
        found = [predicted_timeline(profile, plan).makespan for profile in profiles]
        table.add_row(name, *(f"{seconds * 1e3:.1f}" for seconds in found), f"{max(found) / min(found) - 1:.1%}")
    waking = [f"{profile.waking[-1][1] * 1e3:.2f}" if profile.waking else "" for profile in profiles]
    table.add_row("waking after 0.1 s", *waking, "")
    console = Console(highlight=False, width=140)
    console.print(table)
    console.print(machine())


def _print_planted() -> None:
    """What planted errors lead to."""
    columns = "present layout", "planted", "corrected", "measured", "off", "suggested layout", "predicted"
    table = _table("planted errors: iterations in ms, virtual ranks", "", *columns, "in turn", "faster")
    with local_ranks(2) as ranks:
        for one in planted_cases(ranks):
            times = one.predicted, one.corrected, one.measured
            table.add_row(
                one.name,
                one.present,
                *(f"{seconds * 1e3:.1f}" for seconds in times),
                f"{one.measured / one.corrected - 1:+.1%}",
                one.suggested or "none",
                f"{one.suggested_step * 1e3:.1f}",
                " and ".join(f"{seconds * 1e3:.1f}" for seconds in one.in_turn),
                f"{one.gain:+.1%}",
            )
    console = Console(highlight=False, width=180)
    console.print(table)
    console.print(machine())


def _print_disturbed() -> None:
    """What a run says beside another program."""
    columns = "steps", "count", "the run says", "ours", "others", "predicted ms", "by all steps", "corrected"
    table = _table("a loop beside ranks that wait: iterations", "", *columns)
    with local_ranks(2) as ranks:
        found = list(disturbed_cases(ranks))
    with local_ranks(4) as ranks:
        found.append(sharing_case(ranks))
    for one in found:
        times = ("-" if time is None else f"{time * 1e3:.1f}" for time in (one.predicted, one.by_all, one.corrected))
        steps = str(one.recorded), str(len(one.counted.steps))
        table.add_row(one.name, *steps, one.says, f"{one.ours:.0%}", f"{one.others:.0%}", *times)
    console = Console(highlight=False, width=180)
    console.print(table)
    console.print(machine())


def _models(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Names and overrides of the digits' recipe: the digits, with a wider U-Net, and with self-conditioning."""
    data = folder / "data"
    subprocess.run([sys.executable, DIGITS / "dataset.py", "--out", data], check=True, stdout=subprocess.DEVNULL)
    shared = (f"data.train={data / 'train'}", f"data.validation={data / 'validation'}", f"run.folder={folder / 'run'}")
    if "digits" in names:
        yield "digits", (*shared, f"model.path={DIGITS / 'model'}")
    if "self-conditioned" in names:
        yield "self-conditioned", (*shared, f"model.path={DIGITS / 'model'}", "objective.self_conditioning=0.5")
    if "wide" in names:
        wide = folder / "wide"
        shutil.copytree(DIGITS / "model", wide)
        config = wide / "unet" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text(encoding="utf-8")) | WIDE), encoding="utf-8")
        yield "wide", (*shared, f"model.path={wide}")


def _measure(ranks: LocalRanks, overrides: tuple[str, ...], steps: int) -> dict[str, Found]:
    recipe = DIGITS / "recipe.toml"
    profiles = ranks.run(training.measure_profiles, recipe, overrides)[0]
    plans = plans_of(profiles.together)
    reports = ranks.run(training.train, recipe, overrides, plans, steps)
    return {name: compare(plan, profiles, [report[name] for report in reports]) for name, plan in plans.items()}


def _times(model: str, plans: dict[str, Found]) -> Table:
    columns = (
        "predicted ms",
        "measured",
        "ratio",
        "fastest",
        "rank alone",
        "ratio",
        "step predicted",
        "measured",
        "ratio",
        "corrected",
        "ratio",
        "step corrected",
        "ratio",
    )
    table = _table(f"{model}: iterations and steps", "", *columns, "recorded", "quiet steps", "no core")
    for name, one in plans.items():
        alone = Pair(predicted=one.before, measured=one.iteration.measured)
        times = f"{one.fastest * 1e3:.1f}", f"{one.before * 1e3:.1f}", f"{alone.ratio:.3f}"
        quiet = f"{one.quiet} of {one.steps}", f"{one.delay:.1%}"
        corrected = [text for pair in (one.corrected, one.corrected_step) for text in _pair(pair)[::2]]
        table.add_row(name, *_pair(one.iteration), *times, *_pair(one.step), *corrected, str(one.recorded), *quiet)
    return table


def _kinds(model: str, plans: dict[str, Found]) -> Table:
    table = _table(f"{model}: time by kind of action, all ranks", "", "kind", "predicted ms", "measured", "ratio")
    for name, one in plans.items():
        for kind, pair in one.kinds.items():
            table.add_row(name, kind, *_pair(pair))
    return table


def _bytes(model: str, plans: dict[str, Found]) -> Table:
    table = _table(f"{model}: activations and messages at the peak", "", "rank", "predicted MiB", "counted", "ratio")
    for name, one in plans.items():
        for rank, pair in enumerate(one.held):
            cells = f"{pair.predicted / 2**20:.2f}", f"{pair.measured / 2**20:.2f}", f"{pair.ratio:.3f}"
            table.add_row(name, str(rank), *cells)
    return table


def _pair(pair: Pair) -> tuple[str, str, str]:
    ratio = f"{pair.ratio:.3f}" if pair.predicted else ""
    return f"{pair.predicted * 1e3:.1f}" if pair.predicted else "", f"{pair.measured * 1e3:.1f}", ratio


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _plain(found: dict[str, dict[str, Found]]) -> dict[str, Any]:
    def pair(one: Pair) -> dict[str, float]:
        return {"predicted": one.predicted, "measured": one.measured}

    return {
        model: {
            name: {
                "iteration_s": pair(one.iteration),
                "predicted_by_one_rank_s": one.before,
                "step_s": pair(one.step),
                "corrected_iteration_s": pair(one.corrected),
                "corrected_step_s": pair(one.corrected_step),
                "unexplained": one.unexplained,
                "kinds_s": {kind: pair(times) for kind, times in one.kinds.items()},
                "held_bytes": [pair(rank) for rank in one.held],
                "recorded_steps": one.recorded,
                "quiet_steps": one.quiet,
                "steps": one.steps,
                "fastest_s": one.fastest,
                "no_core": one.delay,
            }
            for name, one in plans.items()
        }
        for model, plans in found.items()
    }


if __name__ == "__main__":
    main()
