"""What is trained: the rows of the table, the most telling first."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from diffusionpipe.ir.versions import Versions

STAGES = 4
ADAPTER_RATE = 1e-2
"""The best of 2e-3, 5e-3 and 1e-2 for the flushed run."""


class Task(StrEnum):
    """What a run learns."""

    DIGITS = "digits"
    """The whole U-Net, from random weights, all ten digits."""
    BASE = "base"
    """The same, but only the digits 0 to 4."""
    ADAPTERS = "adapters"
    """The digits 5 to 9, by adapters of the U-Net that has learnt 0 to 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How weights of batches in flight are treated, and what differs from the example's recipe."""

    name: str
    versions: Versions
    microbatches: int = 4
    optimizer: str = "AdamW"
    """Or "Muon" for the matrices of linear layers, AdamW for all else."""
    learning_rate: float = 2e-3
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Of AdamW, in place of the recipe's."""
    is_clipped_by_block: bool = True
    """Each stage's gradient by its own norm; else all by the norm of all."""
    is_predicted: bool = False
    """Old weights are read as if the last step before them went on as long as they are old."""
    fading: int = 0
    """Steps in which the rate by staleness fades; 0: one rate for all stages."""
    length: float = 1.0
    """Steps of the run, as a multiple of the flushed run's."""
    flushed_until: float = 0.0
    """Part of the run before which it is flushed,"""
    flushed_from: float = 1.0
    """and after which it is."""
    task: Task = Task.DIGITS


def _delayed(name: str, **others: object) -> Setting:
    return Setting(name=f"delayed, {name}", versions=Versions.DELAYED, **others)  # type: ignore[arg-type]


FAMILY = (
    Setting(name="flushed", versions=Versions.FLUSHED, is_clipped_by_block=False),
    Setting(name="stashed, m = 4", versions=Versions.STASHED),
    Setting(name="delayed", versions=Versions.DELAYED),
    Setting(name="stashed, m = 1", versions=Versions.STASHED, microbatches=1),
    Setting(name="newest, m = 1", versions=Versions.NEWEST, microbatches=1),
    Setting(name="vertical, m = 1", versions=Versions.VERTICAL, microbatches=1),
    Setting(name="predicted, m = 1", versions=Versions.STASHED, microbatches=1, is_predicted=True),
    Setting(name="stashed, m = 1, flushed_from = 0.5", versions=Versions.STASHED, microbatches=1, flushed_from=0.5),
    Setting(name="stashed, m = 1, rate by staleness", versions=Versions.STASHED, microbatches=1, fading=100),
)

DELAYED = (
    _delayed("half the rate", learning_rate=1e-3),
    _delayed("predicted by one step", is_predicted=True),
    _delayed("flushed_from = 0.5", flushed_from=0.5),
    _delayed("flushed until 0.25", flushed_until=0.25),
    _delayed("Muon", optimizer="Muon"),
    _delayed("beta1 = 0.95", arguments={"betas": (0.95, 0.999)}),
    _delayed("beta1 = 0.8", arguments={"betas": (0.8, 0.999)}),
    _delayed("beta2 = 0.99", arguments={"betas": (0.9, 0.99)}),
    _delayed("half the rate, predicted by one step", learning_rate=1e-3, is_predicted=True),
)

LONGER = (
    Setting(name="stashed, m = 4, 500 steps", versions=Versions.STASHED, length=1.25),
    Setting(name="stashed, m = 1, 500 steps", versions=Versions.STASHED, microbatches=1, length=1.25),
    _delayed("500 steps", length=1.25),
)

MORE = (
    Setting(name="flushed, each stage clipped alone", versions=Versions.FLUSHED),
    Setting(name="vertical, m = 4", versions=Versions.VERTICAL),
    Setting(name="newest, m = 4", versions=Versions.NEWEST),
)

BASE = Setting(name="base", versions=Versions.FLUSHED, is_clipped_by_block=False, task=Task.BASE)
"""What the model learns before it gets adapters."""


def _adapted(one: Setting, name: str = "", *, length: float = 0.5) -> Setting:
    name = f"adapters, {name or one.name}"
    return replace(one, name=name, learning_rate=ADAPTER_RATE, length=length, task=Task.ADAPTERS)


ADAPTED = (
    _adapted(FAMILY[0]),
    _adapted(FAMILY[0], "not trained", length=0.0),
    *(_adapted(one) for one in (*FAMILY[1:5], FAMILY[6])),
    _adapted(FAMILY[1], "stashed, m = 4, 250 steps", length=0.625),
)

TABLES = {
    "What was learnt": (*FAMILY, *DELAYED, *LONGER, *MORE),
    "What adapters have learnt": ADAPTED,
}
"""Each beside the flushed run of the same samples, its first row."""
SETTINGS = tuple(setting for table in TABLES.values() for setting in table)
