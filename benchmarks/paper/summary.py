"""What all cells say together."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from benchmarks.paper.bandwidth import Threshold
from benchmarks.paper.cells import BEST, PIPELINE, UNFILLED, Cell, Entry
from benchmarks.paper.fill import Fill
from benchmarks.rivals.copies import AHEAD, CACHED, HYBRID, NARROW_SUMS, ZERO1
from benchmarks.rivals.replicated import REPLICATED_SPP
from diffusionpipe.planner.search.naming import DATA_PARALLEL, SHARDED

DDP = "DDP"
DDP_AFTER = "DDP (no overlap)"
TUNED = {"ddp_encoding_ahead": AHEAD, "ddp_bf16": NARROW_SUMS, "zero1": ZERO1, "hybrid": HYBRID, "cached": CACHED}
"""Data parallelism as people tune it, by its name in the summary."""


def summary(cells: Sequence[Cell], thresholds: Sequence[Threshold]) -> dict[str, float | None]:
    """The headline figures by name; None where no cell has one. Only what fits in memory counts."""
    same = [one for cell in cells for one in cell.same_layout]
    over_ddp, over_ddp_after = _over(cells, DDP), _over(cells, DDP_AFTER)
    bandwidths = [one.bandwidth for one in thresholds if one.bandwidth is not None]
    highest = _max(bandwidths)
    return {
        "bubble_after_fill_max": _max(_bubbles(cells, BEST)),
        "pipeline_bubble_after_fill_max": _max(_bubbles(cells, PIPELINE)),
        "pipeline_bubble_after_fill_min": _min(_bubbles(cells, PIPELINE)),
        "speedup_same_layout_max": _max(one.speedup for one in same),
        "speedup_same_layout_without_buckets_max": _max(one.speedup_unbucketed for one in same),
        "speedup_same_layout_min": _min(one.speedup for one in same),
        "speedup_best_baseline_min": _min(speedup_over_best(cell) for cell in cells),
        "speedup_best_baseline_max": _max(speedup_over_best(cell) for cell in cells),
        "speedup_over_ddp_max": _max(over_ddp),
        "speedup_over_ddp_min": _min(over_ddp),
        "speedup_over_ddp_after_max": _max(over_ddp_after),
        "speedup_over_ddp_after_min": _min(over_ddp_after),
        **_extremes(cells, TUNED | {"spp_with_replicas": REPLICATED_SPP}),
        "bubble_before_fill_pipeline_max": _max(_bubbles(cells, UNFILLED)),
        "bubble_before_fill_pipeline_min": _min(_bubbles(cells, UNFILLED)),
        "bubble_after_fill_pipeline_max": _max(_bubbles(cells, PIPELINE)),
        "bubble_after_fill_pipeline_min": _min(_bubbles(cells, PIPELINE)),
        **fill_figures([cell.fill for cell in cells if cell.fill is not None]),
        "ddp_128_bus_bandwidth_gbps": highest * 8 / 1e9 if highest else None,
        "ceiling_max": _max(cell.ceiling for cell in cells),
        "ceiling_min": _min(cell.ceiling for cell in cells),
        "cells_where_the_best_is_data_parallel": sum(is_data_parallel(cell) for cell in cells),
        "cells_where_the_best_is_pipeline": sum(
            not is_data_parallel(cell) for cell in cells if cell.entry(BEST) is not None
        ),
        "cells_where_tuned_data_parallelism_is_as_fast": sum(is_matched(cell) for cell in cells),
        "cells": len(cells),
    }


def fill_figures(fills: Sequence[Fill]) -> dict[str, float | None]:
    """How close filling comes to its bound: no bubble where frozen work exceeds the idle time, no longer elsewhere."""
    enough = [one.bubble for one in fills if one.exceeds_idle]
    ratios = [one.over_bound for one in fills if not one.exceeds_idle]
    return {
        "cells_where_frozen_work_exceeds_idle_time": len(enough),
        "bubble_where_frozen_work_exceeds_idle_time_max": _max(enough),
        "fill_over_bound_elsewhere_max": _max(ratios),
        "fill_over_bound_elsewhere_median": median(ratios) if ratios else None,
        "fill_over_bound_max": _max(one.over_bound for one in fills),
        "fill_over_bound_median": median(one.over_bound for one in fills) if fills else None,
    }


def speedup_over_best(cell: Cell) -> float | None:
    """Over the fastest baseline that fits, at its own best sizes."""
    rivals = [one.step for one in cell.others if one.fits]
    ours = fitting(cell, BEST)
    return min(rivals) / ours.step if ours and rivals else None


def speedup_over(cell: Cell, system: str) -> float | None:
    """Ours over the system of that name; None where one of them does not fit."""
    ours, theirs = fitting(cell, BEST), fitting(cell, system)
    return theirs.step / ours.step if ours and theirs else None


def fitting(cell: Cell, system: str) -> Entry | None:
    """The cell's entry of that name if it fits."""
    entry = cell.entry(system)
    return entry if entry and entry.fits else None


def is_data_parallel(cell: Cell) -> bool:
    """Whether the best of all that ours considers are copies of the model, whole or sharded."""
    ours = cell.entry(BEST)
    return ours is not None and ours.layout.startswith((DATA_PARALLEL, SHARDED))


def is_matched(cell: Cell) -> bool:
    """Whether data parallelism that encodes on the fly, tuned as people do, is at most 1 % slower than ours."""
    found = (speedup_over(cell, system) for system in TUNED.values() if system != CACHED)
    return any(over is not None and over <= 1.01 for over in found)


def _extremes(cells: Sequence[Cell], systems: Mapping[str, str]) -> dict[str, float | None]:
    """Ours over each of the systems, by a short name."""
    return {
        f"speedup_over_{name}_{end}": take(_over(cells, system))
        for name, system in systems.items()
        for end, take in (("max", _max), ("min", _min))
    }


def _over(cells: Sequence[Cell], system: str) -> list[float | None]:
    return [speedup_over(cell, system) for cell in cells]


def _bubbles(cells: Sequence[Cell], system: str) -> list[float | None]:
    found = [fitting(cell, system) for cell in cells]
    return [entry.bubble if entry else None for entry in found]


def _max(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _min(values: Iterable[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)
