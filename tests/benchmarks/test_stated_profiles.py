"""`plan --model` asks the planner what the benchmarks ask it, and answers what their tables say."""

import re
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
import torch
from planner import synthetic

from benchmarks.cards import cells as cards
from benchmarks.paper import cells as paper
from benchmarks.planner import __main__ as planner
from diffusionpipe.cli import main
from diffusionpipe.costs.devices import DEVICES
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding import Workload
from diffusionpipe.ir.files import read_plan
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.search import search
from diffusionpipe.workflows.planning.stated_model import StatedModel, stated_graph

GIB = 2**30
CARDS = {
    "flux.1-dev-lora-rtx4090": ("FLUX.1-dev LoRA", "2 x RTX 4090", True),
    "flux.1-dev-lora-l40s": ("FLUX.1-dev LoRA", "8 x L40S", True),
    "flux.1-dev-lora-h100": ("FLUX.1-dev LoRA", "8 x H100", True),
    "flux.1-dev-rtx4090": ("FLUX.1-dev", "2 x RTX 4090", True),
    "flux.1-dev-l40s": ("FLUX.1-dev", "8 x L40S", True),
    "flux.1-dev-h100": ("FLUX.1-dev", "8 x H100", True),
    "sdxl-rtx4090": ("SDXL", "2 x RTX 4090", True),
    "sdxl-l40s": ("SDXL", "8 x L40S", True),
    "sdxl-h100": ("SDXL", "8 x H100", True),
    "sd3-medium-rtx4090": ("SD3-medium", "RTX 4090 + 4080", True),
    "sd3-medium-l40s": ("SD3-medium", "8 x L40S", False),
    "sd3-medium-h100": ("SD3-medium", "8 x H100", False),
}
"""Profile -> model, machine, and whether layers are recomputed, of a cell that is planned from it."""
PLANNED = ("sd-2.1-a100-80", "controlnet-sd-1.5-a100-80", "sdxl-rtx4090")
"""Profiles that are planned from here, in seconds each; that the same is asked is shown for all."""
PAPER = {"sd-2.1-a100-80": "SD 2.1, 512 px", "controlnet-sd-1.5-a100-80": "ControlNet v1.0, 512 px"}


@dataclass(frozen=True)
class Cell:
    """A benchmark's cell: its setting and how the command states it."""

    profile: str

    @cached_property
    def setting(self) -> Setting:
        if self.profile in CARDS:
            model, machine, is_recomputed = CARDS[self.profile]
            case = cards.Case(model=model, machine=machine)
            return cards.setting_of(case, cards.STATES[0], is_recomputed=is_recomputed)
        if self.profile in PAPER:
            return paper.setting_of(self.case)
        return planner.setting_of(planner.FLUX, planner.NODE, planner.FLUX_WORKLOAD)

    @property
    def case(self) -> paper.Case:
        return paper.Case(model=PAPER[self.profile], devices=8, per_device=8)

    @property
    def command(self) -> list[str]:
        workload, again = self.setting.workload, self.setting.workload.checkpointed
        narrow = ["--frozen-dtype", "bfloat16" if self.profile in CARDS else "none"]
        options = ["--cluster", self.setting.cluster.name, "--batch", str(workload.batch)]
        recomputed = [word for pattern in again or ("none",) for word in ("--checkpoint", pattern)]
        return ["plan", "--model", MODEL_OF[self.profile], *narrow, *options, *recomputed]

    def entry(self) -> tuple[str, tuple[int, ...] | None, int]:
        """Layout, memory of each device where the cell tells it, and what is missing where nothing fits."""
        if self.profile in CARDS:
            one = cards.ours_of(self.setting, is_recomputed=CARDS[self.profile][2])
            return one.layout, one.held, one.overflow
        if self.profile in PAPER:
            found = paper.measure(self.case).entry(paper.BEST)
            assert found is not None
            return found.layout, None, found.overflow
        choice = planner.choose(self.setting)
        return choice.sizes, tuple(use.total for use in choice.proposal.memory), choice.proposal.overflow


