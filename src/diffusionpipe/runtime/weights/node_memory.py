"""Host memory that all ranks of a machine map, so that what they have in common is there once.

    first rank of the machine    an anonymous file (memfd), which it fills
    the others                   open it as /proc/PID/fd/N, map it, and only read it

An anonymous file ends with its last process, however that ends, and /dev/shm may be as small as it likes.
"""

import logging
import mmap
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from diffusionpipe.runtime.comm.exchange import PLAIN, form_of, gather
from diffusionpipe.runtime.job.verdict import RankProcess, this_member
from diffusionpipe.runtime.weights.anonymous_file import anonymous_file
from diffusionpipe.runtime.weights.host_memory import check_free, whole_pages
from diffusionpipe.units import Bytes

logger = logging.getLogger(__name__)

NAME = "diffusionpipe-frozen"
"""The name of the shared file, as /proc/PID/maps shows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """A rank, and the descriptor of the file that it offers to the other ranks on its machine."""

    member: RankProcess
    descriptor: int


class NodeMemory:
    """Host memory that all ranks of a machine share, seen from one rank. Mutable: `pages` sets its size once.

    Every rank of the job makes one, and calls `pages` and `settle` in this order. Where sharing fails each has its own.
    """

    def __init__(self, rank: int) -> None:
        """Find the first rank of this machine, and open its file. If one rank of the machine cannot, none shares."""
        own = anonymous_file(NAME)
        offers = gather(_Offer(member=this_member(rank), descriptor=own), form_of(_Offer))
        machine = offers[rank].member.machine
        # A machine without a name shares with no rank.
        here = [offer.member.rank for offer in offers if machine and offer.member.machine == machine] or [rank]
        first, problem = offers[here[0]], None
        self._descriptor = own
        if first.member.rank != rank:
            try:
                # For writing too, as mmap maps it; only the first rank writes.
                self._descriptor = os.open(f"/proc/{first.member.pid}/fd/{first.descriptor}", os.O_RDWR)
                os.close(own)
            except OSError as error:
                problem = f"rank {rank} cannot open memory of rank {first.member.rank}: {error.strerror}"
        # It is a barrier as well: no file is closed before all ranks have opened it.
        problems = gather(problem, PLAIN)
        found = next((problems[other] for other in here if problems[other]), None)
        if found is not None:
            if here[0] == rank:
                logger.warning("host_memory=one_copy_for_each_rank reason=%r", found)
            if self._descriptor != own:
                os.close(self._descriptor)
                self._descriptor = anonymous_file(NAME)
        self._num_copies = len(here) if found is not None else 1
        self.is_first = found is not None or first.member.rank == rank
        """Whether this rank has to fill the memory."""

    def pages(self, size: Bytes) -> Tensor:
        """The shared memory in whole pages, uint8, (size rounded up,); every rank calls it with the same size.

        Raises:
            ConfigError: there is less free host memory.
        """
        size = whole_pages(size)
        if self.is_first:
            check_free(size, self._num_copies)
            os.ftruncate(self._descriptor, size)
        gather(None, PLAIN)  # now it has its size
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)

    def settle(self) -> None:
        """Wait until the first rank has filled the memory; from then on no rank writes to it. Every rank calls it."""
        gather(None, PLAIN)
        # The mapping lives on without the descriptor.
        os.close(self._descriptor)
