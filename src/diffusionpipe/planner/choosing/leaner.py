"""Finds plans that leave more memory free, if the chosen one almost fills a device."""

from dataclasses import dataclass, replace

from diffusionpipe.costs.cluster import with_memory
from diffusionpipe.planner.choosing.asking import Asking
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.choosing.chosen import Choice
from diffusionpipe.planner.choosing.explain import Remark
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE, estimated_merits, fullest, merits_of
from diffusionpipe.planner.choosing.rows import GIB, smallest_device, unit_of
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.units import Bytes

FULL = 0.9
"""A plan that takes more than this part of a device leaves little room for memory that no plan counts: fragments, other
programs."""
SLOWER = 0.1
"""Plans whose steps take longer by at most this part are offered in its place."""
LEANER = 0.02
"""A plan that leaves less than this part more of a device free is not offered."""
MOST_ASKED = 3
"""The most amounts of memory for which a plan is made: each takes as long as a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaner:
    """A plan for less memory than the devices have."""

    memory: Bytes
    """The limit of each device's memory with which the plan was made; smaller devices keep their own."""
    choice: Choice


def is_full(choice: Choice) -> bool:
    """Whether the plan takes more than 90 % of a device's memory."""
    return choice.merits.fullness > FULL


def leanest(choice: Choice, *, fill: bool | None = None) -> Leaner | None:
    """The plan for the least memory of those whose step takes at most 10 % longer; None where none is found.

    The amounts of memory come from layouts that the search has looked at, the smallest first. The planner gives the
    same choice to a caller that asks for one of them.
    """
    setting = choice.setting.whole or choice.setting
    # `best_choice` may return a near-tie of the fastest plan: with this limit that is not too slow either.
    limit = choice.step * (1 + SLOWER) / (1 + NEAR_TIE)
    for memory in _amounts(choice)[:MOST_ASKED]:
        less = replace(setting, cluster=with_memory(setting.cluster, memory))
        found = best_choice(less, fill=fill, limit=limit)
        if found:
            return Leaner(memory=memory, choice=found)
    return None


def _amounts(choice: Choice) -> list[Bytes]:
    """The amounts of memory, ascending, for which a leaner plan may exist, in bytes rounded to hundredths of a GiB.

    They are the memory of leaner layouts of the search that are fast enough, and 90 % of the smallest device.
    """
    setting, judge = choice.setting, Judge(setting=choice.setting)
    merits = [merits_of(setting, *pair) for pair in choice.search.finalists]
    merits += [estimated_merits(judge, one) for one in choice.search.judged if one.score <= choice.step * (1 + SLOWER)]
    smallest, taken = smallest_device(setting), choice.merits.fullness
    found = [one.fullness for one in merits if one.step <= choice.step * (1 + SLOWER)]
    parts = sorted(part for part in {*found, FULL} if part <= taken - LEANER)
    hundredths = dict.fromkeys(-(-round(part * smallest) * 100 // GIB) for part in parts)
    return [hundredth * GIB // 100 for hundredth in hundredths]


def warning(choice: Choice, leaner: Leaner | None, asking: Asking) -> Remark:
    """A remark that a device is almost full, and how to ask for the leaner plan; `leaner` is None if none was found."""
    rank, part = fullest(choice.setting, choice.proposal)
    name, unit = unit_of(choice.setting.cluster.devices[rank].memory)
    total = choice.setting.cluster.devices[rank].memory
    text = (
        f"Warning: the plan takes {part:.0%} of the memory of rank {rank}, {part * total / unit:.1f} of "
        f"{total / unit:.1f} {name}: fragments or another program may need the rest."
    )
    if leaner is None:
        return Remark(text=f"{text} No leaner layout was found whose step takes at most {SLOWER:.0%} longer.")
    own = leaner.choice
    most = max(use.total for use in own.proposal.memory)
    text += (
        f" The leanest layout whose step takes at most {SLOWER:.0%} longer, {own.sizes}, takes {most / unit:.1f} "
        f"{name} and {own.step * 1e3:.1f} ms a step ({own.step / choice.step - 1:+.1%}):"
    )
    return Remark(text=text, way=asking.memory(leaner.memory))
