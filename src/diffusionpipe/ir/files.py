"""Files of schedules, plans and timelines: versioned JSON that people can read and that round-trips exactly.

    {
      "format": "diffusionpipe-schedule",
      "version": 1,
      "name": "1f1b",
      "placement": {"stages": [...], "pipelines": [...]},
      "orders": [
        "0F0 0F1 0B0 0B1",
        "1F0 1B0 1F1 1B1"
      ],
      "messages": [],
      "fills": []
    }

Equal values have equal text, so a text can be compared, hashed and broadcast. A new kind of file is one more `Format`
beside its dataclass. Reading checks that the text is such a value, not that its orders are legal: **a caller that reads
a schedule or a plan passes its schedules to `diffusionpipe.timing.legal.check` before using them.**
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

from diffusionpipe.errors import FileFormatError
from diffusionpipe.files.input_file import read_named
from diffusionpipe.files.output_file import write_atomically
from diffusionpipe.files.versions import Document, Step, upgraded
from diffusionpipe.ir.alternatives import Alternatives
from diffusionpipe.ir.codec import decode, encode, layout
from diffusionpipe.ir.data_survey import Survey
from diffusionpipe.ir.plan import Plan
from diffusionpipe.ir.schedule import Schedule
from diffusionpipe.ir.timeline import Timeline

T = TypeVar("T")
MAX_PROBLEMS = 12


@dataclass(frozen=True, slots=True)
class Format(Generic[T]):
    """The name and dataclass of a kind of file, and the steps from each of its versions to the next.

    A field with a default may be added without a new version; anything else needs one.
    """

    name: str
    kind: type[T]
    steps: tuple[Step, ...] = ()
    """A function for each old version, oldest first, that makes a file's content one of the next version."""

    @property
    def version(self) -> int:
        """The version of the files that are written: 1, and one more for each step."""
        return len(self.steps) + 1


def _sample_of_each(plan: Document) -> Document:
    """The plan of version 1 as one of version 2: its only schedule for drawing samples becomes a list of one."""
    return plan | ({"sample": [plan["sample"]]} if "sample" in plan else {})


def _storage_of_encoders(plan: Document) -> Document:
    """The plan of version 2 as one of version 3, without the keys "offload_frozen" and "mesh.tensor".

    The first becomes the storage "host" in "encoders" if it was true; the second was always 1.
    """
    if plan.pop("offload_frozen", False):
        plan["encoders"] = "host"
    mesh = plan.get("mesh")
    if isinstance(mesh, dict) and mesh.get("tensor") == 1:
        del mesh["tensor"]
    return plan


SCHEDULE = Format("diffusionpipe-schedule", Schedule)
PLAN = Format("diffusionpipe-plan", Plan, (_sample_of_each, _storage_of_encoders))
TIMELINE = Format("diffusionpipe-timeline", Timeline)
ALTERNATIVES = Format("diffusionpipe-alternatives", Alternatives)
SURVEY = Format("diffusionpipe-survey", Survey)


