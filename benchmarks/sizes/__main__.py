"""Steps of several sizes of about equal tokens beside one size: `python -m benchmarks.sizes [--json] [--quick]`."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from benchmarks.sizes.rehearsed import rehearsed_times
from diffusionpipe.costs import LayerProfile, LayerSpec, Link, ModelGraph, ParameterSpec, Profile, TensorSpec
from diffusionpipe.holding.sizes import at_size, profile_of_sizes, smallest_of
from diffusionpipe.ir.size import Clip
from diffusionpipe.planner import Layout, plan_from_profile
from diffusionpipe.planner.mixed import drawn_rows, mean_step
from diffusionpipe.runtime.job.local_ranks import LocalRanks, local_ranks
from diffusionpipe.trainer.data.sizes.sizes import SizeRules, assign, sizes_of_area
from diffusionpipe.workflows.rehearsing.rehearsal import measured_link

BATCH = 32
LAYERS = 16
REPEATS = 2
"""How often each step is rehearsed; medians count, because a machine may be busy."""
FORWARD = 0.200
"""Seconds of a micro-batch of squares through a stage of four: much longer than a busy machine wakes up late."""
CASES = (("1f1b", 512, (0.5, 2.0)), ("1f1b", 1024, (0.5, 2.0)), ("zb-h1", 512, (0.5, 2.0)), ("1f1b", 1024, (0.25, 4.0)))
"""(schedule, side of the area, aspects)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The figures of a case."""

    schedule: str
    side: int
    sizes: int
    simulated: float
    """Tokens a second of mixed steps over those of squares, both simulated."""
    rehearsed: float | None
    """The same of rehearsed steps."""
    predicted: float | None
    """Predicted mean step over the rehearsed one."""
    squares: float | None
    """The same of steps of squares alone: the part of the difference that has nothing to do with sizes."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sizes", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the figures instead of a table")
    parser.add_argument("--quick", action="store_true", help="a smoke test: one case, nothing rehearsed")
    parser.add_argument("--steps", type=int, default=2, help="different steps that are rehearsed")
    parser.add_argument("--only", type=int, choices=range(len(CASES)), help="the number of one case")
    arguments = parser.parse_args()
    cases = CASES if arguments.only is None else CASES[arguments.only : arguments.only + 1]
    if arguments.quick:
        found = [figures(*CASES[0], None, 0)]
    else:
        with local_ranks(4) as ranks:
            found = [figures(*case, ranks, arguments.steps) for case in cases]
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
        return
    table = Table("schedule", "area", "sizes", "simulated", "rehearsed", "predicted / rehearsed", "of squares")
    for one in found:
        shown = (one.simulated, one.rehearsed, one.predicted, one.squares)
        ratios = ("" if ratio is None else f"{ratio:.3f}" for ratio in shown)
        table.add_row(one.schedule, f"{one.side}^2", str(one.sizes), *ratios)
    Console(width=120, highlight=False).print(table)


def figures(schedule: str, side: int, aspects: tuple[float, float], ranks: LocalRanks | None, steps: int) -> Found:
    """The figures of steps of 4 stages and 16 micro-batches of two pictures each."""
    shares = shares_of(side, aspects)
    built = sorted(shares, key=lambda size: (-size.num_pixels, abs(size.width - size.height)))
    parts = [shares[size] for size in built]
    link = Link() if ranks is None else measured_link(ranks)
    profile = replace(profile_of(built, parts), link=link)
    plan = plan_from_profile(profile, Layout(batch=BATCH, stages=4, microbatches=16, schedule=schedule))
    square = built.index(Clip.square(side))
    tokens = [size.num_pixels for size in built]
    mean_tokens = sum(share * own for share, own in zip(parts, tokens, strict=True))
    alone = mean_step(at_size(profile, square), plan, BATCH, steps=1)
    mixed = mean_step(profile, plan, 2)
    rehearsed = predicted = squares = None
    if ranks is not None:
        drawn = [tuple(sorted(rows)) for rows in drawn_rows(parts, run=2, batch=BATCH, steps=steps)]
        in_turn = [rows for step in drawn for rows in (step, (square,) * BATCH)] * REPEATS
        times = rehearsed_times(ranks, plan, profile, in_turn)
        mean_mixed = fmean(median(times[2 * step :: 2 * steps]) for step in range(steps))
        one_time = median(times[1::2])
        own_tokens = fmean(tokens[size] for rows in drawn for size in rows)
        rehearsed = (own_tokens / mean_mixed) / (tokens[square] / one_time)
        predicted = mean_step(profile, plan, 2, steps=steps) / mean_mixed
        squares = alone / one_time
    simulated = (mean_tokens / mixed) / (tokens[square] / alone)
    return Found(
        schedule=schedule,
        side=side,
        sizes=len(built),
        simulated=simulated,
        rehearsed=rehearsed,
        predicted=predicted,
        squares=squares,
    )


