"""Whole runs of tiny models, over two processes and in one: what they compute, save, draw and refuse."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch
from kit.causality import assert_read_after_sent
from kit.tiny_runs import (
    RESOLUTION,
    ask_to_draw,
    ask_to_save,
    ask_to_save_and_quit,
    draw_untrained,
    held_numbers,
    losses_of,
    recipe_of,
    save_dit,
    save_pictures,
    save_stable_diffusion,
    tensors_of,
    terminate_the_last_rank,
    train,
    train_here,
    train_started_apart,
)
from PIL import Image

from diffusionpipe.errors import CheckpointError, ConfigError, DataError, ModelError, NonFiniteLossError, RecipeError
from diffusionpipe.ir.files import SURVEY, read_file, read_plan, read_timeline
from diffusionpipe.models.opening.folder import scheduler_config
from diffusionpipe.runtime.compute.store import RowStore
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import joined
from diffusionpipe.trainer.checkpoints.checkpoint import latest, verify
from diffusionpipe.trainer.course import preparation, run
from diffusionpipe.trainer.course.documents import write_documents
from diffusionpipe.trainer.data.batches import loader
from diffusionpipe.trainer.data.randomness import normal
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.folder_drawing import draw_from_folder
from diffusionpipe.trainer.model.members import objective_of
from diffusionpipe.trainer.recipe import load_recipe
from diffusionpipe.trainer.reporting import trackers
from diffusionpipe.trainer.reporting.metrics import read_metrics
from diffusionpipe.workflows.planning.job_profiles import CachedProfiles
from diffusionpipe.workflows.training.run_timeline import draw_timeline

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ("a b", "c", "d")
LABELS = (0, 3, 4)
TIMES = ("wall", "step_s", "data_s", "iteration_s", "update_s", "samples_per_s", "bubble", "host_memory_gib")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models, pictures, and room for runs."""
    folder = tmp_path_factory.mktemp("runs")
    save_stable_diffusion(folder / "sd")
    save_dit(folder / "dit")
    save_pictures(folder / "data")
    save_pictures(folder / "held-out", count=6, seed=1)
    return folder


@pytest.fixture(scope="module")
def recipe(place):
    """A recipe of a run called `name`; everything that a run can do is switched on."""

    def make(name, *, kind="sd", **sections):
        drawn = {"prompts": PROMPTS} if kind == "sd" else {"labels": LABELS}
        base = {
            "data": {"validation": str(place / "held-out")},
            "training": {"clip_norm": 0.5},
            "learning_rate": {"schedule": "cosine", "warmup_steps": 2},
            "validation": {"every": 3, "samples": 5, "timesteps": (0.1, 0.5, 0.9)},
            "sampling": {"every": 6, "steps": 3, "guidance": 2.0, **drawn},
            "checkpoint": {"every": 3, "keep": 5},
        }
        merged = {key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}}
        return recipe_of(place / kind, place / "data", place / name, **merged)

    return make


@pytest.fixture(scope="module")
def profiles(place):
    """Filled runs measure the same layers; each set of them is measured once for all."""
    return CachedProfiles(place / "profiles")


@pytest.fixture(scope="module")
def over_two(crew, recipe, place):
    """The finished run over two stages that others are compared with."""
    assert crew.run(train, recipe("over-two")) == [6, 6]
    return place / "over-two"


@pytest.fixture(scope="module")
def in_one(recipe, place):
    """The same run in one process."""
    assert train_here(recipe("in-one")) == 6
    return place / "in-one"


@pytest.fixture(scope="module")
def exact(recipe, place):
    """The same run with float64: Adam enlarges the rounding of float32 until no close tolerance holds everywhere."""
    assert train_here(recipe("exact", training={"precision": "float64"}), exports=False) == 6
    return place / "exact"


@pytest.fixture
def copied(in_one, tmp_path):
    """A copy of the finished run to go on with."""
    return shutil.copytree(in_one, tmp_path / "copied")


def numbers_of(folder):
    """All metrics but the times."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in read_metrics(folder)]


def assert_same_losses(found, expected, tolerance=1e-5):
    for key in ("loss", "validation_loss", "gradient_norm"):
        a, b = losses_of(found, key), losses_of(expected, key)
        assert a.keys() == b.keys()
        assert list(a.values()) == pytest.approx(list(b.values()), rel=tolerance), key


def assert_same_weights(found, expected, tolerance):
    """Adam's moments of gradients that are mathematically zero are noise; what they do to a weight is bounded."""
    a, b = tensors_of(latest(found)), tensors_of(latest(expected))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        if not name.startswith("optimizer."):
            assert float((tensor - b[name]).abs().max()) <= tolerance, name


def assert_identical_checkpoints(found, expected):
    a, b = tensors_of(latest(found)), tensors_of(latest(expected))
    assert a.keys() == b.keys()
    assert {name.partition(".")[0] for name in a} == {"model", "ema", "optimizer"}
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())


