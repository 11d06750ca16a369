"""Two models train in one run, each with its own resolution, learning rate and clipping."""

import json
import tomllib
from functools import partial
from random import Random

import pytest
import torch
from diffusers import DiffusionPipeline
from kit.crew import crew_of
from kit.tiny_runs import kill, losses_of, save_dit, save_pictures, save_stable_diffusion, tensors_of, train, train_here

from diffusionpipe.errors import CheckpointError, ConfigError, RecipeError
from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest
from diffusionpipe.trainer.data import randomness
from diffusionpipe.trainer.data.batches import batch
from diffusionpipe.trainer.recipe.recipe_file import recipe_from_table, recipe_to_toml

pytestmark = pytest.mark.usefixtures("one_thread")

SMALLEST = 1e-4
"""Adam divides by the gradient's size and this. A bias of attention's keys changes no output, because softmax ignores
what all keys share; its gradient is rounding alone, 1e-18, which differs between layouts. With 1e-8 for this, the
quotient would be 1e-10."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cascades")
    save_dit(folder / "dit")
    save_stable_diffusion(folder / "sd")
    save_pictures(folder / "data", resolution=16)
    save_pictures(folder / "held-out", count=6, seed=1, resolution=16)
    return folder


def table_of(place, name, base=(), large=(), **sections):
    table = {
        "models": {
            "base": {"path": str(place / "dit"), "resolution": 8, "learning_rate": 0.02, **dict(base)},
            "large": {"path": str(place / "sd"), "microbatches": 4, **dict(large)},
        },
        "data": {"train": str(place / "data"), "resolution": 16, "workers": 0},
        "training": {"steps": 5, "batch": 8, "ema_decay": 0.9, "precision": "float64"},
        "optimizer": {"learning_rate": 0.01, "arguments": {"eps": SMALLEST}},
        "pipeline": {"microbatches": 2, "encode_chunk": 2},
        "run": {"folder": str(place / name)},
    }
    return {**table, **{key: table.get(key, {}) | value for key, value in sections.items()}}


def recipe_of(place, name, base=(), large=(), **sections):
    return recipe_from_table(table_of(place, name, base, large, **sections), source="cascade.toml")


def weights_of(folder, backbone):
    found = tensors_of(latest(folder)).items()
    return {name: tensor for name, tensor in found if f".{backbone}/" in name and not name.endswith(".step")}


@pytest.fixture(scope="module")
def alone(place):
    """The run in one process."""
    recipe = recipe_of(
        place,
        "alone",
        data={"validation": str(place / "held-out")},
        validation={"every": 5, "samples": 4, "timesteps": [0.2, 0.7]},
        checkpoint={"every": 3},
    )
    assert train_here(recipe) == 5
    return place / "alone"


def test_metrics_tell_the_backbones_apart(alone):
    for key in ("loss", "validation_loss"):
        parts = [losses_of(alone, f"{key}/{name}") for name in ("base", "large")]
        total = losses_of(alone, key)
        assert {step: pytest.approx(sum(part[step] for part in parts)) for step in total} == total
    assert set(losses_of(alone, "learning_rate/base").values()) == {0.02}
    assert set(losses_of(alone, "learning_rate/large").values()) == {0.01}


def test_each_model_has_an_export_that_diffusers_opens(alone):
    for name, kind in (("base", "DiTPipeline"), ("large", "StableDiffusionPipeline")):
        opened = DiffusionPipeline.from_pretrained(alone / "export" / name, use_safetensors=True)
        assert type(opened).__name__ == kind
        denoiser = opened.transformer if name == "base" else opened.unet
        averages = {key: value for key, value in tensors_of(latest(alone)).items() if key.startswith(f"ema.{name}/")}
        stored = dict(denoiser.named_parameters())
        assert len(averages) == len(stored)
        for key, average in averages.items():
            torch.testing.assert_close(stored[key.partition("/")[2].partition(".")[2]], average.float())


def test_what_changes_for_one_model_changes_no_bit_of_the_other(alone, place):
    """Rate, schedule, decays, clipping and micro-batches of `large`: `base` learns what it learns beside any other."""
    own = {"learning_rate": 0.001, "learning_rate_schedule": "cosine", "warmup_steps": 2, "clip_norm": 1e-3}
    own |= {"optimizer_arguments": {"weight_decay": 0.5}, "ema_decay": 0.2, "train": ["unet", "text_encoder"]}
    own |= {"components": {"text_encoder": {"learning_rate": 0.003}}}
    recipe = recipe_of(place, "other", large=own)
    assert train_here(recipe) == 5
    mine, theirs = weights_of(place / "other", "base"), weights_of(alone, "base")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
    assert losses_of(place / "other", "loss/base") == losses_of(alone, "loss/base")
    assert losses_of(place / "other", "loss/large")[5] != losses_of(alone, "loss/large")[5]
    rates = [0.0005, 0.001, 0.001, 0.00075, 0.00025]
    assert list(losses_of(place / "other", "learning_rate/large").values()) == pytest.approx(rates)
    rates = {step: 3 * rate for step, rate in losses_of(place / "other", "learning_rate/large").items()}
    assert losses_of(place / "other", "learning_rate/large/text_encoder") == pytest.approx(rates)
    assert any(name.startswith("ema.large/text_encoder.") for name in weights_of(place / "other", "large"))


def test_a_resumed_run_ends_with_the_same_bits(alone, place, tmp_path):
    recipe = recipe_of(place, "again", training={"steps": 3})
    assert train_here(recipe) == 3
    assert train_here(recipe_of(place, "again"), "latest") == 5
    found, expected = tensors_of(latest(place / "again")), tensors_of(latest(alone))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.slow
def test_five_steps_of_both_are_five_steps_of_each_alone(place, monkeypatch):
    """Alone, a model's noise and times have no name of a model in their keys; here they get it."""
    both = {"base": {"path": str(place / "sd"), "resolution": 16, "microbatches": 2}, "large": {}}
    assert train_here(recipe_of(place, "both", **both)) == 5
    for name, rate, microbatches in (("base", 0.02, 2), ("large", 0.01, 4)):
        for drawn in ("normal", "uniform"):
            monkeypatch.setattr(batch, drawn, partial(_with_name, getattr(randomness, drawn), name))
        table = table_of(place, f"only-{name}", pipeline={"microbatches": microbatches})
        table["model"] = {"path": table.pop("models")["large"]["path"]}
        table["optimizer"]["learning_rate"] = rate
        assert train_here(recipe_from_table(table, source="alone.toml")) == 5
        found, expected = weights_of(place / "both", name), tensors_of(latest(place / f"only-{name}"))
        assert any(key.startswith("optimizer.") for key in found)
        for key, tensor in found.items():
            assert torch.equal(tensor, expected[key.replace(f"{name}/", "", 1)]), key


