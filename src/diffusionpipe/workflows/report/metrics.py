"""The numbers of a run by step as curves of a page, and two answers from them: does it learn, how fast is it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean, median
from typing import TypeGuard

from diffusionpipe.files.growing_lines import GrowingLines
from diffusionpipe.files.input_file import problem_of_file
from diffusionpipe.trainer.reporting.metrics import METRICS, row_of
from diffusionpipe.trainer.reporting.rank_memory import FOLDER, read_memory
from diffusionpipe.viz.metrics import smoothed
from diffusionpipe.viz.thinning import thinned
from diffusionpipe.workflows.report.figures import Json, absent, count, number, percent, seconds
from diffusionpipe.workflows.report.trend import trend

POINTS = 1000
"""About the most points of a curve in a page."""
_RATES = ("learning_rate", "samples_per_s", "gradient_norm", "step_s", "data_s", "update_s", "bubble", "noise_scale")
_MEMORY = ("memory_allocated_gib", "memory_reserved_gib", "memory_peak_gib", "host_memory_gib")
_UNITS = {"_s": "s", "_gib": "GiB", "samples_per_s": "samples/s"}
_MOST_RANKS = 8
"""The most ranks whose memory is drawn."""
_SMOOTHED = 40
"""From this number of steps on a loss, and each time and rate of a step, is also drawn smoothed."""
_NOISY = ("loss", "samples_per_s", "gradient_norm", "step_s", "data_s", "update_s", "iteration_s", "bubble")
_LATE = 0.1
"""The fraction of a step from which on a wait for the batch is called long."""
FEW_STEPS, FEW_VALIDATIONS = 20, 6
"""The least numbers of steps and of validations from which a verdict is made.

Six validations that fall one after the other are the least that chance alone would not show now and then."""

Row = Mapping[str, float | None]


class Metrics:
    """The numbers of a run by name and step. Mutable: grows with the file, and holds 16 bytes a number."""

    def __init__(self, rows: Iterable[Row] = (), problem: str = "") -> None:
        self.problem, self.unreadable, self.has_rows = problem, 0, False
        self._curves: dict[str, tuple[array[float], array[float]]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Add the finite numbers in a line of metrics.jsonl."""
        self.has_rows, step = True, row["step"] or 0
        for key, value in row.items():
            if key != "step" and _is_number(value):
                steps, values = self._curves.setdefault(key, (array("d"), array("d")))
                steps.append(step)
                values.append(value)

    def columns(self, key: str) -> tuple[Sequence[float], Sequence[float]]:
        """(steps, values) of the number with this name, in the order of lines; ((), ()) if no line has it."""
        return self._curves.get(key, ((), ()))

    def curve(self, key: str, last: int | None = None) -> list[tuple[float, float]]:
        """(step, value) of each line that has a number with this name; of the last `last` of them, None: of all."""
        steps, values = self.columns(key)
        start = 0 if last is None else max(0, len(steps) - last)
        return list(zip(steps[start:], values[start:], strict=True))

    @property
    def names(self) -> list[str]:
        """The names of all numbers, in the order of their first lines."""
        return list(self._curves)

    @property
    def last(self) -> int:
        """The last step with a loss; 0 without one."""
        return int(max(self.columns("loss")[0], default=0))


def _is_number(value: float | None) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