def assert_same_pictures(found, expected):
    """Up to the rounding of a value that lies between two levels."""
    difference = np.abs(np.stack(found).astype(int) - np.stack(expected).astype(int))
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.01


def pictures_of(folder, step=6):
    return np.load(folder / "samples" / f"step-{step:08d}.npy")


def drawn_from(folder, wish, guidance=2.0, steps=3, seed=0):
    settings = SamplingSettings(steps=steps, guidance=guidance, seed=seed, scheduler=scheduler_config(folder))
    return draw_from_folder(folder, wish, settings, resolution=RESOLUTION, device=torch.device("cpu"))


# Any layout gives the same run.


def test_pictures_that_travel_as_levels_train_the_same_bits(recipe, in_one, place, monkeypatch):
    monkeypatch.setattr(run, "keeps_levels", lambda device: True)
    fed = []
    write = RowStore.write
    monkeypatch.setattr(RowStore, "write", lambda *given: fed.append(given[3].dtype) or write(*given))
    assert train_here(recipe("levels", training={"steps": 2}, learning_rate={"warmup_steps": 0}), saves=False) == 2
    monkeypatch.undo()
    assert train_here(recipe("values", training={"steps": 2}, learning_rate={"warmup_steps": 0}), saves=False) == 2
    assert fed.count(torch.uint8) == 2, "the pixels of two steps"
    assert losses_of(place / "levels") == losses_of(place / "values")


def test_two_stages_give_the_losses_validation_norms_and_pictures_of_one_process(over_two, in_one):
    assert_same_losses(over_two, in_one)
    assert max(losses_of(in_one, "gradient_norm").values()) > 0.5  # so clipping has an effect
    assert list(losses_of(over_two, "validation_loss")) == [3, 6]
    assert_same_pictures(pictures_of(over_two), pictures_of(in_one))
    timeline = read_timeline(over_two / "timeline.json")
    assert timeline.num_workers == 2
    assert timeline.copies == ()


