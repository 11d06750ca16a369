"""`diffusionpipe plan RECIPE`: the workload is the recipe's, the profile is read, computed or measured, and kept."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from kit.sized_pictures import SIZED, save_sized
from kit.tiny_runs import recipe_of, save_pictures, save_stable_diffusion

from diffusionpipe.cli import main
from diffusionpipe.cli.verbs.plan_asking import PlanCommand
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import PROFILE, read_profile, write_cluster, write_profile
from diffusionpipe.ir.files import read_file, read_plan
from diffusionpipe.timing.legal import check
from diffusionpipe.trainer.recipe import recipe_to_toml
from diffusionpipe.workflows.planning.question import answered, question_of_recipe

pytestmark = pytest.mark.usefixtures("one_trace")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    save_stable_diffusion(folder / "sd")
    save_pictures(folder / "data", count=4)
    return folder


@pytest.fixture(scope="module")
def cache(place):
    """The folder of kept profiles, the same for all tests."""
    return place / "cache"


@pytest.fixture(autouse=True)
def environment(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


@pytest.fixture
def recipe(place, tmp_path):
    path = tmp_path / "recipe.toml"
    sizes = {"microbatches": "none", "encode_chunk": "none"}
    path.write_text(recipe_to_toml(recipe_of(place / "sd", place / "data", tmp_path / "run", pipeline=sizes)))
    return path


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as caught:
        main(["plan", *map(str, arguments), "--all"])
    code = caught.value.code
    return 0 if code is None else code


def kept(cache):
    folder = cache / "diffusionpipe" / "profiles"
    return sorted(folder.iterdir()) if folder.is_dir() else []


@pytest.fixture
def profile(recipe, capsys):
    """A file of the recipe's model, computed for the RTX 4090."""
    run(recipe, "--cluster", "rtx4090x2", "--batch", 8)
    return Path(re.search(r"kept as (.*\.json)", capsys.readouterr().err)[1])


def test_a_known_device_is_computed_once_and_planned_for(recipe, cache, tmp_path, capsys):
    for name in ("one.json", "two.json"):
        assert run(recipe, "--cluster", "rtx4090x2", "--batch", 16, "--out", tmp_path / name) == 0
    assert "analytic, NVIDIA GeForce RTX 4090 (from its data sheet), float32, kept as" in capsys.readouterr().err
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    plan = read_plan(tmp_path / "one.json")
    check(plan.train)
    assert (plan.batch, plan.mesh.num_ranks) == (16, 2)
    found = [path for path in kept(cache) if "GeForce RTX 4090" in path.read_text()]
    assert {read_profile(path).source for path in found} == {"analytic"}


def test_this_machine_is_measured_and_its_kept_profile_used_again(recipe, cache, capsys, monkeypatch):
    options = "pipeline.plan=auto", "pipeline.encode_chunk=1", "--cluster", "cpux2", "--batch", 2
    assert run(recipe, *options) == 0
    assert "profile: measured, " in capsys.readouterr().err
    before = kept(cache)
    # it must not be called again
    monkeypatch.setattr("diffusionpipe.workflows.planning.recipe_profile.profile_model", None)
    assert run(recipe, *options) == 0
    assert kept(cache) == before


def test_without_cache_nothing_is_kept_and_nothing_kept_is_used(recipe, profile, cache, capsys, monkeypatch):
    made = replace(read_profile(profile), device="NVIDIA GeForce RTX 4090", source="measured")
    monkeypatch.setattr("diffusionpipe.workflows.planning.recipe_profile.analytic_profile", lambda *_, **__: made)
    before = kept(cache)
    assert run(recipe, "--cluster", "rtx4090x2", "--batch", 8, "--no-cache") == 0
    assert capsys.readouterr().err.endswith(
        "profile: measured, NVIDIA GeForce RTX 4090 (from its data sheet), float32\n"
    )
    assert kept(cache) == before


def test_checkpointing_trained_components_and_batch_are_the_recipes(recipe, tmp_path):
    keys = ['model.train=["text_encoder"]', "training.activation_checkpointing=true", "training.batch=8"]
    assert run(recipe, *keys, "--cluster", "rtx4090x2", "--out", tmp_path / "plan.json") == 0
    plan = read_plan(tmp_path / "plan.json")
    trained = [name for block in plan.blocks[:-1] for name in block]
    assert set(plan.checkpointed) == set(trained)
    assert any(name.startswith("text_encoder.") for name in trained)
    assert plan.batch == 8


def test_sizes_of_a_recipe_that_is_searched_are_kept_and_those_of_another_are_not(recipe, tmp_path):
    def planned(plan, copies):
        keys = f"pipeline.plan={plan}", f"pipeline.data_parallel={copies}"
        assert run(recipe, *keys, "--cluster", "rtx4090x2", "--batch", 16, "--out", tmp_path / "plan.json") == 0
        return replace(read_plan(tmp_path / "plan.json"), made_with=())

    assert [planned("auto", copies).mesh.data_parallel for copies in (1, 2)] == [1, 2]
    assert planned("none", 1) == planned("none", 2)


