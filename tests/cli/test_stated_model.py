"""A model on the command line: its profile is computed once, kept, and found by all that its numbers depend on."""

import json
import logging
import sys
from dataclasses import replace

import pytest
from golden.plans import recorded_profile
from kit.tiny_runs import save_stable_diffusion

from diffusionpipe.cli import main
from diffusionpipe.costs.devices import DEVICES
from diffusionpipe.costs.files import read_profile
from diffusionpipe.errors import ModelError
from diffusionpipe.workflows.planning import stated_model
from diffusionpipe.workflows.planning.origin import options_made_with
from diffusionpipe.workflows.planning.stated_model import (
    BATCH_SIZES,
    StatedModel,
    computed_profile,
    named_model,
    profile_name,
    stated_graph,
)


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        main([*map(str, arguments)])
    return int(caught.value.code or 0)


@pytest.fixture
def computing(monkeypatch):
    """Counts how often a profile is computed; each one is a recorded profile."""
    made = []

    def compute(stated, device, tell):
        made.append(stated)
        return recorded_profile("sd-2.1-a100-80")

    monkeypatch.setattr(stated_model, "_computed", compute)
    return made


def test_a_folders_profile_is_computed_in_full_and_found_again(tmp_path, monkeypatch):
    save_stable_diffusion(tmp_path / "sd")
    stated = StatedModel(name=str(tmp_path / "sd"), resolution=32)
    made, path = computed_profile(stated, "rtx4090", tmp_path / "kept")
    assert (made.device, made.precision, made.batch_sizes) == (DEVICES["rtx4090"].title, "bfloat16", BATCH_SIZES)
    assert made.mode is not None
    assert all(layer.forward[-1] > 0 for layer in made.layers)
    assert path is not None
    assert read_profile(path) == made
    monkeypatch.setattr(stated_model, "_computed", None)  # calling it would fail
    assert computed_profile(stated, "rtx4090", tmp_path / "kept") == (made, path)


def test_all_that_the_numbers_depend_on_is_in_the_name(tmp_path, computing, monkeypatch):
    save_stable_diffusion(tmp_path / "sd")
    place = tmp_path / "kept"
    shipped, opened = StatedModel(name="sd-2.1"), StatedModel(name=str(tmp_path / "sd"), resolution=32)

    def files():
        return len(list(place.iterdir()))

    for number, (stated, device) in enumerate((
        (shipped, "a100-80"),
        (shipped, "h100"),
        (replace(shipped, resolution=768), "a100-80"),
        (replace(shipped, lora_rank=4), "a100-80"),
        (replace(shipped, has_narrow_store=True), "a100-80"),
        (replace(shipped, has_narrow_weights=True), "a100-80"),
        (replace(shipped, clip=(832, 480, 81)), "a100-80"),
        (opened, "a100-80"),
        (StatedModel(name="WanTransformer3DModel", is_class=True), "a100-80"),
    ), start=1):  # fmt: skip
        computed_profile(stated, device, place)
        computed_profile(stated, device, place)
        assert (len(computing), files()) == (number, number)
    computed_profile(replace(shipped, resolution=512), "a100-80", place)  # the published one
    assert files() == 9
    config = tmp_path / "sd" / "unet" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"layers_per_block": 3}))
    computed_profile(opened, "a100-80", place)
    assert files() == 10
    rates = DEVICES["a100-80"]
    better = replace(rates, efficiency=replace(rates.efficiency, matmul=rates.efficiency.matmul + 0.01))
    monkeypatch.setattr(stated_model, "device_rates", lambda _: better)
    computed_profile(shipped, "a100-80", place)
    assert files() == 11
    monkeypatch.setattr(stated_model, "code_digest", lambda: "other")
    computed_profile(shipped, "a100-80", place)
    assert files() == 12


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, computing, caplog):
    (tmp_path / "kept").write_text("a file")
    with caplog.at_level(logging.WARNING):
        made, path = computed_profile(StatedModel(name="sd-2.1"), "a100-80", tmp_path / "kept")
    assert (made.device, path) == (DEVICES["a100-80"].title, None)
    assert "profile_kept=False" in caplog.text


