"""What is wrong with a recipe, its data or its sizes is said in one block, before anything is trained."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from kit.full_disk import REASONS, full_disk
from kit.screen_files import assert_screen, masked
from kit.terminal import run_in_terminal
from kit.tiny_runs import recipe_of, save_dit, save_pictures, save_stable_diffusion

from diffusionpipe import cli
from diffusionpipe.errors import ConfigError
from diffusionpipe.trainer.launching.run_lock import acquire
from diffusionpipe.trainer.recipe import recipe_to_toml
from diffusionpipe.trainer.reporting.metrics import read_metrics
from diffusionpipe.trainer.step.loop import Stepper
from diffusionpipe.workflows.training import job as training_job
from diffusionpipe.workflows.training.job import TrainingJob, arguments_of_rank

pytestmark = pytest.mark.usefixtures("one_trace")

NUMBERS = {
    r"(?m)^\d\d:\d\d:\d\d ": "hh:mm:ss ",
    r"(?<=_s=)[0-9.e-]+": "#",
    r"(?<=_bytes=)\d+": "#",
    r"(?<=loss=)[0-9.]+": "#",
    r"(?<=bubble=)[0-9.e-]+": "#",
    r'(?<=device=)"[^"]*"': '"a CPU"',
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    save_stable_diffusion(folder / "sd")
    save_dit(folder / "dit")
    save_pictures(folder / "data", count=6)
    return folder


@pytest.fixture
def recipe(place, tmp_path):
    """The file of a recipe that works."""
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_to_toml(recipe_of(place / "sd", place / "data", tmp_path / "run", training={"steps": 1})))
    return path


def refused(capsys, recipe, *words, allowed=()):
    """The block that the command prints; it exits with 2, prints no traceback and trains nothing."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", str(recipe), *words, "--device", "cpu"])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    log, mark, block = printed.err.partition("error: ")
    assert mark
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in log.splitlines()), log
    assert "Traceback" not in block
    run = recipe.parent / "run"
    assert not run.is_dir() or not (run / "metrics.jsonl").exists()
    assert not run.is_dir() or "checkpoints" in allowed or not (run / "checkpoints").exists()
    return block


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.stesp=3", ["training.stesp", "steps"]),
        ("trainign.steps=3", ["trainign", "training"]),
        ("training.steps=many", ["training.steps"]),
        ("training.batch=5", ["training.batch: 5 samples cannot be cut into 2 micro-batches", "multiple of 2"]),
        ("pipeline.schedule=1f1", ["there is no schedule '1f1'", "1f1b"]),
        ("optimizer.name=AdmaW", ["AdmaW", "AdamW"]),
        ('optimizer.arguments={"momentun"=0.1}', ["momentun"]),
        ("pipeline.stages=2", ["need 2 ranks; there are 1"]),
        ('pipeline.splits=["unet.x"]', ["unet.x"]),
        ("model.path=nowhere", ["no model folder nowhere"]),
        ('model.train=["vae"]', ["vae"]),
        ("data.train=nowhere", ["data.train: there is no folder nowhere"]),
        ("data.validation=nowhere", ["data.validation"]),
        ("run.patience=1", ["run.patience", "3"]),
        (
            "run.stuck_after=soon",
            ["1 problem", 'run.stuck_after: expected seconds above 0, "auto" or "none";'],
        ),
        ("run.stuck_after=-1", ["1 problem", "run.stuck_after: expected seconds above 0", "got -1"]),
        ("run.folder=a\0b", ["run.folder: a path cannot hold a NUL character"]),
        ("run.folder=a\udcffb", ["run.folder: the bytes of a path must be UTF-8"]),
        ("data.train=" + "a" * 256, ["data.train: a path has at most"]),
    ],
)
def test_a_wrong_key_or_value_is_named(capsys, recipe, override, parts):
    message = refused(capsys, recipe, override)
    assert all(part in message for part in parts), message