def test_the_memory_of_the_recipes_optimizer_and_average_counts(recipe, capsys):
    sizes = []
    for keys in (["optimizer.name=SGD", "training.ema_decay=none"], []):
        assert run(recipe, *keys, "--cluster", "rtx4090x2", "--batch", 8) == 0
        sizes.append(capsys.readouterr().out.partition("fullest device, MiB: ")[2].partition("\n\n")[0])
    assert "optimizer" not in sizes[0]
    assert "ema" not in sizes[0]
    assert "optimizer" in sizes[1]
    assert "ema" in sizes[1]


def test_a_profile_that_is_given_is_used(recipe, profile, capsys):
    assert run(recipe, "--cluster", "rtx4090x2", "--batch", 8, "--profile", profile) == 0
    assert "profile:" not in capsys.readouterr().err


def refused(capsys, *arguments):
    capsys.readouterr()
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_a_profile_of_another_model_precision_or_device_is_refused(recipe, profile, tmp_path, capsys):
    options = "--cluster", "rtx4090x2", "--batch", 8, "--profile", profile
    assert "this profile was made for another model: " in refused(
        capsys, recipe, 'model.train=["text_encoder"]', *options
    )
    bfloat16 = tmp_path / "bfloat16.json"
    write_profile(replace(read_profile(profile), precision="bfloat16"), bfloat16)
    message = refused(capsys, recipe, "--cluster", "rtx4090x2", "--batch", 8, "--profile", bfloat16)
    assert "is a profile in bfloat16, but the recipe trains in float32" in message
    message = refused(capsys, recipe, "--cluster", "h100x8", "--batch", 8, "--profile", profile)
    assert "this profile was made on NVIDIA GeForce RTX 4090, but the cluster h100x8 has" in message


@pytest.mark.parametrize("value", [0.0, -1.0, None], ids=["zero", "negative", "missing"])
def test_a_profile_with_a_wrong_time_is_refused(recipe, profile, tmp_path, capsys, value):
    data = json.loads(profile.read_text())
    layer = next(layer for layer in data["layers"] if any(layer["weight_grad"]))
    layer["forward"][0] = value
    (tmp_path / "profile.json").write_text(json.dumps(data))
    message = refused(capsys, recipe, "--cluster", "rtx4090x2", "--batch", 8, "--profile", tmp_path / "profile.json")
    assert "profile.json: not a valid diffusionpipe-profile" in message
    assert "forward" in message