OBJECTIVES = {
    "flow": {
        "kind": "flow_matching", "time_sampling": "beta", "beta_alpha": 3.0, "beta_beta": 1.5, "shift": 2.0,
        "time_range": (0.25, 0.875), "weighting": "cosmap", "loss": "huber", "huber_delta": 0.5, "offset_noise": 0.1,
    },
    "epsilon": {
        "time_range": (0.0, 0.5), "weighting": "debiased", "loss": "huber", "huber_delta": 0.5, "offset_noise": 0.1,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_two_stages_give_the_losses_of_one_process_for_every_key_of_the_objective(
    crew, recipe, place, kind, monkeypatch
):
    made = []
    make = preparation.BatchSource
    monkeypatch.setattr(preparation, "BatchSource", lambda **given: made.append(given["augmentation"]) or make(**given))
    changed = {"objective": OBJECTIVES[kind], "sampling": {"every": "none"}, "training": {"steps": 3}}
    assert crew.run(train, recipe(f"{kind}-over-two", **changed), saves=False) == [3, 3]
    assert train_here(recipe(f"{kind}-in-one", **changed), saves=False) == 3
    assert_same_losses(place / f"{kind}-over-two", place / f"{kind}-in-one")
    assert [augmentation.offset_noise for augmentation in made] == [0.1, 0.0], "of training, of validation"
    settings = objective_of(recipe("any", **changed), place / "sd")
    passed_on = set(OBJECTIVES[kind]) - {"kind", "offset_noise"}
    assert {key: getattr(settings, key) for key in passed_on} == {key: OBJECTIVES[kind][key] for key in passed_on}


def test_the_timeline_of_ranks_that_start_apart_has_no_message_that_is_read_before_it_is_sent(crew, recipe, tmp_path):
    assert crew.run(train_started_apart, recipe(tmp_path, training={"steps": 3}), 0.05) == [3, 3]
    timeline, plan = read_timeline(tmp_path / "timeline.json"), read_plan(tmp_path / "plan.json")
    assert_read_after_sent(timeline, plan.train, plan.mesh)
    first = [min(span.start for span in timeline.spans if span.worker == rank) for rank in range(2)]
    assert first[0] > 0.04, "rank 0 began later, and its times say so"


def test_the_timeline_of_copies_has_the_whole_step_of_every_rank(crew, recipe, tmp_path):
    assert crew.run(train, recipe(tmp_path, pipeline={"data_parallel": 2}, training={"steps": 3}), exports=False) == [
        3,
        3,
    ]
    timeline = read_timeline(tmp_path / "timeline.json")
    assert timeline.num_workers == 2
    assert timeline.copies == ((0,), (1,))
    for rank in range(2):
        done = [str(span.action) for span in timeline.spans if span.worker == rank]
        assert {"0F0", "0F1", "0B0", "0B1"} <= set(done)
        phases = [phase for phase in timeline.update if phase.worker == rank]
        assert [phase.name for phase in phases] == ["sum over all ranks", "clip", "optimizer", "average"]
        ends = [
            max(s.end for s in timeline.spans if s.worker == rank),
            *(time for p in phases for time in (p.start, p.end)),
        ]
        assert ends == sorted(ends)
    assert timeline.step > timeline.makespan
    draw_timeline(recipe(tmp_path))
    slices = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {(e["pid"], e["name"]) for e in slices} >= {
        (rank, name) for rank in (0, 1) for name in ("optimizer", "forward 0")
    }


@pytest.mark.parametrize(
    "sections",
    [
        {"pipeline": {"schedule": "gpipe", "microbatches": 4}},
        {"pipeline": {"data_parallel": 2}},
        {"pipeline": {"replicas": (2,)}},
        {"training": {"activation_checkpointing": True}},
        {"pipeline": {"fill": True}},
        {"pipeline": {"schedule": "zb-h1"}, "training": {"post_validation": True}},
        {"pipeline": {"schedule": "zb-v", "fill": True}},
        {"pipeline": {"schedule": "chimera"}},
        {"pipeline": {"data_parallel": 2, "sharded": True}},
        {"pipeline": {"data_parallel": 2, "sharded": True, "fill": True, "offload_frozen": True}},
        {
            "pipeline": {"data_parallel": 2, "sharded": True, "schedule": "gpipe"},
            "training": {"activation_checkpointing": True, "post_validation": True},
        },
        pytest.param(
            {
                "pipeline": {"data_parallel": 2, "sharded": "optimizer", "fill": True},
                "training": {"post_validation": True},
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "gpipe",
        "data parallel",
        "replicas",
        "recomputed",
        "filled",
        "zb-h1",
        "zb-v, filled",
        "chimera",
        "sharded",
        "sharded, filled, offloaded",
        "sharded, block by block, recomputed, post-validated",
        "optimizer sharded, filled, post-validated",
    ],
)
def test_other_layouts_change_nothing(crew, recipe, profiles, exact, tmp_path, sections):
    training = {"precision": "float64"} | sections.get("training", {})
    assert crew.run(train, recipe(tmp_path, **sections | {"training": training}), profiles=profiles, exports=False) == [
        6,
        6,
    ]
    assert_same_losses(tmp_path, exact, 1e-10)
    assert_same_weights(tmp_path, exact, 1e-3)
    assert_same_pictures(pictures_of(tmp_path), pictures_of(exact))


def test_frozen_weights_in_host_memory_change_no_bit(crew, recipe, over_two, tmp_path):
    assert crew.run(train, recipe(tmp_path, pipeline={"offload_frozen": True}), exports=False) == [6, 6]
    assert read_plan(tmp_path / "plan.json").encoders == "host"
    assert numbers_of(tmp_path) == numbers_of(over_two)
    assert_identical_checkpoints(tmp_path, over_two)
    assert np.array_equal(pictures_of(tmp_path), pictures_of(over_two))


def test_a_sharded_rank_starts_with_its_part_of_the_weights_alone(crew, recipe, tmp_path):
    found = crew.run(held_numbers, recipe(tmp_path, pipeline={"data_parallel": 2, "sharded": True}))
    total = found[0][2]
    assert sum(updated for _, updated, _ in found) == total
    for held, updated, _ in found:
        assert held == updated
        assert 0.4 * total < held < 0.6 * total


def test_a_trained_text_encoder_and_random_weights_are_the_same_over_two_stages(crew, recipe, tmp_path):
    model = {"train": ("unet", "text_encoder"), "from_scratch": True}
    options = {"training": {"steps": 3, "precision": "float64"}, "sampling": {"every": 3}, "model": model}
    train_here(recipe(tmp_path / "one", **options), exports=False)
    assert crew.run(train, recipe(tmp_path / "two", **options), exports=False) == [3, 3]
    assert_same_losses(tmp_path / "two", tmp_path / "one", 1e-10)
    assert_same_weights(tmp_path / "two", tmp_path / "one", 1e-8)
    assert_same_pictures(pictures_of(tmp_path / "two", 3), pictures_of(tmp_path / "one", 3))


@pytest.mark.parametrize("layout", [{}, {"data_parallel": 2, "sharded": True}], ids=["stages", "sharded"])
def test_bfloat16_over_two_ranks_stays_near_float32(crew, recipe, over_two, tmp_path, layout):
    assert crew.run(train, recipe(tmp_path, training={"precision": "bfloat16"}, pipeline=layout), exports=False) == [
        6,
        6,
    ]
    assert losses_of(tmp_path) != losses_of(over_two)
    for key in ("loss", "validation_loss"):  # gradient norms part sooner; how soon depends on the processor
        found, expected = losses_of(tmp_path, key), losses_of(over_two, key)
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=0.1), key
    first = [losses_of(folder, "gradient_norm")[1] for folder in (tmp_path, over_two)]
    assert first[0] == pytest.approx(first[1], rel=0.1)
    assert {t.dtype for name, t in tensors_of(latest(tmp_path)).items() if "step" not in name} == {torch.float32}


# Steps before all norms are known.


def copy_what_was_measured(folder, other):
    """Give another run's folder all that plans are made of: the layers, and the links between each two ranks."""
    other.mkdir()
    for measured in ("profile.json", "cluster.json"):
        shutil.copy(folder / measured, other)


@pytest.mark.parametrize("fill", [False, True], ids=["unfilled", "filled"])
def test_a_post_validated_run_is_bit_for_bit_the_blocking_one(crew, recipe, profiles, tmp_path, fill):
    """Clipping is needed every now and then, so that steps are taken back."""
    sections = {"pipeline": {"fill": fill}, "checkpoint": {"every": 8}, "sampling": {"every": 7}}
    common = {"steps": 14, "clip_norm": 0.66}
    assert crew.run(
        train, recipe(tmp_path / "blocking", training=common, **sections), profiles=profiles, exports=False
    ) == [14, 14]
    if fill:
        copy_what_was_measured(tmp_path / "blocking", tmp_path / "validated")
    validated = recipe(tmp_path / "validated", training=common | {"post_validation": True}, **sections)
    assert crew.run(train, validated, at={11: terminate_the_last_rank}, exports=False) != [14, 14]
    assert crew.run(train, validated, "latest", exports=False) == [14, 14]
    rows = numbers_of(tmp_path / "validated")
    amended = [row.pop("amended") for row in rows if "amended" in row]
    assert 1 <= len(amended) < 10
    assert rows == numbers_of(tmp_path / "blocking")
    assert_identical_checkpoints(tmp_path / "validated", tmp_path / "blocking")


# Interruptions.


def test_the_facts_about_the_data_are_kept_in_the_run_folder(over_two):
    survey = read_file(over_two / "survey.json", SURVEY)
    assert [(one.size, one.cut) for one in survey.sizes] == [(f"{RESOLUTION} x {RESOLUTION}", 0.0)]
    assert "epochs" in [line.name for line in survey.lines]
    assert next(line.text for line in survey.further if line.name == "captions").startswith("of ")


def test_pictures_that_a_person_asks_for_change_no_bit_of_the_run(crew, recipe, over_two, tmp_path):
    drawn = recipe(tmp_path)
    assert crew.run(train, drawn, at={2: ask_to_draw, 6: ask_to_draw}, exports=False) == [6, 6]
    assert sorted(one.name for one in (tmp_path / "samples").glob("*.npy")) == [
        "step-00000002.npy",
        "step-00000006.npy",
    ]
    assert len(list((tmp_path / "samples/step-00000002").glob("*.png"))) == len(PROMPTS)
    assert not (tmp_path / "draw").exists()
    assert numbers_of(tmp_path) == numbers_of(over_two)
    assert_identical_checkpoints(tmp_path, over_two)
    assert np.array_equal(pictures_of(tmp_path), pictures_of(over_two))


def test_a_stop_that_is_asked_for_in_the_last_step_is_an_end(recipe, tmp_path, caplog):
    assert train_here(recipe(tmp_path), at={6: ask_to_save_and_quit}) == 6
    assert "stopped step=" not in caplog.text
    assert (tmp_path / "export").exists()


def test_a_recipe_without_samples_says_that_it_draws_none(recipe, tmp_path, caplog):
    assert train_here(recipe(tmp_path, sampling={"every": None}), at={1: ask_to_draw}, saves=False) == 6
    assert "the recipe draws nothing" in caplog.text
    assert not (tmp_path / "samples").exists()
    assert not (tmp_path / "draw").exists()


def test_a_run_that_was_interrupted_twice_is_bit_for_bit_the_uninterrupted_one(crew, recipe, over_two, tmp_path):
    interrupted = recipe(tmp_path)
    assert crew.run(train, interrupted, at={2: terminate_the_last_rank}) == [2, 2]
    assert latest(tmp_path).name == "step-00000002"
    assert not (tmp_path / "export").exists()
    assert crew.run(train, interrupted, "latest", at={4: ask_to_save_and_quit}) == [4, 4]
    assert not (tmp_path / "save_quit").exists()
    assert crew.run(train, interrupted, "latest", exports=False) == [6, 6]
    assert numbers_of(tmp_path) == numbers_of(over_two)
    assert_identical_checkpoints(tmp_path, over_two)
    assert np.array_equal(pictures_of(tmp_path), pictures_of(over_two))


def test_a_filled_run_goes_on_bit_for_bit_with_the_profile_that_it_was_planned_by(crew, recipe, profiles, tmp_path):
    filled = {"pipeline": {"fill": True}}
    assert crew.run(train, recipe(tmp_path / "whole", **filled), profiles=profiles, exports=False) == [6, 6]
    copy_what_was_measured(tmp_path / "whole", tmp_path / "stopped")
    assert crew.run(train, recipe(tmp_path / "stopped", **filled), at={3: ask_to_save_and_quit}) == [3, 3]
    assert crew.run(train, recipe(tmp_path / "stopped", **filled), "latest", exports=False) == [6, 6]
    assert (tmp_path / "stopped" / "plan.json").read_text() == (tmp_path / "whole" / "plan.json").read_text()
    assert numbers_of(tmp_path / "stopped") == numbers_of(tmp_path / "whole")
    assert_identical_checkpoints(tmp_path / "stopped", tmp_path / "whole")


def test_another_number_of_stages_may_go_on(crew, recipe, over_two, tmp_path):
    assert train_here(recipe(tmp_path), at={3: ask_to_save_and_quit}) == 3
    assert crew.run(train, recipe(tmp_path, pipeline={"schedule": "gpipe"}), "latest", exports=False) == [6, 6]
    assert_same_losses(tmp_path, over_two)


SHARDED = {"data_parallel": 2, "sharded": True}
OWNED = {"data_parallel": 2, "sharded": "optimizer"}


@pytest.mark.parametrize(
    "layout",
    [{}, SHARDED, pytest.param(OWNED, marks=pytest.mark.slow)],
    ids=["stages", "sharded", "optimizer sharded"],
)
def test_in_float64_another_layout_changes_less_than_a_ten_billionth(crew, recipe, tmp_path, layout):
    options = {"kind": "dit", "training": {"precision": "float64"}}
    over_two = options | {"pipeline": layout}
    assert train_here(recipe(tmp_path / "whole", **options), at={2: ask_to_save}, exports=False) == 6
    kept = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000003", "step-00000006"]  # so asking to save did not stop it
    assert crew.run(train, recipe(tmp_path / "cut", **over_two), at={3: ask_to_save_and_quit}) == [3, 3]
    assert train_here(recipe(tmp_path / "cut", **options), "latest", at={4: ask_to_save_and_quit}) == 4
    assert crew.run(train, recipe(tmp_path / "cut", **over_two), "4", exports=False) == [6, 6]
    assert_same_losses(tmp_path / "cut", tmp_path / "whole", 1e-10)
    assert_same_weights(tmp_path / "cut", tmp_path / "whole", 1e-8)


def test_a_finished_run_can_be_resumed_to_export_again(recipe, copied):
    shutil.rmtree(copied / "export")
    before = numbers_of(copied)
    assert train_here(recipe(copied), "latest") == 6
    assert (copied / "export" / "model_index.json").exists()
    assert numbers_of(copied) == before


def test_a_finished_run_has_nothing_to_do_and_says_so(recipe, copied, caplog, monkeypatch):
    """Whatever of the layout has changed: no weights are loaded, and no file is written."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(run, "open_session", None)
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.is_file()}
    assert train_here(recipe(copied, pipeline={"microbatches": 4}), "latest") == 6
    after = {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.is_file()}
    assert before.keys() == after.keys()
    assert before == after
    assert "nothing to do: all 6 steps are done" in caplog.text
    assert "raise training.steps to train on" in caplog.text


def test_a_run_keeps_its_timeline_on_the_same_layout_only(recipe, copied, over_two):
    names = {"timeline.json", "timeline.png", "trace.json"}
    for name in names:
        (copied / name).touch()
    write_documents(recipe(copied), read_plan(copied / "plan.json"))
    assert names <= {path.name for path in copied.iterdir()}
    write_documents(recipe(copied), read_plan(over_two / "plan.json"))
    assert not names & {path.name for path in copied.iterdir()}


def test_more_steps_may_be_added_to_a_finished_run(recipe, copied):
    longer = recipe(copied, training={"steps": 8}, learning_rate={"schedule": "constant"})
    assert train_here(longer, "latest", exports=False) == 8
    assert list(losses_of(copied)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_epochs_end_a_run_where_as_many_steps_do_also_when_it_goes_on(recipe, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    own = recipe(tmp_path / "epochs", training={"steps": None, "epochs": 0.6})  # of 20 pictures, 4 a step
    assert train_here(own, exports=False) == 3
    assert load_recipe(tmp_path / "epochs" / "recipe.toml").training.steps == 3
    longer = recipe(tmp_path / "epochs", training={"steps": None, "epochs": 1.2})
    assert train_here(longer, "latest", exports=False) == 6
    assert "changed since step 3: training.epochs 0.6 -> 1.2" in caplog.text
    epochs = losses_of(tmp_path / "epochs", "epoch")
    assert epochs == {1: 0.2, 2: 0.4, 3: 0.6, 4: 0.8, 5: 1.0, 6: 1.2}


@pytest.mark.slow
def test_with_steps_and_epochs_a_run_ends_at_what_comes_first(recipe, tmp_path):
    at_first = {"schedule": "constant", "warmup_steps": 2}
    steps = recipe(tmp_path / "steps", training={"steps": 6}, learning_rate=at_first)
    same = recipe(tmp_path / "same", training={"steps": 9, "epochs": 1.1}, learning_rate=at_first)
    assert train_here(steps) == train_here(same) == 6
    assert losses_of(tmp_path / "steps") == losses_of(tmp_path / "same")


def test_a_warm_up_longer_than_the_epochs_is_refused_before_anything_is_measured(recipe, place, monkeypatch):
    monkeypatch.setattr(run, "open_session", None)
    with pytest.raises(RecipeError, match=r"learning_rate.warmup_steps: 2 is not less than the 2 steps"):
        train_here(recipe("short", training={"steps": None, "epochs": 0.4}))


def test_a_run_draws_and_validates_at_its_start_as_the_untrained_model(recipe, tmp_path):
    folder = tmp_path / "start"
    own = recipe(folder, training={"steps": 1}, learning_rate={"warmup_steps": 0}, sampling={"at_start": True})
    assert train_here(own, saves=False) == 1
    with joined(membership({}), device="cpu") as job:
        assert_same_pictures(pictures_of(folder, step=0), draw_untrained(job, own))
    assert list(losses_of(folder, "validation_loss")) == [0, 1]
    assert np.abs(pictures_of(folder, step=0).astype(int) - pictures_of(folder, step=1)).max() > 0


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"seed": 7}}, "seed was 0 and is 7"),
        ({"training": {"batch": 8}}, "batch was 4 and is 8"),
        ({"objective": {"kind": "v_prediction"}}, "prediction was 'epsilon' and is 'v_prediction'"),
        ({"data": {"train": "held-out"}}, "14 pictures are gone, e.g. 006.png; 6 pictures or captions are different"),
        ({"objective": {"snr_gamma": 5.0}}, "objective.snr_gamma was none and is 5.0"),
        ({"training": {"steps": 4}}, "from step 6, but the recipe ends at step 4"),
        ({"optimizer": {"name": "SGD"}}, "optimizer.name was AdamW and is SGD"),
        ({"objective": {"loss": "huber"}}, "objective.loss was l2 and is huber"),
        ({"data": {"flip": True}}, "data.flip was false and is true"),
        ({"data": {"resolution": 16}}, "data.resolution was 8 and is 16"),
        (
            {"training": {"precision": "float64"}},
            "precision was float32 and is float64 .the checkpoint's numbers have",
        ),
        ({"optimizer": {"arguments": {"amsgrad": True}}}, "optimizer.arguments was {} and is .*keeps other numbers"),
    ],
)
def test_what_would_be_another_run_does_not_continue_this_one(recipe, copied, place, sections, message):
    if sections == {"data": {"train": "held-out"}}:
        sections = {"data": {"train": str(place / "held-out")}}
    before = read_metrics(copied)
    with pytest.raises(CheckpointError, match=message):
        train_here(recipe(copied, **sections), "latest")
    assert read_metrics(copied) == before


def test_a_tracker_that_does_not_start_ends_the_run_before_anything_is_measured(recipe, place, monkeypatch):
    def refuse(name, opening):
        raise PermissionError("no login")

    monkeypatch.setattr(trackers, "_open", refuse)
    free = {"plan": "auto", "microbatches": "none", "encode_chunk": "none"}
    with pytest.raises(ConfigError, match=r"run\.trackers: swanlab did not start: PermissionError: no login\nset up"):
        train_here(recipe("untracked", run={"trackers": ("swanlab",)}, pipeline=free))
    assert not (place / "untracked" / "profile.json").exists()
    assert not (place / "untracked" / "cluster.json").exists()


def test_changed_captions_are_other_data(recipe, place, copied, tmp_path):
    data = shutil.copytree(place / "data", tmp_path / "data")
    lines = (data / "metadata.jsonl").read_text()
    (data / "metadata.jsonl").write_text(lines.replace('"text": "b"', '"text": "x"', 1))
    with pytest.raises(CheckpointError, match=r"not the data of this run: 1 picture or caption is different, e.g. 001"):
        train_here(recipe(copied, data={"train": str(data)}), "latest")


def test_a_folder_with_checkpoints_is_not_trained_in_afresh(recipe, copied):
    with pytest.raises(ConfigError, match=r"holds the checkpoints of an earlier run; continue with --resume latest"):
        train_here(recipe(copied))
    assert latest(copied).name == "step-00000006"


@pytest.mark.parametrize("wanted", ["latest", "3", "nowhere"])
def test_there_must_be_something_to_resume(recipe, tmp_path, wanted):
    with pytest.raises(CheckpointError, match=r"no checkpoint|does not exist"):
        train_here(recipe(tmp_path), wanted)


def test_with_auto_the_first_start_and_a_restart_with_a_damaged_checkpoint_give_one_run(recipe, tmp_path):
    """The same command both times; the steps after the older checkpoint are done again."""
    run = recipe(tmp_path / "run", sampling={"every": None})
    assert train_here(run, "auto", exports=False) == 6
    before, losses = numbers_of(tmp_path / "run"), losses_of(tmp_path / "run")
    largest = max(latest(tmp_path / "run").glob("*.safetensors"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    assert train_here(run, "auto", exports=False) == 6
    assert (numbers_of(tmp_path / "run"), losses_of(tmp_path / "run")) == (before, losses)


def test_a_truncated_checkpoint_is_refused_by_name_and_the_previous_one_works(recipe, copied, over_two):
    damaged = latest(copied)
    largest = max(damaged.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"step-00000006 is damaged: .*{largest.name}.*\n.*--resume 3"):
        train_here(recipe(copied), "latest", exports=False)
    assert train_here(recipe(copied), "3", exports=False) == 6
    assert_same_losses(copied, over_two)
    verify(latest(copied))


# A loss that is not finite.


@pytest.mark.parametrize("post_validation", [False, True])
def test_a_loss_that_is_not_finite_stops_every_rank_and_names_step_and_samples(crew, recipe, tmp_path, post_validation):
    endless = recipe(
        tmp_path,
        training={"clip_norm": None, "post_validation": post_validation},
        optimizer={"name": "SGD", "learning_rate": 1e30},
        learning_rate={"schedule": "constant", "warmup_steps": 0},
        checkpoint={"every": None if post_validation else 1},
    )
    errors = crew.run(train, endless)
    assert [type(error) for error in errors] == [NonFiniteLossError] * 2
    assert str(errors[0]) == str(errors[1])
    step = len(losses_of(tmp_path)) + 1
    assert 2 <= step <= 4
    assert f"step {step}: " in str(errors[0])
    way = "No checkpoint was saved. Start again."
    if not post_validation:
        earlier = f", or from an earlier one with --resume {step - 2}" if step > 2 else ""
        way = f"The checkpoint of step {step - 1} is kept. Resume with --resume latest{earlier}."
    assert str(errors[0]).splitlines()[-1] == way
    assert "every sample of the batch, so the weights or the learning rate are the cause" in str(errors[0])
    if not post_validation:
        assert latest(tmp_path).name == f"step-{step - 1:08d}"
        verify(latest(tmp_path))


# Pictures and exports.


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("model", ["sd", "dit"])
def test_the_pipeline_draws_what_one_process_draws(crew, recipe, place, tmp_path, model, guidance):
    drawing = recipe(tmp_path, kind=model, sampling={"guidance": guidance})
    found = crew.run(draw_untrained, drawing)
    wish = SampleRequest(prompts=PROMPTS) if model == "sd" else SampleRequest(labels=LABELS)
    [shown] = [pictures for pictures in found if pictures is not None]
    assert_same_pictures(shown, drawn_from(place / model, wish, guidance))


def test_the_first_rank_shows_pictures_although_its_stage_reads_no_latents(crew, recipe, place, tmp_path):
    """As where a search cuts behind the layers of the time alone."""
    shown, other = crew.run(draw_untrained, recipe(tmp_path, pipeline={"splits": ["unet.conv_in"]}))
    assert other is None
    assert_same_pictures(shown, drawn_from(place / "sd", SampleRequest(prompts=PROMPTS), 2.0))


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "flow_matching"])
def test_the_export_draws_the_pictures_of_the_run(crew, recipe, tmp_path, kind):
    short = {"training": {"steps": 2}, "learning_rate": {"warmup_steps": 0}, "validation": {"every": 2}}
    assert crew.run(train, recipe(tmp_path, objective={"kind": kind}, sampling={"every": 2}, **short)) == [2, 2]
    ours = drawn_from(tmp_path / "export", SampleRequest(prompts=PROMPTS))
    assert_same_pictures(pictures_of(tmp_path, 2), ours)
    if kind != "flow_matching":
        assert_same_pictures(diffusers_pictures(tmp_path / "export"), ours)


def test_pictures_that_two_ranks_drew_are_drawn_again_bit_for_bit(over_two, tmp_path):
    from PIL import Image
    from typer.testing import CliRunner

    from diffusionpipe import cli

    kept = sorted((over_two / "samples" / "step-00000006").iterdir())
    assert len(kept) == len(PROMPTS)
    for path, drawn in zip(kept, pictures_of(over_two), strict=True):
        words = ["sample", str(over_two), "--like", str(path), "--out", str(tmp_path / "x.png"), "--device", "cpu"]
        result = CliRunner().invoke(cli.app, words)
        assert result.exit_code == 0, result.output
        assert np.array_equal(np.asarray(Image.open(tmp_path / "x.png")), drawn)


def diffusers_pictures(folder):
    """What diffusers draws from the same first noise."""
    from diffusers import StableDiffusionPipeline

    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    noise = normal(seed=0, purpose="sampling", step=0, positions=range(len(PROMPTS)), shape=(4, 4, 4))
    images = pipeline(
        list(PROMPTS), latents=noise, guidance_scale=2.0, num_inference_steps=3, output_type="np",
        height=RESOLUTION, width=RESOLUTION,
    ).images  # fmt: skip
    return (images * 255).round().astype(np.uint8)


def test_the_command_draws_from_a_run_that_was_trained_by_flow_matching(recipe, tmp_path):
    from typer.testing import CliRunner

    from diffusionpipe import cli

    short = {"training": {"steps": 1}, "learning_rate": {"warmup_steps": 0}}
    train_here(recipe(tmp_path, kind="dit", objective={"kind": "flow_matching"}, sampling={"every": 1}, **short))
    out = tmp_path / "grid.png"
    words = ["--label", "0", "--label", "3", "--count", "2", "--steps", "2", "--out", str(out)]
    result = CliRunner().invoke(cli.app, ["sample", str(tmp_path), *words])
    assert result.exit_code == 0, result.output
    assert "4 pictures" in result.output
    assert out.stat().st_size > 0


# Refused before the first step.


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"kind": "dit", "sampling": {"labels": (9,)}}, RecipeError, "no class 9; the model has classes 0 to 4"),
        ({"kind": "dit", "sampling": {"labels": (), "prompts": PROMPTS}}, RecipeError, "give labels, not prompts"),
        ({"sampling": {"labels": LABELS, "prompts": ()}}, RecipeError, "give prompts, not labels"),
        ({"sampling": {"scheduler": "DDIMSchedule"}}, RecipeError, "no scheduler 'DDIMSchedule'"),
        (
            {"sampling": {"scheduler": "DDIMScheduler"}, "objective": {"kind": "flow_matching"}},
            RecipeError,
            "DDIMScheduler cannot replace",
        ),
        (
            {"sampling": {"steps": 1000}},
            RecipeError,
            (
                "scheduler_config.json: DDIMScheduler cannot make 1000 denoising steps: ValueError: they begin at time "
                "1000, and the last time of the model is"
            ),
        ),
    ],
)
def test_what_can_never_be_drawn_is_refused_at_the_start(recipe, tmp_path, sections, error, message):
    with pytest.raises(error, match=message):
        train_here(recipe(tmp_path, **sections))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_model_without_a_tokenizer_is_refused_by_name(recipe, place, tmp_path):
    model = shutil.copytree(place / "sd", tmp_path / "model")
    shutil.rmtree(model / "tokenizer")
    with pytest.raises(ModelError, match=r"tokenizer is missing"):
        train_here(recipe(tmp_path / "run", model={"path": str(model)}, sampling={"every": None, "prompts": ()}))


def test_all_ranks_refuse_a_folder_of_pictures_alike(crew, recipe, place, tmp_path):
    data = shutil.copytree(place / "data", tmp_path / "data")
    with (data / "metadata.jsonl").open("a") as file:
        file.write(json.dumps({"file_name": "gone.png", "text": "a"}) + "\n")
    (data / "003.png").write_bytes(b"no picture")
    errors = crew.run(train, recipe(tmp_path / "run", data={"train": str(data)}))
    assert [type(error) for error in errors] == [DataError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "gone.png" in str(errors[0])
    assert "003.png" in str(errors[0])


@pytest.mark.slow
@pytest.mark.parametrize("growing_at", [2, 5])
def test_new_pictures_enter_at_the_next_epoch_and_the_running_one_keeps_its_order(
    recipe, place, tmp_path, monkeypatch, growing_at
):
    """Of 20 pictures in steps of 8: an epoch ends within step 3, the next one with step 5."""
    data = shutil.copytree(place / "data", tmp_path / "data")
    read, told, make = [], [], loader.make_batch

    def make_batch(source, rows, **more):
        read.append((rows.step, [source.dataset.samples[index].name for index in rows.samples]))
        return make(source, rows, **more)

    monkeypatch.setattr(loader, "make_batch", make_batch)
    short = {"sampling": {"every": "none"}, "validation": {"every": "none"}}
    short |= {"learning_rate": {"schedule": "constant", "warmup_steps": 0}}
    short |= {"checkpoint": {"every": "none"}}

    def train_to(steps, **more):
        own = {"train": str(data), "validation": "none", **more}
        made = recipe(tmp_path / "run", data=own, training={"steps": steps, "batch": 8}, **short)
        told.clear()
        return train_here(
            made, "auto", tell_data=lambda lines: told.extend(x.text for x in lines if x.name == "growth")
        )

    assert train_to(growing_at) == growing_at
    for number in range(5):
        Image.new("RGB", (8, 8)).save(data / f"000-{number}.png")  # between the others by name
        (data / f"000-{number}.txt").write_text("a")
    with pytest.raises(CheckpointError, match=r"5 pictures are new, e.g. 000-0.png\.\nSet data\.allow_growth = true"):
        train_to(10)
    assert train_to(8, allow_growth=True) == 8
    first = "2 on, in step 3" if growing_at == 2 else "3 on, in step 6"
    assert f"5 new pictures from epoch {first}; the running epoch keeps its order" in told
    assert train_to(10) == 10  # what has entered belongs to the run
    order = [name for _, names in sorted(read) for name in names]
    assert len(order) == 10 * 8
    start = 20 if growing_at == 2 else 40
    old = {f"{number:03}.png" for number in range(20)}
    for epoch in range(0, start, 20):
        assert set(order[epoch : epoch + 20]) == old
    for epoch in range(start, 80 - 24, 25):
        assert set(order[epoch : epoch + 25]) == old | {f"000-{number}.png" for number in range(5)}
