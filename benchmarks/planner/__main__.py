"""Seconds to plan against the number of devices: `python -m benchmarks.planner [--json] [--quick] [--pairs]`."""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.cascade.ways import setting_of as pair_setting
from benchmarks.paper import profiles
from benchmarks.planner import pairs
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.holding import Workload
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.units import Seconds

NODE = 8
PER_DEVICE = (8, 32, 64)
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
QUICK = (8, 16)
PAIR, PAIR_SIZES = "IF-I-M + IF-II-M", (8, 16, 64)
FLUX, FLUX_WORKLOAD = "flux.1-dev", Workload(batch=64, checkpointed=("*",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One plan and the time that it took."""

    model: str
    devices: int
    batch: int
    search: Seconds
    """Of the processor, until the plan is known, filled or not."""
    compare: Seconds
    """Of the baselines that `diffusionpipe plan` prints beside it."""
    num_estimated: int
    winner: str


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--quick", action="store_true", help="8 and 16 devices only")
    parser.add_argument(
        "--pairs", action="store_true", help="two backbones: cut at once, and planned on 8 to 64 devices"
    )
    arguments = parser.parse_args()
    if arguments.pairs:
        _print_pairs(as_json=arguments.json)
        return
    found = []
    with Console(stderr=True).status("starting") as status:
        for one in measure(QUICK if arguments.quick else SIZES):
            found.append(one)
            status.update(f"done: {one.model} on {one.devices}")
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        Console(width=160, highlight=False).print(table(found))


def measure(sizes: tuple[int, ...]) -> Iterator[Planned]:
    """SD 2.1 on so many A100s, and FLUX.1-dev on 8."""
    for per_device in PER_DEVICE:
        for devices in sizes:
            yield planned("sd-2.1", devices, Workload(batch=per_device * devices))
    yield planned(FLUX, NODE, FLUX_WORKLOAD)


def _print_pairs(*, as_json: bool) -> None:
    """Two backbones: the longest of some cuts, then whole plans."""
    cuts = pairs.measure()
    plans = [planned_setting(PAIR, pair_setting(PAIR, devices, 1)) for devices in PAIR_SIZES]
    if as_json:
        print(json.dumps({"cuts": [asdict(cut) for cut in cuts], "plans": [asdict(plan) for plan in plans]}, indent=1))
        return
    made = Table(title="Seconds of one cut of 27 + 30 layers over 8 devices", title_justify="left", box=None)
    for column in ("devices of a block", "by loads", "by the paper's formula"):
        made.add_column(column, justify="right")
    for cut in cuts:
        made.add_row(f"1 to {max(cut.replicas)}", f"{cut.loads:.2f}", f"{cut.path:.2f}")
    Console(width=160, highlight=False).print(made, table(plans))


def planned(name: str, devices: int, workload: Workload) -> Planned:
    """The plan of a stored profile's model, and the processor seconds that it took; the profile is read before."""
    return planned_setting(name, setting_of(name, devices, workload))


def planned_setting(name: str, setting: Setting) -> Planned:
    """The same of a setting."""
    started = time.process_time()
    choice = choose(setting)
    searched = time.process_time()
    choice.comparison()
    ended = time.process_time()
    return Planned(
        model=name,
        devices=setting.cluster.num_ranks,
        batch=setting.workload.batch,
        search=searched - started,
        compare=ended - searched,
        num_estimated=choice.search.num_estimated,
        winner=choice.sizes,
    )


def setting_of(name: str, devices: int, workload: Workload) -> Setting:
    """A stored profile's model on so many A100s."""
    cluster = load_cluster(f"a100-80x8:{devices // NODE}")
    return Setting(profile=profiles.load(name), cluster=cluster, workload=workload)


def table(found: list[Planned]) -> Table:
    """One line for each plan."""
    made = Table(title="Processor seconds to plan, one process", title_justify="left", box=None, pad_edge=False)
    for column in ("model", "A100s", "batch", "search CPU s", "baselines CPU s", "estimated", "winner"):
        made.add_column(column, justify="left" if column in ("model", "winner") else "right")
    for one in found:
        sizes = (str(one.devices), str(one.batch))
        seconds = (f"{one.search:.2f}", f"{one.compare:.2f}")
        made.add_row(one.model, *sizes, *seconds, str(one.num_estimated), one.winner)
    return made


if __name__ == "__main__":
    main()
