"""Orders from outside: files that say in which order every rank works. The ending of the name says what they hold.

    .csv     torch.distributed.pipelining's compute-only CSV (`ir.torch_csv`)
    .json    a schedule file (`ir.files`), as `diffusionpipe schedule --out` writes it
    .rules   rules for any number of ranks and micro-batches (`rules_text`)

Places in errors are places in the file: `line 2, cell 3` of a CSV, `orders[1], action 2` of a schedule file.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from diffusionpipe.errors import ConfigError, ScheduleError
from diffusionpipe.files.input_file import read_named
from diffusionpipe.ir import Schedule
from diffusionpipe.ir.files import schedule_from_text
from diffusionpipe.ir.placement import WHOLE
from diffusionpipe.ir.torch_csv import place_in_file, schedule_from_csv, schedule_from_rows
from diffusionpipe.schedules.building.shapes import FORWARD, SPLIT, TRAIN
from diffusionpipe.schedules.files.rules import schedule_by_rules
from diffusionpipe.schedules.files.rules_text import rules_from_text
from diffusionpipe.timing.legal import check

RULES = ".rules"
ENDINGS = (".csv", ".json", RULES)
MAX_PROBLEMS = 8


def is_order_file(name: str) -> bool:
    """Whether the name ends as a file of orders does: in .csv, .json or .rules, in any case of letters."""
    return Path(name).suffix.lower() in ENDINGS


def read_orders(
    path: Path,
    num_workers: int | None = None,
    num_microbatches: int | None = None,
    *,
    names: tuple[str, str] = ("--ranks", "--microbatches"),
) -> Schedule:
    """The legal schedule that a file of orders states, with the name of the file.

    Args:
        path: the file; its ending names its kind.
        num_workers: ranks, before stages are replicated; None: as many as in the file.
        num_microbatches: of one iteration, over all of its pipelines; None: as many as in the file.
        names: the names of these two in errors.

    Raises:
        ConfigError: the file cannot be read, is a file of another kind, has other sizes, or needs some.
        ScheduleError: its orders are illegal; names every problem with its place in the file.
    """
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise ConfigError(f"{path}: the orders of ranks are in files whose names end in {', '.join(ENDINGS)}")
    text = _text(path)
    if ending == RULES:
        if num_workers is None or num_microbatches is None:
            raise ConfigError(f"{path}: rules suit any number of ranks and micro-batches; give {' and '.join(names)}")
        try:
            rules = rules_from_text(text, source=str(path))
            return schedule_by_rules(rules, num_workers, num_microbatches, name=path.name)
        except ConfigError as error:
            # Errors in the text of the rules name the file already.
            raise ConfigError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    schedule = _given_orders(path, text, is_csv=ending == ".csv")
    own, wanted = (schedule.num_workers, schedule.num_microbatches()), (num_workers, num_microbatches)
    problems = [
        f"{path}: it has orders for {has} {what}, but {name} is {wants}; use {has}, or another file"
        for has, what, name, wants in zip(own, ("ranks", "micro-batches"), names, wanted, strict=True)
        if wants not in (None, has)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return schedule


def _text(path: Path) -> str:
    try:
        return read_named(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of a file of orders") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text, so it has no orders; check the path") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}, so it has no orders; check the path") from None


def _given_orders(path: Path, text: str, *, is_csv: bool) -> Schedule:
    """The legal schedule that the text of a CSV or schedule file states, with the name of the file.

    Raises:
        ScheduleError: it cannot be read, or its orders are illegal; names every problem with its place in the file.
    """
    try:
        schedule = schedule_from_csv(text) if is_csv else schedule_from_text(text, source=str(path))
        _check_orders(schedule)
    except ScheduleError as error:
        raise _illegal(error, str(path), _places(text, is_csv=is_csv)) from None
    except csv.Error as error:
        raise ScheduleError([f"{path}: this is not a CSV file: {error}"]) from None
    return replace(schedule, name=path.name)


def orders_from_rows(rows: Sequence[Sequence[str]], *, name: str) -> Schedule:
    """The legal schedule that rows of actions state, one row for each rank, in the cells of `ir.torch_csv`.

    Raises:
        ScheduleError: they are illegal; names every problem with its rank and position, counted from 0.
    """
    try:
        schedule = schedule_from_rows(rows, name=name, place=_position)
        _check_orders(schedule)
    except ScheduleError as error:
        raise _illegal(error, name, _places_in_rows(rows, _position)) from None
    return schedule


def _position(rank: int, number: int) -> str:
    return f"rank {rank}, position {number}"


def _check_orders(schedule: Schedule) -> None:
    """Check that the schedule has actions, no others than F, B, I and W, and that it is legal.

    Raises:
        ScheduleError: it is not so.
    """
    ops = dict.fromkeys(action.op for _, action in schedule.actions())
    if not ops:
        raise ScheduleError(["there are no actions; list the actions of every rank"])
    if beyond := ", ".join(op for op in ops if op not in SPLIT | TRAIN):
        raise ScheduleError([f"there are the actions {beyond}; list only F, B, I and W, the rest is added"])
    check(schedule)


def _illegal(error: ScheduleError, source: str, places: Mapping[str, str]) -> ScheduleError:
    """The same error with the name of its source, and before each problem the place of the action that it names.

    `places`: text of an action -> its place. After eight problems only the number of the others follows.
    """
    problems = [_located(problem, places) for problem in error.problems[:MAX_PROBLEMS]]
    more = [f"  and {len(error.problems) - MAX_PROBLEMS} more"] if len(error.problems) > MAX_PROBLEMS else []
    return ScheduleError([f"{source}: the orders are illegal:", *(f"  {one}" for one in problems), *more])


_ACTION = re.compile(r"\b\d+[A-Z][A-Z_]*\d+\b")


def _places(text: str, *, is_csv: bool) -> Mapping[str, str]:
    """Text of an action -> its place in the file, such as "line 2, cell 3"; the last place if there are several."""
    if is_csv:
        return _places_in_rows(csv.reader(io.StringIO(text)), place_in_file)
    found: dict[str, str] = {}
    for rank, order in enumerate(schedule_from_text(text).orders):
        found |= {str(action): f"orders[{rank}], action {number}" for number, action in enumerate(order)}
    return found


def _places_in_rows(rows: Iterable[Sequence[str]], place: Callable[[int, int], str]) -> Mapping[str, str]:
    found: dict[str, str] = {}
    for number, row in enumerate(rows):
        for cell, word in enumerate(row):
            action, where = word.strip(), place(number, cell)
            found[action] = where
            for op in ("I", "W"):  # of a B that is read as I and W
                found.setdefault(action.replace("B", op), where)
    return found


def _located(problem: str, places: Mapping[str, str]) -> str:
    """The text of a problem, after the place of the first action that it names; unchanged if it has a place already.

    `places`: text of an action -> its place.
    """
    words = (word for word in _ACTION.findall(problem) if word in places)
    action = next(words, None)
    # Not where the problem has a place already.
    return problem if action is None or "line " in problem or "position " in problem else f"{places[action]}: {problem}"


def untrainable(schedule: Schedule) -> Iterator[str]:
    """One sentence for each reason why no model can train with this legal schedule; none for a trainable one."""
    placement = schedule.placement
    if idle := set(range(schedule.num_workers)) - {stage.worker for stage in placement.stages}:
        yield f"rank {min(idle)} has no stage; give every rank one"
    for number, pipeline in enumerate(placement.pipelines):
        whose = f"pipeline {number}" if len(placement.pipelines) > 1 else "the schedule"
        if not pipeline.stages:
            yield f"{whose} has no stages; remove it"
        elif pipeline.ops == FORWARD:
            yield f"{whose} has only forwards; add the backwards"
        elif pipeline.ops not in (TRAIN, SPLIT):
            yield f"{whose} has the ops {', '.join(sorted(pipeline.ops))}; use F and B, or F, I and W"
        if len(set(pipeline.microbatches)) > 1:
            yield f"{whose} has micro-batches of {', '.join(map(str, pipeline.microbatches))} samples; make them equal"
        if [placement.stages[stage].weights for stage in pipeline.stages] != list(range(len(pipeline.stages))):
            yield f"{whose} does not take its blocks in the order 0, 1, 2, ...; number them in forward order"
        if any(placement.stages[stage].share != WHOLE for stage in pipeline.stages):
            yield f"{whose} has replicas of stages; give one stage a block, and set pipeline.replicas"