def test_all_problems_are_listed_at_once_also_those_of_ranks_and_folders(capsys, recipe):
    (recipe.parent / "run" / "checkpoints" / "step-00000001").mkdir(parents=True)
    words = ["pipeline.schedule=1f1bx", "pipeline.microbatches=none", "pipeline.encode_chunk=none", "training.steps=0"]
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", str(recipe), *words, "pipeline.plan=auto", "data.train=nowhere", "--ranks", "2"])
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert "4 problems" in message
    assert "there is no schedule '1f1bx'; did you mean '1f1b'? (set on the command line)" in message
    assert "data.train: there is no folder nowhere" in message
    assert "training.steps" in message
    assert "run.folder: " in message
    assert "holds the checkpoints of an earlier run" in message
    assert "rank" not in message.replace("--ranks", "")
    assert not (recipe.parent / "run" / "logs").exists(), "no rank was started"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["pipeline.plan=auto", "pipeline.stages=3"], "2 ranks cannot form pipelines of 3 stages"),
        (["pipeline.stages=3"], "need 3 ranks; there are 2"),
        (["pipeline.schedule=a=b"], "pipeline.schedule: there is no schedule 'a=b'"),
    ],
)
def test_sizes_that_do_not_suit_the_ranks_are_refused_before_these_start(capsys, recipe, words, part):
    free = ["pipeline.microbatches=none", "pipeline.encode_chunk=none"] if "auto" in words[0] else []
    with pytest.raises(SystemExit):
        cli.main(["train", str(recipe), *free, *words, "--ranks", "2"])
    message = capsys.readouterr().err
    assert part in message
    assert "1 problem" in message
    assert not (recipe.parent / "run").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "43 stages but the trained part has only 14 layers; use at most 14 stages"),
        (["pipeline.plan=auto"], "a batch of 4 samples cannot be cut over 43 ranks by any number of stages"),
    ],
    ids=["given sizes", "searched"],
)
def test_more_ranks_than_the_layers_can_occupy_are_refused_before_these_start(capsys, recipe, monkeypatch, words, part):
    monkeypatch.setattr(training_job, "start", lambda job: pytest.fail("ranks were started"))
    free = ["pipeline.microbatches=none", "pipeline.encode_chunk=none"] if words else []
    assert part in refused(capsys, recipe, *free, *words, "--ranks", "43")


def test_weights_that_a_cpu_would_read_with_a_loss_are_refused_before_ranks_start(capsys, recipe, monkeypatch):
    monkeypatch.setattr(training_job, "start", lambda job: pytest.fail("ranks were started"))
    words = ["model.frozen_dtype=nf4", "lora.rank=2", "training.precision=auto"]
    assert "model.frozen_dtype: " in (message := refused(capsys, recipe, *words, "--ranks", "2"))
    assert "arithmetic" in message


def test_what_the_optimizer_cannot_train_is_named_with_the_other_problems_before_anything_is_measured(
    capsys, recipe, place, tmp_path
):
    data = shutil.copytree(place / "data", tmp_path / "data")
    (data / "002.png").write_bytes(b"no picture")
    free = ["pipeline.microbatches=none", "pipeline.encode_chunk=none", "pipeline.plan=auto"]
    message = refused(capsys, recipe, *free, "optimizer.name=Muon", f"data.train={data}")
    assert "optimizer.name: Muon cannot train" in message
    assert "002.png" in message
    assert not (tmp_path / "run" / "profile.json").exists()
    assert not (tmp_path / "run" / "cluster.json").exists()


@pytest.mark.parametrize(("folder", "where"), [("data", "is"), ("data/one/run", "lies in"), ("link/run", "lies in")])
def test_a_run_folder_among_the_pictures_is_refused(capsys, recipe, tmp_path, folder, where):
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    words = [f"data.train={tmp_path / 'data'}", f"run.folder={tmp_path / folder}"]
    assert f"{folder} {where} the folder of pictures of data.train" in refused(capsys, recipe, *words)
    assert not any((tmp_path / "data").iterdir())


@pytest.mark.parametrize("name", ["recipe.toml", "trace.json", "logs/rank_1.out", "logs/.rank_0.error.json"])
def test_a_fifo_where_the_run_writes_is_refused_because_writing_would_never_end(capsys, recipe, tmp_path, name):
    place = tmp_path / "run" / name
    place.parent.mkdir(parents=True)
    os.mkfifo(place)
    assert f"run.folder: {place}: it is not a regular file; move it away" in refused(capsys, recipe)


def test_a_file_in_place_of_a_folder_of_the_run_is_refused_before_the_first_step(capsys, recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/samples").touch()
    assert f"run.folder: {tmp_path / 'run/samples'}: it is not a folder" in refused(capsys, recipe)


def test_a_recipe_may_begin_with_the_mark_that_some_editors_write(capsys, recipe):
    recipe.write_bytes(b"\xef\xbb\xbf" + recipe.read_bytes())
    message = refused(capsys, recipe, "training.steps=0")
    assert "1 problem" in message
    assert "training.steps" in message


@pytest.mark.parametrize("number", ["abc", "", "-1", "1.0"])
def test_a_rank_without_a_number_is_refused(capsys, recipe, monkeypatch, number):
    job = {"RANK": number, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    message = refused(capsys, recipe)
    assert "RANK is not set" in message if not number else f"RANK='{number}' is not a number" in message


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("GLOO_SOCKET_IFNAME", "nonesuch", "GLOO_SOCKET_IFNAME=nonesuch names no interface of this machine"),
        ("DIFFUSIONPIPE_TOKEN", "short", "DIFFUSIONPIPE_TOKEN has 5 characters"),
    ],
)
def test_what_no_rank_could_start_with_is_refused_before_ranks_start(capsys, recipe, monkeypatch, name, value, says):
    monkeypatch.setenv(name, value)
    message = refused(capsys, recipe, "pipeline.plan=auto", "--ranks", "2")
    assert says in message
    assert "rank 0" not in message


