"""Which versions of the weights a window reads: one row for each member of the family.

row         staleness of F              of B        with 4 stages and one micro-batch
stashed     as far as it leads          as its F    3 2 1 0
vertical    as on the first stage       as its F    3 3 3 3
delayed     d                           d           d d d d, d at least 3
newest      as far as it leads          0           3 2 1 0, and 0 0 0 0 in the backward
predicted   as far as it leads          as its F    3 2 1 0, read ahead by as much
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Op, Schedule
from diffusionpipe.ir.action import Reading
from diffusionpipe.ir.versions import Versions
from diffusionpipe.passes.overlap import turn_of
from diffusionpipe.timing.held import forwards_held


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A forward of a window, by the batches and steps on which the age of its weights depends."""

    lead: int
    """The number of batches by which the forward leads."""
    first_lead: int
    """The number of batches by which the first stage's forward of the same micro-batch leads."""
    delay: int
    """The delay that was asked for, in steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """Two functions that give, in versions, the age of the weights that a forward and its backward read."""

    forward: Callable[[Forward], int]
    backward: Callable[[Forward], int]
    is_predicted: bool = False
    """Whether the weights are predicted ahead by as many steps as they are old."""


def _own(forward: Forward) -> int:
    return forward.lead


def _first(forward: Forward) -> int:
    return forward.first_lead


def _given(forward: Forward) -> int:
    return forward.delay


def _nothing(forward: Forward) -> int:
    return 0


ROWS: Mapping[Versions, VersionRow] = {
    Versions.STASHED: VersionRow(forward=_own, backward=_own),
    Versions.VERTICAL: VersionRow(forward=_first, backward=_first),
    Versions.DELAYED: VersionRow(forward=_given, backward=_given),
    Versions.NEWEST: VersionRow(forward=_own, backward=_nothing),
    Versions.PREDICTED: VersionRow(forward=_own, backward=_own, is_predicted=True),
}


def with_versions(window: Schedule, versions: Versions, delay: int = 1) -> Schedule:
    """The window whose forwards and backwards state the age of the weights that they read.

    `delay`: the age for `Versions.DELAYED`, in steps; it has no effect with others.

    Raises:
        ConfigError: `versions` is DELAYED, and the delay is shorter than the lead of a forward.
    """
    leads = {(a.stage, a.microbatch): a.reading.lead for _, a in window.actions() if a.op is Op.F}
    row, lead = ROWS[versions], max(leads.values())
    if versions is Versions.DELAYED and delay < lead:
        stages = len({window.placement.stages[stage].weights for stage, _ in leads})
        turn = turn_of(window)
        # Forwards lead by (forwards ahead) / (micro-batches) batches, rounded up. A worker that holds h forwards runs h
        # - turn ahead, and both numbers are multiples of `turn`.
        needed = turn * -(-(max(forwards_held(window)) // turn - 1) // delay)
        raise ConfigError(
            f"a delay of {delay} needs at least {needed} micro-batches for {stages} stages; use more, or delay = {lead}"
        )
    orders = []
    for order in window.orders:
        read = []
        for action in order:
            if action.op in (Op.F, Op.B, Op.I):
                first = window.placement.pipeline_of(action.stage).stages[0]
                forward = Forward(
                    lead=leads[action.stage, action.microbatch],
                    first_lead=leads[first, action.microbatch],
                    delay=delay,
                )
                staleness = (row.forward if action.op is Op.F else row.backward)(forward)
                predicted = staleness if row.is_predicted else 0
                reading = Reading(lead=action.reading.lead, staleness=staleness, predicted=predicted)
                action = replace(action, reading=reading)
            read.append(action)
        orders.append(tuple(read))
    return replace(window, orders=tuple(orders))
