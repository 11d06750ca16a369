"""Python time of the runtimes: a fake process group that does nothing, and a stage that computes next to nothing."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import thread_time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from benchmarks.throughput.chains import our_schedule, torch_schedule
from benchmarks.throughput.ranks import run_ranks
from benchmarks.throughput.ratios import Ratio, interleaved, median_ratio
from diffusionpipe.costs import TensorSpec
from diffusionpipe.ir.torch_csv import schedule_to_csv
from diffusionpipe.models.graphs.graph import Layer
from diffusionpipe.runtime.comm.transport import ProcessTransport
from diffusionpipe.runtime.compute.stage import LayerStage
from diffusionpipe.runtime.engine.equipment import Equipment
from diffusionpipe.runtime.engine.executor import Executor
from diffusionpipe.schedules import REGISTRY

RANK, NUM_RANKS, NUM_MICROBATCHES = 1, 4, 16
WIDTH = 8
REPEATS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """CPU seconds per action beyond bare autograd, on rank 1 of 4, 1F1B with 16 micro-batches."""

    num_actions: int
    torch_loop: float
    torch_runtime: float
    ours: float
    ours_over_loop: Ratio
    ours_over_runtime: Ratio


def measure(num_rounds: int) -> Overhead:
    """Medians over interleaved rounds; an action is an F, a B, a send or a receive, the same 96 for all."""
    num_actions, times = run_ranks(1, _rank, num_rounds)[0]
    bare = times.pop("bare")
    beyond = {name: [t - b for t, b in zip(values, bare, strict=True)] for name, values in times.items()}
    per_action = {name: median(values) / num_actions for name, values in beyond.items()}
    return Overhead(
        num_actions=num_actions,
        torch_loop=per_action["torch loop"],
        torch_runtime=per_action["torch runtime"],
        ours=per_action["ours"],
        ours_over_loop=median_ratio(beyond["ours"], beyond["torch loop"]),
        ours_over_runtime=median_ratio(beyond["ours"], beyond["torch runtime"]),
    )


def _rank(_: int, num_rounds: int) -> tuple[int, dict[str, list[float]]]:
    """CPU seconds of one iteration of each, by round."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=NUM_RANKS)
    module = nn.Linear(WIDTH, WIDTH)
    executor = _executor(module)
    steps = {
        "bare": _bare(module),
        "torch loop": torch_schedule("1f1b", _stage(module), NUM_MICROBATCHES, _loss).step,
        "torch runtime": _torch_runtime(module).step,
        "ours": executor.run,
    }
    for step in steps.values():
        _cpu_seconds(step)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for order in interleaved(list(steps), num_rounds):
        for name in order:
            times[name].append(_cpu_seconds(steps[name]))
    return len(executor.schedule.orders[RANK]), times


def _cpu_seconds(step: Callable[[], object]) -> float:
    """This thread's CPU time of one iteration, which other processes disturb less than the clock on the wall."""
    start = thread_time()
    for _ in range(REPEATS):
        step()
    return (thread_time() - start) / REPEATS


def _bare(module: nn.Module) -> Callable[[], None]:
    """What no runtime can avoid: forward and backward of every micro-batch."""
    leaves = [torch.zeros(1, WIDTH, requires_grad=True) for _ in range(NUM_MICROBATCHES)]
    gradient = torch.ones(1, WIDTH)

    def run() -> None:
        for leaf in leaves:
            torch.autograd.backward(module(leaf), gradient)
            leaf.grad = None

    return run


def _executor(module: nn.Module) -> Executor:
    layer = Layer(
        name="linear", component="model", reads=("hidden",), writes=("hidden",), modules=("",), run=lambda m, x: (m(x),)
    )
    schedule = our_schedule("1f1b", NUM_RANKS, NUM_MICROBATCHES)
    return Executor(
        schedule,
        RANK,
        Equipment(
            stages={RANK: LayerStage([layer], {"model": module}, outputs=("hidden",))},
            tensors={"hidden": TensorSpec(name="hidden", shape=(WIDTH,), needs_gradient=True)},
            transport=ProcessTransport(torch.device("cpu")),
            device=torch.device("cpu"),
        ),
    )


class _StaticStage(PipelineStage):
    """A stage whose peers, which do not exist, have agreed to take shapes from the examples."""

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:
        return torch.ones(1, dtype=torch.int32)


def _stage(module: nn.Module) -> PipelineStage:
    example = torch.zeros(1, WIDTH, requires_grad=True)
    return _StaticStage(
        module, RANK, NUM_RANKS, torch.device("cpu"), input_args=(example,), output_args=(module(example),)
    )


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def _torch_runtime(module: nn.Module) -> _PipelineScheduleRuntime:
    """The same order on torch's engine for any schedule."""
    runtime = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        [_stage(module)], NUM_MICROBATCHES, loss_fn=_loss, scale_grads=False
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "order.csv")
        path.write_text(schedule_to_csv(REGISTRY["1f1b"](NUM_RANKS, NUM_MICROBATCHES, 1)))
        runtime._load_csv(str(path))
    return runtime
