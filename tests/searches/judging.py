"""One setting searched and enumerated, and what is wrong with the answer."""

from dataclasses import dataclass, replace
from itertools import combinations
from random import Random

from searches.enumeration import Optimum, fullest, layouts_of, optimum
from searches.settings import Drawn, with_devices, with_memory

from diffusionpipe.errors import ConfigError
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.choosing.chosen import Choice
from diffusionpipe.planner.choosing.fewer import fewer_devices
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.units import Seconds

AS_FAST = 1.002
"""The search may be slower than the enumeration by this factor: orders of messages differ in both."""
GIVEN = 1.01
"""A search with a key given may be faster than the free one by this factor."""
NUM_SAMPLED = 40
"""Layouts whose memory says how much the devices of a tight setting have."""
MOST_FIT = 0.5
"""Part of the layouts that fit in a tight setting, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found out about one setting."""

    number: int
    drawn: Drawn
    step: Seconds
    """Of the fastest that the search found; inf: nothing fits."""
    best: Seconds
    """Of the fastest that the enumeration found."""
    bound: Seconds
    num_layouts: int
    num_simulated: int
    num_fewer: int
    """Choices of fewer devices on which the enumeration found something faster than the search on all of them."""
    problems: tuple[str, ...]


def judged(drawn: Drawn, number: int, seed: int) -> Verdict:
    """Search and enumerate one setting."""
    random = Random(f"{seed} {number} memory")
    setting = _tight(drawn.setting, random) if drawn.is_tight else drawn.setting
    found, listed = best_choice(setting), optimum(setting)
    step = found.fastest.step if found else float("inf")
    problems = []
    if step > AS_FAST * listed.step:
        what = f"{found.fastest.sizes} {step:.6g}" if found else "nothing"
        problems.append(f"the search found {what}, the enumeration {listed.text} {listed.step:.6g}")
    if found:
        problems += _problems_of(found)
        found.plan()  # raises an error if a layout that was chosen cannot be made into a plan
    problems += _with_keys(setting, step, random)
    faster = _on_fewer(setting, step)
    problems += _problems_of_fewer(setting, step, faster)
    return Verdict(
        number=number,
        drawn=replace(drawn, setting=setting),
        step=step,
        best=listed.step,
        bound=found.fastest.search.bound if found else 0.0,
        num_layouts=listed.num_layouts,
        num_simulated=listed.num_simulated,
        num_fewer=len(faster),
        problems=tuple(problems),
    )


def _tight(setting: Setting, random: Random) -> Setting:
    """The setting with memory that a part of its layouts fits, at most half."""
    layouts = list(layouts_of(setting))
    sample = random.sample(layouts, min(NUM_SAMPLED, len(layouts)))
    held = sorted(fullest(propose(setting, one.layout)) for one in sample)
    place = random.randrange(max(1, int(MOST_FIT * len(held))))
    # One in eight has less than any of them: then often nothing fits.
    return with_memory(setting, held[place] if random.random() > 1 / 8 else held[0] - 1)


def _problems_of(found: Choice) -> list[str]:
    problems, fastest = [], found.fastest
    if found.step > (1 + NEAR_TIE) * fastest.step:
        problems.append(f"the choice takes {found.step:.6g}, the fastest {fastest.step:.6g}")
    for way in {id(one.search): one.search for one in (found, fastest)}.values():
        for _, proposal in way.finalists:
            if proposal.step < way.bound * (1 - 1e-9):
                problems.append(f"the bound says {way.bound:.6g}, {proposal.step:.6g} was reached")
    return problems


def _on_fewer(setting: Setting, step: Seconds) -> list[Optimum]:
    """What the enumeration finds that is faster on each choice of fewer devices where it finds something."""
    devices = range(setting.cluster.num_ranks)
    choices = (ranks for count in devices[1:] for ranks in combinations(devices, count))
    found = (optimum(with_devices(setting, ranks), limit=step / AS_FAST) for ranks in choices)
    return [one for one in found if one.step < step]


def _problems_of_fewer(setting: Setting, step: Seconds, faster: list[Optimum]) -> list[str]:
    """Where the row of fewer devices is missing or slower than what the enumeration found."""
    best = min(faster, key=lambda one: one.step, default=None)
    if best is None:
        return []
    row = fewer_devices(setting, limit=step)
    reached = row.choice.fastest.step if row else step
    # Of choices of devices that are about as fast the simplest is shown.
    if reached <= AS_FAST * (1 + NEAR_TIE) * best.step:
        return []
    return [f"on fewer devices {reached:.6g} was found, by the enumeration {best.text} {best.step:.6g}"]


def _with_keys(setting: Setting, step: Seconds, random: Random) -> list[str]:
    """Problems of searches with one key given."""
    batch, ranks = setting.workload.batch, setting.cluster.num_ranks
    keys = (
        Given(microbatches=random.choice([n for n in range(1, batch + 1) if batch % n == 0])),
        Given(stages=random.choice([n for n in range(1, ranks + 1) if ranks % n == 0])),
        Given(schedule=random.choice(sorted(REGISTRY))),
        Given(data_parallel=random.choice([n for n in range(1, ranks + 1) if ranks % n == 0])),
    )
    problems = []
    for given in keys:
        try:
            found = best_choice(replace(setting, given=given))
        except ConfigError:  # these sizes do not fit each other
            continue
        if found and found.fastest.step * GIVEN < step:
            sizes = found.fastest.sizes
            problems.append(f"{given} takes {found.fastest.step:.6g} ({sizes}), the free search {step:.6g}")
    return problems
