"""How the result depends on what is uncertain: `python -m benchmarks.paper.sensitivity [--png FILE]`.

SD 2.1 with another share of the encoders, with faster and slower layers, and with other links between nodes.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from benchmarks.paper.bandwidth import with_bandwidth
from benchmarks.paper.cells import Case, setting_of
from benchmarks.tables import table
from diffusionpipe.costs import LayerProfile
from diffusionpipe.planner.choosing.band import stretched
from diffusionpipe.planner.filling.filler import filler_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.baselines import data_parallel
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.planner.search.naming import name_of, sizes_of
from diffusionpipe.planner.search.search import search
from diffusionpipe.units import Seconds
from diffusionpipe.viz.pictures import new_figure, save_figure

MODEL = "SD 2.1, 512 px"
CELLS = ((8, 8), (64, 8), (64, 64))
"""Devices, and samples of a step on each."""
SHARES = (0.4, 0.6)
"""The encoders' time over the trained part's."""
RATES = (0.75, 1.25)
BANDWIDTHS = (1, 5, 10, 40, 100, 400)
"""Of the bus between nodes, in GB/s."""
UNITS = (2, 4, 8)
"""Ranks of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One setting."""

    question: str
    case: Case
    ddp: Seconds
    """Overlapped, encoders first."""
    copies: Seconds
    """The best data parallelism, whole or sharded, that encodes the next batch meanwhile."""
    pipeline: Seconds
    """The best filled pipeline."""
    layout: str
    """Of that pipeline."""
    bandwidth: float | None = None
    """Between nodes in GB/s, where that is the question."""

    @property
    def best(self) -> Seconds:
        """Of ours."""
        return min(self.copies, self.pipeline)


def rows() -> Iterator[Row]:
    """One for each question and cell."""
    for devices, per_device in CELLS:
        case = Case(model=MODEL, devices=devices, per_device=per_device)
        setting = setting_of(case)
        yield row("as computed", case, setting)
        for share in SHARES:
            yield row(f"encoders {share:.1f} of the trained part", case, with_share(setting, case, share))
        for rate in RATES:
            yield row(f"rates {rate - 1:+.0%}", case, stretched(setting, 1 / rate))
    case = Case(model=MODEL, devices=64, per_device=8)
    setting = setting_of(case)
    for gigabytes in BANDWIDTHS:
        linked = replace(setting, cluster=with_bandwidth(setting.cluster, gigabytes * 1e9))
        yield replace(row(f"{gigabytes} GB/s between nodes", case, linked), bandwidth=gigabytes)


def row(question: str, case: Case, setting: Setting) -> Row:
    """The best of each kind that fits."""
    filler = filler_of(setting)
    ddp = data_parallel(Judge(setting=setting), is_overlapped=True)
    assert ddp is not None
    pipeline, copies = (search(setting, filler=filler, units=units).winner for units in (UNITS, (1,)))
    assert pipeline is not None
    assert copies is not None
    return Row(
        question=question,
        case=case,
        ddp=ddp.step,
        copies=copies[1].step,
        pipeline=pipeline[1].step,
        layout=f"{name_of(pipeline[0])}, {sizes_of(pipeline[0])}",
    )


def with_share(setting: Setting, case: Case, share: float) -> Setting:
    """The setting with all encoder layers faster or slower by one factor, so that they take that share."""
    judge = Judge(setting=setting)
    sums = judge.tables.table.sums(case.per_device)
    factor = share * (sums.forward[-1] + sums.backward[-1]) / judge.tables.frozen_seconds
    frozen = setting.graph.frozen_layers

    def scaled(layer: LayerProfile) -> LayerProfile:
        if layer.name not in frozen:
            return layer
        return replace(layer, forward=tuple(factor * time for time in layer.forward), cast=factor * layer.cast)

    return replace(setting, profile=replace(setting.profile, layers=tuple(map(scaled, setting.profile.layers))))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper.sensitivity", description=__doc__)
    parser.add_argument("--png", type=Path, metavar="FILE", help="also draw the bandwidths")
    arguments = parser.parse_args()
    found = list(rows())
    if arguments.png:
        draw(found, arguments.png)
    columns = ("A100s", "each", "DDP ms", "copies ms", "pipeline ms", "best over DDP", "pipeline over copies")
    made = table("SD 2.1, simulated", ("question", "best pipeline", *columns), num_left=2)
    for one in found:
        made.add_row(
            one.question,
            one.layout,
            str(one.case.devices),
            str(one.case.per_device),
            *(f"{1e3 * step:.1f}" for step in (one.ddp, one.copies, one.pipeline)),
            f"{one.ddp / one.best:.3f}",
            f"{one.copies / one.pipeline:.3f}",
        )
    Console(width=160).print(made)


def draw(found: Sequence[Row], path: Path) -> None:
    """Speed over overlapped data parallelism by the bandwidth between nodes."""
    figure = new_figure(8, 3.6)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    linked = [(one.bandwidth, one) for one in found if one.bandwidth is not None]
    bandwidths = [bandwidth for bandwidth, _ in linked]
    axes.plot(bandwidths, [one.ddp / one.copies for _, one in linked], marker="o", label="filled data parallelism")
    axes.plot(bandwidths, [one.ddp / one.pipeline for _, one in linked], marker="s", label="filled pipeline")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("GB/s between nodes")
    axes.set_title("SD 2.1, 64 A100s, 8 samples each: speed over overlapped DDP, simulated", loc="left", fontsize=10)
    axes.legend(frameon=False)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
