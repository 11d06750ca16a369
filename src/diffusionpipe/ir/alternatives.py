"""The layouts that a search looked at, and the reason for the one that it chose: a file beside the plan."""

from dataclasses import dataclass
from hashlib import sha256

from diffusionpipe.ir.plan import Plan
from diffusionpipe.units import Bytes, Seconds


@dataclass(frozen=True, slots=True)
class HeldItem:
    """The kind and the bytes of one item of a device's memory, such as "activations"."""

    kind: str
    size: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A layout that a search looked at, with its predicted times and memory."""

    name: str
    """The schedule, or the system that would run it."""
    sizes: str
    """Stages, copies and micro-batches in words."""
    step: Seconds
    """The predicted time of a step, in seconds."""
    samples_per_second: float
    bubble: float
    """The idle part of all devices' time, 0 to 1."""
    memory: Bytes
    """Bytes that the fullest device holds at its peak."""
    overflow: Bytes
    """Bytes by which the fullest device's peak exceeds its memory; 0 or less: the layout fits."""
    found: str
    """The source of the figures: "simulated", "estimated", or "other" for another system's layout, estimated."""
    is_chosen: bool = False
    items: tuple[HeldItem, ...] = ()
    """The items of the fullest device's memory; () but for the layout that was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """The result of a search, as its file beside the plan holds it: the layouts, the choice and the reason."""

    plan: str
    """The mark of the plan that was chosen, by `mark_of`."""
    verdict: str
    """The reason for the plan, in a sentence or two."""
    remarks: tuple[str, ...]
    """Further sentences about the choice, such as a warning that a device is almost full."""
    layouts: tuple[Alternative, ...]
    estimated: int = 0
    """The number of layouts whose time was estimated."""
    simulated: int = 0
    """The number of layouts that were simulated in full."""


def mark_of(plan: Plan, text: str) -> str:
    """The mark of a plan: 16 hexadecimal digits, a hash of its mesh, its blocks and `text`.

    `text` is the text of its training schedule. Plans with equal layouts and orders have equal marks.
    """
    return sha256(f"{plan.mesh}\n{plan.blocks}\n{text}".encode()).hexdigest()[:16]
