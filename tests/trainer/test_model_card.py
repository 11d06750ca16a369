import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from diffusers import DDIMScheduler, DiTPipeline
from huggingface_hub import ModelCard
from kit.card_code import picture_of
from kit.tiny_described import save_described
from kit.tiny_models import tiny_transformer, tiny_vae
from kit.tiny_pipelines import PIPELINES
from kit.tiny_runs import recipe_of

from diffusionpipe.models.objectives.objective import Prediction
from diffusionpipe.models.opening.folder import REGISTRY
from diffusionpipe.models.opening.pipeline_defaults import Guidance
from diffusionpipe.trainer.exports.card_snippet import FILLING, Example
from diffusionpipe.trainer.exports.export import with_size
from diffusionpipe.trainer.exports.model_card import Adapters, Card, model_card, public_name, public_recipe
from diffusionpipe.trainer.model.members import sample_size
from diffusionpipe.trainer.recipe import recipe_from_table

EXAMPLE = Example(prompt='a "b" c', label=3, steps=2, guidance=Guidance(scale=3.0), resolution=8)
DISTILLED = replace(EXAMPLE, guidance=Guidance(scale=2.0, embedded=3.5))
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}
CLASSES = {
    "sdxl": "StableDiffusionXLPipeline",
    "controlnet": "StableDiffusionControlNetPipeline",
    "sd3": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
    "dit": "DiTPipeline",
}


def card_of(pipeline="StableDiffusionPipeline", **changes):
    base = Card(
        pipeline=pipeline,
        base_model="someone/somewhere",
        trained=("unet",),
        prediction=Prediction.EPSILON,
        step=40,
        is_average=True,
        copied=("vae", "tokenizer"),
        own_scheduler=FLOW,
        scheduler=FLOW,
        example=EXAMPLE,
    )
    return replace(base, **changes)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_code_of_a_card_draws_a_picture(tmp_path, kind):
    model = tmp_path / "model"
    if kind == "dit":  # diffusers' pipeline knows the null class 1000 alone
        scheduler = DDIMScheduler(clip_sample=False)
        DiTPipeline(tiny_transformer(num_embeds_ada_norm=1000, out_channels=4), tiny_vae(), scheduler).save_pretrained(
            model
        )
    else:
        PIPELINES[kind]().save_pretrained(model)
    example = DISTILLED if kind == "flux" else EXAMPLE
    flows = kind in ("sd3", "flux")
    prediction = Prediction.FLOW_MATCHING if flows else Prediction.EPSILON
    text = model_card(card_of(CLASSES[kind], prediction=prediction, example=example))
    assert picture_of(text, model, tmp_path).size == (8, 8)
    assert "num_inference_steps=2" in text
    expected = ["class_labels=[3]", "guidance_scale=3,"] if kind == "dit" else ['"a \\"b\\" c",']
    if kind == "flux":
        expected += ["guidance_scale=3.5", "true_cfg_scale=2"]
    assert all(part in text for part in expected)


def test_the_code_of_a_card_draws_a_clip(tmp_path):
    model = save_described("WanPipeline", tmp_path / "model")
    example = replace(EXAMPLE, resolution=32, height=16, frames=5, frame_rate=8.0)
    text = model_card(card_of("WanPipeline", prediction=Prediction.FLOW_MATCHING, example=example))
    drawn = picture_of(text, model, tmp_path, result="clip.gif")
    assert drawn.size == (32, 16)
    assert drawn.n_frames == 5
    assert drawn.info["duration"] == 120  # GIF counts in hundredths of a second


