"""Files of an earlier version open with today's code; tests/golden/README.md says which version."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from golden.folders import save_model, save_pictures
from golden.losses import differences, is_same, machine
from golden.recipes import STEPS, TRAININGS, Training, recipe_of
from kit.tiny_runs import losses_of, tensors_of, train_here

from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import CLUSTER, profile_to_text, read_profile
from diffusionpipe.ir.files import TIMELINE, plan_to_text, read_plan, read_timeline, to_text
from diffusionpipe.planner import predicted_timeline
from diffusionpipe.timing.legal import check
from diffusionpipe.trainer.checkpoints.checkpoint import verify

pytestmark = pytest.mark.usefixtures("one_thread")

FILES = Path(__file__).parent


def texts():
    """What today's code reads of each file, written again."""
    return {
        "plan.json": plan_to_text(read_plan(FILES / "plan.json")),
        "profile.json": profile_to_text(read_profile(FILES / "profile.json")),
        "cluster.json": to_text(load_cluster(str(FILES / "cluster.json")), CLUSTER),
        "plan.timeline.json": to_text(read_timeline(FILES / "plan.timeline.json"), TIMELINE),
    }


@pytest.mark.parametrize("name", ["plan.json", "profile.json", "cluster.json", "plan.timeline.json"])
def test_a_file_opens_and_nothing_of_it_is_lost(name):
    """Every value that the file states is stated by what was read; later versions may state more."""
    old = json.loads((FILES / name).read_text(encoding="utf-8"))
    if name == "plan.json":  # one backbone then, so one schedule to draw with
        old["sample"] = [old["sample"]]
        assert old.pop("offload_frozen") is False  # encoders on the device, which is said by their storage now
        assert old["mesh"].pop("tensor") == 1  # nothing else could be
    if name == "profile.json":
        graph = old["graph"]
        graph["backbones"] = [{"name": "", "loss": graph.pop("output"), "prediction": graph.pop("prediction")}]
    assert lost(old, json.loads(texts()[name])) == []


def lost(old, new, where="file"):
    if isinstance(old, dict) and isinstance(new, dict):
        return [line for key in old.keys() - {"version"} for line in lost(old[key], new.get(key), f"{where}.{key}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [line for i, (a, b) in enumerate(zip(old, new, strict=True)) for line in lost(a, b, f"{where}[{i}]")]
    return [] if old == new else [where]


def test_a_value_that_is_lost_is_noticed():
    plan = json.loads((FILES / "plan.json").read_text(encoding="utf-8"))
    assert lost(plan, {**plan, "mesh": {**plan["mesh"], "pipeline": 3}}) == ["file.mesh.pipeline"]
    assert lost(plan, {**plan, "further": 1}) == []


def test_the_plan_is_legal_and_its_timeline_is_what_profile_and_cluster_predict():
    plan = read_plan(FILES / "plan.json")
    for schedule in (plan.train, plan.prologue, plan.validate, *plan.sample):
        check(schedule)
    profile, cluster = read_profile(FILES / "profile.json"), load_cluster(str(FILES / "cluster.json"))
    recorded, found = read_timeline(FILES / "plan.timeline.json"), predicted_timeline(profile, plan, cluster)
    assert {(span.worker, span.action) for span in recorded.spans} == set(plan.train.actions())
    assert found.makespan == pytest.approx(recorded.makespan, rel=1e-9)


def test_the_checkpoint_is_whole_and_a_step_from_it_has_the_recorded_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a checkpoint knows its model by the path that the recipe gives
    save_model("dit", Path("dit"))
    save_pictures(Path("data"))
    checkpoint = tmp_path / "step-00000005"
    shutil.unpack_archive(FILES / "checkpoint.tar.xz", checkpoint, filter="data")
    verify(checkpoint)
    tensors = tensors_of(checkpoint)
    assert {name.partition(".")[0] for name in tensors} == {"model", "ema", "optimizer"}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    recipe = recipe_of(TRAININGS["dit-alone"], "float32", model="dit", data="data", folder="run", steps=STEPS + 1)
    assert train_here(recipe, str(checkpoint)) == STEPS + 1
    losses = losses_of(Path("run"))
    assert list(losses) == [STEPS + 1]
    recorded = json.loads((FILES / "sixth_step.json").read_text(encoding="utf-8"))
    if is_same(recorded["machine"], machine()):
        assert differences(recorded["losses"]["float32"], list(losses.values()), "float32", is_same_machine=True) == []
    else:
        assert losses[STEPS + 1] == pytest.approx(float.fromhex(recorded["losses"]["float32"][0]), rel=1e-3)


FLOW = {"objective": {"kind": "flow_matching"}}
BY_HAND = {
    "flux-adapters": Training(
        kind="flux", ranks=1, changes={**FLOW, "lora": TRAININGS["flux-lora-data-parallel"].changes["lora"]}
    ),
    "sd3": Training(kind="sd3", ranks=1, changes=FLOW),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_run_of_a_model_that_was_cut_by_hand_goes_on_by_its_plan(name, tmp_path, monkeypatch):
    """Two steps more, from a checkpoint after three, have the losses that the earlier version had."""
    monkeypatch.chdir(tmp_path)
    training, files = BY_HAND[name], FILES / name
    save_model(training.kind, Path(training.kind))
    save_pictures(Path("data"))
    shutil.unpack_archive(files / "checkpoint.tar.xz", "step-00000003", filter="data")
    planned = replace(training, changes={**training.changes, "pipeline": {"plan": str(files / "plan.json")}})
    recipe = recipe_of(planned, "float32", model=training.kind, data="data", folder="run", steps=5)
    assert train_here(recipe, "step-00000003") == 5
    recorded, losses = json.loads((files / "losses.json").read_text(encoding="utf-8")), losses_of(Path("run"))
    assert list(losses) == [4, 5]
    if is_same(recorded["machine"], machine()):
        found = differences(recorded["losses"]["float32"], list(losses.values()), "float32", is_same_machine=True)
        assert found == []
    else:
        expected = [float.fromhex(text) for text in recorded["losses"]["float32"]]
        assert list(losses.values()) == pytest.approx(expected, rel=1e-3)
