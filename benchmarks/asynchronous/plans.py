"""What `plan` shows of training without a flush, for every shipped model on every shipped cluster of known devices."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.tables import table
from diffusionpipe.costs import Cluster, Profile
from diffusionpipe.costs.clusters import load_cluster, shipped_clusters
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.opening.configured import configured_graph
from diffusionpipe.planner.choosing.rows import Row
from diffusionpipe.planner.choosing.unflushed import unflushed
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.tables import Tables
from diffusionpipe.profiler import analytic_profiles
from diffusionpipe.units import Seconds
from diffusionpipe.workflows.planning.stated_model import BATCH_SIZES, PRECISION, known_rates
from diffusionpipe.workflows.planning.stated_setting import stated_setting

PER_DEVICE = 8
"""Samples of a step."""
PLANS = "plans.jsonl"
COLUMNS = ("model", "cluster", "fastest row", "rows", "step s", "all work s", "ratio", "idle", "fits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The rows of one model on one cluster."""

    model: str
    cluster: str
    rows: int
    """0: there are none."""
    sizes: str
    """Of the fastest row that fits, or else of the fastest."""
    step: Seconds
    least: Seconds
    """All work of that row's step, shared by the speeds of the devices."""
    least_ratio: float
    """The smallest step of all rows over its own all work."""
    idle: float
    fits: bool


def clusters() -> tuple[Cluster, ...]:
    """The shipped ones whose devices are known."""
    found = map(load_cluster, shipped_clusters())
    return tuple(cluster for cluster in found if known_rates(cluster) is not None)


def cells_of(model: str, machines: Sequence[Cluster]) -> Iterator[Cell]:
    """A model on each cluster; its work is counted once."""
    graph = configured_graph(model)
    known = [known_rates(cluster) for cluster in machines]
    names = [rates.name for rates in known if rates is not None]
    profiles = analytic_profiles(
        graph,
        describe(graph, autocast=torch.bfloat16),
        devices=names,
        precision=PRECISION,
        batch_sizes=BATCH_SIZES,
    )
    for cluster, profile in zip(machines, profiles, strict=True):
        yield _cell(model, setting_of(profile, cluster))


def setting_of(profile: Profile, cluster: Cluster) -> Setting:
    """As `plan --model` has it, with AdamW and all layers recomputed."""
    batch = PER_DEVICE * cluster.num_ranks
    return stated_setting(profile, cluster, batch, checkpoint=("*",), has_ema=False, optimizer="AdamW")


def _cell(model: str, setting: Setting) -> Cell:
    rows = unflushed(setting)
    if not rows:
        return Cell(
            model=model,
            cluster=setting.cluster.name,
            rows=0,
            sizes="",
            step=0.0,
            least=0.0,
            least_ratio=0.0,
            idle=0.0,
            fits=False,
        )
    return Cell(
        model=model,
        cluster=setting.cluster.name,
        rows=len(rows),
        sizes=f"{rows[0].name}, {rows[0].sizes}",
        step=rows[0].step,
        least=all_work(setting, rows[0]),
        least_ratio=min(row.step / all_work(setting, row) for row in rows),
        idle=rows[0].bubble,
        fits=rows[0].fits,
    )


def all_work(setting: Setting, row: Row) -> Seconds:
    """The time of a step if the work of all ranks were shared by their speeds, without any wait or message."""
    batch, cluster, tables = setting.workload.batch, setting.cluster, Tables(setting=setting)
    microbatches, groups = (_count(row.sizes, word) for word in ("micro-batch", "groups"))
    trained = sum(setting.table.sums(batch / (groups * microbatches)).steps()) * microbatches * groups
    encoding = tables.encoding(-(-batch // cluster.num_ranks)) * cluster.num_ranks
    return (trained + encoding) / sum(device.speed for device in cluster.devices)


def _count(sizes: str, word: str) -> int:
    """How many a row's sizes say that there are; 1 where they do not say.

    >>> _count("4 stages, 8 micro-batches, x 2 groups", "micro-batch"), _count("4 stages", "groups")
    (8, 1)
    """
    found = re.search(rf"(\d+) {word}", sizes)
    return int(found[1]) if found else 1


def kept(folder: Path) -> tuple[Cell, ...]:
    """Those that are written down in a folder."""
    path = folder / PLANS
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return tuple(Cell(**json.loads(line)) for line in lines)


def plan(folder: Path, models: Sequence[str]) -> Iterator[Cell]:
    """Plan what is missing; each cell is written down as soon as it is there."""
    for model in models:
        done = {cell.cluster for cell in kept(folder) if cell.model == model}
        missing = [cluster for cluster in clusters() if cluster.name not in done]
        for cell in cells_of(model, missing) if missing else ():
            with (folder / PLANS).open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(cell)) + "\n")
            yield cell


def table_of(cells: Sequence[Cell]) -> Table:
    """A row for each cell."""
    made = table("What plan shows of training without a flush, simulated", COLUMNS, num_left=3)
    for cell in sorted(cells, key=lambda one: (one.model, one.cluster)):
        figures = f"{cell.step:.3f}", f"{cell.least:.3f}", f"{cell.least_ratio:.3f}", f"{cell.idle:.1%}"
        made.add_row(cell.model, cell.cluster, cell.sizes, str(cell.rows), *figures, "yes" if cell.fits else "no")
    return made
