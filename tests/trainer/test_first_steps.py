"""Runs correct their profiles by their own first steps, and learn what they learn without that."""

import shutil

import pytest
from kit.checked_runs import LOG, PARTS, train_checked, values_of_keys
from kit.tiny_runs import losses_of, recipe_of, save_pictures, save_stable_diffusion, train

from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import read_profile
from diffusionpipe.ir import Mesh, parse_action
from diffusionpipe.trainer.course.first_steps import OwnSteps, recorded_of
from diffusionpipe.trainer.reporting.metrics import read_metrics
from diffusionpipe.workflows.training.expected_step import read_expected

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checked")
    save_stable_diffusion(folder / "sd")
    save_pictures(folder / "data")
    return folder


def recipe(place, name, **pipeline):
    sizes = {"stages": 2, "microbatches": 2, "schedule": "1f1b", "fill": True}
    return recipe_of(place / "sd", place / "data", place / name, training={"steps": 6}, pipeline=sizes | pipeline)


def test_a_filled_run_writes_a_corrected_profile_and_learns_the_same(crew, place):
    assert crew.run(train_checked, recipe(place, "checked", replan="suggest", plan="auto")) == [6, 6]
    folder = place / "checked"
    found, measured = read_profile(folder / "profile.corrected.json"), read_profile(folder / "profile.json")
    assert found.origin == f"profile.json of {folder}, corrected by its steps 2 to 4"
    assert found.graph == measured.graph
    assert found.layers != measured.layers
    row = next(row for row in read_metrics(folder) if "corrected_step_s" in row)
    assert min(row["predicted_step_s"], row["measured_step_s"], row["corrected_step_s"]) > 0
    log = (folder / LOG).read_text(encoding="utf-8")
    assert 'other_programs="0 % of the cores"' in log
    values = values_of_keys(log)
    for key in ("simulated_step_s", "predicted_step_s", "measured_step_s", "corrected_step_s", "checked_steps", "off"):
        assert key in values
    assert {key: found for key, found in values.items() if len(found) > 1 and key not in PARTS} == {}
    parts = {key.partition(" of ")[0] for key in values if " of " in key}
    assert not parts & values.keys()
    assert [(one.first, one.second) for one in load_cluster(str(folder / "cluster.json")).pairs] == [(0, 1)]
    corrected = load_cluster(str(folder / "cluster.corrected.json"))
    assert corrected.link(0, 1) == corrected.intra
    (place / "plain").mkdir()
    for name in ("profile.json", "cluster.json"):
        shutil.copy(folder / name, place / "plain")  # and so the same plan
    assert crew.run(train, recipe(place, "plain", plan="auto")) == [6, 6]
    assert losses_of(folder) == losses_of(place / "plain")


def test_a_run_beside_other_programs_says_so_and_corrects_nothing(crew, place):
    assert crew.run(train_checked, recipe(place, "disturbed", replan="suggest"), 0.4) == [6, 6]
    folder = place / "disturbed"
    log = (folder / LOG).read_text(encoding="utf-8")
    assert 'checked_steps=2-4 prediction="not judged: other programs used 40 % of the cores"' in log
    expected = read_expected(folder)
    assert expected.unjudged == "steps 2 to 4: other programs used 40 % of the cores"
    assert values_of_keys(log)["predicted_step_s"] == {f"{expected.step:.4f}"}
    assert not (folder / "profile.corrected.json").exists()
    assert not any("corrected_step_s" in row for row in read_metrics(folder))


def own(**times):
    return OwnSteps(**times, layers=(), memory=1, loading=0.5)


def test_the_recordings_of_two_ranks_are_one_timeline():
    actions = [parse_action("0F0"), parse_action("0B0")]
    ranks = [
        own(starts=(0.0, 2.0), seconds=(1.0, 2.0), ends=(5.0, 9.0, 6.0), steps=(7.0, 10.0, 8.0)),
        own(starts=(0.5, 2.0), seconds=(1.0, 3.0), ends=(6.0, 5.0, 5.0), steps=(6.0, 11.0, 8.0)),
    ]
    found = recorded_of(Mesh(data_parallel=2, pipeline=1), ranks, [tuple(actions)] * 2, (6, 8))
    assert found.iteration == 6.0  # the median of 6, 9, 6
    assert found.step == 8.0
    assert found.ends == (6.0, 5.0)
    assert found.loading == (0.5, 0.5)
    assert [(span.worker, span.start, span.end) for span in found.timeline.spans] == [
        (0, 0.0, 1.0), (0, 2.0, 4.0), (1, 0.5, 1.5), (1, 2.0, 5.0),
    ]  # fmt: skip
