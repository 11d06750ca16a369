"""Recorded plans: what was asked, stated in full, and what was answered.

plans/questions.json      for each plan its cell, profile, cluster, workload and given sizes, and the answer
plans/NAME.json.xz        the plan file
profiles/NAME.json.xz     the profiles of that version; those that are shipped may change
clusters/NAME.json
"""

import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from diffusionpipe.costs import Cluster, Profile
from diffusionpipe.costs.files import cluster_from_text, profile_from_text
from diffusionpipe.holding import DEVICE, HOST, Workload, plain_states
from diffusionpipe.ir import Plan
from diffusionpipe.ir.files import plan_from_text
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import stored_as
from diffusionpipe.planner.search.proposal import Proposal, predict

FOLDER = Path(__file__).parent
TOLERANCE = 1e-9
"""Relative, of simulated times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the planner found, and what the simulator said of it. Times are seconds as `float.hex`."""

    layout: str
    step: str
    iteration: str
    peak: tuple[int, ...]
    """Bytes that each worker holds at most."""
    overflow: int
    """Of the fullest device, in bytes; negative: what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a plan was made for. Every field of the workload is written out: its defaults may change."""

    name: str
    cell: str
    profile: str
    cluster: str
    workload: Mapping[str, Any]
    given: Mapping[str, Any]
    """Sizes that the search keeps to; the others are free."""
    answer: Answer | None
    """None: nothing fits."""


def questions() -> tuple[Question, ...]:
    """All that are recorded."""
    rows = json.loads((FOLDER / "plans" / "questions.json").read_text(encoding="utf-8"))
    return tuple(Question(**{**row, "answer": row["answer"] and Answer(**row["answer"])}) for row in rows)


def setting_of(question: Question) -> Setting:
    """As the planner wants it."""
    given = dict(question.given)
    is_on_host = given.pop("offload_frozen")
    return Setting(
        profile=recorded_profile(question.profile),
        cluster=_cluster(question.cluster),
        workload=_workload_of(question.workload),
        given=Given(**given, encoders=None if is_on_host is None else _PLACES[is_on_host].name),
    )


_PLACES = {False: DEVICE, True: HOST}


def _workload_of(recorded: Mapping[str, Any]) -> Workload:
    """The workload of a record, whose words are those of the version that wrote it."""
    place, width = _PLACES[recorded["offload_frozen"]], recorded["frozen_bytes"]
    storage = DEVICE if width is None else DEVICE.narrow(width)
    return Workload(
        batch=recorded["batch"],
        states=plain_states(
            parameter=recorded["parameter_bytes"],
            gradient=recorded["gradient_bytes"],
            master=recorded["master_bytes"],
            optimizer=recorded["optimizer_bytes"],
            ema=recorded["ema_bytes"],
            has_backup=recorded["has_backup"],
        ),
        frozen=storage,
        encoders=storage.at(place),
        checkpointed=tuple(recorded["checkpointed"]),
        encode_chunk=recorded["encode_chunk"],
    )


def recorded_plan(question: Question) -> Plan:
    """The plan file, read by today's code."""
    path = FOLDER / "plans" / f"{question.name}.json.xz"
    return plan_from_text(unpacked(path), source=str(path))


def predicted(question: Question, plan: Plan) -> Proposal:
    """What today's simulator says of a plan for the question's machines."""
    setting = setting_of(question)
    return predict(stored_as(setting, plan.encoders), plan.train, plan.blocks, plan.mesh)


def unpacked(path: Path) -> str:
    """The text of an xz file."""
    return lzma.decompress(path.read_bytes()).decode()


def pack(text: str, path: Path) -> None:
    """Write a text as xz, the same bytes whenever it is done."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


@cache
def recorded_profile(name: str) -> Profile:
    """A profile as that version shipped it."""
    path = FOLDER / "profiles" / f"{name}.json.xz"
    return profile_from_text(unpacked(path), source=str(path))


@cache
def _cluster(name: str) -> Cluster:
    path = FOLDER / "clusters" / f"{name}.json"
    return cluster_from_text(path.read_text(encoding="utf-8"), source=str(path))
