"""Models in one file: written, opened by diffusers, and read back as `model.path`."""

import json
from dataclasses import replace
from math import prod

import diffusers
import huggingface_hub
import pytest
import torch
from kit.card_code import picture_of
from kit.drawn_families import asked_of, by_diffusers, difference, drawn_here, size_of
from kit.tiny_models import (
    randomise_pipeline,
    tiny_projected_text_encoder,
    tiny_sd3_transformer,
    tiny_t5,
    tiny_text_encoder,
    tiny_unet,
    tiny_vae,
)
from kit.tiny_pipelines import CLIP, PIECES
from kit.tiny_pipelines import flux as tiny_flux
from kit.tiny_pipelines import sd3 as tiny_sd3
from kit.tiny_pipelines import sdxl as tiny_sdxl
from kit.tiny_runs import RESOLUTION, losses_of, recipe_of, save_pictures, save_stable_diffusion, train_here
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPTextModelWithProjection

from diffusionpipe import cli
from diffusionpipe.errors import ModelError
from diffusionpipe.models.objectives.objective import ObjectiveSettings
from diffusionpipe.models.opening import folder as opening
from diffusionpipe.models.opening.configured import configured_family, configured_parts
from diffusionpipe.models.opening.folder import REGISTRY, open_component, resolve_folder
from diffusionpipe.models.parameters.single_file.layout import Component, layout_of, parts_of
from diffusionpipe.models.parameters.stored import opened, stored_weights
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.trainer.exports.single_file import write_single_file

pytestmark = pytest.mark.usefixtures("one_thread", "one_trace", "offline")


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """No network, and a cache of our own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setattr(huggingface_hub.constants, "HF_ASSETS_CACHE", str(tmp_path_factory.mktemp("assets")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def sd1(folder):
    save_stable_diffusion(folder)
    return diffusers.StableDiffusionPipeline.from_pretrained(folder)


def sd2(folder):
    """OpenCLIP's encoder, linear projections around the U-Net's attention, and predicted velocities."""
    pipeline = sd1(folder)
    pipeline.register_modules(
        text_encoder=tiny_text_encoder(**CLIP, hidden_act="gelu", num_hidden_layers=3),
        unet=tiny_unet(use_linear_projection=True, layers_per_block=2),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, prediction_type="v_prediction", steps_offset=1),
    )
    return pipeline


def sdxl(_):
    """The second encoder is wider, as readers tell the two apart by their widths."""
    pipeline = tiny_sdxl()
    pipeline.register_modules(
        text_encoder_2=tiny_projected_text_encoder(**CLIP, hidden_size=12, num_attention_heads=3),
        unet=type(pipeline.unet).from_config({**pipeline.unet.config, "cross_attention_dim": 20}),
        scheduler=diffusers.DDIMScheduler(
            clip_sample=False, prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
        ),
    )
    return pipeline


def sd3(_):
    """Blocks with a second attention and with norms of queries and keys; a first encoder without a projection."""
    pipeline = tiny_sd3()
    config = tiny_text_encoder(**CLIP, projection_dim=8).config
    pipeline.register_modules(
        text_encoder=CLIPTextModelWithProjection(config),
        text_encoder_2=tiny_projected_text_encoder(**CLIP, hidden_size=12, num_attention_heads=3),
        text_encoder_3=tiny_t5(vocab_size=len(PIECES)),
        transformer=tiny_sd3_transformer(
            qk_norm="rms_norm", dual_attention_layers=(0, 1), pooled_projection_dim=12, joint_attention_dim=20
        ),
        vae=tiny_vae(shift_factor=0.2, use_quant_conv=False, use_post_quant_conv=False),
    )
    return pipeline


MODELS = {"sd1": sd1, "sd2": sd2, "sdxl": sdxl, "sd3": sd3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a tiny model, and the same model in one file; each is made once."""
    known = {}

    def make(name):
        if name not in known:
            place = tmp_path_factory.mktemp(name)
            pipeline = MODELS[name](place / "folder")
            randomise_pipeline(pipeline)
            if name == "sd3":
                nn.init.eye_(pipeline.text_encoder.text_projection.weight)
            pipeline.save_pretrained(place / "folder")
            write_single_file(place / "folder", place / "model.safetensors")
            known[name] = place / "folder", place / "model.safetensors"
        return known[name]

    return make


