"""Adapters on text encoders: rates of their own, other layouts, checkpoints, exports that diffusers opens, drawing."""

import diffusers
import numpy as np
import pytest
import torch
from kit.crew import crew_of
from kit.tiny_models import randomise_pipeline
from kit.tiny_pipelines import PIPELINES
from kit.tiny_runs import losses_of, recipe_of, save_pictures, save_stable_diffusion, tensors_of, train, train_here
from safetensors.torch import load_file
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.ir.files import read_plan
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.parameters.lora import is_second_matrix
from diffusionpipe.models.parameters.lora_read import ADAPTERS
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import joined
from diffusionpipe.trainer.checkpoints.checkpoint import latest
from diffusionpipe.trainer.checkpoints.training_state import load_training
from diffusionpipe.trainer.setup.planning import Planning
from diffusionpipe.trainer.setup.session import open_session

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("peft")
TRAINED = {
    "sd": ["unet", "text_encoder"],
    "sdxl": ["unet", "text_encoder", "text_encoder_2"],
    "sd3": ["transformer", "text_encoder", "text_encoder_2", "text_encoder_3"],
    "flux": ["transformer", "text_encoder", "text_encoder_2"],
}
T5 = {"sd3": "text_encoder_3", "flux": "text_encoder_2"}
LAYOUTS = {
    "1f1b": {},
    "split": {"schedule": "zb-h1", "fill": True},
    "sharded": {"stages": 1, "data_parallel": 2, "sharded": True},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    save_stable_diffusion(folder / "sd")
    save_pictures(folder / "data", count=8)
    return folder


@pytest.fixture(scope="module")
def recipe(place):
    """A recipe of 4 steps in float64, by gradients alone: no update magnifies what is rounded."""

    def make(name, kind="sd", **sections):
        if not (place / kind).is_dir():
            pipeline = PIPELINES[kind]()
            randomise_pipeline(pipeline)
            pipeline.save_pretrained(place / kind)
        base = {
            "model": {"train": TRAINED[kind], "components": {"text_encoder": {"learning_rate": 0.3}}},
            "lora": {"rank": 2, "alpha": 6.0},
            "training": {"steps": 4, "precision": "float64", "ema_decay": "none"},
            "optimizer": {"name": "SGD", "learning_rate": 0.1},
            "checkpoint": {"every": 2, "keep": 5},
        }
        merged = {key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}}
        return recipe_of(place / kind, place / "data", place / name, **merged)

    return make


@pytest.fixture(scope="module")
def in_one(recipe):
    """A run of one process."""
    made = recipe("in-one")
    assert train_here(made) == 4
    return made


def weights_of(checkpoint):
    return {name.removeprefix("model."): t for name, t in tensors_of(checkpoint).items() if name.startswith("model.")}


def assert_same_weights(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 1e-12 * tensor.norm(), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_learn_what_one_process_learns_also_where_they_go_on(layout, in_one, recipe, crew):
    made = recipe(f"two-{layout}", pipeline=LAYOUTS[layout])
    assert crew.run(train, made) == [4, 4]
    expected = weights_of(latest(in_one.run.folder))
    assert {name.partition(".")[0] for name in expected} == {"unet", "text_encoder"}
    assert losses_of(made.run.folder) == pytest.approx(losses_of(in_one.run.folder), rel=1e-12)
    assert_same_weights(weights_of(latest(made.run.folder)), expected)
    again = recipe(f"again-{layout}")
    assert train_here(again, str(made.run.folder / "checkpoints" / "step-00000002")) == 4
    assert_same_weights(weights_of(latest(again.run.folder)), expected)


@pytest.mark.slow
def test_two_encoders_beside_each_other_learn_what_one_process_learns(recipe):
    """Three ranks: one for each encoder, and one for the rest of SDXL."""
    splits = ["text_encoder_2.text_model.encoder.layers.0", "text_encoder_2.text_states"]
    made = recipe("beside", "sdxl", pipeline={"stages": 3, "schedule": "graphpipe", "splits": splits})
    alone = recipe("sdxl-in-one", "sdxl")
    assert train_here(alone) == 4
    with crew_of(3) as ranks:
        assert ranks.run(train, made) == [4, 4, 4]
    train_schedule = read_plan(made.run.folder / "plan.json").train
    edges = {(edge.producer, edge.consumer) for edge in train_schedule.placement.pipelines[0].edges}
    assert (train_schedule.name, (0, 1) in edges, (0, 2) in edges) == ("graphpipe", False, True)
    assert losses_of(made.run.folder) == pytest.approx(losses_of(alone.run.folder), rel=1e-12)
    assert_same_weights(weights_of(latest(made.run.folder)), weights_of(latest(alone.run.folder)))


def test_an_encoder_has_a_rate_of_its_own(recipe):
    """The second matrices start at zero, so the first step leaves the rate times the gradient in them."""
    found = []
    for rate in (0.2, 0.1):
        own = {"components": {"text_encoder": {"learning_rate": rate}}}
        made = recipe(f"rate-{rate}", model=own, training={"steps": 1})
        assert train_here(made, exports=False) == 1
        found.append({n: t for n, t in weights_of(latest(made.run.folder)).items() if is_second_matrix(n)})
    double, single = found
    for name, tensor in single.items():
        factor = 2 if name.startswith("text_encoder.") else 1
        assert tensor.abs().max() > 0
        assert torch.allclose(double[name], factor * tensor, rtol=1e-9, atol=0), name


def predicted(made):
    """Raw inputs of the denoiser's conditions and times, and what our modules predict from them."""
    from diffusionpipe.planner.unequal.cutting import cutting_of
    from diffusionpipe.workflows.training.run_plan import make_plan

    with joined(membership({}), device="cpu") as job:
        session = open_session(made, job, Planning(make_plan=make_plan, make_cutting=cutting_of))
        load_training(latest(made.run.folder), session.state)
        generator = torch.Generator().manual_seed(0)
        noisy = torch.rand((2, 4, 4, 4), generator=generator, dtype=torch.float64)
        ids = torch.randint(0, 50, (2, 6), generator=generator)
        inputs = {"noisy": noisy, "timesteps": torch.tensor([7, 500]), "input_ids": ids}
        layers = [one for one in session.graph.layers if one.component in ("unet", "text_encoder")]
        with torch.no_grad():
            return inputs, run_layers(layers, session.graph.components, inputs, targets=["prediction"])["prediction"]


def by_diffusers(pipeline, inputs):
    with torch.no_grad():
        states = pipeline.text_encoder(inputs["input_ids"])[0]
        return pipeline.unet(inputs["noisy"], inputs["timesteps"], states, return_dict=False)[0]


def test_diffusers_loads_the_adapters_of_denoiser_and_encoder(in_one, place):
    inputs, expected = predicted(in_one)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(place / "sd").to(torch.float64)
    plain = by_diffusers(pipeline, inputs)
    pipeline.load_lora_weights(in_one.run.folder / "export")
    unet_alone = by_diffusers_without_encoder(pipeline, inputs)
    found = by_diffusers(pipeline, inputs)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12 * expected.abs().max())
    assert (found - plain).abs().max() > 1e-3
    assert (found - unet_alone).abs().max() > 1e-6
    card = (in_one.run.folder / "export" / "README.md").read_text()
    assert "adapters (LoRA) of rank 2 on text_encoder, unet" in card


