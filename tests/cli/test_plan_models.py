"""`diffusionpipe plan --models`: which models fit a cluster; each is counted once for all cards."""

from types import SimpleNamespace

import pytest
from golden.plans import recorded_profile

from diffusionpipe.cli import main
from diffusionpipe.costs.cluster import with_memory
from diffusionpipe.costs.clusters import known_cards, load_cluster
from diffusionpipe.costs.devices import DEVICES
from diffusionpipe.models.opening.configured import configured_models
from diffusionpipe.planner.choosing.advice import with_adapters
from diffusionpipe.planner.choosing.best import best_choice
from diffusionpipe.planner.choosing.rows import GIB
from diffusionpipe.workflows.planning import model_table
from diffusionpipe.workflows.planning.model_table import ADAPTERS, WHOLE, answers, models_named
from diffusionpipe.workflows.planning.stated_setting import stated_setting


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return int(caught.value.code or 0)


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """The models whose work was counted; all of them are one recorded profile, on each card that is asked for."""
    from dataclasses import replace

    made, recorded = [], recorded_profile("sd-2.1-a100-80")

    def count(stated, devices, tell):
        made.append(ADAPTERS if stated.lora_rank else WHOLE)
        whole = stated_setting(recorded, load_cluster("a100-80x1"), 1, checkpoint=(), has_ema=False, optimizer="AdamW")
        profile = with_adapters(whole, stated.lora_rank).profile if stated.lora_rank else recorded
        return [replace(profile, device=DEVICES[name].title, precision=stated.precision) for name in devices]

    monkeypatch.setattr(model_table, "profiles_of_devices", count)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return made


def test_a_model_is_counted_once_for_all_cards_of_its_arithmetic(counted, monkeypatch):
    monkeypatch.setattr(model_table, "best_way", lambda *_, **__: SimpleNamespace())  # no plan is looked at
    for name in ("rtx3090x1", "a100-80x1", "rtx3090x1"):
        found = list(answers(["sd-1.5"], load_cluster(name)))
        assert [(one.model, one.trained) for one in found] == [("sd-1.5", WHOLE), ("sd-1.5", ADAPTERS)]
    assert counted == [WHOLE, ADAPTERS]
    list(answers(["sd-1.5"], load_cluster("t4x1")))  # in float32
    assert counted == [WHOLE, ADAPTERS] * 2


def test_what_fits_has_a_plan_and_what_does_not_lacks_memory(counted):
    whole, adapters = answers(["sd-1.5"], with_memory(load_cluster("rtx3090x1"), 9 * GIB))
    assert whole.tried is None
    assert whole.nearest.proposal.overflow > 0
    assert adapters.tried.choice.proposal.overflow <= 0
    assert adapters.tried.batch == 1
    assert best_choice(adapters.tried.choice.setting).step == pytest.approx(adapters.tried.choice.step)


def test_classes_that_take_no_adapters_have_one_row(counted):
    assert [one.trained for one in answers(["dit-xl-2-256"], load_cluster("a100-80x1"))] == [WHOLE]


def test_all_models_but_those_that_are_others_with_adapters_are_asked_about():
    assert set(configured_models()) - set(models_named("all")) == {"flux.1-dev-lora"}
    assert models_named("sdxl, sd-1.5") == ("sdxl", "sd-1.5")
    assert len(known_cards()) > 10


def test_each_row_is_one_line_of_80_columns(counted, capsys):
    assert run("plan", "--models", "sd-1.5", "--cluster", "rtx3090x1", "--memory", 9) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(len(line) <= 80 for line in lines)
    assert "lacks " in lines[1]
    assert "GiB: " in lines[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "sd-9"], "--models: there is no shipped model 'sd-9'; give all, or some of chroma"),
        (["--models", ","], "--models: no model is named"),
        (["--models", "all", "--model", "sdxl"], "--model: no effect on --models; leave it out, or name one model"),
        (["--models", "all", "--batch", "8,16"], "--batch: --models takes one batch"),
        (["--models", "sdxl", "--cluster", "cpux2"], "the devices of the cluster cpux2 are not known"),
    ],
)
def test_options_that_do_not_fit_are_refused(counted, capsys, options, words):
    cluster = [] if "--cluster" in options else ["--cluster", "rtx3090x1"]
    assert run("plan", *options, *cluster) == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not counted
