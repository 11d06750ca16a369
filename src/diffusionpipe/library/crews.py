"""The ranks of a run: threads of this process, processes of torchrun, or processes that this one starts."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from itertools import count
from typing import Any, Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from diffusionpipe.costs.graph import BYTES_OF_DTYPE
from diffusionpipe.errors import ConfigError, PeerError
from diffusionpipe.ir import Plan
from diffusionpipe.ir.files import plan_from_text, plan_to_text
from diffusionpipe.library.checks import check_plan
from diffusionpipe.library.models import Model
from diffusionpipe.library.profiles import description_for, precision_of
from diffusionpipe.library.rank import Rank
from diffusionpipe.models.graphs.describe import dtype_name
from diffusionpipe.runtime.comm.exchange import PLAIN, Json, form_of, gather, optional
from diffusionpipe.runtime.comm.places import holders_of
from diffusionpipe.runtime.comm.threads import ThreadRanks
from diffusionpipe.runtime.comm.transport import ProcessTransport, Transport
from diffusionpipe.runtime.job.local_ranks import LocalRanks, local_ranks
from diffusionpipe.runtime.job.membership import Membership
from diffusionpipe.runtime.job.process_group import Job, joined
from diffusionpipe.runtime.recording.clocks import RankTrace


class Crew(Protocol):
    """The ranks of a run: `here` calls a method on the ranks of this process, `everywhere` on all ranks."""

    @property
    def speaks(self) -> bool:
        """Whether this process prints for all ranks."""
        ...

    def here(self, name: str, *arguments: Any) -> list[Any]:
        """Call the method `name` of `Rank` on every rank of the run; returns the results of this process's ranks."""
        ...

    def everywhere(self, name: str, *arguments: Any) -> list[Any]:
        """Call the method `name` of `Rank` on every rank of the run; returns all results, in the order of ranks."""
        ...

    def close(self, error: BaseException | None = None) -> None:
        """End all ranks; `error`: the reason, if it is not a normal end."""
        ...


class Threads:
    """A crew whose ranks are threads of this process."""

    speaks = True

    def __init__(self, model: Model, plan: Plan, precision: str) -> None:
        description = description_for(model, precision)
        self._threads = ThreadRanks(plan.mesh.num_ranks)

        def build(rank: int, transport: Transport) -> Rank:
            return Rank(model, plan, rank, transport, device=model.device, precision=precision, description=description)

        self._ranks = self._threads.run(build)

    def everywhere(self, name: str, *arguments: Any) -> list[Any]:
        """Call the method `name` of `Rank` on every rank; returns all results, in the order of ranks; see `Crew`."""
        return self._threads.run(lambda rank, _: getattr(self._ranks[rank], name)(*arguments))

    here = everywhere

    def close(self, error: BaseException | None = None) -> None:
        """End all ranks; `error`: the reason, if it is not a normal end; see `Crew`."""
        self._ranks = []


class TorchrunRank:
    """A crew of one rank of a job that torchrun has started; the other ranks are processes with the same program."""

    def __init__(self, model: Model, plan: Plan, precision: str, member: Membership) -> None:
        self._stack = ExitStack()
        try:
            number = next(_JOINED)
            again = replace(member, attempt=member.attempt + number * _LATER)
            self._job = self._stack.enter_context(joined(again, device=model.device.type))
            self._job.agree("the plan", _digest(plan_to_text(plan).encode()))
            self._job.agree(
                "the model's weights (call torch.manual_seed before the modules are made)", digest_of(model)
            )
            self._rank = _rank_of(self._job, model, plan, precision)
        except BaseException as error:
            self.close(error)
            raise

    @property
    def speaks(self) -> bool:
        """Whether this process prints for all ranks, which is so on rank 0; see `Crew`."""
        return self._job.membership.rank == 0

    def here(self, name: str, *arguments: Any) -> list[Any]:
        """Call the method `name` of `Rank` on this process's rank; returns a list of its result alone; see `Crew`."""
        return [getattr(self._rank, name)(*arguments)]

    def everywhere(self, name: str, *arguments: Any) -> list[Any]:
        """Call the method `name` of `Rank` on every rank; returns all results, in the order of ranks; see `Crew`."""
        (own,) = self.here(name, *arguments)
        if isinstance(own, dict):
            return tensors_of_all(own, self._job.membership)
        return gather(own, optional(form_of(RankTrace)))

    def close(self, error: BaseException | None = None) -> None:
        """End all ranks; `error`: the reason, if it is not a normal end; see `Crew`."""
        self._stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


GUARD = 'A script that starts processes is read by each: it must call dp.run under if __name__ == "__main__": alone.'


