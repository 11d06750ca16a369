"""Recipes whose frozen weights are stored in int8 and nf4: runs, samples, checkpoints, exports; what is refused."""

import numpy as np
import pytest
import torch
from diffusers import FluxTransformer2DModel
from kit.forked import completed
from kit.tiny_models import randomise_pipeline
from kit.tiny_pipelines import flux
from kit.tiny_runs import (
    losses_of,
    opened_here,
    recipe_of,
    save_dit,
    save_pictures,
    save_stable_diffusion,
    tensors_of,
    train,
    train_here,
)
from PIL import Image
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.costs.forms import Form, stored_bytes
from diffusionpipe.errors import RecipeError
from diffusionpipe.models.parameters.lora import is_adapter
from diffusionpipe.models.parameters.stored_linear import stored_layers
from diffusionpipe.trainer.checkpoints.checkpoint import latest

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("peft")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    pipeline = flux()
    randomise_pipeline(pipeline)
    pipeline.save_pretrained(folder / "flux")
    save_stable_diffusion(folder / "sd")
    save_dit(folder / "dit")
    save_pictures(folder / "data", count=8)
    return folder


@pytest.fixture(scope="module")
def recipe(place):
    """A recipe of a run of 2 steps called `name` that trains adapters of FLUX.1 on an nf4 base in bfloat16."""

    def make(name, *, kind="flux", **sections):
        base = {
            "model": {"frozen_dtype": "nf4"},
            "lora": {"rank": 2},
            "training": {"steps": 2, "precision": "bfloat16"},
            "checkpoint": {"every": 2, "keep": 5},
        }
        merged = {key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}}
        return recipe_of(place / kind, place / "data", place / name, **merged)

    return make


DRAWN = {"prompts": ("a b",), "every": 2, "steps": 2, "guidance": 2.0, "at_start": True}


@pytest.mark.slow
def test_two_stages_learn_and_draw_what_one_process_does_and_hold_adapters_alone(crew, recipe):
    two, one = recipe("two", sampling=DRAWN, pipeline={"schedule": "zb-h1"}), recipe("one", sampling=DRAWN)
    assert crew.run(train, two) == [2, 2]
    assert train_here(one) == 2
    assert losses_of(two.run.folder) == pytest.approx(losses_of(one.run.folder), rel=2e-3)
    first, second = (np.load(made.run.folder / "samples" / "step-00000000.npy") for made in (two, one))
    assert np.abs(first.astype(float) - second.astype(float)).max() <= 1e-5
    names = tensors_of(latest(two.run.folder))
    assert not [name for name in names if "codes" in name or "scales" in name]
    assert all(is_adapter(name) for name in names if name.startswith("model."))


def test_the_form_changes_the_losses_and_a_run_goes_on_with_another(recipe):
    made = recipe("changed")
    assert train_here(made, exports=False) == 2
    again = recipe("changed", training={"steps": 3}, model={"frozen_dtype": "bfloat16"})
    assert train_here(again, "latest") == 3
    wide = recipe("wide", model={"frozen_dtype": "bfloat16"})
    assert train_here(wide, saves=False) == 2
    found, plain = losses_of(made.run.folder), losses_of(wide.run.folder)
    assert found[1] != plain[1]
    assert found[1] == pytest.approx(plain[1], rel=0.3)
    started = recipe("started", lora={"start": made.run.folder / "export"}, training={"steps": 1})
    assert train_here(started, saves=False) == 1  # the file of adapters knows nothing of the form


@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline",
    [
        {"data_parallel": 2, "sharded": True, "microbatches": 1, "stages": 1},
        {"offload_frozen": True, "schedule": "1f1b"},
        {"fill": True, "schedule": "1f1b"},
    ],
    ids=["sharded", "encoders on the host", "filled"],
)
def test_other_layouts_learn_what_one_process_learns(crew, recipe, pipeline):
    name = "-".join(pipeline)
    made, one = recipe(f"over-{name}", pipeline=pipeline), recipe(f"plain-{name}")
    assert crew.run(train, made) == [2, 2]
    assert train_here(one) == 2
    assert losses_of(made.run.folder) == pytest.approx(losses_of(one.run.folder), rel=2e-3)


def test_a_merged_export_adds_the_adapters_to_the_wide_base(recipe, place):
    made = recipe("merged", lora={"merge": True}, training={"ema_decay": "none"})
    assert train_here(made) == 2
    base = FluxTransformer2DModel.from_pretrained(place / "flux" / "transformer").state_dict()
    merged = FluxTransformer2DModel.from_pretrained(made.run.folder / "export" / "transformer").state_dict()
    trained = tensors_of(latest(made.run.folder))
    assert base.keys() == merged.keys()
    changed = 0
    for name, weight in merged.items():
        path = f"model.transformer.{name.removesuffix('.weight')}"
        down, up = (trained.get(f"{path}.lora_{one}.default.weight") for one in "AB")
        expected = base[name] if down is None else base[name] + up @ down
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)
        changed += down is not None
    assert changed


def test_forms_by_component_store_these_alone_and_the_description_has_their_bytes(recipe):
    forms = {"transformer": "nf4", "text_encoder": "int8"}
    built = opened_here(recipe("by-component", model={"frozen_dtype": forms}))
    found = {name: {one.form for one in stored_layers(part).values()} for name, part in built.graph.components.items()}
    assert {name: forms for name, forms in found.items() if forms} == {
        "transformer": {Form.NF4},
        "text_encoder": {Form.INT8},
    }
    specs = {spec.name: spec for spec in built.model.parameters}
    layers = {f"transformer.{path}": one for path, one in stored_layers(built.graph.components["transformer"]).items()}
    assert layers
    for path, layer in layers.items():
        held = specs[f"{path}.codes"].num_bytes + specs[f"{path}.scales"].num_bytes
        assert held == stored_bytes(Form.NF4, layer.out_features, layer.in_features)
        assert (specs[f"{path}.codes"].dtype, specs[f"{path}.codes"].is_trainable) == ("nf4", False)
    others = [spec for spec in built.model.parameters if spec.name.startswith("text_encoder_2.")]
    assert {spec.dtype for spec in others} == {"bfloat16", "float32"}


