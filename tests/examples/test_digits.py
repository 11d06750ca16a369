"""The scripts behind `make demo` and `make demo-memory`."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from unittest import mock

import pytest
from kit.forked import completed
from kit.tiny_runs import measured_briefly

from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.profiler import profile_model
from diffusionpipe.trainer.recipe import load_recipe
from diffusionpipe.workflows.planning import recipe_profile
from diffusionpipe.workflows.planning.recipe_setting import restriction_of
from diffusionpipe.workflows.report.page import report_page

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples/digits"
SHORT = 12
"""Steps of a short run of the demo."""


def script(name):
    spec = spec_from_file_location(f"digits_{name}", DIGITS / f"{name}.py")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


compare, memory = script("compare"), script("memory")


def outcome(status, output="", peaks=(2**30, 2**29)):
    return memory.Outcome(status=status, output=output, peaks=peaks)


def test_the_time_of_a_step_is_the_median_of_the_last_ones(tmp_path):
    rows = [{"step": i, "step_s": 9.0 if i < 10 else 0.1 * (1 + i % 3)} for i in range(1, 41)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in [*rows, {"step": 40, "loss": 1}]))
    assert compare.seconds_of_a_step(tmp_path) == pytest.approx(0.2)


def test_both_times_are_said_whichever_is_faster():
    slower, faster = (" ".join(compare.sentence(a, b, 64).split()) for a, b in ((0.25, 0.2), (0.2, 0.25)))
    for text in (slower, faster):
        assert "pipeline of two stages 2" in text
        assert "A pipeline pays when the model with its gradients and optimizer state does not fit one device" in text
    assert "Data parallelism is 1.25 times as fast for this model" in slower
    assert "320 samples/s" in slower
    assert "The pipeline is 1.25 times as fast here" in faster


def test_the_comparison_is_of_the_demos_recipe_with_two_copies(monkeypatch):
    recipe = load_recipe(DIGITS / "recipe.toml", [*compare.OVERRIDES, "training.steps=25"])
    assert (recipe.pipeline.stages, recipe.pipeline.data_parallel, recipe.pipeline.schedule) == (1, 2, None)
    assert recipe.pipeline.is_searched
    assert (recipe.checkpoint.every, recipe.sampling.every, recipe.data.validation) == (None, None, None)
    shown = load_recipe(DIGITS / "recipe.toml")
    assert (recipe.training.batch, recipe.optimizer) == (shown.training.batch, shown.optimizer)


def test_a_run_says_which_keys_restrict_the_search_of_its_layout():
    said = restriction_of(load_recipe(DIGITS / "recipe.toml"))
    assert 'fixes data_parallel = 1, microbatches = 4, schedule = "1f1b", fill = true: the search tries only' in said
    free = [f"pipeline.{key}=none" for key in ("data_parallel", "microbatches", "schedule", "fill")]
    assert restriction_of(load_recipe(DIGITS / "recipe.toml", free)) == ""


def test_the_limit_stands_in_the_cluster_and_the_recipes_are_valid(tmp_path):
    memory.write_cluster(tmp_path / "cluster.json", 450 * 2**20)
    assert [device.memory for device in load_cluster(str(tmp_path / "cluster.json")).devices] == [450 * 2**20] * 2
    assert load_recipe(DIGITS / "memory.toml").pipeline.is_searched
    copies = load_recipe(DIGITS / "memory.toml", list(memory.DATA_PARALLEL)).pipeline
    assert (copies.stages, copies.data_parallel, copies.is_searched) == (1, 2, False)


def test_the_larger_model_is_the_digits_model_with_another_unet(tmp_path):
    memory.write_model(tmp_path / "model", channels=(32, 64, 96))
    config = json.loads((tmp_path / "model/unet/config.json").read_text())
    assert config["block_out_channels"] == [32, 64, 96]
    assert len(config["down_block_types"]) == len(config["up_block_types"]) == 3
    assert (tmp_path / "model/vae/config.json").read_text() == (DIGITS / "model/vae/config.json").read_text()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_memory_of_ranks_is_what_the_system_counts_of_their_processes():
    code = "import sys; block = bytearray(100 * 2**20); print(len(block), flush=True); sys.stdin.read()"
    environment = {**os.environ, "RANK": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as child:
        child.stdout.readline()
        held = {rank: memory.private_memory(folder) for rank, folder in memory.ranks_of(os.getpid()).items()}
        child.stdin.close()
    assert list(held) == [1]
    assert 100 * 2**20 <= held[1] < 200 * 2**20
    assert memory.private_memory(Path("/proc") / str(child.pid)) == 0  # it has ended


def test_the_report_says_what_was_measured_and_nothing_else():
    full = outcome(1, "x\nerror: rank 1: out of memory (can't allocate memory).\nUse more stages", (1000 * 2**20,) * 2)
    trained = outcome(0, "step=1 loss=1.069\nstep=4 loss=0.9")
    text, is_shown = memory.report(600 * 2**20, 1050 * 2**20, full, trained)
    assert is_shown
    assert "fails with 1,000 and 1,000 MiB in use:\n    error: rank 1: out of memory" in text
    assert "trains. Peak memory of the ranks: 1,024 and 512 MiB, loss 1.069 to 0.900" in text
    for copies, pipeline in ((trained, trained), (full, full), (outcome(1, "Traceback"), trained)):
        text, is_shown = memory.report(600 * 2**20, 1050 * 2**20, copies, pipeline)
        assert not is_shown
        assert "That is not what this demo is to show" in text


def measure_once():
    """Keep the profile that `plan` will ask for: the demo shows memory, which is counted; one pass gives the times."""
    memory.FOLDER.mkdir(parents=True)
    memory.write_model(memory.FOLDER / "model")
    memory.write_cluster(memory.FOLDER / "cluster.json", 400 * memory.MIB)
    cluster = load_cluster(str(memory.FOLDER / "cluster.json"))
    once = partial(profile_model, repeats=1)
    with measured_briefly(), mock.patch.object(recipe_profile, "profile_model", once):
        recipe_profile.make_profile_of(load_recipe(DIGITS / "memory.toml"), cluster, uses_cache=True)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits memory as Linux does")
@pytest.mark.usefixtures("one_thread")
def test_under_a_real_limit_copies_run_out_of_memory_and_the_pipeline_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measure_once()
    for name, *arguments in (("dataset", "--out", "runs/digits-data"), ("memory",)):
        command = [sys.executable, str(DIGITS / f"{name}.py"), *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    kept = list((tmp_path / "cache" / "diffusionpipe" / "profiles").iterdir())
    assert len(kept) == 1, "`plan` asks for what has been measured"
    verdict = " ".join(done.stdout.split())  # its lines are as wide as the terminal
    assert re.search(r"a whole copy of the model needs [0-9.]+ GiB more than a device has", verdict)
    assert "data parallelism   fails with" in done.stdout
    assert "pipeline           trains" in done.stdout


@pytest.mark.slow
def test_the_report_of_the_demo_has_less_than_300_kilobytes_beside_its_pictures(tmp_path, monkeypatch):
    """A short run of the demo's recipe, whose rows stand for those of all its steps."""
    monkeypatch.chdir(tmp_path)
    here = [f"model.path={DIGITS}/model", "data.train=data/train", "data.validation=data/validation", "run.folder=run"]
    short = [f"training.steps={SHORT}", "learning_rate.warmup_steps=2", "validation.every=6", "sampling.every=6"]
    for command in (
        [str(DIGITS / "dataset.py"), "--out", "data"],
        ["-m", "diffusionpipe", "train", str(DIGITS / "recipe.toml"), "--ranks", "2", *here, *short],
    ):
        completed(command, timeout=900)
    metrics = Path("run/metrics.jsonl")
    rows = [row for line in metrics.read_text().splitlines() if (row := json.loads(line)).get("step")]
    repeated = [row | {"step": row["step"] + first} for first in range(0, 400, SHORT) for row in rows]
    metrics.write_text("".join(f"{json.dumps(row)}\n" for row in repeated))
    page = report_page([Path("run")])
    pictures = re.findall(r"data:image/[^\"]*", page)
    assert len(pictures) >= 20
    assert len(page.encode()) - sum(map(len, pictures)) < 300_000
