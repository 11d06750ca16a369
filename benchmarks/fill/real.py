"""Real compute: a small Stable Diffusion on two CPU ranks, its encoders in the bubbles or before the backbone."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, process_time

import torch
import torch.distributed as dist

from benchmarks.fill.model import raw_batch, small_stable_diffusion
from benchmarks.fill.plans import FILLED, SERIAL, Pair, pair_of
from benchmarks.throughput.ratios import Ratio, interleaved, median_ratio
from diffusionpipe.costs import ModelGraph, Profile
from diffusionpipe.ir import Plan
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.profiler import profile_job
from diffusionpipe.runtime.comm.places import channels_of, encoded_rows
from diffusionpipe.runtime.comm.transport import ProcessTransport
from diffusionpipe.runtime.engine.worker import build_worker
from diffusionpipe.runtime.job.local_ranks import local_ranks
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.simulator import simulate
from diffusionpipe.units import Seconds

LAYOUT = Layout(batch=32, stages=2, microbatches=4, encode_chunk=8)
BATCH_SIZES = (1, 2, 4, 8)
TOLERANCE = 1e-5
"""Of the loss in float32."""

_Span = tuple[Seconds, Seconds, Seconds]
"""Start, end, processor time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RealSpeedup:
    """Gradients of one batch, serial and filled."""

    frozen_share: float
    """Time of the frozen part over that of the trained one."""
    seconds: dict[str, list[Seconds]]
    """First start to last end of each iteration."""
    cpu: dict[str, list[Seconds]]
    """Processor time of both ranks."""
    predicted: dict[str, Seconds]

    @property
    def measured(self) -> Ratio:
        """Serial over filled, round by round."""
        return median_ratio(self.seconds[SERIAL], self.seconds[FILLED])

    @property
    def simulated(self) -> float:
        """Serial over filled as predicted from layers that both ranks timed at once."""
        return self.predicted[SERIAL] / self.predicted[FILLED]


def measure(num_rounds: int) -> RealSpeedup:
    """Both plans in turn in the same processes.

    Raises:
        RuntimeError: their losses differ.
    """
    torch.set_num_threads(1)
    graph = small_stable_diffusion()
    model = describe(graph)
    with local_ranks(2, preload=("benchmarks.fill.real",)) as ranks:
        profile = ranks.run(_profile, model)[0]
        pair = pair_of(profile, LAYOUT)
        reports = ranks.run(_rank, model, pair.plans, num_rounds)
    losses = {name: sum(report[1][name] for report in reports) for name in pair.plans}
    if abs(losses[SERIAL] - losses[FILLED]) > TOLERANCE * abs(losses[SERIAL]):
        raise RuntimeError(f"the losses of one batch differ: {losses}")
    spans: dict[str, list[list[_Span]]] = {name: [report[0][name] for report in reports] for name in pair.plans}
    return RealSpeedup(
        frozen_share=_frozen_share(profile),
        seconds={name: [_length(both) for both in zip(*of, strict=True)] for name, of in spans.items()},
        cpu={name: [sum(cpu for _, _, cpu in both) for both in zip(*of, strict=True)] for name, of in spans.items()},
        predicted=_predicted(pair),
    )


def _profile(job: Job, model: ModelGraph) -> Profile:
    """Measured by both ranks at once."""
    return profile_job(job, small_stable_diffusion(), model, batch_sizes=BATCH_SIZES, repeats=5, time_budget=60)


def _length(spans: Sequence[_Span]) -> Seconds:
    """From the first rank's start to the last one's end."""
    return max(end for _, end, _ in spans) - min(start for start, _, _ in spans)


def _predicted(pair: Pair) -> dict[str, Seconds]:
    return {name: simulate(plan.train, pair.costs[name]).makespan for name, plan in pair.plans.items()}


def _frozen_share(profile: Profile) -> float:
    size = LAYOUT.batch // LAYOUT.microbatches
    frozen = sum(profile.forward(name, size) for name in profile.graph.frozen_layers)
    trained = sum(
        profile.forward(name, size) + profile.input_grad(name, size) + profile.weight_grad(name, size)
        for name in profile.graph.backbone_layers
    )
    return frozen / trained


def _rank(
    job: Job, model: ModelGraph, plans: dict[str, Plan], num_rounds: int
) -> tuple[dict[str, list[_Span]], dict[str, float]]:
    """Spans of every iteration on this rank, and its part of the loss."""
    rank = job.membership.rank
    graph = small_stable_diffusion()
    batch = raw_batch(graph, LAYOUT.batch)
    workers, losses = {}, {}
    for name, plan in plans.items():
        transport = ProcessTransport(job.device)
        transport.warm_up(channels_of(plan))
        worker = workers[name] = build_worker(graph, model, plan, rank, transport, device=job.device)
        rows = encoded_rows(plan.train, worker.place.worker)
        own = {key: value[rows.start : rows.stop] for key, value in batch.items()} if rows is not None else {}
        if worker.prologue is not None:
            worker.feed(worker.prologue, own)
            worker.prologue.run()
        for _ in range(2):  # both stores of a plan that works ahead
            worker.feed(worker.train, own)
            worker.reset_gradients()
            losses[name] = sum(float(output.value.sum()) for output in worker.train.run()) / LAYOUT.batch
    spans: dict[str, list[_Span]] = {name: [] for name in plans}
    for names in interleaved([SERIAL, FILLED], num_rounds):
        for name in names:
            workers[name].reset_gradients()
            dist.barrier()
            cpu, start = process_time(), perf_counter()
            workers[name].train.run()
            spans[name].append((start, perf_counter(), process_time() - cpu))
    return spans, losses