def test_a_recipe_that_is_not_there_is_named(capsys, tmp_path):
    assert "gone.toml: cannot be read" in refused(capsys, tmp_path / "gone.toml")


@pytest.mark.parametrize("wanted", ["latest", "5", "elsewhere", ""])
def test_a_wrong_resume_says_what_is_there(capsys, recipe, wanted):
    (recipe.parent / "run").mkdir()
    (recipe.parent / "run" / "notes").touch()
    assert "run contains notes" in refused(capsys, recipe, "--resume", wanted)


@pytest.mark.parametrize("case", ["a file", "a link to nothing", "a full disk", "logs is a file"])
def test_a_run_folder_that_cannot_be_written_is_refused_before_ranks_start(capsys, recipe, case):
    run = recipe.parent / "run"
    with ExitStack() as stack:
        if case == "a file":
            run.touch()
        elif case == "a link to nothing":
            run.symlink_to("nowhere")
        else:
            run.mkdir()
            if case == "a full disk":
                stack.enter_context(full_disk(run))
            else:
                (run / "logs").touch()
        block = refused(capsys, recipe, "--ranks", "2")
    says = {"a link to nothing": "is a link to nowhere, which does not exist", "a full disk": f"({REASONS})"}
    assert re.search(f"run.folder: nothing can be written to .*: .*{says.get(case, 'is a file')}", block), block


def test_a_run_folder_on_a_read_only_disk_is_refused(capsys, recipe):
    run = recipe.parent / "run"
    run.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", run], capture_output=True).returncode:
        pytest.skip("this process may not mount")
    try:
        assert "Read-only file system" in refused(capsys, recipe, "--ranks", "2")
    finally:
        subprocess.run(["umount", run], check=True)


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("words", [[], ["--resume", "auto"], ["--resume", "auto", "--take-over"]])
def test_a_second_job_beside_a_running_one_is_refused_before_it_touches_a_file(capsys, recipe, tmp_path, words, ranks):
    run = tmp_path / "run"
    with acquire(run):
        (run / "checkpoints" / ".step-00000003.writing").mkdir(parents=True)
        before = sorted(run.rglob("*"))
        message = refused(capsys, recipe, *words, "--ranks", ranks, allowed=("checkpoints",))
        assert f"run is in use by process {os.getpid()} on " in message
        assert sorted(run.rglob("*")) == before