@pytest.mark.parametrize("pipeline", ["StableDiffusionPipeline", "DiTPipeline"])
def test_a_flow_that_diffusers_cannot_sample_is_drawn_by_our_command(pipeline):
    text = model_card(card_of(pipeline, prediction=Prediction.FLOW_MATCHING))
    assert "cannot sample it" in text
    (line,) = [line for line in text.splitlines() if line.startswith("diffusionpipe sample")]
    words = shlex.split(line)
    assert words[2] == "path/to/this/folder"
    what = ["--label", "3"] if pipeline == "DiTPipeline" else ["--prompt", 'a "b" c']
    assert words[3:] == [*what, "--steps", "2", "--guidance", "3", "--resolution", "8", "--out", "picture.png"]


def test_our_command_draws_the_size_of_the_samples():
    for size, expected, out in (
        ({"height": 16}, ["--resolution", "8", "--height", "16"], "picture.png"),
        ({"height": 16, "frames": 5}, ["--resolution", "8", "--height", "16", "--frames", "5"], "clip.gif"),
    ):
        text = model_card(card_of(prediction=Prediction.FLOW_MATCHING, example=replace(EXAMPLE, **size)))
        (line,) = [line for line in text.splitlines() if line.startswith("diffusionpipe sample")]
        assert shlex.split(line)[-len(expected) - 2 :] == [*expected, "--out", out]


@pytest.mark.parametrize("sizes", [["24x16", "16x8"], ["16x24x5", "16x24"]])
def test_a_card_of_several_sizes_has_the_size_that_the_run_draws(tmp_path, sizes):
    recipe = recipe_of(tmp_path / "model", tmp_path / "data", tmp_path / "run", data={"resolution": sizes})
    drawn = sample_size(recipe)
    example = with_size(EXAMPLE, recipe)
    assert (example.resolution, example.height, example.frames or 1) == (drawn.width, drawn.height, drawn.frames)


def test_classes_that_diffusers_does_not_count_are_drawn_by_our_command():
    text = model_card(card_of("DiTPipeline", example=replace(EXAMPLE, num_classes=10)))
    assert "The model has 10 classes" in text
    assert "diffusionpipe sample path/to/this/folder --label 3 " in text
    assert "class_labels" in model_card(card_of("DiTPipeline", example=replace(EXAMPLE, num_classes=1000)))


def test_a_card_says_only_what_the_files_hold():
    text = model_card(card_of(copied=("vae",), left_out=("safety_checker",)))
    for part in (
        "the exponential moving average of the weights.",
        "Unchanged copies from the base model: vae.",
        "The scheduler is the base model's.",
        "did not have them: safety_checker",
    ):
        assert part in text
    assert "everything else" not in text
    changed = model_card(card_of(scheduler={**FLOW, "shift": 1.0}, is_average=False))
    assert "except for `shift = 1.0`" in changed
    assert "the weights as trained" in changed
    other = model_card(card_of(own_scheduler={"_class_name": "PNDMScheduler"}))
    assert "The scheduler is `FlowMatchEulerDiscreteScheduler`; the base model's is `PNDMScheduler`." in other


def test_adapters_are_loaded_into_their_base_with_the_scheduler_that_they_were_trained_for():
    alone = Adapters(4, is_merged=False)
    text = model_card(card_of("FluxPipeline", prediction=Prediction.FLOW_MATCHING, adapters=alone, example=DISTILLED))
    assert 'FluxPipeline.from_pretrained("someone/somewhere")' in text
    assert 'load_lora_weights("path/to/this/folder")' in text
    assert "pipeline.scheduler" not in text
    shifted = card_of(
        "FluxPipeline", prediction=Prediction.FLOW_MATCHING, adapters=alone, scheduler={**FLOW, "shift": 1.0}
    )
    assert f"FlowMatchEulerDiscreteScheduler.from_config({ {**FLOW, 'shift': 1.0}!r})" in model_card(shifted)
    flow = model_card(card_of(prediction=Prediction.FLOW_MATCHING, adapters=alone))
    assert "diffusionpipe sample path/to/the/run --prompt" in flow