def shares_of(side: int, aspects: tuple[float, float]) -> dict[Clip, float]:
    """The sizes of 10,000 pictures whose aspects are log-uniform from 1:2 to 2:1, and their shares."""
    draw = Random(0)
    pictures = [(round(1000 * 2 ** draw.uniform(-1, 1)), 1000) for _ in range(10_000)]
    found = assign(pictures, SizeRules(areas=(sizes_of_area(side, aspects),)), 2)
    return {share.size: share.visits / found.visits for share in found.shares}


def profile_of(sizes: Sequence[Clip], shares: Sequence[float]) -> Profile:
    """The profile of equal layers at these sizes, as `profile_of_sizes` makes it from two of them."""
    models = [_graph(size) for size in sizes]
    square = max(size.num_pixels for size in sizes)
    least = smallest_of(models)
    return profile_of_sizes(_alone(models[0], square), _alone(models[least], square), models, shares)


def _graph(size: Clip) -> ModelGraph:
    """A transformer's layers: operations in proportion to tokens, and of attention to their square."""
    tokens = size.num_pixels // 256
    names = ["pixels", *(f"hidden{number}" for number in range(LAYERS - 1)), "loss"]
    return ModelGraph(
        layers=tuple(
            LayerSpec(
                name=f"layer{number}",
                component="transformer",
                reads=(names[number],),
                writes=(names[number + 1],),
                parameters=(f"layer{number}.weight",),
                flops=24 * tokens * 1024**2 + 4 * tokens**2 * 1024,
            )
            for number in range(LAYERS)
        ),
        tensors=tuple(
            TensorSpec(name=name, shape=() if name == "loss" else (tokens,), needs_gradient=name != "pixels")
            for name in names
        ),
        parameters=tuple(ParameterSpec(name=f"layer{number}.weight", shape=(8,)) for number in range(LAYERS)),
        inputs=("pixels",),
    )


def _alone(model: ModelGraph, most: int) -> Profile:
    """The profile of a model whose layers take a time in proportion to their operations, and 5 % for a call."""
    tokens = most // 256
    per_sample = FORWARD * 4 / LAYERS / 2 / (24 * tokens * 1024**2 + 4 * tokens**2 * 1024)
    layers = []
    for layer in model.layers:
        times = tuple(0.05 * FORWARD * 4 / LAYERS + samples * layer.flops * per_sample for samples in (1, 2, 4))
        kept = tuple(samples * model.tensor(layer.writes[0]).num_bytes for samples in (1, 2, 4))
        layers.append(
            LayerProfile(
                name=layer.name,
                forward=times,
                input_grad=times,
                weight_grad=times,
                activation=kept,
                workspace=kept,
                kept=kept,
            )
        )
    return Profile(
        graph=model,
        batch_sizes=(1, 2, 4),
        layers=tuple(layers),
        device="virtual",
        device_type="cpu",
        precision="float32",
        source="analytic",
    )


if __name__ == "__main__":
    main()
