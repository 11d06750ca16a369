"""Emulated compute: stages that wait, so that only the runtime and its transport are measured."""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from benchmarks.throughput.chains import SCHEDULES, our_schedule, torch_schedule
from benchmarks.throughput.ranks import run_ranks
from benchmarks.throughput.ratios import Ratio, interleaved, median_ratio
from diffusionpipe.costs import Costs, StageCosts, TensorSpec
from diffusionpipe.runtime.comm.transport import ProcessTransport
from diffusionpipe.runtime.rehearsals.virtual import VirtualCompute, virtual_executor

FORWARD, BACKWARD = 0.020, 0.040
WIDTH = 16
TENSORS = {
    "input": TensorSpec(name="input", shape=(WIDTH,)),
    "hidden": TensorSpec(name="hidden", shape=(WIDTH,), needs_gradient=True),
    "loss": TensorSpec(name="loss", shape=(), needs_gradient=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedCase:
    """One schedule on a number of ranks: iteration times over the ideal, and ours over torch's."""

    schedule: str
    num_ranks: int
    num_microbatches: int
    torch: Ratio
    ours: Ratio
    ours_over_torch: Ratio


def measure(num_ranks: int, num_rounds: int) -> list[EmulatedCase]:
    """Every schedule at m = 2p; ideal is (m + p - 1) (F + B), without any communication."""
    num_microbatches = 2 * num_ranks
    times = run_ranks(num_ranks, _rank, num_ranks, num_microbatches, num_rounds)
    ideal = (num_microbatches + num_ranks - 1) * (FORWARD + BACKWARD)
    cases = []
    for schedule in SCHEDULES:
        seconds = {}
        for system in ("torch", "ours"):
            name = f"{system} {schedule}"
            spans = [[rank[name][i] for rank in times] for i in range(num_rounds)]
            seconds[system] = [max(end for _, end in span) - min(start for start, _ in span) for span in spans]
        cases.append(
            EmulatedCase(
                schedule=schedule,
                num_ranks=num_ranks,
                num_microbatches=num_microbatches,
                torch=median_ratio(seconds["torch"], [ideal] * num_rounds),
                ours=median_ratio(seconds["ours"], [ideal] * num_rounds),
                ours_over_torch=median_ratio(seconds["ours"], seconds["torch"]),
            )
        )
    return cases


def _rank(rank: int, num_ranks: int, num_microbatches: int, num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Start and end of every iteration on this rank, on the clock that all processes of a machine share."""
    steps = {}
    transport = ProcessTransport(torch.device("cpu"))
    for schedule in SCHEDULES:
        steps[f"torch {schedule}"] = _torch_step(schedule, rank, num_ranks, num_microbatches)
        steps[f"ours {schedule}"] = _our_step(schedule, rank, num_ranks, num_microbatches, transport)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for order in interleaved(list(steps), num_rounds):
        for name in order:
            dist.barrier()
            start = perf_counter()
            steps[name]()
            times[name].append((start, perf_counter()))
    return times


def _our_step(
    schedule: str, rank: int, num_ranks: int, num_microbatches: int, transport: ProcessTransport
) -> Callable[[], object]:
    costs = Costs(stages=(StageCosts(forward=FORWARD, backward=BACKWARD),) * num_ranks)
    explicit = our_schedule(schedule, num_ranks, num_microbatches)
    return virtual_executor(explicit, rank, costs=costs, tensors=TENSORS, transport=transport, inputs=("input",)).run


class _WaitingModule(nn.Module):
    """The same waits as our virtual stages', as torch's runtime wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = VirtualCompute(forward=FORWARD, backward=BACKWARD, writes=[TENSORS["hidden"]])

    def forward(self, hidden: Tensor) -> Tensor:
        return self.compute(hidden)[0]


def _torch_step(schedule: str, rank: int, num_ranks: int, num_microbatches: int) -> Callable[[], object]:
    stage = PipelineStage(_WaitingModule(), rank, num_ranks, torch.device("cpu"))
    runner = torch_schedule(schedule, stage, num_microbatches, lambda output, target: output.sum())
    inputs = (torch.zeros(num_microbatches, WIDTH),) if rank == 0 else ()
    last = {"target": torch.zeros(num_microbatches)} if rank == num_ranks - 1 else {}
    return lambda: runner.step(*inputs, **last, return_outputs=False)
