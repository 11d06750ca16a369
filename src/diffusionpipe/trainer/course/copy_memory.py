"""Whether the machines have memory for copies of the training's state, from which checkpoints are written."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from diffusionpipe.errors import RecipeError
from diffusionpipe.holding import Ledger
from diffusionpipe.runtime.comm.exchange import form_of, gather
from diffusionpipe.runtime.job.verdict import this_member
from diffusionpipe.runtime.machine.free_memory import free_memory
from diffusionpipe.trainer.model.workload import workload_of
from diffusionpipe.trainer.setup.session import Session
from diffusionpipe.units import Bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """The host memory that one rank needs for a copy of its state, and the free memory of its machine, in bytes."""

    host: str
    """The host name of the rank's machine."""
    machine: str
    """The name of the machine, the same in all its containers; "" if unknown."""
    held: Bytes
    """The bytes of the training state that the rank holds; other ranks may hold the same."""
    owned: Bytes
    """The bytes of it that count for this rank alone, where several ranks hold the same."""
    later: Bytes
    """The bytes that training has yet to allocate in host memory: on a CPU the gradients and the optimizer's state."""
    free: Bytes | None
    """The free memory of the machine in bytes; None if unknown."""


def can_checkpoint_async(session: Session) -> bool:
    """Whether the run writes checkpoints while training continues: the recipe allows it and all machines have memory.

    Every rank calls it, before the first step; rank 0 logs the reason. False for trainings without a flush.

    Raises:
        RecipeError: on all ranks; the recipe demands it, but a machine has too little memory.
    """
    wanted = session.recipe.checkpoint.asynchronous
    if wanted is False or session.worker.window is not None:
        return False
    demands = gather(_demand(session), form_of(MemoryNeed))
    shortage = shortage_of(demands)
    if shortage is None:
        if session.is_first:
            copied = sum(demand.owned for demand in demands)
            logger.info("asynchronous_checkpoints=True host_copy_mib=%.1f", copied / 2**20)
        return True
    if wanted is True:
        error = RecipeError(
            f'checkpoint.asynchronous: {shortage}; set it to "auto" or false, or start fewer ranks per machine'
        )
        error.is_common = True
        raise error
    if session.is_first:
        logger.warning('asynchronous_checkpoints=False reason="%s"', shortage)
    return False


def shortage_of(demands: Sequence[MemoryNeed]) -> str | None:
    """A sentence that names the first machine with too little memory, needed and left in GiB; None if there is none."""
    # Of what several ranks hold one writes each tensor, so that all of them write about equally much.
    share = sum(demand.owned for demand in demands) / max(1, sum(demand.held for demand in demands))
    machines: dict[str, list[MemoryNeed]] = {}
    for demand in demands:
        machines.setdefault(demand.machine or demand.host, []).append(demand)  # ranks of one machine share its memory
    for on_machine in machines.values():
        known = [demand.free for demand in on_machine if demand.free is not None]
        copied = sum(demand.held for demand in on_machine) * share
        free = min(known, default=float("inf")) - sum(demand.later for demand in on_machine)
        if copied > free:
            return (
                f"a copy of the training's state needs {copied / 2**30:.2f} GiB of host memory on "
                f"{on_machine[0].host}, where {max(0.0, free) / 2**30:.2f} GiB are left"
            )
    return None


def _demand(session: Session) -> MemoryNeed:
    worker = session.worker
    ledger = Ledger(graph=worker.model, workload=workload_of(session.recipe, worker.model))
    held, owned = ledger.held(worker.parameters), ledger.held(worker.owned)
    me = this_member(session.job.membership.rank)
    return MemoryNeed(
        host=me.host,
        machine=me.machine,
        held=held.saved,
        owned=owned.saved,
        later=held.gradients + held.optimizer + held.backup if session.job.device.type == "cpu" else 0,
        free=free_memory(),
    )