def to_text(value: T, form: Format[T]) -> str:
    """The text of a file of this format that holds `value`, with a final newline.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    body = encode(value, form.kind)
    assert isinstance(body, dict)
    header = {"format": form.name, "version": form.version}
    entries = [f"  {json.dumps(key)}: {layout(item, 2)}" for key, item in {**header, **body}.items()]
    return "{\n" + ",\n".join(entries) + "\n}\n"


def from_text(text: str, form: Format[T], *, source: str) -> T:
    """The value that a file's text holds; `source` names the text in errors.

    Raises:
        FileFormatError: it is not JSON, or has another format or version, or wrong keys or values; all are named.
    """
    data = _parse(text, source)
    if not isinstance(data, dict):
        raise FileFormatError(f"{source}: must be a JSON object, as {form.name} files are; got {type(data).__name__}")
    found, version = data.pop("format", None), data.pop("version", None)
    if found != form.name:
        holds = f"holds {found!r}" if found is not None else 'has no key "format"'
        raise FileFormatError(f"{source}: {holds}; a file of format {form.name!r} is needed here")
    try:
        data = upgraded(data, version, form.steps)
    except ValueError as error:
        raise FileFormatError(
            f"{source}: {form.name} {error}; write the file again with this version, or use the DiffusionPipe that "
            "wrote it"
        ) from None
    problems: list[str] = []
    value = decode(form.kind, data, "", problems)
    if problems:
        rest = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise FileFormatError("\n  ".join([f"{source}: not a valid {form.name}", *problems[:MAX_PROBLEMS], *rest]))
    assert isinstance(value, form.kind)
    return value


def _parse(text: str, source: str) -> object:
    try:
        # Json would accept NaN and the last of two equal keys.
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{source}: not valid JSON: {error}; it may be truncated; write it again") from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = min(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key {repeated!r} appears twice in one object")
    return found


def _no_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number")


def write_file(value: T, path: Path, form: Format[T]) -> None:
    """Write `value` to `path` as a file of this format; the file is whole or not there.

    Raises:
        ConfigError: the file cannot be written; an old one is untouched.
        ValueError: a number is NaN or infinite.
    """
    write_atomically(path, to_text(value, form))


def read_file(path: Path, form: Format[T]) -> T:
    """The value that a file of this format holds.

    Raises:
        FileFormatError: the file is missing, unreadable or not of this format and version.
    """
    try:
        text = read_named(path)
    except OSError as error:
        raise FileFormatError(f"cannot read {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError:
        raise FileFormatError(f"{path}: not UTF-8 text, so it cannot be a {form.name}; check the path") from None
    except ValueError as error:
        raise FileFormatError(f"{path}: {error}, so it cannot be a {form.name}; check the path") from None
    return from_text(text, form, source=str(path))


def schedule_to_text(schedule: Schedule) -> str:
    """The JSON text of a schedule file that holds `schedule`."""
    return to_text(schedule, SCHEDULE)


def schedule_from_text(text: str, *, source: str = "schedule") -> Schedule:
    """The schedule in the JSON text of a schedule file; not checked for legality.

    Raises:
        FileFormatError: the text has another format; its message names the text as `source`.
    """
    return from_text(text, SCHEDULE, source=source)


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Write the schedule to `path` as a JSON file, which is whole or not there.

    Raises:
        ConfigError: the file cannot be written; an old one is untouched.
    """
    write_file(schedule, path, SCHEDULE)


def read_schedule(path: Path) -> Schedule:
    """The schedule in a JSON file; it is not checked for legality.

    Raises:
        FileFormatError: the file is missing, unreadable or no schedule file of a known version.
    """
    return read_file(path, SCHEDULE)


def plan_to_text(plan: Plan) -> str:
    """The JSON text of a plan file that holds `plan`."""
    return to_text(plan, PLAN)


def plan_from_text(text: str, *, source: str = "plan") -> Plan:
    """The plan in the JSON text of a plan file; its schedules are not checked for legality.

    Raises:
        FileFormatError: the text has another format; its message names the text as `source`.
    """
    return from_text(text, PLAN, source=source)


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan to `path` as a JSON file, which is whole or not there.

    Raises:
        ConfigError: the file cannot be written; an old one is untouched.
    """
    write_file(plan, path, PLAN)


def read_plan(path: Path) -> Plan:
    """The plan in a JSON file; its schedules are not checked for legality.

    Raises:
        FileFormatError: the file is missing, unreadable or no plan file of a known version.
    """
    return read_file(path, PLAN)


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Write the timeline to `path` as a JSON file, which is whole or not there.

    Raises:
        ConfigError: the file cannot be written; an old one is untouched.
        ValueError: a time is NaN or infinite.
    """
    write_file(timeline, path, TIMELINE)


def read_timeline(path: Path) -> Timeline:
    """The timeline in a JSON file.

    Raises:
        FileFormatError: the file is missing, unreadable or no timeline file of a known version.
    """
    return read_file(path, TIMELINE)
