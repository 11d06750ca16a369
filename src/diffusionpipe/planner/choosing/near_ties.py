"""Chooses among the plans that are about as fast as the fastest.

Predictions are not better than a percent or two, so a plan that is faster by less is not known to be faster. Less
memory and a simpler plan are sure. So of the plans within `NEAR_TIE` of the fastest step the choice is the simplest of
those that leave at least `SAVING` more of the fullest device free; where none does, the simplest of those that leave
about as much.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from diffusionpipe.ir import Sharded
from diffusionpipe.planner.choosing.rows import smallest_device, update_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.candidates import Candidate
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.pool import Judged
from diffusionpipe.planner.search.proposal import Proposal
from diffusionpipe.schedules import is_published as is_known
from diffusionpipe.schedules.several.opposed import JOINT
from diffusionpipe.schedules.traits import is_chain
from diffusionpipe.units import Seconds

NEAR_TIE = 0.015
"""Plans whose steps are longer than the fastest by at most this part of it are about as fast."""
SAVING = 0.1
"""A plan takes less memory than another if it leaves at least this part more of the fullest device's memory free."""

Complexity = tuple[int, bool, bool, bool, int, bool, bool]
SIMPLER = (
    "it has fewer devices",
    "it has copies of the model in place of a pipeline",
    "its copies hold all their parameters",
    "its copies hold all their optimizer states",
    "it has fewer stages",
    "its stages form a chain",
    "its order is a published one",
)
"""For each item of `Complexity` words for the advantage of a plan whose item is less; the first that differs counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merits:
    """The step, the memory and the complexity by which plans that are about as fast are compared."""

    step: Seconds
    fullness: float
    """Part of the memory of the fullest device that is taken."""
    complexity: Complexity
    """The number of devices and the yes-no traits that make a plan complex; less is simpler."""

    def is_near(self, fastest: "Merits") -> bool:
        """Whether the plan's step is at most 1.5 % longer than the fastest one's."""
        return self.step <= fastest.step * (1 + NEAR_TIE)

    def saves(self, other: "Merits") -> bool:
        """Whether the plan leaves at least a tenth more of the fullest device's memory free than `other`."""
        return self.fullness <= other.fullness - SAVING


def complexity_of(candidate: Candidate) -> Complexity:
    """The numbers and yes-no traits that make a candidate complex, in the order of `SIMPLER`; less is simpler."""
    is_published = is_known(candidate.schedule) or candidate.schedule in JOINT
    return (
        candidate.arrangement.units * candidate.arrangement.data_parallel,
        not candidate.is_copy,
        candidate.sharded is Sharded.ALL,
        candidate.sharded is not Sharded.NONE,
        sum(candidate.stages),
        not _is_chain(candidate),
        not is_published,
    )


def _is_chain(candidate: Candidate) -> bool:
    """Whether each worker has one stage, in the order of the workers."""
    if candidate.orders is None:
        return is_chain(candidate.schedule)
    stages = candidate.orders.placement.stages
    return [stage.worker for stage in stages] == list(range(candidate.workers))


def merits_of(setting: Setting, candidate: Candidate, proposal: Proposal) -> Merits:
    """The merits of a plan that was simulated in full."""
    _, fullness = fullest(setting, proposal)
    return Merits(step=proposal.step, fullness=fullness, complexity=complexity_of(candidate))


def fullest(setting: Setting, proposal: Proposal) -> tuple[int, float]:
    """(rank, part of its device's memory that the plan takes) for the device with the least part free."""
    devices = setting.cluster.devices
    taken = {
        rank: proposal.memory[proposal.mesh.place(rank)[1]].total / devices[rank].memory
        for rank in range(proposal.mesh.num_ranks)
    }
    rank = max(taken, key=lambda rank: taken[rank])
    return rank, taken[rank]


def estimated_merits(judge: Judge, one: Judged) -> Merits:
    """The merits of a candidate that was only estimated."""
    return Merits(
        step=one.score + update_of(judge, one.candidate),
        fullness=1 + one.estimate.overflow / smallest_device(judge.setting),
        complexity=complexity_of(one.candidate),
    )


Rank = tuple[int, Complexity, float, Seconds]


def rank(one: Merits, fastest: Merits) -> Rank:
    """A tuple that orders plans which are about as fast as the fastest: the plan with the least one is chosen.

    Plans that save memory compared with the fastest come first, plans that take more by the same part come last. Of
    each kind the simplest comes first; of equally simple ones the leanest if they save memory, else the fastest.
    """
    if one.saves(fastest):
        return -1, one.complexity, one.fullness, one.step
    return int(fastest.saves(one)), one.complexity, 0, one.step


def hopeful(judged: Iterable[Judged], judge: Judge, *, than: Merits, fastest: Merits) -> list[Judged]:
    """The estimated candidates that would be chosen rather than `than` if their estimates were right, best first."""
    # A search that must shard estimates whole copies too, to compare with.
    allowed = (one for one in judged if judge.setting.given.sharded in (None, Sharded.NONE, one.candidate.sharded))
    # The score has no update, so nothing is left out here; the merits, which cost more, are asked of the rest.
    near = [one for one in allowed if one.score <= fastest.step * (1 + NEAR_TIE)]
    ranked = [(merits, one) for one in near if (merits := estimated_merits(judge, one)).is_near(fastest)]
    better = [pair for pair in ranked if rank(pair[0], fastest) < rank(than, fastest)]
    return [one for _, one in sorted(better, key=lambda pair: rank(pair[0], fastest))]


def reason_of(chosen: Merits, fastest: Merits) -> str:
    """Words why a plan is chosen rather than a faster one: its memory or its simplicity; "" for neither."""
    if chosen.saves(fastest):
        return f"it takes {chosen.fullness:.0%} of its fullest device's memory in place of {fastest.fullness:.0%}"
    pairs = zip(SIMPLER, chosen.complexity, fastest.complexity, strict=True)
    return next((words for words, own, other in pairs if own != other), "")