def test_plan_names_the_kept_profile_and_rehearse_finds_it(tmp_path, computing, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def stop(setting, **_):
        asked.append(setting)
        raise SystemExit(0)

    monkeypatch.setattr("diffusionpipe.planner.choosing.choice.choose", stop)
    question = ("--model", "sd-2.1", "--resolution", 512, "--cluster", "a100-80x8")
    assert run("plan", *question, "--batch", 64) == 0
    shown = capsys.readouterr().err
    assert "profile: analytic, NVIDIA A100-SXM4-80GB" in shown
    assert str(tmp_path / "diffusionpipe" / "profiles") in shown
    assert asked[0].profile == recorded_profile("sd-2.1-a100-80")
    assert asked[0].workload.batch == 64
    assert run("plan", *question, "--batch", 64, "--no-cache") == 0
    assert len(computing) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "sd-2.1", "--profile", "x.json"], "--profile and --model are both given"),
        (["--model", "sd-2.1", "--model-class", "X"], "--model and --model-class are both given"),
        (["--model-class", "X", "--profile", "x.json"], "--profile and --model-class are both given"),
        (["recipe.toml", "--model-class", "X"], "--model-class: the recipe sets this"),
        (
            ["--profile", "x.json", "--resolution", "512"],
            "--resolution: only for a model that --model or --model-class",
        ),
        (
            ["--model", "sd-2.1", "--frozen-dtype", "int4"],
            "use bfloat16, float8, int8, nf4, none or auto, or leave it out",
        ),
        *(
            (["--model", "sd-2.1", "--resolution", size], f"--resolution {size!r} is not the side of a picture, 8 to")
            for size in ("4", "16385", "64x64", "64x0x5", "99999x8x5", "64x64x0", "64x64x5x5", "x", "-8", "1e3")
        ),
        (
            ["--model", "sd-2.1", "--weights", "float8"],
            "--weights is 'float8'; use float32 or bfloat16, or leave it out",
        ),
        (["--model", "sd-2.1", "--weights", "bfloat16", "--lora-rank", "4"], "--weights bfloat16: adapters take few"),
        (["--profile", "x.json", "--weights", "bfloat16"], "--weights: only for a model that --model or --model-class"),
        (["recipe.toml", "--gradients", "bfloat16"], "--gradients: the recipe sets this"),
        (["--model", "sd-2.1", "--gradients", "bfloat16"], "--gradients bfloat16: weights are float32"),
        (["--model", "sd-2.1", "--weights", "bfloat16", "--gradients", "4"], "--gradients 4: use float32 or bfloat16"),
        (["--model-class", "X", "--caption-chunks", "2"], "--caption-chunks: a class of --model-class has no text"),
        (["--model", "sd-9"], "Or name one of the shipped models: chroma"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_computed(
    options, words, computing, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run("plan", *options, "--cluster", "a100-80x8", "--batch", "64") == 2
    assert words in " ".join(capsys.readouterr().err.split())
    assert not computing


def test_a_class_is_planned_without_a_folder_and_its_sample_is_shown(tmp_path, computing, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []
    monkeypatch.setattr(
        "diffusionpipe.planner.choosing.choice.choose", lambda setting, **_: asked.append(setting) or sys.exit(0)
    )
    options = ("--resolution", "832x480x81", "--lora-rank", 16, "--cluster", "a100-80x8", "--batch", 64)
    assert run("plan", "--model-class", "WanTransformer3DModel", *options) == 0
    assert computing == [
        StatedModel(
            name="WanTransformer3DModel", is_class=True, clip=(832, 480, 81), lora_rank=16, has_narrow_store=True
        )
    ]
    shown = capsys.readouterr().err
    assert "WanTransformer3DModel without encoders and VAE; a sample is " in shown
    assert asked[0].workload.batch == 64


def test_rehearse_without_a_profile_needs_model_and_cluster(tmp_path, capsys):
    from golden.plans import questions, recorded_plan

    from diffusionpipe.ir.files import write_plan

    write_plan(recorded_plan(next(one for one in questions() if one.answer)), tmp_path / "plan.json")
    for options in ([], ["--model", "sd-2.1"], ["--cluster", "a100-80x8"]):
        assert run("rehearse", tmp_path / "plan.json", *options) == 2
        assert "give --profile, or --model and --cluster" in " ".join(capsys.readouterr().err.split())


def test_a_cluster_of_unknown_devices_is_refused(tmp_path, computing, capsys):
    from diffusionpipe.costs.clusters import load_cluster
    from diffusionpipe.costs.files import write_cluster

    known = load_cluster("l40sx8")
    write_cluster(
        replace(known, devices=tuple(replace(one, name="Card") for one in known.devices)), tmp_path / "c.json"
    )
    assert run("plan", "--model", "sd-2.1", "--cluster", tmp_path / "c.json", "--batch", 64) == 2
    assert "not among the known ones" in " ".join(capsys.readouterr().err.split())


def test_captions_in_chunks_are_part_of_a_stated_model_of_its_profiles_name_and_of_its_plans_options(tmp_path):
    save_stable_diffusion(tmp_path / "sd")
    one = StatedModel(name=str(tmp_path / "sd"), resolution=32)
    two = named_model(one.name, None, resolution="32", caption_chunks=2)
    assert two == replace(one, caption_chunks=2, has_narrow_store=True)
    shapes = [
        next(spec.shape for spec in stated_graph(stated).inputs if spec.name == "input_ids") for stated in (one, two)
    ]
    assert shapes[1] == (2, *shapes[0])
    assert profile_name(one, DEVICES["a100-80"]) != profile_name(replace(one, caption_chunks=2), DEVICES["a100-80"])
    assert "--caption-chunks=2" in options_made_with(model=two)
    with pytest.raises(ModelError, match="caption_chunks: captions are read in chunks by StableDiffusion"):
        stated_graph(StatedModel(name="z-image", caption_chunks=2))
