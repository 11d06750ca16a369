"""Documents of earlier versions become today's by steps; tests/files/run holds documents of 84d59d94."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from kit.tiny_runs import recipe_of, save_dit, save_pictures, tensors_of, train_here

from diffusionpipe.errors import CheckpointError
from diffusionpipe.files.versions import upgraded
from diffusionpipe.trainer.checkpoints import manifest
from diffusionpipe.trainer.checkpoints.checkpoint import latest, read_state
from diffusionpipe.trainer.course.kept_facts import facts_to_keep, kept_facts
from diffusionpipe.trainer.course.recipe_changes import Settled, settle
from diffusionpipe.trainer.course.run_end import has_ended, note_end
from diffusionpipe.trainer.course.run_identity import check_resumed
from diffusionpipe.trainer.old_documents import ENDED, STATE, update_of_before
from diffusionpipe.trainer.recipe import effect_of, recorded_recipe, values_of

FILES = Path(__file__).parents[1] / "files" / "run"
SOURCE = Path("runs/x/checkpoints/step-00000002")


def state_of_before():
    return json.loads((FILES / "state.json").read_text(encoding="utf-8"))


def recipe_of_before(**sections):
    """The recipe that wrote the files."""
    own = {
        "lora": {"rank": 2},
        "data": {"validation": "held-out"},
        "validation": {"every": 1},
        "objective": {"weighting": "debiased"},
        "training": {"steps": 2},
        "model": {"path": "sd", "frozen_dtype": "none"},
    }
    return recipe_of(Path("sd"), Path("data"), Path("run2"), **(own | sections))


def test_steps_are_taken_from_the_version_on():
    steps = [lambda found, n=n: found | {"steps": [*found.get("steps", []), n]} for n in (1, 2)]
    assert [upgraded({}, version, steps).get("steps") for version in (1, 2, 3)] == [[1, 2], [2], None]
    for wrong in (0, 4, None, "1", True, 1.0):
        with pytest.raises(ValueError, match=r"version .* is unknown; this DiffusionPipe reads version 1 to 3"):
            upgraded({}, wrong, steps)
    with pytest.raises(ValueError, match=r"reads version 1$"):
        upgraded({}, 2, [])


def test_a_state_without_a_number_says_the_same_as_todays():
    before = state_of_before()
    found = kept_facts(state_of_before(), SOURCE)
    assert found.step == 2
    assert found.is_whole
    assert found.values == before["recipe"]
    names = ("data", "picture files", "lora", "prediction")
    assert found.identity == {name: before[name] for name in names}
    today = json.loads(json.dumps({"step": 2, **facts_to_keep(found.identity, found.values, found.stated)}))
    assert kept_facts(today, SOURCE) == found
    assert settle(recipe_of_before(), {}, found) == Settled(recipe=recipe_of_before())


def test_no_entry_of_a_state_of_before_is_lost():
    """Those of a run that has all: each is in the identity of today, or a value of the recipe says it."""
    others = {"clips": "9 frames, all of a second", "models.a": "sd at auto", "a.low_resolution": "8, noised below 0.1"}
    beside = {"past_values": {"loss": [1.0]}, "learning_rate_state": {"rate": 1.0}}
    before = state_of_before() | others | beside | {"growth": [[0, 4]], "sources": {"a": "3 times"}}
    after = upgraded(before, 2, STATE)
    assert {name: after[name] for name in beside} == beside
    said = {"seed": "training.seed", "batch": "training.batch", "model": "model.path", "clips": "data.frames"}
    gone = before.keys() - after.keys() - after["identity"].keys()
    assert gone == {*said, "objective", "models.a"}
    for key in (*said.values(), "objective.weighting", "models.a.path", "models.a.resolution"):
        assert effect_of(key) == "fixed"


@pytest.mark.parametrize(
    ("sections", "refused"),
    [
        ({"training": {"steps": 2, "seed": 1}}, "training.seed was 0 and is 1"),
        ({"training": {"steps": 2, "batch": 8}}, "training.batch was 4 and is 8"),
        ({"objective": {}}, "objective.weighting was debiased and is none"),
        ({"objective": {"weighting": "debiased", "offset_noise": 0.1}}, "objective.offset_noise was 0.0 and is 0.1"),
        ({"model": {"path": "other", "frozen_dtype": "none"}}, "model.path was sd and is other"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_run_of_before_is_another_one_where_its_values_differ(sections, refused, version, tmp_path):
    """Also a first version's, which kept no recipe: by its identity, and the recipe in the run's folder."""
    state = state_of_before()
    if version == 1:
        del state["recipe"], state["stated"]
        shutil.copy(FILES / "recipe.toml", tmp_path)
    kept = kept_facts(state, tmp_path / "checkpoints" / "step-00000002")
    assert settle(recipe_of_before(), {}, kept).notes == ()
    with pytest.raises(CheckpointError) as caught:
        settle(recipe_of_before(**sections), {}, kept)
    assert refused in str(caught.value)


def test_a_first_version_without_a_recipe_beside_it_is_held_against_what_it_says():
    state = {name: value for name, value in state_of_before().items() if name not in ("recipe", "stated")}
    state["objective"] = "snr_gamma 5.0, time_sampling uniform, time_range [0.1, 0.9], speed_pairs True, shift auto"
    found = kept_facts(state, SOURCE)
    assert not found.is_whole
    assert found.values == {
        "training.seed": 0,
        "training.batch": 4,
        "model.path": "sd",
        "objective.snr_gamma": 5.0,
        "objective.time_sampling": "uniform",
        "objective.time_range": [0.1, 0.9],
        "objective.speed_pairs": True,
        "objective.shift": "auto",
    }
    with pytest.raises(
        CheckpointError, match=r"objective\.snr_gamma was 5\.0 and is none; objective\.speed_pairs was true"
    ):
        settle(recipe_of_before(), {}, found)
    state["objective"] = "snr_gamma none, time_sampling uniform, shift auto, variance auto, guidance auto"
    assert (
        settle(recipe_of_before(data={"validation": "held-out", "flip": True}), {}, kept_facts(state, SOURCE)).notes
        == ()
    )


def test_a_state_of_a_later_version_is_refused_with_the_versions_that_are_read():
    with pytest.raises(CheckpointError, match=r"state\.json: version 9 is unknown; .* reads version 1 to 3; resume wi"):
        kept_facts(state_of_before() | {"format": 9}, SOURCE)


@pytest.mark.parametrize("wrong", [{"data.sources": {"a": 3}}, {"data.sizes": 3}])
def test_values_that_no_run_has_written_are_refused(wrong):
    with pytest.raises(CheckpointError, match="it was not written by a run"):
        kept_facts({"step": 1, "recipe": wrong}, SOURCE)


def test_a_note_of_before_says_that_the_run_has_ended(tmp_path):
    shutil.copy(FILES / "ended.json", tmp_path)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "README.md").touch()
    plain, more = (
        recipe_of_before(run={"folder": str(tmp_path)}, lora={"rank": 2, **own})
        for own in ({}, {"formats": ["diffusers", "comfy"]})
    )
    assert has_ended(plain, SOURCE)
    assert not has_ended(more, SOURCE)
    assert not has_ended(plain, SOURCE.with_name("step-00000003"))
    note_end(more, SOURCE)
    assert has_ended(more, SOURCE)
    assert not has_ended(plain, SOURCE)
    today = json.loads((tmp_path / "ended.json").read_text(encoding="utf-8"))
    assert today.pop("format") == len(ENDED) + 1
    assert today.keys() == {"checkpoint", "merged", "formats", "dora_as_difference", "save_dtype", "trigger"}


def test_a_recipe_of_a_run_of_before_is_read_also_with_aspects_that_had_no_effect(tmp_path):
    text = (FILES / "recipe.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text)["data"]["sizes"] == []
    (tmp_path / "recipe.toml").write_text(text, encoding="utf-8")
    assert values_of(recorded_recipe(tmp_path / "recipe.toml")) == state_of_before()["recipe"]
    text = text.replace("\nresolution = 8\nsizes = []", '\nresolution = 64\nsizes = ["64x64", "32x32"]').replace(
        '\naspects = "none"', "\naspects = [0.5, 2.0]"
    )
    (tmp_path / "recipe.toml").write_text(text, encoding="utf-8")
    assert recorded_recipe(tmp_path / "recipe.toml").data.aspects is None


@pytest.mark.parametrize(
    ("today", "before"),
    [
        ({}, {}),
        ({"states": "host", "average": "bfloat16"}, {"states": "host", "average": "bfloat16"}),
        ({"rounding": "stochastic"}, {"rounding": "stochastic"}),
        (
            {"rest": {"name": "AdamW", "learning_rate": "auto", "parameters": ["*embed*"]}},
            {"rest": {"name": "AdamW", "parameters": ["*embed*"]}},
        ),
        ({"rest": {"name": "SGD", "learning_rate": 0.1}}, {"rest": {"name": "SGD", "learning_rate": 0.1}}),
    ],
)
def test_a_kept_profile_of_before_is_found_by_the_key_that_it_had(today, before):
    same = {"name": "Muon", "arguments": {}, "clips": True, "averages": True}
    usual = {"rest": None, "states": "device", "average": "device", "rounding": None}
    assert update_of_before(json.dumps(same | usual | today)) == json.dumps(same | before, sort_keys=True)


def test_a_run_of_before_continues_bit_for_bit(tmp_path, monkeypatch):
    """Its checkpoint has the documents of 84d59d94; only the facts of this run's data are put in."""
    monkeypatch.chdir(tmp_path)
    save_dit(Path("dit"))
    save_pictures(Path("data"))

    def recipe(folder, steps):
        return recipe_of(Path("dit"), Path("data"), Path(folder), training={"steps": steps})

    train_here(recipe("whole", 3), exports=False)
    train_here(recipe("run", 2), exports=False)
    shutil.copytree("run", "other")
    checkpoint = latest(Path("run"))
    today, before = read_state(checkpoint), state_of_before()
    facts = {"data", "picture files", "lora", "prediction"}
    state = before | {name: value for name, value in today["identity"].items() if name in facts} | {"model": "dit"}
    state["recipe"] = today["recipe"]
    assert state.keys() == before.keys()
    (checkpoint / "state.json").write_text(json.dumps(state), encoding="utf-8")
    kept = manifest.read_manifest(checkpoint)
    names = [record.name for record in kept.files]
    files = manifest.describe_files(checkpoint, names)
    manifest.write_manifest(checkpoint, manifest.Manifest(step=kept.step, sequence=kept.sequence, files=files))
    train_here(recipe("run", 3), "latest", exports=False)
    whole, resumed = tensors_of(latest(Path("whole"))), tensors_of(latest(Path("run")))
    assert whole.keys() == resumed.keys()
    assert all(whole[name].equal(resumed[name]) for name in whole)
    assert check_resumed(kept_facts(read_state(latest(Path("run"))), "run"), today["identity"], 3) == 3
