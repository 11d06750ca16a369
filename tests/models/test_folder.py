import json

import diffusers
import huggingface_hub
import pytest
import torch
from diffusers import DDPMScheduler, DiTPipeline, StableDiffusionPipeline, UNet2DConditionModel
from kit.tiny_models import (
    randomise_parameters,
    raw_inputs,
    tiny_text_encoder,
    tiny_transformer,
    tiny_unet,
    tiny_vae,
)
from transformers import CLIPTextModel

from diffusionpipe.errors import ModelError
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.models.objectives.objective import ObjectiveSettings
from diffusionpipe.models.opening.folder import build_graph, open_components, resolve_folder, weight_sources
from diffusionpipe.models.parameters.weights import materialize

PLAIN = ObjectiveSettings()


@pytest.fixture
def stable_diffusion(tmp_path):
    """A folder as diffusers itself writes it, without a tokenizer."""
    parts = {"text_encoder": tiny_text_encoder(), "vae": tiny_vae(), "unet": tiny_unet()}
    for part in parts.values():
        randomise_parameters(part)
    none = dict.fromkeys(("tokenizer", "safety_checker", "feature_extractor"))
    pipeline = StableDiffusionPipeline(
        **parts,
        **none,
        scheduler=DDPMScheduler(num_train_timesteps=50, steps_offset=1, clip_sample=False),
        requires_safety_checker=False,
    )
    pipeline.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def dit(tmp_path):
    pipeline = DiTPipeline(transformer=tiny_transformer(), vae=tiny_vae(), scheduler=DDPMScheduler())
    pipeline.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _edit(path, **changes):
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))


def _all(graph):
    return [layer.name for layer in graph.layers]


def test_a_stable_diffusion_folder_becomes_a_graph_without_weights(stable_diffusion):
    graph = build_graph(stable_diffusion, objective=PLAIN, resolution=8)
    assert all(p.is_meta for component in graph.components.values() for p in component.parameters())
    assert not any(b.is_meta for component in graph.components.values() for b in component.buffers())
    assert graph.components["objective"].num_timesteps == 50
    assert describe(graph).tensor("prediction").shape == (4, 4, 4)


def test_what_the_folder_holds_is_what_runs(stable_diffusion):
    graph = build_graph(stable_diffusion, objective=PLAIN, resolution=8)
    sources = weight_sources(stable_diffusion, graph)
    materialize(graph, _all(graph), sources, device="cpu", dtype=torch.float32, seed=0)
    inputs = raw_inputs(graph, 2)
    tensors = inputs | run_layers(graph.layers, graph.components, inputs)
    text_encoder = CLIPTextModel.from_pretrained(stable_diffusion / "text_encoder")
    unet = UNet2DConditionModel.from_pretrained(stable_diffusion / "unet")
    text = text_encoder(inputs["input_ids"]).last_hidden_state
    assert torch.equal(tensors["text_states"], text)
    prediction = unet(tensors["noisy"], tensors["timesteps"], text).sample
    assert torch.equal(tensors["prediction"], prediction)


def test_a_dit_folder_becomes_a_graph_that_trains(dit):
    graph = build_graph(dit, objective=PLAIN, resolution=8)
    materialize(graph, _all(graph), weight_sources(dit, graph), device="cpu", dtype=torch.float32, seed=0)
    loss = run_layers(graph.layers, graph.components, raw_inputs(graph, 2), targets=["loss"])["loss"]
    loss.sum().backward()
    assert all(p.grad is not None for p in graph.components["transformer"].parameters())


def test_components_to_train_can_be_chosen(stable_diffusion):
    graph = build_graph(stable_diffusion, objective=PLAIN, resolution=8, train=["text_encoder"])
    trained = {name.partition(".")[0] for name in (p.name for p in describe(graph).parameters if p.is_trainable)}
    assert trained == {"text_encoder"}


