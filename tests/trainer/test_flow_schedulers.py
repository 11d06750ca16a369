"""Exports and pictures of SD3-like and FLUX-like folders are those of their own schedulers, as in diffusers."""

import inspect
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline, calculate_shift, retrieve_timesteps
from kit.tiny_models import randomise_pipeline
from kit.tiny_pipelines import PIPELINES
from kit.tiny_runs import recipe_of, save_pictures, train_here
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.errors import RecipeError
from diffusionpipe.models.objectives.flow_shift import FlowShift
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction
from diffusionpipe.models.opening.folder import build_graph, scheduler_config
from diffusionpipe.models.opening.pipeline_defaults import Guidance, default_guidance, default_resolution
from diffusionpipe.trainer.checkpoints.checkpoint import save
from diffusionpipe.trainer.data.randomness import normal
from diffusionpipe.trainer.exports.export import Export, export
from diffusionpipe.trainer.inference import cascade_drawing, drawing, folder_drawing
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings, Spacing, build_scheduler, set_times
from diffusionpipe.trainer.inference.drawing import spacing_of
from diffusionpipe.trainer.inference.folder_drawing import draw_from_folder
from diffusionpipe.trainer.model.guidance import guidance_of, trained_guidance
from diffusionpipe.trainer.model.members import build_model, objective_of
from diffusionpipe.trainer.model.scheduler import sampling_scheduler, shift_contradiction

pytestmark = pytest.mark.usefixtures("one_trace")

SCHEDULERS = {
    "sd3": {"shift": 3.0},
    "flux": {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15},
    "sd3-dynamic": {"use_dynamic_shifting": True, "time_shift_type": "linear", "shift_terminal": 0.1},
}
PROMPTS = ("a b", "c")
SIZES = (8, 16, 32)
"""In pixels; a token is a square of 4."""


@dataclass(frozen=True)
class Folders:
    """A model and the export of its own weights."""

    source: Path
    export: Path


def save_model(folder: Path, kind: str, scheduler: dict[str, object] | None = None) -> Path:
    """A pipeline of `PIPELINES` whose transformer reads positions up to 64 pixels."""
    pipeline = PIPELINES[kind]()
    randomise_pipeline(pipeline)
    pipeline.register_modules(scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**(scheduler or {})))
    pipeline.save_pretrained(folder)
    return folder


def export_of(source: Path, place: Path, **options: object) -> Path:
    """The export of a run that has changed nothing."""
    loaded = getattr(diffusers, json.loads((source / "transformer/config.json").read_text())["_class_name"])
    parameters = loaded.from_pretrained(source / "transformer").named_parameters()
    tensors = {f"model.transformer.{name}": tensor.detach() for name, tensor in parameters}
    checkpoint = save(place / "run", 1, tensors, {}, keep=1)
    settings = Export(
        source_model=source,
        trained={"transformer": "transformer."},
        prediction=Prediction.FLOW_MATCHING,
        **options,  # type: ignore[arg-type]
    )
    return export(checkpoint, place / "export", settings)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    found = {}
    for name, scheduler in SCHEDULERS.items():
        place = tmp_path_factory.mktemp(name)
        source = save_model(place / "model", name.partition("-")[0], scheduler)
        found[name] = Folders(source, export_of(source, place))
    return found