class MetricsFile:
    """Reads a run's metrics.jsonl as it grows. Mutable: each call of `read` reads only new lines."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS
        self._lines, self._metrics, self._unreadable = GrowingLines(self._path), Metrics(), 0

    def read(self) -> Metrics:
        """The numbers in all complete lines, also of a run that was killed in the middle of a line."""
        if not self._path.exists():
            return Metrics(problem=f"there is no {METRICS}; the run has not finished a step yet")
        if problem := problem_of_file(self._path):
            return Metrics(problem=f"{METRICS}: {problem}")
        try:
            is_new, lines = self._lines.more()
        except OSError as error:
            return Metrics(problem=f"{METRICS} cannot be read: {error.strerror}")
        # The file was replaced or cut, so nothing that was read of it holds.
        if is_new:
            self._metrics, self._unreadable = Metrics(), 0
        for line in filter(bytes.strip, lines):
            row = row_of(line.decode("utf-8", errors="replace"))
            if row is None:
                self._unreadable += 1
            else:
                self._metrics.add(row)
        found = self._metrics
        found.unreadable = self._unreadable + self._lines.is_cut
        nothing = f"{METRICS} has no complete line; the run has not finished a step yet"
        found.problem = "" if found.has_rows else nothing
        return found


def curves_of(metrics: Metrics) -> list[Json]:
    """The page's charts of a run: for each a label, a unit, and lines of at most about `POINTS` points."""
    losses = [key for key in metrics.names if key == "loss" or key.startswith("loss/")]
    validation = [key for key in metrics.names if key.startswith("validation_loss") and "_t" not in key]
    by_time = [key for key in metrics.names if key.startswith("validation_loss_t")]
    groups: tuple[tuple[str, str, list[str]], ...] = (
        ("loss", "Loss", [*losses, *validation]),
        ("times", "Validation loss by time of the noise", by_time),
        *((key, _label(key), [key]) for key in _RATES),
        ("memory", "Memory of rank 0", [key for key in _MEMORY if key in metrics.names]),
    )
    drawn = {key for _, _, keys in groups for key in keys} | _UNDRAWN
    groups += tuple((key, _label(key), [key]) for key in metrics.names if key not in drawn)
    found: list[Json] = []
    for name, label, keys in groups:
        lines = [_line(metrics, key, POINTS) for key in keys]
        lines = [line for line in lines if line["points"]]
        if lines:
            found.append({"id": name, "label": label, "unit": _unit(keys[0]), "lines": lines, "file": METRICS})
    return found


def _label(key: str) -> str:
    """The name of a number in words, without its unit, and after it the model or the part that it is of.

    >>> _label("data_s"), _label("host_memory_gib"), _label("loss/unet")
    ('Waiting for the batch', 'Host memory', 'Loss, unet')
    """
    name, _, part = key.partition("/")
    words = _NAMES.get(name, name.removesuffix("_s").removesuffix("_gib").replace("_", " ").capitalize())
    return f"{words}, {part}" if part else words


_UNDRAWN = {"epoch", "wall"}
"""Names of numbers that are not drawn: they only say when a step was."""
_NAMES = {"iteration_s": "Running the schedule",
          "learning_rate": "Learning rate", "samples_per_s": "Speed", "gradient_norm": "Gradient norm",
          "step_s": "Time of a step", "data_s": "Waiting for the batch", "update_s": "Update",
          "bubble": "Idle part of the iteration", "noise_scale": "Gradient noise scale"}  # fmt: skip