def test_a_folder_without_pictures_is_refused(capsys, recipe, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "holds no pictures" in refused(capsys, recipe, f"data.train={tmp_path / 'empty'}")


def test_every_missing_or_unreadable_picture_is_named_at_once(capsys, recipe, place, tmp_path):
    data = shutil.copytree(place / "data", tmp_path / "data")
    with (data / "metadata.jsonl").open("a") as file:
        file.write(json.dumps({"file_name": "gone.png", "text": "a"}) + "\n")
    (data / "002.png").write_bytes(b"no picture")
    (data / "extra.png").write_bytes((data / "003.png").read_bytes())
    message = refused(capsys, recipe, f"data.train={data}")
    assert all(name in message for name in ("gone.png", "002.png", "extra.png")), message


def test_labels_above_the_models_classes_are_refused(capsys, recipe, place, tmp_path):
    data = shutil.copytree(place / "data", tmp_path / "data")
    lines = (data / "metadata.jsonl").read_text()
    (data / "metadata.jsonl").write_text(lines.replace('"label": 4', '"label": 40'))
    message = refused(capsys, recipe, f"model.path={place / 'dit'}", f"data.train={data}")
    assert "004.png has 40" in message


def test_more_stages_than_layers_are_refused(recipe, place):
    from diffusionpipe.trainer.model.members import build_model
    from diffusionpipe.trainer.recipe import load_recipe
    from diffusionpipe.workflows.training.run_plan import make_plan

    loaded = load_recipe(recipe)
    model = build_model(loaded, "cpu").model
    with pytest.raises(ConfigError, match=r"99 stages but the trained part has only \d+ layers; use at most \d+"):
        make_plan(model, loaded, 99, None)


def test_a_folder_that_holds_no_model_is_named(capsys, recipe, place):
    assert "is missing; a model is a folder as diffusers" in refused(capsys, recipe, f"model.path={place / 'data'}")


def test_an_unknown_device_is_refused(capsys, recipe):
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", str(recipe), "--device", "gpu"])
    assert caught.value.code == 2
    assert "there is no device 'gpu'" in capsys.readouterr().err


def test_ctrl_c_while_loading_is_one_line_and_its_own_status(capsys, recipe, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("diffusionpipe.trainer.course.run.open_model", interrupt)
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", str(recipe), "--device", "cpu"])
    assert caught.value.code == 130
    assert (
        capsys.readouterr().err == "interrupted by Ctrl-C outside of the training steps; no new checkpoint was saved\n"
    )


def test_the_recipes_patience_is_the_jobs(recipe, monkeypatch):
    class SeenError(Exception):
        """The rank was about to join."""

    def join(member, *, device, patience):
        raise SeenError(patience)

    monkeypatch.setattr("diffusionpipe.runtime.job.process_group.joined", join)
    with pytest.raises(SeenError, match=r"^30\.0$"):
        cli.main(["train", str(recipe), "run.patience=30", "--device", "cpu"])


def test_a_stopped_run_has_a_status_of_its_own_and_the_same_command_finishes_it(capsys, recipe, monkeypatch, tmp_path):
    """As a scheduler of jobs starts it, ends it and starts it again."""

    class Stopped(Stepper):
        def step(self, step, inputs):
            if step == 1:
                signal.raise_signal(signal.SIGTERM)
            return super().step(step, inputs)

    monkeypatch.setattr("diffusionpipe.trainer.course.run.Stepper", Stopped)
    term = signal.getsignal(signal.SIGTERM)
    command = ["train", str(recipe), "training.steps=4", "data.workers=0", "--resume", "auto", "--device", "cpu"]
    with pytest.raises(SystemExit) as stopped:
        cli.main(command)
    signal.signal(signal.SIGTERM, term)  # the command ignores it until it ends
    assert stopped.value.code == 75
    assert "stopped step=2 reason=requested exit_status=75 resume=latest" in capsys.readouterr().err
    with pytest.raises(SystemExit) as finished:
        cli.main(command)
    assert finished.value.code == 0
    assert (tmp_path / "run" / "export").is_dir()


@pytest.mark.slow
def test_a_rate_of_the_command_line_is_said_and_stays_at_the_next_resume(capsys, recipe, tmp_path):
    def start(*words):
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", str(recipe), *words, "data.workers=0", "--resume", "auto", "--device", "cpu"])
        assert ended.value.code == 0
        return capsys.readouterr().err

    def rates():
        return [row["learning_rate"] for row in read_metrics(tmp_path / "run") if "learning_rate" in row]

    assert "changed since" not in start("optimizer.learning_rate=1e-4")
    said = start("optimizer.learning_rate=2e-4", "training.steps=2")
    assert "changed since step 1: training.steps 1 -> 2; optimizer.learning_rate 1e-4 -> 2e-4" in said
    said = start("training.steps=3")
    assert "optimizer.learning_rate stays 2e-4, as the command line has set it before; the file has 0.01" in said
    assert rates() == [1e-4, 2e-4, 2e-4]
    drawn = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("*.png")}
    assert {"loss.png", "timeline.png"} <= drawn.keys()
    said = start()
    assert {name: (tmp_path / "run" / name).stat().st_mtime_ns for name in drawn} == drawn, "nothing is drawn again"
    assert "training.steps stays 3, as the command line has set it before; the file has 1" in said
    assert "nothing to do: all 3 steps are done" in said
    assert start("training.steps=4", "optimizer.learning_rate=0.01").count("changed since step 3") == 1
    assert rates() == [1e-4, 2e-4, 2e-4, 0.01]


def test_one_rank_trains_draws_its_results_and_is_sampled(capsys, recipe, place, tmp_path):
    words = ["data.workers=0", "sampling.every=1", 'sampling.prompts=["a","b"]', "sampling.steps=2"]
    with pytest.raises(SystemExit) as caught:
        cli.main(["train", str(recipe), *words, "--device", "cpu"])
    assert caught.value.code == 0
    run = tmp_path / "run"
    printed = capsys.readouterr()
    assert printed.out == (
        f"Results in {run}: samples.png, loss.png, timeline.png, trace.json (open in ui.perfetto.dev), export/, "
        "metrics.jsonl\n"
    )
    log = "\n".join(line for line in printed.err.splitlines() if "elapsed_s=" not in line)
    assert_screen("train_pipe", masked(log.replace(f"{tmp_path}/", "").replace(f"{place}/", ""), NUMBERS))
    (row,) = [row for row in read_metrics(run) if "step_s" in row]
    assert row["step_s"] == pytest.approx(row["data_s"] + row["iteration_s"] + row["update_s"])
    assert row["samples_per_s"] == pytest.approx(4 / row["step_s"])
    for name in ("samples.png", "loss.png", "timeline.png", "trace.json", "metrics.jsonl", "plan.json", "recipe.toml"):
        assert (run / name).stat().st_size > 0, name
    with pytest.raises(SystemExit) as caught:
        cli.main(["sample", str(run), "--prompt", "a b", "--steps", "2", "--out", str(tmp_path / "grid.png")])
    assert caught.value.code == 0
    assert (tmp_path / "grid.png").stat().st_size > 0


@pytest.mark.slow
def test_a_terminal_shows_a_block_bars_that_go_and_the_results(place, tmp_path):
    recipe = recipe_of(Path("sd"), Path("data"), tmp_path / "run", training={"steps": 3}, pipeline={"stages": 1})
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(recipe).replace(f"{tmp_path}/", ""))
    for name in ("sd", "data"):
        (tmp_path / name).symlink_to(place / name)
    command = [sys.executable, "-m", "diffusionpipe", "train", "recipe.toml", "sampling.every=3", "sampling.steps=2"]
    command += ['sampling.prompts=["a"]', "--device", "cpu"]
    shown = run_in_terminal(["env", "-C", str(tmp_path), *command], width=80, environ=os.environ)
    bars = {
        r"━[━╸╺ ]*(?= \d)": "━━━ ",
        r"\d+:\d\d:\d\d$": "h:mm:ss",
        r"\S+ samples/s, \S+ left": "# samples/s, # left",
        r"(?<=loss )[0-9.]+": "#",
        r" +[0-9.]+ ms": " # ms",
        r"median step +measured": "median step  measured",
        r"(?<=node: ).*?(?= *│)": "a CPU",
        r" +│$": " │",
    }
    lines = {rf"(?m){pattern}": replacement for pattern, replacement in bars.items()}
    assert_screen("train_terminal_80", masked(masked(shown, NUMBERS), lines))