def tensors_of(pipeline):
    parts = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    return {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.state_dict().items()}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    assert not [key for key, tensor in expected.items() if not torch.equal(found[key], tensor)]


@pytest.mark.parametrize("name", MODELS)
def test_diffusers_opens_the_file_with_each_tensor_bit_for_bit(saved, name):
    folder, file = saved(name)
    expected = diffusers.DiffusionPipeline.from_pretrained(folder)
    found = type(expected).from_single_file(str(file), config=str(folder))
    assert_same_bits(tensors_of(found), tensors_of(expected))


@pytest.mark.parametrize("name", MODELS)
def test_the_file_as_a_model_is_the_folder_bit_for_bit(saved, name):
    folder, file = saved(name)
    linked = resolve_folder(file, None, str(folder))
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    for part, module in pipeline.components.items():
        if isinstance(module, nn.Module):
            assert (linked / part / "single_file.json").is_file()
            own = open_component(linked, part, device=torch.device("cpu"))
            assert_same_bits(dict(own.state_dict()), dict(module.state_dict()))


@pytest.mark.parametrize(
    "name", ["sd1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sd2", "sdxl", "sd3"))]
)
def test_the_file_as_a_model_draws_what_diffusers_draws_from_it(saved, name):
    folder, file = saved(name)
    linked = resolve_folder(file, None, str(folder))
    asked = asked_of(folder, size_of(type(diffusers.DiffusionPipeline.from_pretrained(folder)).__name__))
    ours = drawn_here(replace(asked, sources=(replace(asked.sources[0], folder=linked),)))
    assert difference(ours, (by_diffusers(asked),)) < 1e-5


def test_the_names_are_those_that_the_authors_gave(saved):
    names = {name: set(load_file(saved(name)[1])) for name in MODELS}
    assert "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn1.to_q.weight" in names["sd1"]
    assert "model.diffusion_model.output_blocks.2.1.conv.weight" not in names["sd1"]
    assert "first_stage_model.decoder.mid.attn_1.q.weight" in names["sd1"]
    assert "cond_stage_model.transformer.text_model.encoder.layers.1.mlp.fc1.bias" in names["sd1"]
    assert "cond_stage_model.model.transformer.resblocks.2.attn.in_proj_weight" in names["sd2"]
    assert "conditioner.embedders.1.model.text_projection" in names["sdxl"]
    assert "model.diffusion_model.label_emb.0.2.weight" in names["sdxl"]
    assert "model.diffusion_model.joint_blocks.0.x_block.attn2.qkv.weight" in names["sd3"]
    assert "text_encoders.t5xxl.transformer.shared.weight" in names["sd3"]
    assert {name for name in names["sdxl"] if "." not in name} == {"v_pred", "ztsnr"}  # ComfyUI's
    assert not [name for name in names["sd2"] if "." not in name]
    file = load_file(saved("sd1")[1])
    assert file["first_stage_model.decoder.mid.attn_1.q.weight"].ndim == 4


def test_only_the_rows_of_a_tensor_are_read(saved, monkeypatch):
    folder, file = saved("sd3")
    found = stored_weights(resolve_folder(file, None, str(folder)) / "transformer")
    with opened(found.files[0]) as tensors:
        monkeypatch.setattr(tensors, "_content", _Sliced(tensors._content))
        value = tensors.get("transformer_blocks.0.attn.to_k.weight")
    assert value.shape == tensors.shape("transformer_blocks.0.attn.to_k.weight")


class _Sliced:
    """An open file that gives no whole tensor."""

    def __init__(self, content):
        self.get_slice = content.get_slice

    def get_tensor(self, name):
        raise AssertionError(f"{name} is read whole")


