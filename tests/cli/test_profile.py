"""Profiles and clusters from the command line."""

from dataclasses import replace

import pytest
from kit.tiny_runs import recipe_of, save_dit, save_pictures
from planner import synthetic

from diffusionpipe import cli
from diffusionpipe.cli.verbs.profile import _print_report
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import read_profile
from diffusionpipe.trainer.recipe import recipe_to_toml


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    save_dit(folder / "dit")
    save_pictures(folder / "data", count=2)
    path = folder / "recipe.toml"
    path.write_text(recipe_to_toml(recipe_of(folder / "dit", folder / "data", folder / "run", training={"steps": 1})))
    return path


def exit_of(*arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(list(map(str, arguments)))
    return caught.value.code


def test_a_measured_profile_is_written_and_summed_up(recipe, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = tmp_path / "profile.json"
    assert exit_of("profile", recipe, "--out", out, "--batch-sizes", "2,1", "--device", "cpu", "--repeats", 1) == 0
    profile = read_profile(out)
    assert (profile.batch_sizes, profile.source) == ((1, 2), "measured")
    printed = capsys.readouterr().out
    for text in (profile.device, "slowest layers", "component", "kept:", "temp"):
        assert text in printed
    assert "transformer.transformer_block" in printed  # what is left of a name too long for its column follows below
    assert printed.endswith(f"Written to {out}\n")
    assert "…" not in printed


def test_no_figure_is_cut_however_long_the_names_of_layers_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    made = synthetic.unet()
    long = replace(
        made.layers[0], name="transformer.single_transformer_blocks.37.attn.processor", forward=(98.76543,) * 7
    )
    graph = replace(made.graph, layers=(replace(made.graph.layers[0], name=long.name), *made.graph.layers[1:]))
    _print_report(replace(made, graph=graph, layers=(long, *made.layers[1:])))
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert "98765.43" in printed


def test_an_analytic_profile_needs_no_device(recipe, tmp_path, capsys):
    out = tmp_path / "profile.json"
    assert exit_of("profile", recipe, "--out", out, "--batch-sizes", "1,4", "--analytic", "h200") == 0
    assert (read_profile(out).device, read_profile(out).source) == ("NVIDIA H200", "analytic")
    assert "analytic on NVIDIA H200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--batch-sizes", "1,two"), "whole numbers from 1 to 9,999,999"),
        (("--batch-sizes", "0"), "whole numbers from 1 to 9,999,999"),
        (("--time-budget", "nan"), "--time-budget"),
        (("--analytic", "a100"), "known are"),
        (("--device", "tpu"), "choose auto, cpu or cuda"),
    ],
)
def test_a_wrong_option_is_refused(recipe, tmp_path, capsys, options, words):
    assert exit_of("profile", recipe, "--out", tmp_path / "p.json", *options) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()


def test_shipped_clusters_are_listed_and_shown(capsys):
    assert exit_of("cluster", "--list") == 0
    assert "rtx4090x2" in capsys.readouterr().out
    assert exit_of("cluster", "a100-80x8:2") == 0
    assert "16 x NVIDIA A100-SXM4-80GB (75.0 GiB) in 2 nodes" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch's agent leaves log files open
@pytest.mark.usefixtures("forked_ranks")
def test_links_are_measured_between_two_processes(tmp_path):
    out = tmp_path / "mine.json"
    assert exit_of("cluster", "--ranks", 2, "--device", "cpu", "--out", out) == 0
    cluster = load_cluster(str(out))
    assert (cluster.num_ranks, cluster.nodes, cluster.name) == (2, (0, 0), "mine")
    assert cluster.intra.latency > 0
    (pair,) = cluster.pairs
    assert (pair.first, pair.second, pair.latency, pair.bandwidth) == (
        0,
        1,
        cluster.intra.latency,
        cluster.intra.bandwidth,
    )


def test_one_rank_has_no_links(capsys):
    assert exit_of("cluster", "--device", "cpu") == 2
    assert "--ranks 2" in capsys.readouterr().err
