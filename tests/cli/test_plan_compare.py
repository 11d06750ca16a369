import re
from dataclasses import replace

import pytest
from kit.screen_files import assert_screen
from planner import synthetic
from planner.rivals.vgg16 import MINIBATCH, vgg16_profile

from diffusionpipe.cli import main
from diffusionpipe.cli.text.plan_compare import names_of, rival_lines, writable
from diffusionpipe.costs.files import write_cluster, write_profile
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.files import read_plan, read_timeline
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.planners import PLANNERS
from diffusionpipe.planner.rivals.simulated import simulated
from diffusionpipe.timing.legal import check


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as exit_info:
        main([str(argument) for argument in arguments])
    code = exit_info.value.code
    return 0 if code is None else code


@pytest.fixture
def plan_of(tmp_path):
    def plan(profile, cluster, batch, *more):
        names = tmp_path / "profile.json", tmp_path / "cluster.json"
        write_profile(profile, names[0])
        write_cluster(cluster, names[1])
        return run(
            "plan",
            "--profile",
            names[0],
            "--cluster",
            names[1],
            "--batch",
            batch,
            "--all",
            "--checkpoint",
            "none",
            *more,
        )

    return plan


CHAIN = synthetic.chain([0.02, 0.01, 0.01, 0.01, 0.01, 0.01], parameters=[10**6] * 6, elements=1000, frozen=0.01)


@pytest.fixture(scope="module")
def compared():
    """Copies do not fit, links are slow, and PipeDream's replicas cannot share the batch."""
    profile = synthetic.chain([0.12] + [0.01] * 3, parameters=[10**8] * 4, elements=10**5, frozen=0.02)
    cluster = synthetic.cluster(4, memory=5.5, intra_gb=0.5)
    setting = Setting(profile=replace(profile, update=1e-9), cluster=cluster, workload=synthetic.workload(16))
    return choose(setting), simulated(list(PLANNERS), setting)


@pytest.mark.parametrize("width", [80, 160])
def test_the_screen(compared, width):
    lines = [line for line, _ in rival_lines(tuple(PLANNERS), *compared, width=width)]
    assert all(len(line) <= width for line in lines)
    assert_screen(f"plan_compare_{width}", "\n".join(lines))


def test_every_figure_of_the_table_adds_up(compared):
    _, rivals = compared
    assert any(rival.scale < 1 for rival in rivals)
    for rival in rivals:
        assert rival.step == pytest.approx(rival.encoding + rival.pipeline + rival.proposal.update)


@pytest.mark.slow
def test_the_partition_of_vgg16_is_printed_with_its_formula(plan_of, capsys):
    cluster = synthetic.cluster(4, intra_gb=1.0)
    assert plan_of(vgg16_profile(), cluster, 2 * MINIBATCH, "--no-fill", "--compare", "pipedream") == 0
    shown = capsys.readouterr().out
    assert re.search(r"PipeDream, 2 stages \(3,1\), +411\.0 .*\n +2 mb\*", shown), shown  # 2 x 205.52 ms
    assert "SOSP 2019" in " ".join(shown.split())


@pytest.mark.parametrize("name", ["pipedream", "zero3", "bapipe", "megatron"])
def test_a_rivals_plan_is_written_legal_and_with_its_prediction(name, plan_of, tmp_path):
    path = tmp_path / "rival.json"
    assert plan_of(CHAIN, synthetic.cluster(2), 8, "--compare", name, "--out", path) == 0
    plan = read_plan(path)
    assert plan.batch == 8
    assert plan.prologue is None  # encoders run first
    check(plan.train)
    assert read_timeline(tmp_path / "rival.timeline.json").makespan > 0


def test_a_system_that_needs_more_layers_says_so_in_the_table_and_before_a_plan_is_written(plan_of, capsys, tmp_path):
    short = synthetic.chain([0.02, 0.01], parameters=[10**6] * 2, elements=1000, frozen=0.01)
    assert plan_of(short, synthetic.cluster(4), 8, "--compare", "bapipe,ddp") == 0
    assert "BaPipe: there is no layout with a layer for each device" in capsys.readouterr().out
    path = tmp_path / "rival.json"
    assert plan_of(short, synthetic.cluster(4), 8, "--compare", "bapipe", "--out", path) == 2
    assert "none with a layer for each device; use" in " ".join(capsys.readouterr().err.split())
    assert not path.exists()


def test_all_are_all(capsys):
    assert names_of("all", writes=False) == tuple(PLANNERS)
    assert names_of("spp, ddp,spp", writes=False) == ("spp", "ddp")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pipedrem", ["'pipedrem'", "did you mean pipedream?", *PLANNERS]),
        ("dapple,nothing", ["'nothing'", "all, or some of"]),
        (" , ", ["no system is named", "all, or some of"]),
    ],
)
def test_an_unknown_system_is_refused_with_the_list(text, words):
    with pytest.raises(ConfigError) as error:
        names_of(text, writes=False)
    assert all(word in str(error.value) for word in words)


def test_several_systems_have_no_one_plan_to_write(plan_of, capsys, tmp_path):
    path = tmp_path / "rival.json"
    assert plan_of(CHAIN, synthetic.cluster(2), 8, "--compare", "spp,ddp", "--out", path) == 2
    assert "--compare names 2 systems; name the one" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "memory", "batch", "words"),
    [
        ("pipedream", 80, 16, "the replicas of PipeDream's stages cannot share this batch equally; a batch of 18 can"),
        ("ddp", 6, 16, "DDP's layout needs 6.3 GiB more than the fullest device has"),
        ("zero3", 80, 9, "no layout for this batch"),
        ("megatron", 1, 16, "Megatron-LM's layout needs"),
    ],
    ids=["shares", "memory", "batch", "megatron"],
)
def test_a_plan_that_cannot_train_is_not_written_and_says_why(name, memory, batch, words):
    profile = synthetic.chain([0.09, 0.01, 0.01, 0.01], parameters=[100] * 3 + [8 * 10**8], elements=10, frozen=0.01)
    cluster = synthetic.cluster(4, memory=memory, intra_gb=1.0)
    setting = Setting(profile=profile, cluster=cluster, workload=synthetic.workload(batch))
    with pytest.raises(ConfigError, match=re.escape(words)):
        writable(simulated([name], setting))