def test_only_results_that_exist_are_named(capsys, tmp_path):
    from diffusionpipe.cli.verbs.train import _name_results

    (tmp_path / "loss.png").touch()
    (tmp_path / "export").mkdir()
    _name_results(tmp_path)
    assert capsys.readouterr().out == f"Results in {tmp_path}: loss.png, export/\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--prompt", "a"], "there is no folder nowhere"),
        (["{data}", "--prompt", "a"], "holds no export/ yet"),
        (["{sd}"], "say what to draw"),
        (["{sd}", "--prompt", "a", "--label", "1"], "say what to draw"),
        (["{sd}", "--label", "1"], "give prompts, not labels"),
        (["{dit}", "--label", "7"], "there is no class 7"),
        (["{dit}", "--label", "-1"], "there is no class -1; the model has classes 0 to"),
        (["{sd}", "--prompt", "a", "--resolution", "1000000"], "one picture of 1000000 x 1000000 pixels"),
        (
            ["{sd}", "--prompt", "a", "--resolution", "1000000", "--count", "3"],
            "3 pictures of 1000000 x 1000000 pixels",
        ),
        (["{sd}", "--prompt", "a", "--scheduler", "Nonsense"], "no scheduler 'Nonsense'"),
    ],
)
def test_sample_says_what_it_cannot_draw(capsys, place, tmp_path, words, message):
    filled = [word.format(data=place / "data", sd=place / "sd", dit=place / "dit") for word in words]
    with pytest.raises(SystemExit) as caught:
        cli.main(["sample", *filled, "--out", str(tmp_path / "grid.png"), "--device", "cpu"])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "grid.png").exists()


def test_ranks_are_told_what_the_command_line_says():
    job = TrainingJob(
        recipe=Path("a.toml"),
        overrides=["training.steps=3"],
        folder=Path("runs/a"),
        devices=(0, 1),
        device="cpu",
        resume="latest",
        take_over=True,
        port=None,
        max_restarts=3,
        uses_cache=False,
    )
    told = ["train", "a.toml", "training.steps=3", "--device", "cpu"]
    assert arguments_of_rank(job, "auto") == [*told, "--resume", "auto", "--no-cache"]
    assert arguments_of_rank(replace(job, uses_cache=True), None) == told