def test_the_hub_reads_the_card_and_links_it_to_a_base_model_that_it_knows(tmp_path):
    data = ModelCard(model_card(card_of(adapters=Adapters(4, is_merged=False)))).data
    assert (data.base_model, data.library_name, data.pipeline_tag) == (
        "someone/somewhere",
        "diffusers",
        "text-to-image",
    )
    assert data.tags == ["lora"]
    (tmp_path / "base").mkdir()
    text = model_card(card_of(base_model=str(tmp_path / "base"), adapters=Adapters(4, is_merged=False)))
    assert ModelCard(text).data.base_model is None
    assert '.from_pretrained("path/to/base")' in text
    assert str(tmp_path) not in text


TASKS = {
    "WanImageToVideoPipeline": "image-to-video",
    "FluxFillPipeline": "image-to-image",
    "StableDiffusionInpaintPipeline": "image-to-image",
    "StableDiffusionXLInpaintPipeline": "image-to-image",
    "StableDiffusionControlNetPipeline": "text-to-image",
    "DiTPipeline": "unconditional-image-generation",
    "DDPMPipeline": "unconditional-image-generation",
}


@pytest.mark.parametrize("pipeline", sorted({*REGISTRY, *FILLING.values()}))
def test_the_hub_is_given_the_task_of_the_pipeline(pipeline):
    family = REGISTRY.get(pipeline)
    expected = "text-to-video" if family is not None and family.has_clips else "text-to-image"
    found = ModelCard(model_card(card_of(pipeline, prediction=Prediction.FLOW_MATCHING))).data.pipeline_tag
    assert found == TASKS.get(pipeline, expected)


PRIVATE = {
    "model": {"path": "~/models/secret/flux"},
    "data": {
        "train": "/home/someone/clients/acme/birds",
        "validation": "clients/acme/held-out/",
        "resolution": 8,
    },
    "training": {"steps": 10, "batch": 4},
    "pipeline": {"plan": "plans/private/fast.json"},
    "validation": {"every": 5},
    "sampling": {
        "prompts": ["red and/or blue", "/home/someone/prompts.txt", "~/more.txt", "C:\\Users\\someone\\x.txt"]
    },
    "run": {"folder": "/mnt/disk/runs/private/birds"},
}


def test_no_path_of_the_recipe_gets_into_the_card():
    recipe = recipe_from_table(PRIVATE, source="recipe.toml")
    text = model_card(card_of(recipe=recipe, base_model=recipe.model.path))
    parts = ("/home", "someone/c", "~", "secret", "acme", "private", "/mnt", "Users", "clients")
    assert not [part for part in parts if part in text]
    shown = public_recipe(recipe)
    assert all(part in shown for part in ('"birds"', '"held-out"', '"fast.json"', '"flux"'))
    assert "and/or" in shown
    assert 'path = "flux"' in shown


def test_a_public_name_is_a_hub_id_or_the_last_part_of_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert public_name("black-forest-labs/FLUX.1-dev") == "black-forest-labs/FLUX.1-dev"
    Path("models/flux").mkdir(parents=True)
    assert public_name("models/flux") == "flux"
    assert public_name(str(tmp_path / "models" / "flux") + "/") == "flux"
    assert public_name("~") == ""


@pytest.mark.parametrize("pipeline", ["IFPipeline", "IFSuperResolutionPipeline", "QwenImagePipeline", "SanaPipeline"])
def test_the_hub_lists_models_of_captions_as_such(pipeline):
    assert "pipeline_tag: text-to-image" in model_card(card_of(pipeline))
    assert "pipeline_tag: unconditional-image-generation" in model_card(card_of("DiTPipeline"))


def test_a_model_from_random_weights_has_no_base(tmp_path):
    recipe = recipe_of(Path("someone/somewhere"), tmp_path, tmp_path / "run", model={"from_scratch": True})
    text = model_card(card_of(recipe=recipe))
    assert "unet, from random weights" in text
    assert ModelCard(text).data.base_model is None