ALL = [Cell(name) for name in (*CARDS, *PAPER, "flux.1-dev-a100-80")]
MODEL_OF = {
    one.profile: one.profile.removesuffix(f"-{device}")
    for one in ALL
    for device in DEVICES
    if one.profile.endswith(f"-{device}")
}


def run(command: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        main(command)
    return int(caught.value.code or 0)


@pytest.mark.parametrize("cell", ALL, ids=lambda cell: cell.profile)
def test_the_command_plans_for_the_setting_of_the_benchmarks_cell(cell, monkeypatch):
    """The profiles themselves are those of a small model: what is shown is that the same ones are asked for."""
    asked = []

    def stop(setting, **_):
        asked.append(setting)
        raise ConfigError("no search is needed")

    def small(stated, device, *_):
        """A profile that says what it was asked for."""
        name = f"{stated.name} {stated.has_narrow_store} {stated.lora_rank} {device}"
        return replace(synthetic.chain([0.1] * 2, frozen=0.1), device=name), None

    monkeypatch.setattr("diffusionpipe.planner.choosing.choice.choose", stop)
    stated = "diffusionpipe.workflows.planning.stated_model"
    for module in (stated, "benchmarks.paper.profiles", "benchmarks.cards.profiles"):
        monkeypatch.setattr(f"{module}.computed_profile", small)
    for module in (paper.profiles, cards.profiles):
        monkeypatch.setattr(module, "load", module.load.__wrapped__)
    assert run(cell.command) == 2
    assert asked == [cell.setting]


@pytest.mark.slow
@pytest.mark.parametrize("cell", [one for one in ALL if one.profile in PLANNED], ids=lambda cell: cell.profile)
def test_the_commands_plan_is_that_of_the_benchmarks_cell(cell, tmp_path, capsys, monkeypatch):
    """Its layout, memory and lack of memory; searches for an equal setting are made once, as they take seconds."""
    chosen, searches = [], {}

    def note(*arguments, **options):
        chosen.append(choose(*arguments, **options))
        return chosen[-1]

    def once(setting, *, filler=None, limit=float("inf"), **options):
        if setting != cell.setting:
            return search(setting, filler=filler, limit=limit, **options)
        key = (filler is None, limit, *options.items())
        if key not in searches:
            searches[key] = search(setting, filler=filler, limit=limit, **options)
        return searches[key]

    monkeypatch.setattr("diffusionpipe.planner.choosing.best.search", once)
    monkeypatch.setattr("benchmarks.paper.cells.search", once)
    monkeypatch.setattr("benchmarks.paper.cells._same_layout", lambda *_: None)  # nothing of them is looked at here
    monkeypatch.setattr("benchmarks.paper.cells.best_baselines", lambda _: ())
    with monkeypatch.context() as patches:
        patches.setattr("diffusionpipe.planner.choosing.choice.choose", note)
        status = run([*cell.command, "--out", str(tmp_path / "plan.json")])
    shown = capsys.readouterr()
    if chosen:

        def again(setting, **_):
            assert setting == cell.setting
            return chosen[0]

        monkeypatch.setattr("benchmarks.cards.cells.best_choice", again)
        monkeypatch.setattr("benchmarks.planner.__main__.choose", again)
    layout, held, overflow = cell.entry()
    if overflow > 0:
        assert status == 2
        missing = re.search(r"needs ([0-9.]+) GiB more than worker \d+ has", shown.err)
        assert missing, shown.err
        assert float(missing[1]) == pytest.approx(overflow / GIB, abs=0.05)
        return
    assert status == 0
    choice = chosen[0]
    assert layout in (choice.fastest if cell.profile in PAPER else choice).sizes
    assert replace(read_plan(tmp_path / "plan.json"), made_with=()) == choice.plan()
    if held is not None:
        assert tuple(use.total for use in choice.proposal.memory) == held


@pytest.mark.slow
def test_the_base_of_adapters_is_counted_with_its_matrices_in_two_bytes():
    stated = StatedModel(name="flux.1-dev-lora", has_narrow_store=True)
    parameters = describe(stated_graph(stated), autocast=torch.bfloat16).parameters
    held = sum(Workload(batch=1).frozen.size(one) for one in parameters if not one.is_trainable)
    assert held / GIB == pytest.approx(31.6, abs=0.05)
