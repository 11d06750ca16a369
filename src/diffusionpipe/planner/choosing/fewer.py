"""Finds plans that leave devices out, because these slow the others down or the batch cannot be cut over all.

A search uses all the devices that it is given. One at the end of a slow link, a slow one, or one that holds no whole
layer may make a plan slower than the others would be alone. Which devices are worth asking about:

    a few devices     every choice of them that differs from all others in devices, nodes or links
    many              the fastest nodes and of these the fastest devices, by their number; without slow ones, without
                      small ones, without those that have slow links

Each is asked about only where a bound of its time allows it to be faster, the most promising first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from diffusionpipe.costs import Cluster
from diffusionpipe.costs.cluster import of_ranks, slow_links
from diffusionpipe.planner.choosing.asking import Asking
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.choosing.chosen import Choice
from diffusionpipe.planner.choosing.explain import Remark
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE, rank
from diffusionpipe.planner.pricing.given import is_possible
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.cascades import least_time
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.places import places_of
from diffusionpipe.units import Seconds

MOST_ENUMERATED = 5
"""Up to this number of devices every choice of some of them is looked at: 30 searches at most, of which a bound leaves
few."""
MOST_SEARCHED = 16
"""The most choices of devices that are searched: each takes as long as a plan for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewer:
    """A plan on some of the cluster's devices."""

    ranks: tuple[int, ...]
    """The ranks that it uses, ascending."""
    choice: Choice


def fewer_devices(setting: Setting, *, fill: bool | None = None, limit: Seconds = float("inf")) -> Fewer | None:
    """The best plan on fewer devices with a step below `limit` seconds; None where there is none.

    Of plans that are about as fast as the fastest of them, `near_ties` decides: fewer devices are simpler.
    """
    whole = setting.whole or setting
    asked = [
        (bound, ranks, own)
        for ranks in choices_of(setting.cluster)
        for own in [replace(whole, cluster=of_ranks(setting.cluster, ranks))]
        if (bound := least_of(own)) < limit
    ]
    found: list[Fewer] = []
    # The most promising bound first: a plan that is found leaves out all whose bound is above it.
    for bound, ranks, own in sorted(asked, key=lambda one: (one[0], len(one[1]), one[1]))[:MOST_SEARCHED]:
        most = min([limit, *(one.choice.step * (1 + NEAR_TIE) for one in found)])
        # Fewer devices have less memory together, so what needs least of it may be the only plan.
        choice = best_choice(own, fill=fill, limit=most, is_tight=True) if bound < most else None
        if choice:
            found.append(Fewer(ranks=ranks, choice=choice if choice.step < limit else choice.fastest))
    if not found:
        return None
    fastest = min((one.choice for one in found), key=lambda choice: choice.step).merits
    near = [one for one in found if one.choice.merits.is_near(fastest)]
    return min(near, key=lambda one: rank(one.choice.merits, fastest))


def least_of(setting: Setting) -> Seconds:
    """A lower bound of an iteration on all devices of a setting, in seconds; infinite if no layout cuts the batch."""
    count = len(setting.graph.backbones)
    batch, num_ranks = setting.workload.batch, setting.cluster.num_ranks
    if not is_possible(setting.given, batch=batch, num_ranks=num_ranks, num_backbones=count):
        return float("inf")
    judge = Judge(setting=setting)
    if count > 1:
        return least_time(judge)
    return min((bound for bound, _, _ in places_of(judge, is_filled=True, ramp=0.0)), default=float("inf"))


def remark_on(fewer: Fewer, setting: Setting, step: Seconds, asking: Asking) -> Remark:
    """A remark that a plan without some ranks is faster than a step of `step` seconds, and how to ask for it."""
    own = fewer.choice
    text = (
        f"{_without(fewer, setting)} a step would be {step / own.step:.2f} times as fast ({own.sizes}, "
        f"{own.step * 1e3:.1f} ms). The plan is one for all devices. To leave these out:"
    )
    return Remark(text=text, way=asking.use(fewer.ranks))


def as_remedy(fewer: Fewer, setting: Setting, asking: Asking) -> str:
    """A sentence that says how to ask for a plan on fewer devices, for a setting without a plan on all of them."""
    own = fewer.choice
    text = f"{_without(fewer, setting)} there is a plan, {own.sizes}, {own.step * 1e3:.1f} ms a step:"
    return f"{text} {asking.use(fewer.ranks)}"


def _without(fewer: Fewer, setting: Setting) -> str:
    left_out = [rank for rank in range(setting.cluster.num_ranks) if rank not in fewer.ranks]
    return f"Without {'rank' if len(left_out) == 1 else 'ranks'} {', '.join(map(str, left_out))}"


def choices_of(cluster: Cluster) -> list[tuple[int, ...]]:
    """The sets of ranks, each without some rank, that are worth a search, largest first.

    Of sets with the same devices, nodes and links the first is taken.
    """
    # Reversed, because the last of equal keys stays: of equal choices the first is wanted.
    found = {_kind(cluster, ranks): ranks for ranks in reversed(list(_subsets(cluster)))}
    return sorted(found.values(), key=lambda ranks: (-len(ranks), ranks))


def _subsets(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    ranks = range(cluster.num_ranks)
    if cluster.num_ranks <= MOST_ENUMERATED:
        for count in ranks[1:]:
            yield from combinations(ranks, count)
        return
    devices, nodes = cluster.devices, cluster.nodes
    speeds = {node: sum(devices[r].speed for r in ranks if nodes[r] == node) for node in nodes}
    # Whole nodes together, the fastest node first, and the fastest devices of each.
    by_speed = sorted(ranks, key=lambda r: (-speeds[nodes[r]], nodes[r], -devices[r].speed, r))
    slow = {r for pair in slow_links(cluster) for r in pair}
    kept = [{r for r in ranks if devices[r].speed >= speed} for speed in {one.speed for one in devices}]
    kept += [{r for r in ranks if devices[r].memory >= memory} for memory in {one.memory for one in devices}]
    kept += [set(ranks) - slow, *(set(ranks) - {r} for r in slow)]
    for some in kept:
        own = [r for r in by_speed if r in some]
        for count in range(1, len(own) + 1):
            if count < cluster.num_ranks:
                yield tuple(sorted(own[:count]))


def _kind(cluster: Cluster, ranks: tuple[int, ...]) -> object:
    """A key with all properties of these ranks that a plan can depend on: devices, nodes and links."""
    own = of_ranks(cluster, ranks)
    return own.devices, own.nodes, own.pairs