def test_a_denoiser_without_weights_is_trained_where_the_recipe_says_so_and_a_vae_is_not(stable_diffusion):
    graph = build_graph(stable_diffusion, objective=PLAIN, resolution=8)
    (stable_diffusion / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    assert weight_sources(stable_diffusion, graph, from_scratch=True)["unet"] is None
    with pytest.raises(ModelError, match=r"unet has no weights \(it has config.json\).* set model.from_scratch = true"):
        weight_sources(stable_diffusion, graph)
    (stable_diffusion / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"vae has no weights \(it has config.json\), and vae is not trained"):
        weight_sources(stable_diffusion, graph, from_scratch=True)


def test_an_unknown_pipeline_is_refused_with_those_that_are_known(stable_diffusion):
    _edit(stable_diffusion / "model_index.json", _class_name="KandinskyPipeline")
    with pytest.raises(
        ModelError, match=r"is a KandinskyPipeline; supported pipelines: AuraFlowPipeline, .*, ZImagePipeline$"
    ):
        open_components(stable_diffusion)


def test_a_pipeline_that_diffusers_does_not_have_either_is_refused_with_its_version(stable_diffusion):
    _edit(stable_diffusion / "model_index.json", _class_name="TomorrowPipeline")
    with pytest.raises(ModelError, match=rf"diffusers {diffusers.__version__}, .* has no TomorrowPipeline either"):
        open_components(stable_diffusion)


def test_every_wrong_component_is_told_at_once(stable_diffusion):
    index = {"unet": ["diffusers", "UNet2DModel"], "vae": "absent"}
    _edit(stable_diffusion / "model_index.json", **index)
    (stable_diffusion / "text_encoder" / "config.json").unlink()
    with pytest.raises(ModelError) as caught:
        open_components(stable_diffusion)
    message = str(caught.value)
    assert "unet is UNet2DModel; supported: UNet2DConditionModel" in message
    assert "vae is None; supported: AutoencoderKL" in message
    assert "config.json is missing" in message


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_file_that_is_no_json_object_is_named(stable_diffusion, content):
    (stable_diffusion / "unet" / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"unet/config\.json"):
        open_components(stable_diffusion)


def test_a_configuration_that_makes_no_model_is_named(stable_diffusion):
    _edit(stable_diffusion / "unet" / "config.json", block_out_channels=[8])
    with pytest.raises(ModelError, match=r"unet/config\.json is not the configuration of a UNet2DConditionModel"):
        open_components(stable_diffusion)


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ("vae", "scaling_factor"),
        ("vae", "norm_num_groups"),
        ("unet", "norm_eps"),
        ("unet", "block_out_channels"),
        ("text_encoder", "layer_norm_eps"),
        ("text_encoder", "hidden_size"),
        ("scheduler", "prediction_type"),
        ("scheduler", "beta_end"),
    ],
)
def test_a_null_in_place_of_a_value_is_named_with_its_file(stable_diffusion, part, key):
    path = next((stable_diffusion / part).glob("*config.json"))
    _edit(path, **{key: None})
    with pytest.raises(ModelError, match=f"{path.name}: {key} is null, but .* needs a value") as raised:
        build_graph(stable_diffusion, objective=PLAIN, resolution=8)
    assert "\n" not in str(raised.value)


def test_a_null_that_says_none_or_no_or_that_nobody_reads_changes_nothing(stable_diffusion):
    plain = describe(build_graph(stable_diffusion, objective=PLAIN, resolution=8))
    _edit(stable_diffusion / "vae" / "config.json", shift_factor=None, latents_mean=None, force_upcast=None)
    _edit(stable_diffusion / "unet" / "config.json", upcast_attention=None, sample_size=None, class_embed_type=None)
    _edit(stable_diffusion / "scheduler" / "scheduler_config.json", clip_sample_range=None, thresholding=None)
    assert describe(build_graph(stable_diffusion, objective=PLAIN, resolution=8)) == plain


def test_a_folder_without_scheduler_is_refused(stable_diffusion):
    (stable_diffusion / "scheduler" / "scheduler_config.json").unlink()
    with pytest.raises(ModelError, match=r"scheduler_config\.json is missing"):
        build_graph(stable_diffusion, objective=PLAIN, resolution=8)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"model_index\.json is missing"):
        build_graph(tmp_path, objective=PLAIN, resolution=8)


@pytest.mark.parametrize("name", ["./nowhere", "a/b/c", "nowhere", "/a/b"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match="there is no model folder"):
        resolve_folder(name)


def test_a_hub_id_is_fetched_without_pickles_and_variants(stable_diffusion, monkeypatch):
    asked = {}

    def download(name, **patterns):
        asked.update(patterns, name=name)
        return str(stable_diffusion)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    graph = build_graph("owner/model-v1.5", objective=PLAIN, resolution=8)
    assert describe(graph).frozen_layers
    assert asked["name"] == "owner/model-v1.5"
    assert {"model_index.json", "unet/*.safetensors", "tokenizer/*.txt"} <= set(asked["allow_patterns"])
    assert not any("bin" in pattern or pattern == "*" for pattern in asked["allow_patterns"])