class Processes:
    """A crew whose ranks are processes that this one starts; each calls the function that returns the model."""

    speaks = True

    def __init__(self, build: Callable[[], Model], plan: Plan, precision: str | None) -> None:
        self._stack = ExitStack()
        self._ranks: LocalRanks = self._stack.enter_context(local_ranks(plan.mesh.num_ranks, preload=[__name__]))
        try:
            self._ranks.run(_build, build.__module__, build.__qualname__, plan_to_text(plan), precision)
        except PeerError as error:
            self.close()
            raise PeerError(f"{error}\n{GUARD}") from None
        except BaseException:
            self.close()
            raise

    def everywhere(self, name: str, *arguments: Any) -> list[Any]:
        """Call the method `name` of `Rank` on every rank; returns all results, in the order of ranks; see `Crew`."""
        results = self._ranks.run(_call, name, packed(arguments))
        return [unpacked(result) for result in results]

    here = everywhere

    def close(self, error: BaseException | None = None) -> None:
        """End all ranks; `error`: the reason, if it is not a normal end; see `Crew`."""
        self._stack.close()


def tensors_of_all(own: dict[str, Tensor], member: Membership) -> list[dict[str, Tensor]]:
    """Each rank's dictionary, name -> CPU tensor, in the order of ranks; every rank calls it with its own."""
    mine: Json = [[name, list(one.shape), dtype_name(one.dtype)] for name, one in own.items()]
    kinds = gather(mine, PLAIN)
    found: list[dict[str, Tensor]] = []
    for rank, kind in enumerate(kinds):
        tensors = own
        if rank != member.rank:
            tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in _specs(kind)}
        # All ranks walk through the same names in the same order, so the broadcasts meet.
        for tensor in tensors.values() if member.world_size > 1 else ():
            torch.distributed.broadcast(tensor, src=rank)
        found.append(tensors)
    return found


def _specs(kind: Any) -> Iterator[tuple[str, list[int], str]]:
    """(name, shape, dtype) of each tensor that a rank will send, from the JSON list that it has sent before.

    Raises:
        ConfigError: a dtype is not known here.
    """
    for name, shape, dtype in kind:
        if dtype not in BYTES_OF_DTYPE:
            raise ConfigError(f"a rank has sent a tensor of the type {dtype!r}; start all ranks with the same version")
        yield str(name), [int(size) for size in shape], dtype


_JOINED = count()
"""The next number for a run of this process: torchrun's store still has the entries of earlier runs."""
_LATER = 10_000
"""The distance of the attempt numbers of two runs of a process, more than torchrun's restarts of a job."""
_OWN: dict[str, Rank] = {}
"""The `Rank` of a process that another one has started, under the key "rank"; calls of `LocalRanks` share it."""


def _rank_of(job: Job, model: Model, plan: Plan, precision: str) -> Rank:
    everyone = tuple(range(plan.mesh.num_ranks))
    transport = ProcessTransport(job.device, summing=(*holders_of(plan).values(), everyone))
    return Rank(
        model,
        plan,
        job.membership.rank,
        transport,
        device=job.device,
        precision=precision,
        description=description_for(model, precision, job.device.type),
    )


def _build(job: Job, module: str, name: str, plan_text: str, precision: str | None) -> None:
    """Make the `Rank` of this process and put it into `_OWN`; the function `name` of `module` returns the model.

    Raises:
        ConfigError: the function returns something else, or the plan is for another model.
    """
    build = getattr(importlib.import_module(module), name)
    model, plan = build(), plan_from_text(plan_text)
    if not isinstance(model, Model):
        raise ConfigError(f"{module}.{name} returned a {type(model).__name__}; return what dp.pipeline makes")
    check_plan(model, plan)
    job.agree("the model's weights (call torch.manual_seed before the modules are made)", digest_of(model))
    _OWN["rank"] = _rank_of(job, model, plan, precision or precision_of(model))


def _call(job: Job, name: str, arguments: Any) -> Any:
    return packed(getattr(_OWN["rank"], name)(*unpacked(arguments)))


def packed(value: Any) -> Any:
    """The value with each tensor replaced by its bytes, so that it can be pickled without shared memory.

    Tensors in dictionaries and tuples are found.
    """
    if isinstance(value, Tensor):
        return _Bytes(save({"": value.detach().cpu().contiguous()}))
    if isinstance(value, dict):
        return {key: packed(one) for key, one in value.items()}
    # Plain tuples alone: a named tuple would lose its class.
    return tuple(packed(one) for one in value) if type(value) is tuple else value


def unpacked(value: Any) -> Any:
    """The value that `packed` was called with, from its result: bytes of tensors become tensors again."""
    if isinstance(value, _Bytes):
        return load(value)[""]
    if isinstance(value, dict):
        return {key: unpacked(one) for key, one in value.items()}
    return tuple(unpacked(one) for one in value) if type(value) is tuple else value


class _Bytes(bytes):
    """The bytes of a tensor in the format of safetensors, as `packed` makes them."""


def digest_of(model: Model) -> str:
    """A hash of the model's parameters and buffers, 12 hexadecimal digits; equal for models with equal bytes."""
    return _digest(*(tensor.detach().cpu().contiguous().view(torch.uint8).numpy() for tensor in _flat(model)))


def _flat(model: Model) -> Iterator[Tensor]:
    for tensor in model.state_dict().values():
        # An empty tensor has no bytes to look at.
        if isinstance(tensor, Tensor) and tensor.numel():
            yield tensor.reshape(-1)


def _digest(*parts: Any) -> str:
    found = sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:12]
