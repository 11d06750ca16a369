"""One training's state, saved again and again on every rank of a job: how long its steps stand still."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.checkpoints.run_checkpoints import RunCheckpoints
from diffusionpipe.trainer.checkpoints.training_state import TrainingState
from diffusionpipe.trainer.optim.ema import Ema
from diffusionpipe.trainer.optim.optimizer import build_optimizer
from diffusionpipe.trainer.reporting.screen import NoScreen
from diffusionpipe.units import Bytes, Seconds

_COPIES = 4
"""Float32 numbers of a parameter in a checkpoint: itself, two of AdamW's, the average."""
_TENSOR = 250_000
"""Numbers of a parameter, as of a 3x3 convolution with 160 channels."""
_WORK = 384
"""Side of the matrices that a step multiplies."""


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint."""

    standstill: Seconds
    """The time for which training waits for it."""
    seconds: Seconds
    """Until it is complete."""


def state_of(rank: int, size: Bytes) -> TrainingState:
    """The state of one rank after a step, about `size` bytes, under names of its own."""
    count = max(1, size // (_COPIES * 4 * _TENSOR))
    generator = torch.Generator().manual_seed(rank)
    parameters = {
        f"unet.{rank}.{number}.weight": nn.Parameter(torch.randn(_TENSOR, generator=generator))
        for number in range(count)
    }
    optimizer = build_optimizer("AdamW", parameters, 1e-3, {"fused": True})
    assert optimizer is not None, "it has parameters"
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for parameter in parameters.values():
        parameter.grad = None
    return TrainingState(
        model=parameters, trainable=parameters, optimizer=optimizer, ema=Ema(parameters, dict.fromkeys(parameters, 0.9))
    )


def saves(job: Job, folder: Path, size: Bytes, rounds: int) -> dict[str, list[Save]]:
    """Saves of `size` bytes by this rank in both ways, which take turns; every rank of the job calls it."""
    state = state_of(job.membership.rank, size)
    runs = {
        name: RunCheckpoints(job, folder / name, 1, NoScreen(), is_asynchronous=name == "asynchronous")
        for name in ("synchronous", "asynchronous")
    }
    found: dict[str, list[Save]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in list(runs)[:: 1 if number % 2 else -1]:
            save = _save(runs[name], 10 * (number + 1), state)
            if number:  # the first ones take memory that the others find
                found[name].append(save)
    return found


def ratio(saves: Mapping[str, Sequence[Save]]) -> float:
    """The median standstill of asynchronous saves over that of synchronous ones."""
    return median(save.standstill for save in saves["asynchronous"]) / median(
        save.standstill for save in saves["synchronous"]
    )


def _save(run: RunCheckpoints, step: int, state: TrainingState) -> Save:
    """One save, and steps until it is complete."""
    dist.barrier()
    started = time.perf_counter()
    run.save(step, state, {"step": step}, is_proven=True, is_last=False)
    standstill = time.perf_counter() - started
    while not run.is_idle:
        step += 1
        _work()
        began = time.perf_counter()
        run.protect()
        standstill += time.perf_counter() - began
        votes = torch.tensor([float(run.vote())], dtype=torch.float64)
        dist.all_reduce(votes)
        began = time.perf_counter()
        run.after(step, int(votes))
        standstill += time.perf_counter() - began
    return Save(standstill, time.perf_counter() - started)


def _work() -> None:
    """What a step computes: a quarter of a second on one core that does nothing else."""
    matrix = torch.ones(_WORK, _WORK)
    for _ in range(100):
        matrix = matrix @ matrix / _WORK