@pytest.mark.slow
def test_a_flux_transformer_of_true_width_is_written_and_read_bit_for_bit(tmp_path):
    """One block of either kind, since widths are written into diffusers' converter."""
    torch.manual_seed(0)
    pipeline = tiny_flux()
    config = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 128, "num_attention_heads": 24}
    wide = type(pipeline.transformer).from_config(
        {**pipeline.transformer.config, **config, "axes_dims_rope": (16, 56, 56)}
    )
    pipeline.register_modules(transformer=wide.to(torch.bfloat16))
    pipeline.save_pretrained(tmp_path / "folder")
    del pipeline, wide
    file = tmp_path / "flux.safetensors"
    assert write_single_file(tmp_path / "folder", file) == ("transformer",)
    kind, options = diffusers.FluxTransformer2DModel, {"subfolder": "transformer", "torch_dtype": torch.bfloat16}
    expected = kind.from_pretrained(tmp_path / "folder", **options).state_dict()
    found = kind.from_single_file(str(file), config=str(tmp_path / "folder"), **options).state_dict()
    assert_same_bits(found, expected)
    linked = resolve_folder(file, None, str(tmp_path / "folder"))
    assert (linked / "vae").is_symlink()
    with opened(stored_weights(linked / "transformer").files[0]) as tensors:
        assert_same_bits({name: tensors.get(name) for name in tensors.names()}, expected)


def test_all_that_a_file_lacks_is_fetched_from_the_id_and_nothing_else(saved, tmp_path, monkeypatch):
    source, whole = saved("sd3")
    file = tmp_path / "without-t5.safetensors"
    save_file({name: tensor for name, tensor in load_file(whole).items() if ".t5xxl." not in name}, file)
    asked = []

    def fetch(name, patterns, variant):
        asked.append(set(patterns))
        return source

    monkeypatch.setattr(opening, "fetched", fetch)
    linked = resolve_folder(file, None, "owner/name")
    first, second = asked
    assert not [pattern for pattern in first if pattern.endswith((".safetensors", ".bin"))]
    assert {pattern for pattern in second if pattern.endswith(".safetensors")} == {"text_encoder_3/*.safetensors"}
    assert (linked / "text_encoder_3").resolve() == source / "text_encoder_3"
    assert (linked / "text_encoder_2/single_file.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["sd-1.5", "sd-2.1", "sdxl", "sd3-medium", "sd3.5-medium", "sd3.5-large", "flux.1-dev"]
)
def test_published_models_have_a_place_for_each_tensor_in_a_file(name):
    parts, places = configured_parts(name), 0
    pipeline = next(kind for kind, family in REGISTRY.items() if family is configured_family(name))
    for part in parts_of(pipeline):
        module = parts[part]
        config = dict(module.config if isinstance(module.config, dict) else module.config.to_dict())
        own = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
        shapes, origins = layout_of(pipeline, part, Component(kind=type(module).__name__, config=config, shapes=own))
        assert len(origins) == len(own)
        held = sum(prod(own[key]) for key in own if origins[key.removeprefix("text_model.")].name)
        assert sum(map(prod, shapes.values())) == held
        places += len(shapes)
    assert places > 700


# Bad input.


def refusal(call):
    with pytest.raises(ModelError) as caught:
        call()
    return str(caught.value)


def test_what_cannot_be_opened_says_what_to_do(saved, tmp_path):
    folder, file = saved("sd1")
    assert "set model.config to the diffusers folder or hub id" in refusal(lambda: resolve_folder(file))
    assert "model.config: it belongs to a model in one file" in refusal(
        lambda: resolve_folder(folder, None, str(folder))
    )
    assert "model.config: there is no folder" in refusal(lambda: resolve_folder(file, None, "no/such/folder/here"))
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(2)}, other)
    assert "holds no unet under the names of its authors (it has a, ...)" in refusal(
        lambda: resolve_folder(other, None, str(folder))
    )
    other.write_bytes(file.read_bytes()[:3000])
    assert "cannot be read" in refusal(lambda: resolve_folder(other, None, str(folder)))
    assert "a StableDiffusion3Pipeline" not in refusal(lambda: resolve_folder(file, None, str(saved("sd3")[0])))


