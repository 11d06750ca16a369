"""Stages on branches beside chains, simulated: `python -m benchmarks.branches [--only TEXT]`."""

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import zip_longest

import torch
from torch import Tensor, nn

import diffusionpipe as dp
from benchmarks.cards import cells
from benchmarks.choices import checked
from diffusionpipe.costs import Profile
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.holding import Workload
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.graphs.graph import canonical_names
from diffusionpipe.models.opening.configured import configured_graph
from diffusionpipe.models.parameters.lora import LoraSettings, adapt
from diffusionpipe.models.parameters.weights import factors
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.choosing.chosen import Choice
from diffusionpipe.planner.choosing.near_ties import NEAR_TIE
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.branch_order import has_branches, part_in_a_row, tree_of_branches
from diffusionpipe.profiler import analytic_profiles
from diffusionpipe.workflows.planning.profile_cache import cache_folder, kept_profile
from diffusionpipe.workflows.planning.stated_model import BATCH_SIZES, PRECISION, code_digest

RANK, WIDTH, LENGTH = 16, 1024, 256
TRAINED = {
    "SDXL and both text encoders": ("sdxl", ("unet", "text_encoder", "text_encoder_2")),
    "FLUX.1-dev, CLIP and T5": ("flux.1-dev", ("transformer", "text_encoder", "text_encoder_2")),
    "SD3-medium, two CLIP and T5": (
        "sd3-medium",
        ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3"),
    ),
}
"""Shipped configurations with adapters of rank 16 on the denoiser and on every text encoder."""
TOWERS = {"two equal towers": (6, 6), "towers of 8 and 4 layers": (8, 4)}
"""Residual layers in two towers of a user's own model, whose join four more of them read."""
MACHINES = ("2 x RTX 4090", "4 x RTX 4090", "8 x L40S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The plans of one cell."""

    name: str
    in_a_row: float
    """Part of the trained layers' time on the longest way through them."""
    kind: str
    """What the search does with the branches."""
    beside: Choice | None
    chain: Choice | None
    """The same search without branches."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.branches", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="models and machines whose names hold this text")
    arguments = parser.parse_args()
    wins = count = 0
    for name, settings in all_cells():
        if arguments.only not in name:
            continue
        found = measure(name, settings())
        count += 1
        wins += _is_win(found)
        print(_line(found), flush=True)
    print(f"branches win in {wins} of {count} cells")


def all_cells() -> Iterator[tuple[str, Callable[[], list[Setting]]]]:
    """The cells of benchmarks.cards, those in which text encoders are trained too, and two towers."""
    for machine in cells.MACHINES:
        for model in cells.MODELS:
            yield f"{model} on {machine}", partial(_of_cards, cells.Case(model=model, machine=machine))
    for machine in MACHINES:
        for model in (*TRAINED, *TOWERS):
            yield f"{model} on {machine}", partial(_with_branches, model, cells.MACHINES[machine])


def _of_cards(case: cells.Case) -> list[Setting]:
    """Nothing recomputed, then all."""
    return [cells.setting_of(case, cells.STATES[0], is_recomputed=again) for again in (False, True)]


def _with_branches(model: str, machine: cells.Machine) -> list[Setting]:
    setting = Setting(
        profile=profile_of(model, machine.device),
        cluster=load_cluster(machine.cluster),
        workload=Workload(batch=machine.lora),
    )
    return [setting, replace(setting, workload=replace(setting.workload, checkpointed=("*",)))]


def measure(name: str, settings: list[Setting]) -> Found:
    """The faster of both ways to recompute, with branches and without."""
    first = settings[0]
    if not has_branches(first):
        return Found(name=name, in_a_row=part_in_a_row(first), kind="as without", beside=None, chain=None)
    beside, chain = (_fastest([replace(one, may_branch=may) for one in settings]) for may in (True, False))
    if beside and chain:
        assert beside.step <= chain.step * (1 + NEAR_TIE), f"{name}: {beside.step} s with branches, {chain.step} s"
    kind = "searched" if tree_of_branches(first) is not None else "not series-parallel"
    return Found(name=name, in_a_row=part_in_a_row(first), kind=kind, beside=beside, chain=chain)


def _fastest(settings: list[Setting]) -> Choice | None:
    made = [checked(choice) for setting in settings if (choice := best_choice(setting)) is not None]
    return min(made, key=lambda choice: choice.step, default=None)


def _is_win(found: Found) -> bool:
    return bool(found.beside and (not found.chain or found.beside.step * (1 + NEAR_TIE) < found.chain.step))


def _line(found: Found) -> str:
    words = f"{found.name}: {found.in_a_row:.1%} in a row, {found.kind}"
    for way, choice in (("with branches", found.beside), ("without", found.chain)):
        words += f"\n    {way}: {choice.step * 1e3:.1f} ms, {choice.sizes}" if choice else ""
    return words


def profile_of(model: str, device: str) -> Profile:
    """The analytic profile; computed in a minute where it is not kept."""
    if model in TOWERS:
        return dp.profile(towers(*TOWERS[model]), analytic=device, precision="bfloat16", batch_sizes=(1, 2, 4, 8))
    name, trained = TRAINED[model]
    key = sha256(f"branches {name} {trained} {RANK} {device} {code_digest()}".encode()).hexdigest()[:32]

    def make() -> Profile:
        graph = configured_graph(name)
        adapt(graph, trained, LoraSettings(rank=RANK))
        narrow = factors(graph, is_trained=False)
        for parameter, own in canonical_names(graph.components).items():
            if own in narrow:
                parameter.data = parameter.data.to(torch.bfloat16)
        (made,) = analytic_profiles(
            graph,
            describe(graph, autocast=torch.bfloat16),
            devices=[device],
            precision=PRECISION,
            batch_sizes=BATCH_SIZES,
        )
        return made

    return kept_profile(key, make, cache_folder(os.environ))[0]


class Block(nn.Module):
    """A residual layer of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) to (B, T, D)."""
        change: Tensor = self.second(torch.tanh(self.first(x)))
        return x + change


class Join(nn.Module):
    """Both towers' last states, mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Twice (B, T, D) to (B, T, D)."""
        mixed: Tensor = self.mix(torch.cat([left, right], dim=2))
        return mixed


def towers(left: int, right: int) -> dp.Model:
    """Towers of that many layers, listed layer by layer in turn, a join, and four layers."""
    named = [
        [dp.layer(Block(), reads=f"{side}{i}", writes=f"{side}{i + 1}") for i in range(count)]
        for side, count in (("left", left), ("right", right))
    ]
    in_turn = [layer for pair in zip_longest(*named) for layer in pair if layer is not None]
    join = dp.layer(Join(), reads=(f"left{left}", f"right{right}"), writes="both")
    example = {name: torch.zeros(1, LENGTH, WIDTH) for name in ("left0", "right0", "target")}
    return dp.pipeline([*in_turn, join, *(Block() for _ in range(4))], loss=_loss, example=example)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean((1, 2))


if __name__ == "__main__":
    main()