@pytest.mark.parametrize(
    ("kind", "sections", "message"),
    [
        (
            "sd",
            {"model": {"frozen_dtype": {"unet": "nf4"}}, "lora": {"rank": "none"}},
            "unet has no frozen linear layer to store; set lora.rank",
        ),
        ("dit", {"lora": {"rank": "none"}}, "no frozen linear layer to store; set lora.rank"),
    ],
)
def test_what_is_not_frozen_is_not_stored_and_said_before_anything_is_read(recipe, kind, sections, message):
    with pytest.raises(RecipeError, match=message):
        opened_here(recipe("refused", kind=kind, **sections))


def test_a_table_names_components_of_the_folder_which_is_said_before_it_is_opened(recipe, monkeypatch):
    with pytest.raises(ValueError, match="no component unet; it has text_encoder, text_encoder_2, transformer, vae"):
        recipe("unknown-component", model={"frozen_dtype": {"unet": "nf4", "transformer": "int8"}})
    monkeypatch.setattr("diffusionpipe.trainer.recipe.schema.components_of_folder", lambda path: ())  # of a hub id
    made = recipe("unknown-later", model={"frozen_dtype": {"unet": "nf4"}})
    with pytest.raises(RecipeError, match="no component unet; it has text_encoder, text_encoder_2, vae, transformer"):
        opened_here(made)


def test_the_log_names_the_form_of_every_component(recipe, caplog):
    made = recipe("logged", model={"frozen_dtype": {"transformer": "nf4", "text_encoder": "int8"}})
    with caplog.at_level("INFO"):
        assert train_here(made, saves=False) == 2
    (line,) = [one for one in caplog.messages if one.startswith("stored weights")]
    forms = 'forms="nf4 (transformer), int8 (text_encoder), bfloat16 (text_encoder_2, vae)"'
    reverse = 'forms="int8 (text_encoder), nf4 (transformer), bfloat16 (text_encoder_2, vae)"'
    assert forms in line or reverse in line


def test_sample_draws_from_the_stored_base_of_the_run(recipe, tmp_path):
    made = recipe("drawn", sampling=DRAWN | {"at_start": False}, training={"ema_decay": "none"})
    assert train_here(made) == 2
    (drawn,) = np.load(made.run.folder / "samples" / "step-00000002.npy")
    found = {}
    for name, folder in (("run", made.run.folder), ("adapters alone", None)):
        kept = {}

        def keep(pictures, path, *, kept=kept, **options):
            kept["pictures"] = pictures
            path.touch()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("diffusionpipe.viz.grid.sample_grid", keep)
            if folder is None:  # as before it drew from stored weights
                patch.setattr("diffusionpipe.trainer.model.lora.stored_form", lambda stated, component="": None)
            words = ["--prompt", "a b", "--steps", "2", "--guidance", "2", "--out", str(tmp_path / "grid.png")]
            result = CliRunner().invoke(cli.app, ["sample", str(made.run.folder), *words, "--device", "cpu"])
        assert result.exit_code == 0, result.output
        ((_, found[name]),) = kept["pictures"]
    assert np.abs(found["run"].astype(int) - drawn).max() <= 1
    assert np.abs(found["adapters alone"].astype(int) - drawn).max() > 1


def test_a_run_multiplies_integers_where_it_is_asked_to(recipe):
    stored = {"frozen_dtype": "int8"}
    made = recipe("integers", model=stored | {"frozen_arithmetic": "int8"}, training={"steps": 1})
    wide = recipe("no-integers", model=stored, training={"steps": 1})
    assert [train_here(made, saves=False), train_here(wide, saves=False)] == [1, 1]
    found, plain = losses_of(made.run.folder)[1], losses_of(wide.run.folder)[1]
    assert found != plain
    assert found == pytest.approx(plain, rel=0.02)
    with pytest.raises(ValueError, match="no weights are stored in int8; set frozen_dtype"):
        recipe("nothing-in-int8", model={"frozen_dtype": "nf4", "frozen_arithmetic": "int8"})


@pytest.mark.parametrize("value", ["int4", {"unet": "int4"}, {}, 8, {"unet": "auto"}])
def test_an_unknown_form_is_answered_with_those_that_there_are(recipe, value):
    with pytest.raises(ValueError, match=r'expected "bfloat16", "float8", "int8", "nf4", "none" or "auto"'):
        recipe("unknown", model={"frozen_dtype": value})


@pytest.mark.slow
def test_sample_draws_the_same_over_two_ranks(recipe, tmp_path):
    made = recipe("ranks", sampling=DRAWN | {"at_start": False}, training={"ema_decay": "none"})
    assert train_here(made) == 2
    words = ["--prompt", "a b", "--steps", "2", "--guidance", "2", "--device", "cpu"]
    for name, ranks in (("one", []), ("two", ["--ranks", "2"])):
        command = ["-m", "diffusionpipe", "sample", str(made.run.folder), *words, *ranks]
        completed([*command, "--out", str(tmp_path / f"{name}.png")])
    one, two = (np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB"), dtype=int) for name in ("one", "two"))
    assert np.abs(one - two).max() <= 1