def test_a_file_with_the_configuration_of_another_model_is_refused(saved):
    from diffusionpipe.models.objectives.objective import ObjectiveSettings
    from diffusionpipe.models.opening.folder import build_graph, weight_sources

    linked = resolve_folder(saved("sd1")[1], None, str(saved("sd2")[0]))
    graph = build_graph(linked, objective=ObjectiveSettings(), resolution=16)
    said = refusal(lambda: weight_sources(linked, graph))
    assert f"{saved('sd1')[1]} does not fit {saved('sd2')[0] / 'unet/config.json'}" in said
    assert "set model.config to this model's configuration" in said


def test_a_mistyped_file_is_named_as_missing_and_capitals_in_its_ending_are_read(tmp_path):
    missing = tmp_path / "nothere.safetensors"
    assert f"there is no file {missing}; correct the path" in refusal(
        lambda: resolve_folder(missing, None, str(tmp_path))
    )
    capital = tmp_path / "A.SAFETENSORS"
    capital.write_bytes(b"")
    assert "A.SAFETENSORS is a model in one file" in refusal(lambda: resolve_folder(capital))


def test_a_variant_that_no_weights_of_a_folder_have_is_refused(saved):
    folder = saved("sd1")[0]
    assert 'have the variant "fp16"; remove it' in refusal(lambda: resolve_folder(folder, "fp16"))


def test_a_projection_that_a_file_would_lose_is_refused(saved, tmp_path):
    pipeline = diffusers.DiffusionPipeline.from_pretrained(saved("sd3")[0])
    nn.init.ones_(pipeline.text_encoder.text_projection.weight)
    pipeline.save_pretrained(tmp_path)
    said = refusal(lambda: write_single_file(tmp_path, tmp_path / "x.safetensors"))
    assert "text_projection.weight that is not an identity" in said
    assert not (tmp_path / "x.safetensors").exists()


def test_encoders_that_readers_would_mistake_for_each_other_are_refused(tmp_path):
    pipeline = tiny_sdxl()
    pipeline.save_pretrained(tmp_path)
    assert "text_encoder_2 cannot be written" in refusal(
        lambda: write_single_file(tmp_path, tmp_path / "x.safetensors")
    )


# Runs.


def command(*words):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(word) for word in words])
    return caught.value.code


def test_a_run_from_the_file_is_the_run_from_the_folder_and_is_exported_again(saved, tmp_path):
    folder, file = saved("sd1")
    data = save_pictures(tmp_path / "data", count=8)
    sections = {"training": {"steps": 2}, "sampling": {"every": 2, "steps": 1, "prompts": ("a b",)}}
    train_here(recipe_of(folder, data, tmp_path / "folder", **sections))
    model = {"config": str(folder)}
    train_here(recipe_of(file, data, tmp_path / "file", **sections, model={"path": str(file), **model}))
    assert losses_of(tmp_path / "file") == losses_of(tmp_path / "folder")
    exports = [diffusers.DiffusionPipeline.from_pretrained(tmp_path / name / "export") for name in ("folder", "file")]
    assert_same_bits(*map(tensors_of, exports))
    out = tmp_path / "out.safetensors"
    assert command("export", tmp_path / "file", "--single-file", out) == 0
    again = diffusers.StableDiffusionPipeline.from_single_file(str(out), config=str(folder))
    assert_same_bits(tensors_of(again), tensors_of(exports[0]))
    assert out.stat().st_mode & 0o044


@pytest.mark.slow
def test_adapters_are_merged_into_the_file(saved, tmp_path):
    folder, file = saved("sd1")
    original = tmp_path / "original"
    original.symlink_to(folder)
    data = save_pictures(tmp_path / "data", count=8)
    model = {"path": str(file), "config": str(original)}
    recipe = recipe_of(file, data, tmp_path / "run", model=model, lora={"rank": 2}, training={"steps": 2})
    train_here(recipe)
    card = (tmp_path / "run/export/README.md").read_text(encoding="utf-8")
    assert str(tmp_path) not in card
    opens = 'StableDiffusionPipeline.from_single_file("path/to/model.safetensors", config="path/to/original")'
    assert opens in card
    drawn = picture_of(card, tmp_path / "run/export", tmp_path, **{"model.safetensors": file, "original": folder})
    assert drawn.size == (8, 8)
    grid = tmp_path / "grid.png"
    assert command("sample", tmp_path / "run", "--prompt", "a b", "--steps", "1", "--out", grid) == 0
    out = tmp_path / "out.safetensors"
    assert command("export", tmp_path / "run", "--single-file", out) == 0
    before, after = load_file(file), load_file(out)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(".attn" in name and name.startswith("model.diffusion_model.") for name in changed)


