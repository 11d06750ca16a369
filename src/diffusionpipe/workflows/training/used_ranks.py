"""The ranks of a job that train where a recipe leaves some out (pipeline.use).

Our launcher starts the used ranks alone, each with its own device. torchrun starts all: those that are left out end
before they join the job, and the others are its ranks 0, 1, ... in their order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from diffusionpipe.errors import ConfigError

if TYPE_CHECKING:
    from diffusionpipe.runtime.job.membership import Membership


def place_among(member: "Membership", ranks: Sequence[int], environ: Mapping[str, str]) -> "Membership | None":
    """The membership of a started process in the job of the ranks that train, with its rank among them.

    None if it is left out. `ranks`: the ranks that train, which ascend; `environ`: the process's environment. A process
    that our launcher has started has its rank already, so `member` is returned.

    Raises:
        ConfigError: the process that keeps the job's store would end with the ranks that are left out.
    """
    if member.is_launched or member.world_size == 1:
        return member
    # torchrun's agent on the first node keeps the store as long as one of its ranks runs; else rank 0 keeps it.
    own = environ.get("LOCAL_WORLD_SIZE", "")
    keepers = int(own) if member.store_rank is None and own.isdecimal() else 1
    if ranks[0] >= keepers:
        one_of = "rank 0" if keepers == 1 else f"one of the ranks 0 to {keepers - 1}"
        raise ConfigError(
            f"pipeline.use: the job's store is kept with {one_of}, and all of these are left out; use one of them, or "
            "start the job without their node"
        )
    if member.rank not in ranks:
        return None
    return replace(member, rank=list(ranks).index(member.rank), world_size=len(ranks))
