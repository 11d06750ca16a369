"""One module per published family of schedules: sizes -> compute-only orders.

A family is a pure function `(num_workers, num_microbatches, microbatch_size=1) -> Schedule`; further arguments are
keywords with defaults. It decides which worker holds which stage (`shapes`), so the number of blocks into which the
model is cut follows from its placement. A new family is one module and one line in REGISTRY; every property of the
tests then applies to it by itself.
"""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial
from inspect import signature
from types import MappingProxyType
from typing import Protocol

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Schedule
from diffusionpipe.plugins import Kind, load
from diffusionpipe.schedules.building.branches import GRAPHPIPE, over_chain
from diffusionpipe.schedules.families.bitpipe import bitpipe
from diffusionpipe.schedules.families.chimera import chimera, chimera_doubling
from diffusionpipe.schedules.families.dapple import dapple_a, dapple_b
from diffusionpipe.schedules.families.dualpipe import dualpipe
from diffusionpipe.schedules.families.dualpipe_v import dualpipe_v
from diffusionpipe.schedules.families.dynapipe import dynapipe
from diffusionpipe.schedules.families.forward_only import forward_only, forward_over
from diffusionpipe.schedules.families.gpipe import gpipe
from diffusionpipe.schedules.families.hanayo import hanayo
from diffusionpipe.schedules.families.interleaved import interleaved
from diffusionpipe.schedules.families.interleaved_zero_bubble import interleaved_zero_bubble
from diffusionpipe.schedules.families.kfkb import kfkb
from diffusionpipe.schedules.families.looped_bfs import looped_bfs
from diffusionpipe.schedules.families.one_f_one_b import one_f_one_b
from diffusionpipe.schedules.families.sequential import sequential
from diffusionpipe.schedules.families.v_half import v_half
from diffusionpipe.schedules.families.v_min import v_min
from diffusionpipe.schedules.families.zb_h1 import zb_h1
from diffusionpipe.schedules.families.zb_h2 import zb_h2
from diffusionpipe.schedules.families.zb_v import zb_v
from diffusionpipe.schedules.families.zero_bubble import zb_1p, zb_2p
from diffusionpipe.schedules.families.zeropp import zeropp
from diffusionpipe.schedules.files.own_orders import own_orders


class Generator(Protocol):
    """A function from sizes to a family's schedule of these sizes."""

    def __call__(self, num_workers: int, num_microbatches: int, microbatch_size: int = 1) -> Schedule:
        """The schedule; raises ConfigError for sizes that the family cannot do."""
        ...

    def __hash__(self) -> int:
        """The hash of the function: families are functions, so caches can keep their schedules by family."""
        ...


REGISTRY: Mapping[str, Generator] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_f_one_b,
        "sequential": sequential,
        "dapple-a": dapple_a,
        "dapple-b": dapple_b,
        "kfkb": kfkb,
        "interleaved": interleaved,
        "looped-bfs": looped_bfs,
        "hanayo": hanayo,
        "dynapipe": dynapipe,
        "interleaved-zb": interleaved_zero_bubble,
        "zeropp": zeropp,
        "chimera": chimera,
        "chimera-doubling": chimera_doubling,
        "bitpipe": bitpipe,
        "dualpipe": dualpipe,
        "dualpipe-v": dualpipe_v,
        "zb-h1": zb_h1,
        "zb-h2": zb_h2,
        "zb-1p": zb_1p,
        "zb-2p": zb_2p,
        "zb-v": zb_v,
        "v-half": v_half,
        "v-min": v_min,
    }
)
"""Name of a published family, as its paper has it -> its function; families without backwards are not here."""


def is_published(name: str) -> bool:
    """Whether `name` is a published family's name, such a name with the length of a group ("kfkb-3"), or GraphPipe's.

    GraphPipe is not a family, because its orders also follow from the graph of the stages.
    """
    return name in REGISTRY or name == GRAPHPIPE or _in_groups(name) is not None


@cache
def _in_groups(name: str) -> Generator | None:
    """The function of the family with groups of K micro-batches, by a name such as "kfkb-K"; None for other names."""
    family, _, size = name.rpartition("-")
    found = REGISTRY.get(family)
    if found is None or not size.isdecimal() or "group_size" not in signature(found).parameters:
        return None

    sized = partial(found, group_size=int(size))  # type: ignore[call-arg]

    def in_groups(num_workers: int, num_microbatches: int, microbatch_size: int = 1) -> Schedule:
        return replace(sized(num_workers, num_microbatches, microbatch_size), name=name)

    return in_groups


def generator_of(name: str) -> Generator:
    """The function that generates the schedules of the family with this name.

    It may be a family that a package offers. "graphpipe" gives GraphPipe's orders for a chain of stages, "kfkb-3"
    groups of 3.

    Raises:
        ConfigError: there is none; names the closest one. Or it cannot be imported.
    """
    if in_groups := _in_groups(name):
        return in_groups
    if name == GRAPHPIPE:
        return over_chain
    if name not in REGISTRY:
        found = load(Kind.SCHEDULE, name)
        if callable(found):
            return partial(own_orders, found, name)
        if found is not None:
            raise ConfigError(f"the schedule {name!r} that a package offers is not a function (ranks, microbatches)")
        close = get_close_matches(name, REGISTRY, n=1, cutoff=0.4)
        hint = f"did you mean {close[0]!r}?" if close else f"choose one of {', '.join(sorted(REGISTRY))}"
        raise ConfigError(f"there is no schedule {name!r}; {hint}")
    return REGISTRY[name]


__all__ = [
    "REGISTRY",
    "Generator",
    "forward_only",
    "forward_over",
    "generator_of",
    "gpipe",
    "is_published",
    "one_f_one_b",
]
