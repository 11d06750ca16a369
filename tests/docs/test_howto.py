"""The pages of docs/howto: every command runs as it is printed, in a folder with a tiny model and few pictures.

Processes of `forked` commands start with all imports done; those of the unattended run start as a user's do.
"""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
import typer
from kit.forked import Forked
from kit.tiny_runs import RESOLUTION, losses_of, save_pictures, save_stable_diffusion

from diffusionpipe.cli import app
from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest
from diffusionpipe.trainer.launching.exit_status import ExitStatus
from diffusionpipe.trainer.recipe import load_recipe, recipe_to_toml

HOWTO = Path(__file__).parents[2] / "docs/howto"
PAGES = ("own-pictures", "adapters", "several-nodes", "unattended")
PATIENCE = 300
TINY = (
    f"data.resolution={RESOLUTION}",
    "data.workers=0",
    "training.precision=float32",
    "pipeline.microbatches=2",
    "sampling.steps=2",
)
"""Settings beside those of a page that make a run small."""


def blocks(page, language):
    text = (HOWTO / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(page):
    return [line for block in blocks(page, "bash") for line in block.splitlines()]


def recipe_in(place, page, *settings):
    """The recipe of a page, made small, in the file that its commands name."""
    (text,) = blocks(page, "toml")
    name = f"{tomllib.loads(text)['run']['folder'].removeprefix('runs/')}.toml"
    (place / name).write_text(text)
    small = load_recipe(place / name, [*TINY, "training.batch=4", *settings])
    (place / name).write_text(recipe_to_toml(small))


@pytest.fixture(scope="module")
def furnished(tmp_path_factory):
    """A model and pictures at the places that the pages name."""
    place = tmp_path_factory.mktemp("howto")
    save_stable_diffusion(place / "models/stable-diffusion-v1-5")
    save_pictures(place / "data/birds", 8)
    (place / "data/birds/metadata.jsonl").unlink()
    for picture in (place / "data/birds").glob("*.png"):
        picture.with_suffix(".txt").write_text("a bird")
    return place


@pytest.fixture
def place(furnished, tmp_path, monkeypatch):
    copied = shutil.copytree(furnished, tmp_path / "place")
    monkeypatch.chdir(copied)
    return copied


def started(command):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["bash", "-c", f"exec {command}"], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@contextmanager
def running(command, start=started):
    process = start(command)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)
        process.stdout.close()


def forked(command):
    """The command of a page, whose processes start with all imports done."""
    program, *words = shlex.split(command)
    module = {"diffusionpipe": "diffusionpipe", "torchrun": "torch.distributed.run"}[program]
    return Forked(["-m", module, *words], os.environ, is_merged=True)


def runs(command, start=forked):
    process = start(command)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, (command, said)
    return said


def awaited(what):
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def steps_of(folder):
    return len(losses_of(Path(folder))) if (Path(folder) / "metrics.jsonl").exists() else 0


def test_own_pictures_are_looked_at_trained_on_shown_and_drawn(place):
    recipe_in(place, "own-pictures", "training.steps=4", "sampling.every=2")
    said = {command: runs(command) for command in commands("own-pictures")}
    assert "8 in data/birds" in next(iter(said.values()))
    for name in ("sheet.png", "birds.html", "robin.png", "runs/birds/export/model_index.json"):
        assert (place / name).exists(), name
    text = (HOWTO / "own-pictures.md").read_text(encoding="utf-8")
    (watch,) = re.findall(r"`(diffusionpipe watch [^`]*)`", text)
    with running(watch, forked) as server:
        assert server.stdout.readline().startswith("watching runs/birds")
        with urlopen(server.stdout.readline().strip(), timeout=PATIENCE) as answer:
            assert b"Draw now" in answer.read()


def test_adapters_are_trained_written_for_other_programs_drawn_with_and_trained_on(place):
    recipe_in(place, "adapters", "training.steps=3", "lora.rank=2", "sampling.every=3")
    for command in commands("adapters"):
        runs(command.replace("training.steps=2500", "training.steps=5"))
        if "lora.formats" in command:
            assert len(list((place / "runs/birds-lora/export").glob("*.safetensors"))) == 2
    assert steps_of("runs/birds-lora") == 5
    assert (place / "robin.png").exists()


