"""Virtual ranks: SD 2.1's times on an A100 as waits, everything else real."""

from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.fill.plans import FILLED, SERIAL, pair_of
from benchmarks.throughput.ratios import Ratio, interleaved, median_ratio
from diffusionpipe.costs import Link, Profile
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.opening.configured import configured_graph
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.profiler import analytic_profile
from diffusionpipe.runtime.job.local_ranks import local_ranks
from diffusionpipe.runtime.rehearsals.rehearsal import VirtualRun
from diffusionpipe.units import Seconds
from diffusionpipe.workflows.rehearsing.rehearsal import (
    Rehearsed,
    fitting_bytes_scale,
    measured_link,
    predict_run,
    rehearse_runs,
    virtual_run,
)

MODEL, DEVICE, PRECISION = "sd-2.1", "a100-80", "bfloat16"
BATCH_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A layout, and how long an iteration of its filled plan is to last."""

    layout: Layout
    iteration: Seconds
    num_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speedup:
    """Serial over filled, measured and simulated."""

    case: Case
    found: dict[str, Rehearsed]
    link: Link
    scale: float
    bytes_scale: float

    @property
    def measured(self) -> Ratio:
        """Serial over filled, round by round."""
        return median_ratio(self.found[SERIAL].seconds, self.found[FILLED].seconds)

    @property
    def simulated(self) -> float:
        """Serial over filled as predicted with the measured link."""
        return self.found[SERIAL].predicted.makespan / self.found[FILLED].predicted.makespan

    @property
    def measured_over_simulated(self) -> float:
        """1 where the prediction of the speed-up is right."""
        return self.measured.median / self.simulated

    def bubble(self, name: str) -> tuple[float, float]:
        """Idle part, measured and predicted."""
        found = self.found[name]
        return median(timeline.bubble for timeline in found.measured), found.predicted.bubble


def profile() -> Profile:
    """SD 2.1 at 512 pixels, computed for an A100."""
    graph = configured_graph(MODEL)
    model = describe(graph, autocast=torch.bfloat16)
    return analytic_profile(graph, model, device=DEVICE, precision=PRECISION, batch_sizes=BATCH_SIZES)


def measure(profile: Profile, case: Case) -> Speedup:
    """Both plans in turn on one set of processes."""
    pair, layout = pair_of(profile, case.layout), case.layout
    with local_ranks(layout.workers) as ranks:
        link = measured_link(ranks)

        def runs(scale: float, bytes_scale: float) -> dict[str, VirtualRun]:
            return {
                name: virtual_run(
                    plan.train,
                    pair.costs[name],
                    profile.graph,
                    plan.mesh,
                    scale=scale,
                    bytes_scale=bytes_scale,
                    link=link,
                )
                for name, plan in pair.plans.items()
            }

        scale = case.iteration / predict_run(runs(1.0, 1e-9)[FILLED]).makespan
        bytes_scale = min(
            fitting_bytes_scale(plan.train, pair.costs[name], link, case.iteration) for name, plan in pair.plans.items()
        )
        order = [name for names in interleaved([SERIAL, FILLED], case.num_rounds) for name in names]
        found = rehearse_runs(ranks, runs(scale, bytes_scale), order)
    return Speedup(case=case, found=found, link=link, scale=scale, bytes_scale=bytes_scale)
