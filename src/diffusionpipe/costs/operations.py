"""The time of a model's layers, operation by operation, and the figures that follow from it; plain data.

An operation with W floating-point operations and Q bytes takes at least max(W / peak, Q / bandwidth) on a device: the
roofline (Williams, Waterman, Patterson, 2009, https://doi.org/10.1145/1498765.1498785). Operations that run side by
side share both. So n of them together take at least max(sum W / peak, sum Q / bandwidth), and one after the other at
least the sum of their own limits. The quotient is the most that running side by side could ever gain.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from diffusionpipe.errors import FileFormatError
from diffusionpipe.files.input_file import problem_of_file
from diffusionpipe.units import Seconds

FORMAT = "diffusionpipe operations"
VERSION = 1
HELD = 0.8
"""The part of the time that the operations of `holding` take together, by default."""
OUTSIDE = "outside operations"
"""The time of a layer in which none of torch's operations runs: the host's calls, waits, and code of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationUse:
    """The calls, time and work of one kind of operation in one pass (forward or backward) of one layer."""

    layer: str
    component: str
    is_backward: bool
    name: str
    """The operation's name in torch, e.g. "addmm"; or `OUTSIDE`."""
    calls: int
    seconds: Seconds
    """The time of all calls together."""
    flops: float
    num_bytes: float
    computing: Seconds
    """The least time of the floating-point operations of all calls, at the device's peak rate."""
    moving: Seconds
    """The least time in which the bytes of all calls are moved, at the device's bandwidth."""

    @property
    def least(self) -> Seconds:
        """The least seconds that the roofline allows: the larger one of its computing and moving times."""
        return max(self.computing, self.moving)

    @property
    def share(self) -> float:
        """The time at the roofline as a part of the measured time; 0 where the measured time is 0.

        It is above 1 where the bytes come from a cache.
        """
        return self.least / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationReport:
    """The operations of all layers, forward and whole backward, at one number of samples, on one device."""

    device: str
    source: str
    """"measured" or "analytic"."""
    precision: str
    samples: int
    peak: float
    """Floating-point operations a second that the device can do at most, or did in one large product."""
    bandwidth: float
    """Bytes a second that it can move at most, or moved in one large copy."""
    uses: tuple[OperationUse, ...]

    @property
    def seconds(self) -> Seconds:
        """The time of all operations together, in seconds."""
        return sum(use.seconds for use in self.uses)

    def of_layer(self, name: str) -> Seconds:
        """Seconds of one layer, forward and backward together, at the report's number of samples."""
        return sum(use.seconds for use in self.uses if use.layer == name)


def holding(uses: Sequence[OperationUse], part: float = HELD) -> tuple[OperationUse, ...]:
    """The fewest operations that together take the part `part` of the time, longest first; by default four fifths."""
    total, held, found = sum(use.seconds for use in uses), 0.0, []
    for use in sorted(uses, key=lambda use: -use.seconds):
        if held >= part * total:
            break
        found.append(use)
        held += use.seconds
    return tuple(found)


def side_by_side(uses: Sequence[OperationUse]) -> float:
    """The most that running these operations side by side could gain: a factor of speed at the roofline; 1: nothing."""
    together = max(sum(use.computing for use in uses), sum(use.moving for use in uses))
    return sum(use.least for use in uses) / together if together else 1.0


def report_to_text(report: OperationReport) -> str:
    """The JSON text of the report, with its total time, the gain of `side_by_side`, and the operations of `holding`."""
    named = [[use.layer, "backward" if use.is_backward else "forward", use.name] for use in holding(report.uses)]
    head = {"format": FORMAT, "version": VERSION}
    figures = {"seconds": report.seconds, "side_by_side": side_by_side(report.uses), "holding_80_percent": named}
    return json.dumps(head | {"report": asdict(report)} | figures, indent=1) + "\n"


def read_report(path: Path) -> OperationReport:
    """The report in a file that `report_to_text` wrote.

    Raises:
        FileFormatError: the file cannot be read or has another format; the message has the command that makes one.
    """
    if problem := problem_of_file(path):
        raise FileFormatError(f"{path}: {problem}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict) and data.get("format") == FORMAT and data.get("version") == VERSION:
            if not isinstance(data["report"], dict):
                raise TypeError('"report" must be an object')
            uses = tuple(OperationUse(**use) for use in data["report"].pop("uses"))
            return OperationReport(**data["report"], uses=uses)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FileFormatError(f"{path} is not a file of operations: {error}") from error
    made = f"diffusionpipe profile RECIPE --operations {path.stem}-operations.json"
    raise FileFormatError(f"{path} has no operations; make them with: {made}")