def by_diffusers_without_encoder(pipeline, inputs):
    pipeline.text_encoder.disable_adapters()
    found = by_diffusers(pipeline, inputs)
    pipeline.text_encoder.enable_adapters()
    return found


@pytest.mark.slow
def test_a_merged_export_is_a_whole_model_with_the_same_predictions(recipe):
    made = recipe("merged", lora={"merge": True}, training={"steps": 1})
    assert train_here(made) == 1
    inputs, expected = predicted(made)
    export = made.run.folder / "export"
    pipeline = diffusers.DiffusionPipeline.from_pretrained(export).to(torch.float64)
    assert torch.allclose(by_diffusers(pipeline, inputs), expected, rtol=0, atol=1e-5)
    assert not list(export.rglob("*lora*"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sdxl", "sd3", "flux"])
@pytest.mark.parametrize("dora", [False, True])
def test_diffusers_loads_clip_of_every_pipeline_and_overlooks_t5(kind, dora, recipe, place):
    made = recipe(f"{kind}-{dora}", kind=kind, lora={"dora": dora}, training={"steps": 1})
    assert train_here(made) == 1
    stored = load_file(made.run.folder / "export" / ADAPTERS)
    assert {name.partition(".")[0] for name in stored} == set(TRAINED[kind])
    pipeline = diffusers.DiffusionPipeline.from_pretrained(place / kind).to(torch.float64)
    pipeline.load_lora_weights(made.run.folder / "export")
    saved = weights_of(latest(made.run.folder))
    for component in TRAINED[kind]:
        module = getattr(pipeline, component)
        loaded = {n.replace(".default_0", ".default"): p for n, p in module.named_parameters() if ".lora_" in n}
        own = {n.partition(".")[2]: t for n, t in saved.items() if n.partition(".")[0] == component}
        assert loaded.keys() == (set() if component == T5.get(kind) else own.keys())
        for name, parameter in loaded.items():
            expected = 3 * own[name] if is_second_matrix(name) else own[name]
            assert torch.equal(parameter, expected), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd", "sdxl", "sd3", "flux"])
@pytest.mark.parametrize("dora", [False, True])
def test_what_is_drawn_while_training_is_what_sample_draws_from_the_export(kind, dora, recipe, tmp_path):
    drawn = {"prompts": ("a b",), "every": 2, "steps": 2, "guidance": 2.0}
    made = recipe(
        f"drawn-{kind}-{dora}",
        kind=kind,
        lora={"dora": dora, "rank_stabilized": True, "target_modules": "linear", "exclude": ["proj_out"]}
        if kind != "sd"
        else {"dora": dora, "rank_pattern": {"to_q": 1, "q_proj": 3}},
        training={"steps": 2, "precision": "float32"},
        sampling=drawn,
    )
    assert train_here(made) == 2
    (shown,) = np.load(made.run.folder / "samples" / "step-00000002.npy")
    kept = {}

    def keep(pictures, path, **options):
        kept["pictures"] = pictures
        path.touch()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffusionpipe.viz.grid.sample_grid", keep)
        words = ["--prompt", "a b", "--steps", "2", "--guidance", "2", "--out", str(tmp_path / "grid.png")]
        result = CliRunner().invoke(cli.app, ["sample", str(made.run.folder), *words, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    ((_, found),) = kept["pictures"]
    assert np.abs(found.astype(int) - shown).max() <= 1