def memory_curve(folder: Path) -> list[Json]:
    """A list with the page's chart of the ranks' memory by step; [] where the run kept none.

    Of many ranks only the `_MOST_RANKS` that use most are drawn.
    """
    kept = read_memory(folder)
    names = ("memory_allocated_gib", "host_memory_gib")
    key = next((name for name in names if any(name in row for rows in kept.values() for row in rows)), None)
    if key is None:
        return []
    peaks = {rank: max((row.get(key, 0.0) for row in rows), default=0.0) for rank, rows in kept.items()}
    shown = sorted(sorted(peaks, key=lambda rank: -peaks[rank])[:_MOST_RANKS])
    lines = [
        _line(Metrics(kept[rank]), key, POINTS // 2) | {"label": f"rank {rank}", "file": f"{FOLDER}/rank_{rank}.jsonl"}
        for rank in shown
    ]
    few = f", the {len(shown)} of {len(peaks)} ranks that use most" if len(shown) < len(peaks) else ""
    label = ("Memory of the devices" if key == names[0] else "Host memory of the ranks") + few
    return [{"id": "rank-memory", "label": label, "unit": "GiB", "lines": lines, "file": FOLDER}]


def _unit(key: str) -> str:
    return next((unit for end, unit in reversed(_UNITS.items()) if key.endswith(end)), "")


def _line(metrics: Metrics, key: str, most: int) -> Json:
    points = metrics.curve(key)
    flat: list[float] = []
    for step, value in thinned(points, most):
        flat += [int(step), float(f"{value:.6g}")]
    line: dict[str, object] = {"key": key, "label": _in_a_sentence(_label(key)), "points": flat, "of": len(points)}
    if len(points) >= _SMOOTHED and key.partition("/")[0] in _NOISY:
        means = smoothed([value for _, value in points], len(points) // 40)
        kept = thinned([(step, mean) for (step, _), mean in zip(points, means, strict=True)], most // 4)
        line["smooth"] = [one for step, mean in kept for one in (int(step), float(f"{mean:.6g}"))]
    return line


def _in_a_sentence(name: str) -> str:
    return name[:1].lower() + name[1:]


def learning_of(metrics: Metrics) -> Json:
    """The page's verdict whether the run learns: a word, a mood, and sentences with their numbers; see `_verdict`."""
    if metrics.problem:
        return absent(metrics.problem)
    held_out, trained = metrics.curve("validation_loss"), metrics.curve("loss")
    if len(held_out) >= FEW_VALIDATIONS:
        return _held_out(held_out)
    if len(trained) < FEW_STEPS:
        text = (
            f"{len(trained)} steps say too little beside the noise of the loss; this page judges from {FEW_STEPS} "
            f"steps or {FEW_VALIDATIONS} validations on."
        )
        return _verdict("Too early to say", "none", text)
    return _trained(trained, validations=len(held_out))


def _verdict(word: str, mood: str, *text: str | Json) -> Json:
    """The page's verdict: its "word", its "mood" ("good", "warn", "bad" or "none"), and its "text".

    The text is sentences, cut into texts and numbers for the page.
    """
    return {"word": word, "mood": mood, "text": list(text)}


def _held_out(curve: Sequence[tuple[float, float]]) -> Json:
    first, last = curve[0], curve[-1]
    best = min(curve, key=lambda point: point[1])
    shown = [_at(*first, "validation_loss"), _at(*last, "validation_loss"), _at(*best, "validation_loss")]
    span: list[str | Json] = [
        "Validation loss ",
        shown[0],
        f" at step {first[0]:,.0f}, ",
        shown[1],
        f" at step {last[0]:,.0f}. ",
    ]
    change = 1 - last[1] / first[1] if first[1] else 0.0
    key = f"1 - validation_loss @ step {last[0]:.0f} / validation_loss @ step {first[0]:.0f}"
    since = curve[curve.index(best) + 1 :]
    best_was: list[str | Json] = [] if best is last else ["The best was ", shown[2], f" at step {best[0]:,.0f}. "]
    way, way_since = trend([value for _, value in curve]), trend([value for _, value in since])
    if way > 0 or (way_since > 0 and last[1] >= first[1]):
        return _verdict("No", "bad", *span, *best_was, "It rises.")
    if way_since > 0:
        words = "It rises since, as where a run begins to learn its pictures by heart."
        return _verdict("It was", "warn", *span, *best_was, words)
    if way < 0:
        return _verdict("Yes", "good", *span, *best_was, "It has fallen by ", percent(change, METRICS, key), ".")
    words = f"Chance alone could order {len(curve)} validations so."
    return _verdict("It cannot be seen", "warn", *span, *best_was, words)


def _at(step: float, value: float, key: str) -> Json:
    return number(value, METRICS, f"{key} @ step {step:.0f}")


def _trained(curve: Sequence[tuple[float, float]], *, validations: int) -> Json:
    """The verdict whether a run learns, from the trends of its training loss over all steps and over the second half.

    `curve`: (step, loss). `validations`: the number of validations, which are too few for a verdict.
    """
    fifth, losses = len(curve) // 5, [value for _, value in curve]
    text: tuple[str | Json, ...] = (
        "Mean training loss ",
        _mean(curve[:fifth]),
        " over the first fifth of the steps, ",
        _mean(curve[-2 * fifth : -fifth]),
        " over the last but one, ",
        _mean(curve[-fifth:]),
        " over the last. ",
    )
    more = "Validation data (data.validation) would say more."
    if validations:
        more = f"Validations are judged from {FEW_VALIDATIONS} on; this run has {validations}."
    way, late = trend(losses), trend(losses[len(losses) // 2 :])
    if way < 0 and late > 0:
        return _verdict("It was", "warn", *text, "It has fallen, and rises in the second half. ", more)
    if way > 0 or late > 0:
        words = "It rises. " if way > 0 else "It rises in the second half. "
        return _verdict("No", "bad", *text, words, more)
    if way < 0 and late < 0:
        return _verdict("Yes", "good", *text, "It still falls. ", more)
    if way < 0:
        words = "It has fallen; in the second half no change is clearer than its noise. "
        return _verdict("It has", "good", *text, words, more)
    return _verdict("It cannot be seen", "warn", *text, "No change is clearer than the noise of the loss. ", more)


def _mean(part: Sequence[tuple[float, float]]) -> Json:
    key = f"mean(loss) of steps {part[0][0]:.0f} to {part[-1][0]:.0f}"
    return number(fmean(value for _, value in part), METRICS, key)


def usual(metrics: Metrics, key: str) -> tuple[float, str] | None:
    """(median of a number over all steps but the first, its origin in words); None without any."""
    steps, values = metrics.columns(key)
    if not steps:
        return None
    # The first step allocates memory and chooses kernels.
    first = 1 if len(steps) > 1 else 0
    return median(values[first:]), f"median({key}) of steps {steps[first]:.0f} to {steps[-1]:.0f}"


def speed_of(metrics: Metrics) -> Iterator[tuple[str, Json]]:
    """Yield (name, number for the page) of the median step, its parts, samples a second and idle share.

    Numbers that the run does not have are left out.
    """
    for name, key in (("step", "step_s"), ("iteration", "iteration_s"), ("update", "update_s"), ("data", "data_s")):
        if found := usual(metrics, key):
            yield name, seconds(*_in(found))
    if found := usual(metrics, "samples_per_s"):
        yield "rate", number(*_in(found), unit="samples/s")
    if found := usual(metrics, "bubble"):
        yield "idle", percent(*_in(found))


def step_in_words(metrics: Metrics) -> list[str | Json]:
    """The median step with its parts as a sentence, cut into texts and numbers; [] without the time of a step."""
    parts = dict(speed_of(metrics))
    if "step" not in parts:
        return []
    names = (("iteration", "running the schedule"), ("update", "the update"), ("data", "waiting for the batch"))
    text: list[str | Json] = ["A step takes ", parts["step"]]
    for place, (key, words) in enumerate((key, words) for key, words in names if key in parts):
        text += [": " if place == 0 else ", ", f"{words} ", parts[key]]
    text.append(". ")
    if "idle" in parts:
        text += ["While it runs the schedule a rank is idle for ", parts["idle"], " of the time, as the mean. "]
    return text


def late_batches(metrics: Metrics) -> list[str | Json]:
    """A sentence, cut into texts and numbers, if steps wait long for their batch; else []."""
    step, data = usual(metrics, "step_s"), usual(metrics, "data_s")
    if step is None or data is None or data[0] < _LATE * step[0]:
        return []
    share = percent(data[0] / step[0], METRICS, f"{data[1]} / {step[1]}")
    return ["Steps wait ", share, " of their time for the batch; more data.workers, or smaller pictures, help. "]


def _in(found: tuple[float, str]) -> tuple[float, str, str]:
    return found[0], METRICS, found[1]


def progress_of(metrics: Metrics, recipe: Mapping[str, object], *, is_running: bool) -> Json:
    """The page's part about progress: "step", the steps done, and where they are known "of", "left" and "epoch".

    "of": all steps of the run; "left": how long the rest takes at the last speed, while the run runs. `recipe`: its
    values by key.
    """
    asked = recipe.get("training.steps")
    found: dict[str, object] = {"step": count(metrics.last, METRICS, "last(step)")}
    if isinstance(asked, int):
        found["of"] = count(asked, "recipe.toml", "training.steps")
        latest = metrics.curve("step_s", last=20)
        left = asked - metrics.last
        if left > 0 and latest and is_running:
            key = f"(training.steps - last(step)) x mean(step_s) of steps {latest[0][0]:.0f} to {latest[-1][0]:.0f}"
            found["left"] = seconds(left * fmean(value for _, value in latest), METRICS, key)
    if epochs := metrics.curve("epoch", last=1):
        found["epoch"] = number(epochs[-1][1], METRICS, f"epoch @ step {epochs[-1][0]:.0f}", digits=3)
    return found