def _with_name(draw, name, *, purpose, **key):
    return draw(purpose=f"{name}/{purpose}" if purpose in batch._DRAWN else purpose, **key)


class Killed(BaseException):
    """Nobody catches it, and nothing is saved after it, as after SIGKILL."""


def die(job, recipe):
    raise Killed


@pytest.mark.slow
def test_ten_kills_and_resumptions_change_no_bit(place):
    """Each run dies at a random step after the last checkpoint; every second step is saved."""
    sizes = {"training": {"steps": 24}, "checkpoint": {"every": 2, "keep": 1, "asynchronous": False}}
    assert train_here(recipe_of(place, "whole", **sizes)) == 24
    draw, done, resume = Random(13), 0, None
    for _ in range(10):
        at = min(done + draw.choice([2, 3]), 23)
        with pytest.raises(Killed):
            train_here(recipe_of(place, "killed", **sizes), resume, at={at + 1: die})
        assert latest(place / "killed").name == f"step-{at // 2 * 2:08d}"
        done, resume = at // 2 * 2, "latest"
    assert train_here(recipe_of(place, "killed", **sizes), "latest") == 24
    found, expected = tensors_of(latest(place / "killed")), tensors_of(latest(place / "whole"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout(alone, place, crew):
    """From one rank to two that run the models in opposite directions, with frozen work in the waits."""
    assert train_here(recipe_of(place, "moved", training={"steps": 3})) == 3
    moved = recipe_of(place, "moved", pipeline={"schedule": "opposed", "fill": True})
    assert crew.run(train, moved, "latest") == [5, 5]
    found, expected = tensors_of(latest(place / "moved")), tensors_of(latest(alone))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_two_kills_of_two_processes_change_no_bit(place):
    sizes = {"training": {"steps": 7}, "checkpoint": {"every": 2, "keep": 1, "asynchronous": False}}
    sizes |= {"pipeline": {"schedule": "opposed"}}  # filled, the order would depend on measured times
    with crew_of(2) as crew:
        assert crew.run(train, recipe_of(place, "whole-2", **sizes)) == [7, 7]
    recipe, resume = recipe_of(place, "killed-2", **sizes), None
    for at in (3, 5):
        with crew_of(2) as crew, pytest.raises((EOFError, ConnectionResetError)):
            crew.run(train, recipe, resume, at={at + 1: kill})
        assert latest(place / "killed-2").name == f"step-{at - 1:08d}"
        resume = "latest"
    with crew_of(2) as crew:
        assert crew.run(train, recipe, resume) == [7, 7]
    found, expected = tensors_of(latest(place / "killed-2")), tensors_of(latest(place / "whole-2"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_a_run_is_not_resumed_with_another_model(alone, place):
    recipe = recipe_of(place, "alone", base={"path": str(place / "sd")}, training={"steps": 6})
    with pytest.raises(CheckpointError, match=r"belongs to another run: models\.base\.path was .*dit and is .*sd"):
        train_here(recipe, "latest")


def test_captions_are_not_missed_in_silence_beside_labels(place):
    data = save_pictures(place / "labelled", count=8, resolution=16)
    lines = [json.loads(line) for line in (data / "metadata.jsonl").read_text().splitlines()]
    bare = [json.dumps({key: value for key, value in line.items() if key != "text"}) for line in lines]
    (data / "metadata.jsonl").write_text("\n".join(bare) + "\n")
    with pytest.raises(
        ConfigError, match=r"8 pictures have no caption, e.g. 000.png; the models need labels and captions"
    ):
        train_here(recipe_of(place, "captions", data={"train": str(data)}))


@pytest.mark.slow
@pytest.mark.parametrize("fill", [False, True], ids=["encoded before", "filled"])
@pytest.mark.parametrize("schedule", ["opposed", "together", "1f1b", "zb-h1"])
def test_two_ranks_learn_what_one_learns(alone, place, crew, schedule, fill):
    name = f"{schedule}-{fill}"
    recipe = recipe_of(place, name, pipeline={"schedule": schedule, "fill": fill})
    assert crew.run(train, recipe) == [5, 5]
    for key in ("loss/base", "loss/large", "gradient_norm/base", "gradient_norm/large"):
        assert list(losses_of(place / name, key).values()) == pytest.approx(
            list(losses_of(alone, key).values()), rel=1e-9
        )


@pytest.mark.slow
def test_two_ranks_read_the_estimates_that_one_reads(place, crew):
    settings = {"objective": {"self_conditioning": 0.5}}
    assert train_here(recipe_of(place, "estimates", **settings)) == 5
    settings["pipeline"] = {"schedule": "opposed", "fill": True}
    assert crew.run(train, recipe_of(place, "estimates-2", **settings)) == [5, 5]
    for key in ("loss/base", "loss/large"):
        expected = pytest.approx(list(losses_of(place / "estimates", key).values()), rel=1e-9)
        assert list(losses_of(place / "estimates-2", key).values()) == expected
    unet = DiffusionPipeline.from_pretrained(place / "estimates-2" / "export" / "large", use_safetensors=True).unet
    assert unet.config.in_channels == 2 * unet.config.out_channels


@pytest.mark.slow
def test_post_validation_and_encoders_in_host_memory_change_no_bit(alone, place):
    training, pipeline = {"post_validation": True}, {"offload_frozen": True}
    assert train_here(recipe_of(place, "validated", training=training, pipeline=pipeline)) == 5
    found, expected = tensors_of(latest(place / "validated")), tensors_of(latest(alone))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.slow
def test_bfloat16_stays_near_float32(alone, place):
    assert train_here(recipe_of(place, "narrow", training={"precision": "bfloat16"})) == 5
    for key in ("loss/base", "loss/large"):
        narrow, wide = losses_of(place / "narrow", key), losses_of(alone, key)
        assert narrow != wide
        assert narrow == pytest.approx(wide, rel=0.1)


def test_a_recipe_with_one_named_model_is_that_with_a_model(place):
    table = table_of(place, "one")
    models = table.pop("models")
    named = recipe_from_table({**table, "models": {"base": models["base"]}}, source="one.toml")
    plain = {**table, "model": {"path": models["base"]["path"]}}
    plain["data"] = {**table["data"], "resolution": 8}
    plain["optimizer"] = {**table["optimizer"], "learning_rate": 0.02}
    assert named == recipe_from_table(plain, source="one.toml")


def test_a_recipe_of_several_models_is_written_and_read_back(place):
    recipe = recipe_of(place, "written")
    assert recipe_from_table(tomllib.loads(recipe_to_toml(recipe)), source="other.toml") == recipe
    assert json.loads(recipe.model_dump_json())["models"]["base"]["resolution"] == 8


REFUSED = {
    "models.large.microbatches: the search": {"pipeline": {"plan": "auto", "microbatches": None}},
    "models.large.microbatches: the plan in a.json has its own": {
        "pipeline": {"plan": "a.json", "microbatches": None, "encode_chunk": None}
    },
    "models.large.microbatches: a micro-batch of 1 samples cannot be shared by 2 replicas": {
        "pipeline": {"replicas": [2, 1]},
        "large": {"microbatches": 8},
    },
    "pipeline.splits": {"pipeline": {"splits": ["unet.mid_block"]}},
    "lora.rank": {"lora": {"rank": 2}},
    "models.base.resolution: it is above": {"base": {"resolution": 32}},
    "models.large.microbatches": {"large": {"microbatches": 3}},
    "pipeline.plan: sizes are searched for models that read no estimates": {
        "pipeline": {"plan": "auto", "microbatches": None},
        "objective": {"self_conditioning": 0.5},
    },
    "data.resolution: no model reads": {"large": {"resolution": 8}},
    "model: a recipe has [model] or [models.NAME], not both": {"model": {"path": "models/a"}},
    "models.base.colour: unknown key": {"base": {"colour": "red"}},
    "models.large.path": {"large": {"path": 3}},
    'one model alone is not switched off; set training.clip_norm to "none"': {"large": {"clip_norm": "none"}},
}


@pytest.mark.parametrize(("says", "sections"), REFUSED.items(), ids=list(REFUSED))
def test_what_several_models_cannot_do_is_refused_with_its_key(place, says, sections):
    table = table_of(place, "refused", **sections)
    table["pipeline"] = {key: value for key, value in table["pipeline"].items() if value is not None}
    with pytest.raises(RecipeError) as caught:
        recipe_from_table(table, source="cascade.toml")
    assert says in str(caught.value)


def test_a_misspelt_model_is_not_taken_for_a_third_one(place):
    with pytest.raises(RecipeError, match=r"models\.bse: did you mean models\.base\? \(set on the command line\)"):
        recipe_from_table(table_of(place, "refused"), ["models.bse.learning_rate=0.1"], source="cascade.toml")


def test_a_wrong_value_of_one_model_hides_what_all_of_them_would_say(place):
    """`large` alone reads the largest pictures; that its section is wrong does not make data.resolution wrong."""
    with pytest.raises(RecipeError, match=r"1 problem\n  models\.large\.noise_augmentation") as caught:
        recipe_from_table(table_of(place, "refused", large={"noise_augmentation": 2}), source="cascade.toml")
    assert "data.resolution" not in str(caught.value)