def test_two_nodes_are_examined_train_one_job_and_go_on(place):
    recipe_in(place, "own-pictures", "training.steps=3", "sampling.every=none")
    (place / "runs").mkdir()
    for command in commands("several-nodes"):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        both = command.replace("localhost:29500", f"localhost:{port}").replace("steps=5500", "steps=5")
        nodes = [forked(both) for _ in range(2)]
        for node in nodes:
            said, _ = node.communicate(timeout=PATIENCE)
            assert node.returncode == 0, (command, said)
    assert steps_of("runs/birds") == 5


def ranks_of(job):
    """The processes of the ranks that a launcher has started, in any of its threads."""
    threads = Path(f"/proc/{job.pid}/task").glob("*/children")
    children = [child for thread in threads for child in thread.read_text().split()]
    return [int(one) for one in children if b"diffusionpipe" in Path(f"/proc/{one}/cmdline").read_bytes()]


def goes_on(folder, job):
    """Wait until the run has made a step more."""
    seen = steps_of(folder)
    awaited(lambda: steps_of(folder) > seen or job.poll() is not None)
    assert job.poll() is None, job.communicate()[0]


def asks(command, job):
    """Ask a run by a file, and wait until it has removed the file."""
    goes_on(Path(command.split()[1]).parent, job)
    runs(command, started)
    awaited(lambda: not Path(command.split()[1]).exists())


def test_an_unattended_run_survives_kills_is_asked_by_files_and_goes_on(place):
    recipe_in(place, "own-pictures", "training.steps=100000", "sampling.every=90000")
    start, save, draw, save_quit, report, last = commands("unattended")
    folder = Path("runs/birds")
    with running(start) as job:
        asks(save, job)
        awaited(lambda: latest(folder) is not None)
        killed = ranks_of(job)
        assert len(killed) == 2
        os.kill(killed[1], signal.SIGKILL)
        awaited(lambda: len(set(ranks_of(job)) - set(killed)) == 2)
        goes_on(folder, job)
        job.kill()
        assert "restart=1 of=10 resume=auto" in job.communicate(timeout=PATIENCE)[0]
    with running(start) as job:
        asks(draw, job)
        asks(save_quit, job)
        job.communicate(timeout=PATIENCE)
        assert job.returncode == ExitStatus.STOPPED
    assert list(folder.glob("samples/step-*/*.png"))
    done = int(latest(folder).name.removeprefix("step-"))
    assert str(place) not in (runs(report) or Path("birds.html").read_text())
    runs(f"{last} training.steps={done + 2}")
    assert steps_of(folder) == done + 2


@pytest.mark.parametrize("page", PAGES)
def test_every_option_and_setting_of_a_page_exists(page, tmp_path):
    """Where a page has a recipe of its own, the settings of its commands fit to it."""
    (recipe, *_) = [*blocks(page, "toml"), *blocks("own-pictures", "toml")]
    (tmp_path / "recipe.toml").write_text(recipe)
    for command in commands(page):
        before, found, after = command.partition("diffusionpipe ")
        if not found:
            assert before.startswith("touch runs/birds/")
            continue
        verb, *words = shlex.split(after)
        group = typer.main.get_command(app).make_context("diffusionpipe", [verb, *words])
        values = app_command(group, verb).make_context(verb, words).params
        load_recipe(tmp_path / "recipe.toml", values.get("overrides") or [])


def app_command(group, verb):
    found = group.command.get_command(group, verb)
    assert found is not None, verb
    return found


def test_every_page_is_named_in_the_index():
    assert sorted(path.stem for path in HOWTO.glob("*.md")) == sorted(PAGES)
    readme = (HOWTO.parents[1] / "README.md").read_text(encoding="utf-8")
    assert all(f"docs/howto/{page}.md" in readme for page in PAGES)