def test_a_device_that_is_neither_here_nor_known_is_refused(recipe, tmp_path, capsys):
    cluster = load_cluster("rtx4090x2")
    strange = tuple(replace(device, name="Strange 1") for device in cluster.devices)
    write_cluster(replace(cluster, name="lab", devices=strange), tmp_path / "lab.json")
    message = refused(capsys, recipe, "--cluster", tmp_path / "lab.json", "--batch", 8)
    assert "its devices (Strange 1) are not on this machine" in message
    assert "diffusionpipe profile RECIPE" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "7", "--cluster", "a100-80x8", "pipeline.plan=auto", "pipeline.microbatches=2"], "7 samples"),
        (["--batch", "6", "--cluster", "a100-80x8", "pipeline.plan=auto", "pipeline.stages=2"], "6 samples cannot"),
        (["--cluster", "a100-80x8", "pipeline.plan=auto", "pipeline.stages=3"], "8 ranks cannot form pipelines of 3"),
        (["--cluster", "cpux2", "--ema"], "--ema: the recipe sets this"),
        (["--cluster", "cpux2", "--optimizer", "SGD", "--checkpoint", "*"], "--checkpoint, --optimizer: the recipe"),
        ([], "--cluster: this option is missing"),
        (["--cluster", "nowhere"], "there is no cluster 'nowhere'"),
        (["--cluster", "cpux2", "--profile", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_is_profiled(recipe, capsys, monkeypatch, words, message):
    for name in ("profile_model", "analytic_profile", "build_model"):
        monkeypatch.setattr(f"diffusionpipe.workflows.planning.recipe_profile.{name}", None)
    assert message in refused(capsys, recipe, *words)


def test_a_model_that_fits_nowhere_is_refused_with_the_keys_that_would_help(recipe, profile, tmp_path, capsys):
    cluster = load_cluster("rtx4090x2")
    small = tuple(replace(device, memory=10**4) for device in cluster.devices)
    write_cluster(replace(cluster, name="small", devices=small), tmp_path / "small.json")
    message = refused(capsys, recipe, "--cluster", tmp_path / "small.json", "--batch", 8, "--profile", profile)
    assert "No layout fits" in message
    assert "These changes would fit" in message


def test_kept_profiles_are_profile_files(profile):
    assert read_file(profile, PROFILE).graph.backbone_layers


@pytest.fixture
def adapters(recipe):
    """Keys that make the recipe train adapters beside weights in bfloat16."""
    pytest.importorskip("peft")
    return ["lora.rank=2", "training.precision=bfloat16", "model.frozen_dtype=bfloat16"]


def test_a_recipe_with_narrow_frozen_weights_is_planned_as_its_profile_alone_is(recipe, adapters, tmp_path, capsys):
    out, options = tmp_path / "adapters.json", ("--cluster", "rtx4090x2", "--batch", 8)
    with pytest.raises(SystemExit):
        main(["profile", str(recipe), *adapters, "--analytic", "rtx4090", "--batch-sizes", "1,4", "--out", str(out)])
    capsys.readouterr()
    shown = []
    for words in ((recipe, *adapters), ("--ema",)):
        assert run(*words, "--profile", out, *options, "--out", tmp_path / f"plan{len(shown)}.json") == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    plans = [read_plan(tmp_path / f"plan{number}.json") for number in range(2)]
    assert replace(plans[0], made_with=()) == replace(plans[1], made_with=())


def test_adapters_are_profiled_and_planned_as_they_are_trained(recipe, adapters, tmp_path, capsys):
    paths = {"adapters": [*adapters], "whole": ["training.precision=bfloat16"], "wide": ["training.precision=bfloat16"]}
    paths["wide"] += ["model.frozen_dtype=none"]
    held = {}
    for name, keys in paths.items():
        out = tmp_path / f"{name}.json"
        with pytest.raises(SystemExit) as caught:
            main(["profile", str(recipe), *keys, "--analytic", "rtx4090", "--batch-sizes", "1,4", "--out", str(out)])
        assert caught.value.code in (0, None)
        graph = read_profile(out).graph
        held[name] = {p.name: (p.dtype, p.is_trainable) for p in graph.parameters}
        stated = [key for key in keys if "frozen_dtype" not in key]  # else it is as the profile has it
        words = "--cluster", "rtx4090x2", "--batch", 8, "--profile", out, "--out", tmp_path / "p"
        assert run(recipe, *stated, *words) == 0
        check(read_plan(tmp_path / "p").train)
    trained = {name for name, (_, is_trainable) in held["adapters"].items() if is_trainable}
    assert trained
    assert all(".lora_" in name for name in trained)
    assert {held["adapters"][name][0] for name in trained} == {"float32"}
    narrow = {name for name, (dtype, _) in held["adapters"].items() if dtype == "bfloat16"}
    assert any(name.startswith("unet.") for name in narrow)
    assert any(name.startswith("text_encoder.") for name in narrow)
    assert {dtype for dtype, is_trainable in held["whole"].values() if is_trainable} == {"float32"}
    assert "bfloat16" in {dtype for dtype, _ in held["whole"].values()}
    assert all(dtype == "float32" for dtype, _ in held["wide"].values())


@pytest.mark.parametrize(("schedule", "code"), [("zb-h1", 2), ("1f1b", 0), ("none", 0)])
def test_an_older_profile_plans_a_recipe_unless_it_asks_for_split_backwards(
    recipe, profile, tmp_path, capsys, schedule, code
):
    known = read_profile(profile)
    layers = tuple(replace(layer, kept=(), kept_reads=()) for layer in known.layers)
    write_profile(replace(known, layers=layers), tmp_path / "old.json")
    words = ["--cluster", "rtx4090x2", "--profile", tmp_path / "old.json", "--out", tmp_path / "plan.json"]
    assert run(recipe, f"pipeline.schedule={schedule}", *words, "pipeline.plan=auto") == code
    printed = capsys.readouterr().err
    assert (f"diffusionpipe profile RECIPE --out {tmp_path / 'old.json'}" in printed) == (schedule != "1f1b")
    assert printed.count("warning: ") == (schedule == "none")
    if code == 0:
        assert not read_plan(tmp_path / "plan.json").train.splits_backwards


class Shown:
    """Keeps the titles of work under way, with the progress of each; nothing is drawn within another's block."""

    def __init__(self):
        self.steps = {}
        self.is_open = False

    def say(self, text):
        assert not self.is_open

    @contextmanager
    def progress(self, title, *, is_timed=True):
        assert not self.is_open
        self.is_open = True
        yield lambda done, total: self.steps.setdefault(title, []).append((done, total))
        self.is_open = False
        self.steps.setdefault(title, [])


@pytest.mark.slow
def test_all_work_of_a_plan_with_micro_batches_by_tokens_is_shown(place, tmp_path):
    data = save_sized(tmp_path / "sized")
    pipeline = {"plan": "auto", "stages": 2, "schedule": "1f1b", "fill": False, "sharded": False}
    free = {"microbatches": "none", "encode_chunk": "none"}
    sized = {**SIZED, "same_size": "auto", "batching": "tokens"}
    path = tmp_path / "recipe.toml"
    path.write_text(
        recipe_to_toml(recipe_of(place / "sd", data, tmp_path / "run", data=sized, pipeline=pipeline | free))
    )
    shown = Shown()
    asked = question_of_recipe(path, (), cluster="rtx4090x2", profile=None, uses_cache=True, writes=True, tell=shown)
    assert list(shown.steps) == ["reading the model", "profiling", "reading headers"]
    assert shown.steps["reading the model"] == [(1, 3), (2, 3), (3, 3)]
    answered(replace(asked, batches=(asked.setting.workload.batch,)), PlanCommand(["plan"], ()), shown)
    assert list(shown.steps)[-1] == "planning"