def test_export_names_what_is_wrong(tmp_path, capsys):
    assert command("export", tmp_path, "--single-file", tmp_path / "x.bin") == 2
    assert "must end in .safetensors" in capsys.readouterr().err
    assert command("export", tmp_path, "--single-file", tmp_path / "x.safetensors") == 2
    assert "has no export/ of one model" in capsys.readouterr().err
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "DiTPipeline"}))
    assert command("export", tmp_path, "--single-file", tmp_path / "x.safetensors") == 2
    assert "not written into one file" in capsys.readouterr().err


def test_sample_draws_from_the_file_as_from_the_folder_and_again_from_a_kept_picture(saved, tmp_path, capsys):
    folder, file = saved("sd1")
    asked = ("--prompt", "a b", "--steps", "2", "--seed", "3")
    assert command("sample", folder, *asked, "--out", tmp_path / "folder.png") == 0
    place = ("--config", folder)
    assert command("sample", file, *place, *asked, "--keep", tmp_path / "kept", "--out", tmp_path / "file.png") == 0
    assert (tmp_path / "file.png").read_bytes() == (tmp_path / "folder.png").read_bytes()
    (kept,) = (tmp_path / "kept").glob("*.png")
    assert command("sample", file, *place, "--like", kept, "--out", tmp_path / "again.png") == 0
    assert (tmp_path / "again.png").read_bytes() == kept.read_bytes()
    capsys.readouterr()
    assert command("sample", file, *asked, "--out", tmp_path / "x.png") == 2
    assert "is a model in one file; give --config, the diffusers folder or hub id" in " ".join(
        capsys.readouterr().err.split()
    )
    assert command("sample", folder, *place, *asked, "--out", tmp_path / "x.png") == 2
    assert "--config: it belongs to a model in one file" in capsys.readouterr().err
    save_file({"lora_unet_conv_in.lora_down.weight": torch.zeros(1)}, tmp_path / "adapters.safetensors")
    assert command("sample", tmp_path / "adapters.safetensors", *place, *asked, "--out", tmp_path / "x.png") == 2
    assert "holds adapters alone; give the run's folder" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("name", ["sd1", pytest.param("sdxl", marks=pytest.mark.slow)])
def test_each_weight_of_a_file_or_a_folder_has_memory_of_its_own_that_begins_as_torchs_does(saved, name):
    """MKL's product of one row rounds otherwise where the weight begins elsewhere, as it does in a mapped file."""
    folder, file = saved(name)
    for source in (folder, resolve_folder(file, None, str(folder))):
        graph = opening.build_graph(source, objective=ObjectiveSettings(), resolution=RESOLUTION)
        stored = {
            part: stored_weights(source / part) if (source / part).is_dir() else None for part in graph.components
        }
        names = [layer.name for layer in graph.layers]
        materialize(graph, names, stored, device="cpu", dtype=torch.float32, seed=0)
        weights = [weight for part in graph.components.values() for weight in part.parameters()]
        assert not [weight.shape for weight in weights if weight.data_ptr() % 64]
        assert all(weight.untyped_storage().nbytes() == 4 * weight.numel() for weight in weights)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_a_run_in_float32_from_the_file_has_the_losses_of_the_folder_bit_for_bit(saved, tmp_path, batch):
    folder, file = saved("sd1")
    data = save_pictures(tmp_path / "data", count=8)
    training = {"steps": 3, "batch": batch, "precision": "float32"}
    sections = {"training": training, "pipeline": {"microbatches": batch}}
    train_here(recipe_of(folder, data, tmp_path / "folder", **sections))
    model = {"path": str(file), "config": str(folder)}
    train_here(recipe_of(file, data, tmp_path / "file", **sections, model=model))
    assert losses_of(tmp_path / "file") == losses_of(tmp_path / "folder")
