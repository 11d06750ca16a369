"""Runs recorded through accelerate's trackers, read back from the local files of one of them (SwanLab, offline)."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from kit.tiny_runs import recipe_of
from PIL import Image

from diffusionpipe.trainer.recipe import TrackerName
from diffusionpipe.trainer.reporting.accelerate_trackers import AccelerateTracker, _arguments
from diffusionpipe.trainer.reporting.metrics import MetricsWriter, read_metrics
from diffusionpipe.trainer.reporting.tracker import LoggedImage, TrackerConfig
from diffusionpipe.trainer.reporting.trackers import open_trackers, tag_of


@pytest.fixture
def offline(monkeypatch):
    """SwanLab writes files alone, and looks at nothing of the machine."""
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    for probe in ("HARDWARE", "RUNTIME", "REQUIREMENTS", "GIT", "MONITOR", "SWANLAB"):
        monkeypatch.setenv(f"SWANLAB_PROBE_{probe}", "false")


@pytest.fixture
def recipe(tmp_path):
    return recipe_of(tmp_path / "sd", tmp_path / "data", tmp_path / "birds", run={"trackers": ("swanlab",)})


PICTURE = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def write(recipe, steps, resume_step=None):
    recipe.run.folder.mkdir(exist_ok=True)
    with MetricsWriter(recipe.run.folder, resume_step, open_trackers(recipe, resume_step)) as writer:
        for step in steps:
            writer.write(step, {"loss": 1 / step, "step_s": 0.25})
        writer.write(step, {"validation_loss": 2 / step, "validation_loss_t0.1": 3 / step})
        path = recipe.run.folder / "samples" / "000-a-wren.png"
        writer.show(step, [LoggedImage(name=path.stem, caption="a wren", picture=PICTURE, path=path)])


def records(recipe):
    """What SwanLab's files hold: (run, records of its numbers, of its pictures) of each part of a run, in order."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    for path in sorted(recipe.run.folder.glob("swanlog/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(path)
        found = [Record.FromString(data) for data in reader]
        reader.close()
        (start,) = [one.start for one in found if one.HasField("start")]
        scalars = [one.scalar for one in found if one.HasField("scalar")]
        yield start, scalars, [(one.media, path.parent) for one in found if one.HasField("media")]


@pytest.mark.usefixtures("offline")
def test_another_tracker_gets_the_same_numbers_and_pictures_and_a_resumed_run_goes_on_in_it(recipe):
    write(recipe, [1, 2, 3])
    write(recipe, [4, 5], resume_step=3)
    (first, *_), (second, *_) = parts = list(records(recipe))
    assert (first.project, first.name) == ("diffusionpipe", "birds")
    assert first.id == second.id
    found = {(s.key, s.step): s.value.number for _, scalars, _ in parts for s in scalars}
    lines = read_metrics(recipe.run.folder)
    assert found == {(tag_of(k), line["step"]): v for line in lines for k, v in line.items() if k != "step"}
    assert {step for _, step in found} == {1, 2, 3, 4, 5}
    pictures = [(media, folder) for _, _, shown in parts for media, folder in shown]
    assert [(media.key, media.step) for media, _ in pictures] == [("samples/000-a-wren", 3), ("samples/000-a-wren", 5)]
    for media, folder in pictures:
        (item,) = media.value.items
        assert item.caption == "a wren"
        assert np.array_equal(np.asarray(Image.open(folder / "media/image" / item.filename)), PICTURE)
    config = next(recipe.run.folder.glob("swanlog/run-*/files/config.yaml")).read_text()
    assert "training.batch" in config


@pytest.mark.usefixtures("offline")
def test_recording_leaves_torchruns_variables_process_groups_and_threads_alone(recipe, monkeypatch):
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ), torch.get_num_threads()
    opening = TrackerConfig(
        folder=recipe.run.folder, project="p", name="n", values={"a": 1}, resume_step=None, identity=None
    )
    tracker = AccelerateTracker(TrackerName.SWANLAB, opening)
    try:
        assert not dist.is_initialized()
        assert {name: os.environ.get(name) for name in given} == given
        assert torch.get_num_threads() == before[1]
        assert PartialState().num_processes == 1
    finally:
        tracker.close()


def test_accelerate_knows_every_tracker_and_takes_our_arguments(tmp_path):
    from inspect import signature

    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    for name in TrackerName:
        if name not in (TrackerName.AUTO, TrackerName.TENSORBOARD):
            opening = TrackerConfig(
                folder=tmp_path, project="birds", name="first", values={}, resume_step=4, identity="abc"
            )
            made = LOGGER_TYPE_TO_CLASS[str(name)](**_arguments(name, opening))
            assert "birds" in str(vars(made)) or name is TrackerName.DVCLIVE
            assert signature(made.log).parameters["step"]