def sigmas_of_diffusers(folder: Path, steps: int, tokens: int, *, given: bool) -> torch.Tensor:
    """As `FluxPipeline` (`given`) and `StableDiffusion3Pipeline` choose them."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
    config = scheduler.config
    extra: dict[str, object] = {"sigmas": np.linspace(1.0, 1 / steps, steps)} if given else {}
    if given or config.use_dynamic_shifting:
        numbers = (config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift)
        extra["mu"] = calculate_shift(tokens, *numbers)
    retrieve_timesteps(scheduler, steps, "cpu", **extra)
    return scheduler.sigmas


@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_export_is_sampled_at_the_noise_levels_of_its_source(folders, name):
    given = name == "flux"
    config = scheduler_config(folders[name].export)
    found = {}
    for steps in (4, 8, 28):
        for size in SIZES:
            tokens = (size // 4) ** 2
            source = sigmas_of_diffusers(folders[name].source, steps, tokens, given=given)
            assert torch.equal(sigmas_of_diffusers(folders[name].export, steps, tokens, given=given), source)
            ours = build_scheduler(config)
            set_times(ours, config, steps, Spacing(num_tokens=tokens, has_even_sigmas=given))
            assert torch.equal(ours.sigmas, source)
            found[steps, size] = tuple(source.tolist())
    assert len(set(found.values())) == (3 if name == "sd3" else 9)  # the size counts in dynamic shifting alone


@pytest.mark.parametrize("name", SCHEDULERS)
def test_where_the_recipe_says_nothing_the_scheduler_is_exported_as_it_was_written(folders, name):
    file = "scheduler/scheduler_config.json"
    assert (folders[name].export / file).read_bytes() == (folders[name].source / file).read_bytes()
    indices = [
        json.loads((folder / "model_index.json").read_text()) for folder in (folders[name].export, folders[name].source)
    ]
    assert indices[0]["scheduler"] == indices[1]["scheduler"]


def test_tokens_are_squares_of_latents(folders):
    flow = ObjectiveSettings(prediction=Prediction.FLOW_MATCHING)
    for name, sizes in {"flux": (8, 32), "sd3": (8, 16)}.items():
        for size in sizes:
            graph = build_graph(folders[name].source, objective=flow, resolution=size)
            assert spacing_of(graph) == Spacing(num_tokens=(size // 4) ** 2, has_even_sigmas=name == "flux")


# What the recipe sets.


def test_a_given_shift_takes_the_place_of_all_shifting_and_changes_nothing_else(folders):
    flow = Prediction.FLOW_MATCHING
    own = scheduler_config(folders["flux"].source)
    assert sampling_scheduler(folders["flux"].source, flow, 2.0) == own | {"shift": 2.0, "use_dynamic_shifting": False}
    assert sampling_scheduler(folders["sd3"].source, flow, 3.0) == scheduler_config(folders["sd3"].source)
    terminal, own = folders["sd3-dynamic"].source, scheduler_config(folders["sd3-dynamic"].source)
    changed = {"use_dynamic_shifting": False, "shift_terminal": None}
    assert sampling_scheduler(terminal, flow, 1.0) == own | changed
    assert changed.items() & own.items() == set()


def test_a_recipe_that_contradicts_its_folder_is_told_both_numbers(folders):
    flow = Prediction.FLOW_MATCHING
    graph = build_graph(folders["flux"].source, objective=ObjectiveSettings(prediction=flow), resolution=32)
    text = shift_contradiction(folders["flux"].source, graph, flow, 1.0)
    factor = math.exp(calculate_shift(64, 256, 4096, 0.5, 1.15))
    assert text is not None
    assert f"objective.shift is 1, but the model's own scheduler shifts times by {factor:.4g} (64 tokens)" in text
    assert shift_contradiction(folders["flux"].source, graph, flow, None) is None
    assert shift_contradiction(folders["sd3"].source, graph, flow, 3.0) is None
    assert "by 3; the run trains, draws and exports with 1.5" in str(
        shift_contradiction(folders["sd3"].source, graph, flow, 1.5)
    )
    assert "shift_terminal 0.1" in str(shift_contradiction(folders["sd3-dynamic"].source, graph, flow, 1.5))


def test_another_scheduler_must_be_able_to_shift_by_tokens(folders):
    with pytest.raises(RecipeError, match="FlowMatchHeunDiscreteScheduler cannot shift times by the number of tokens"):
        build_scheduler(scheduler_config(folders["flux"].source), "FlowMatchHeunDiscreteScheduler")
    config = scheduler_config(folders["sd3"].source)
    set_times(build_scheduler(config, "FlowMatchHeunDiscreteScheduler"), config, 4, Spacing())


# Pictures.


def first_noise(size: int) -> torch.Tensor:
    shape = (4, size // 2, size // 2)
    return normal(seed=0, purpose="sampling", step=0, positions=range(len(PROMPTS)), shape=shape)


def drawn_by_diffusers(folder: Path, size: int, **extra: object) -> np.ndarray:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    latents = first_noise(size)
    if isinstance(pipeline, FluxPipeline):
        latents = pipeline._pack_latents(latents, *latents.shape)
    images = pipeline(
        list(PROMPTS), latents=latents, num_inference_steps=4, height=size, width=size, output_type="np", **extra
    ).images
    return np.asarray(images)


def drawn_here(monkeypatch, folder: Path, size: int, guidance: float | None, true_cfg_scale: float = 1.0) -> np.ndarray:
    """What `sample` draws, before it is rounded to 256 levels."""
    monkeypatch.setattr(folder_drawing, "decode", drawing.decode_exactly)
    negatives = ("",) * len(PROMPTS) if true_cfg_scale > 1 else ()
    strength = guidance_of(folder, guidance, true_cfg_scale, has_negative=bool(negatives))
    settings = SamplingSettings(
        steps=4,
        guidance=strength.scale,
        embedded_guidance=strength.embedded,
        seed=0,
        scheduler=scheduler_config(folder),
    )
    found = draw_from_folder(
        folder,
        SampleRequest(prompts=PROMPTS, negatives=negatives),
        settings,
        resolution=size,
        device=torch.device("cpu"),
    )
    return np.asarray(found)


@pytest.mark.parametrize(
    ("name", "size", "given", "extra"),
    [
        ("sd3", 8, (None,), {}),
        ("sd3-dynamic", 16, (3.0,), {"guidance_scale": 3.0}),
        ("flux", 32, (None,), {}),
        ("flux", 16, (2.0, 3.0), {"guidance_scale": 2.0, "true_cfg_scale": 3.0, "negative_prompt": ["", ""]}),
    ],
)
def test_sample_draws_what_diffusers_draws_from_the_export(monkeypatch, folders, name, size, given, extra):
    ours = drawn_here(monkeypatch, folders[name].export, size, *given)
    theirs = drawn_by_diffusers(folders[name].export, size, **extra)
    assert ours.shape == theirs.shape == (2, size, size, 3)
    assert np.abs(ours - theirs).max() < 1e-5
    assert theirs.std() > 0.02


def test_guidance_and_size_are_by_default_those_of_diffusers(tmp_path):
    for kind, make in PIPELINES.items():
        pipeline = make()
        pipeline.save_config(tmp_path / kind)
        for name in ("unet", "transformer", "vae"):
            if name in pipeline.components:
                pipeline.components[name].save_config(tmp_path / kind / name)
        stated = inspect.signature(type(pipeline).__call__).parameters["guidance_scale"].default
        found = default_guidance(tmp_path / kind)
        assert (found.embedded if kind == "flux" else found.scale) == stated
        size = getattr(pipeline, "default_sample_size", None) or pipeline.unet.config.sample_size
        assert default_resolution(tmp_path / kind) == size * pipeline.vae_scale_factor


@pytest.mark.parametrize(
    ("kind", "is_guided"), [("FluxPipeline", False), ("QwenImagePipeline", False), ("ChromaPipeline", True)]
)
def test_without_a_negative_prompt_a_family_is_guided_only_if_diffusers_pipeline_guides_it(
    tmp_path, caplog, kind, is_guided
):
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text("{}")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    assert guidance_of(tmp_path, 3.0, 1.0, has_negative=True).scale == 3
    assert caplog.text == ""
    assert guidance_of(tmp_path, 3.0, 1.0, has_negative=False).scale == (3 if is_guided else 1)
    assert ("guidance=3 effect=none" in caplog.text) is not is_guided
    text = "".join(inspect.getsource(getattr(diffusers, kind).__call__))
    assert ("has_neg_prompt" in text) is not is_guided  # as diffusers itself says


def test_guidance_of_a_distilled_model_is_its_embedding(folders, tmp_path):
    flux, sd3 = folders["flux"].source, folders["sd3"].source
    assert guidance_of(flux, None, 1.0, has_negative=True) == Guidance(scale=1.0, embedded=3.5)
    assert guidance_of(flux, 2.0, 4.0, has_negative=True) == Guidance(scale=4.0, embedded=2.0)
    assert guidance_of(sd3, 2.0, 1.0, has_negative=False) == Guidance(scale=2.0, embedded=None)
    with pytest.raises(RecipeError, match=r"true_cfg_scale: 4 has no effect.*Set guidance instead"):
        guidance_of(sd3, None, 4.0, has_negative=False)
    schnell = shutil.copytree(flux, tmp_path / "schnell")
    config = schnell / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"guidance_embeds": False}))
    assert guidance_of(schnell, None, 1.0, has_negative=False) == Guidance(scale=1.0, embedded=None)


# Runs and the command.


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return save_pictures(tmp_path_factory.mktemp("data") / "pictures", count=4)


def test_guidance_without_effect_is_refused_before_the_run(folders, pictures, tmp_path):
    recipe = recipe_of(
        folders["sd3"].source,
        pictures,
        tmp_path / "run",
        objective={"guidance": 2.0},
        sampling={"true_cfg_scale": 2.0},
    )
    with pytest.raises(RecipeError) as caught:
        build_model(recipe, "cpu")
    assert "objective.guidance: 2 has no effect" in str(caught.value)
    assert "sampling.true_cfg_scale: 2 has no effect" in str(caught.value)


def test_training_takes_shift_and_guidance_from_the_folder_unless_the_recipe_says_them(folders, pictures, tmp_path):
    def objective(name, **given):
        recipe = recipe_of(folders[name].source, pictures, tmp_path / "run", objective=given)
        settings = objective_of(recipe, folders[name].source)
        return Objective(settings, scheduler_config(folders[name].source)).shift, trained_guidance(recipe)

    shift, guidance = objective("flux")
    assert shift.factor(1024) == math.exp(calculate_shift(1024, 256, 4096, 0.5, 1.15))
    assert guidance == 1
    assert objective("sd3")[0] == FlowShift(static=3.0)
    assert objective("sd3-dynamic")[0].terminal == 0.1
    assert objective("flux", shift=2, guidance=3.5) == (FlowShift(static=2.0), 3.5)


@pytest.mark.slow
def test_a_run_draws_and_exports_what_its_recipe_says_and_sample_does_the_same(
    folders, pictures, tmp_path, monkeypatch, caplog
):
    recipe = recipe_of(
        folders["flux"].source,
        pictures,
        tmp_path / "run",
        training={"steps": 1, "ema_decay": "none"},
        objective={"shift": 1.0, "guidance": 3.5},
        sampling={"every": 1, "prompts": ["a b"], "steps": 2, "guidance": 2.0},
    )
    assert train_here(recipe) == 1
    assert "objective.shift is 1, but the model's own scheduler shifts times by" in caplog.text
    own = scheduler_config(folders["flux"].source)
    assert scheduler_config(tmp_path / "run/export") == own | {"shift": 1.0, "use_dynamic_shifting": False}
    kept = {}
    monkeypatch.setattr("diffusionpipe.viz.grid.sample_grid", lambda pictures, *_, **__: kept.update(pictures=pictures))
    result = CliRunner().invoke(cli.app, ["sample", str(tmp_path / "run"), "--prompt", "a b", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    ((_, found),) = kept["pictures"]  # steps, guidance and size are the run's
    (drawn,) = np.load(tmp_path / "run/samples/step-00000001.npy")
    assert np.abs(found.astype(int) - drawn).max() <= 1


@pytest.mark.parametrize(("words", "size"), [((), 256), (("--resolution", "16"), 16)])
def test_the_command_draws_from_a_flux_folder_with_and_without_a_size(folders, monkeypatch, tmp_path, words, size):
    asked = {}

    def draw(sources, wish, settings, **_):
        asked.update(resolution=sources[0].resolution, settings=settings[0])
        return ([np.zeros((8, 8, 3), dtype=np.uint8)],)

    if not words:  # 4096 tokens take a while; the size alone is looked at
        monkeypatch.setattr(cascade_drawing, "draw_from_folders", draw)
    out = tmp_path / "grid.png"
    steps = ["--steps", "1", "--true-cfg-scale", "2", "--negative", ""]
    result = CliRunner().invoke(
        cli.app, ["sample", str(folders["flux"].source), "--prompt", "a", "--out", str(out), *steps, *words]
    )
    assert result.exit_code == 0, result.output
    assert out.is_file()
    if not words:
        settings = asked["settings"]
        assert (asked["resolution"], settings.guidance, settings.embedded_guidance) == (size, 2.0, 3.5)
