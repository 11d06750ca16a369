"""Runs that write adapters in several formats: the files of the export and of each checkpoint, and what they hold."""

import hashlib

import diffusers
import numpy as np
import pytest
import torch
from kit.tiny_models import tiny_unet
from kit.tiny_runs import RESOLUTION, recipe_of, save_pictures, save_stable_diffusion, tensors_of, train, train_here
from safetensors import safe_open
from safetensors.torch import load_file

from diffusionpipe.errors import CheckpointError, ModelError
from diffusionpipe.models.parameters.adapter_names import FORMS, to_foreign
from diffusionpipe.models.parameters.lora import LoraSettings
from diffusionpipe.models.parameters.lora_file import layer_adapters
from diffusionpipe.models.parameters.lora_read import ADAPTERS
from diffusionpipe.trainer.checkpoints.checkpoint import latest
from diffusionpipe.trainer.exports.adapter_files import stored_as
from diffusionpipe.trainer.exports.run_export import CHECKPOINT_ADAPTERS
from diffusionpipe.trainer.model.members import open_member
from diffusionpipe.workflows.drawing.trained_model import trained_model

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("peft")
ALPHA, RANK = 6.0, 2


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    save_stable_diffusion(folder / "sd")
    save_pictures(folder / "data", count=8)
    return folder


def _recipe(place, name, *, folder=None, asynchronous="auto", **lora):
    return recipe_of(
        place / "sd",
        place / "data",
        (folder or place) / name,
        lora={"rank": RANK, "alpha": ALPHA, "formats": ["diffusers", "comfy"], "trigger": "sks dog", **lora},
        model={"train": ["unet", "text_encoder"]},
        training={"steps": 4},
        checkpoint={"every": 1, "keep": 1, "adapters": True, "asynchronous": asynchronous},
    )


@pytest.fixture(scope="module", params=["one process", pytest.param("two stages", marks=pytest.mark.slow)])
def birds(request, place):
    """A finished run on both components, with a file of each checkpoint in both formats."""
    if request.param == "one process":
        made = _recipe(place, "birds")
        assert train_here(made) == 4
    else:
        made = _recipe(place, "birds", folder=place / "two", asynchronous=True)
        assert request.getfixturevalue("crew").run(train, made) == [4, 4]
    return made.run.folder


def _header(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def test_each_checkpoint_has_its_files_in_all_formats_and_they_stay_when_it_goes(birds):
    steps = [f"step-0000000{step}" for step in (1, 2, 3, 4)]
    kept = birds / CHECKPOINT_ADAPTERS
    assert not (birds / "checkpoints" / steps[0]).exists()
    assert sorted(path.name for path in kept.iterdir()) == steps
    for step in steps:
        assert {path.name for path in (kept / step).iterdir()} == {ADAPTERS, f"birds-{step}.safetensors"}
    usual = (birds / "recipe.toml").stat().st_mode
    assert {path.stat().st_mode for path in kept.rglob("*.safetensors")} == {usual}
    early, late = (load_file(kept / step / ADAPTERS) for step in ("step-00000002", "step-00000004"))
    assert early.keys() == late.keys()
    assert not all(torch.equal(early[name], late[name]) for name in late)
    exported = load_file(birds / "export" / ADAPTERS)
    assert all(torch.equal(late[name], exported[name]) for name in exported)


def test_the_products_in_both_files_are_those_of_the_checkpoint(birds):
    trained = tensors_of(latest(birds))
    ours, comfy = load_file(birds / "export" / ADAPTERS), load_file(birds / "export" / "birds.safetensors")
    layers = [name.split(".lora_A.")[0] for name in trained if name.startswith("ema.") and ".lora_A." in name]
    assert {layer.split(".")[1] for layer in layers} == {"unet", "text_encoder"}
    assert len(comfy) == 3 * len(layers)
    for layer in layers:
        component, _, name = layer.removeprefix("ema.").partition(".")
        down, up = (trained[f"{layer}.lora_{side}.default.weight"].double() for side in "AB")
        expected = up.flatten(1) @ down.flatten(1) * ALPHA / RANK
        plain = name if component == "unet" else f"text_model.{name.removeprefix('text_model.')}"
        kohya = ("lora_unet_" if component == "unet" else "lora_te_") + plain.replace(".", "_")
        assert comfy[f"{kohya}.alpha"] == ALPHA
        found = [comfy[f"{kohya}.lora_{side}.weight"].double().flatten(1) for side in ("up", "down")]
        assert (found[0] @ found[1] * ALPHA / RANK - expected).abs().max() <= 1e-6 * expected.abs().max()
        sides = ("lora.up", "lora.down") if component == "unet" else ("lora_B", "lora_A")
        found = [ours[f"{component}.{plain}.{side}.weight"].double().flatten(1) for side in sides]
        assert (found[0] @ found[1] - expected).abs().max() <= 1e-6 * expected.abs().max()  # without any scale


def _drawn(place, path):
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(place / "sd")
    pipeline.set_progress_bar_config(disable=True)
    if path is not None:
        pipeline.load_lora_weights(str(path))
    size = {"height": RESOLUTION, "width": RESOLUTION}
    generator = torch.Generator().manual_seed(0)
    return pipeline("a b", num_inference_steps=2, generator=generator, output_type="np", **size).images


def test_diffusers_draws_the_same_from_both_files_of_an_export(birds, place):
    files = (None, birds / "export" / ADAPTERS, birds / "export" / "birds.safetensors")
    plain, *pictures = (_drawn(place, path) for path in files)
    assert np.abs(pictures[0] - plain).max() > 1e-4
    assert np.abs(pictures[0] - pictures[1]).max() <= 1e-5


def test_the_header_says_what_the_file_is_and_verifies_its_tensors(birds):
    for path, alpha in ((birds / "export" / ADAPTERS, "2"), (birds / "export" / "birds.safetensors", "6")):
        header, content = _header(path), path.read_bytes()
        digest = hashlib.sha256(content[8 + int.from_bytes(content[:8], "little") :]).hexdigest()
        assert header["modelspec.hash_sha256"] == f"0x{digest}"
        assert header["sshs_model_hash"] == digest
        facts = {
            "format": "pt",
            "modelspec.sai_model_spec": "1.0.1",
            "modelspec.architecture": "stable-diffusion-v1/lora",
            "modelspec.implementation": "diffusers",
            "modelspec.title": "birds",
            "modelspec.trigger_phrase": "sks dog",
            "modelspec.prediction_type": "epsilon",
            "modelspec.resolution": f"{RESOLUTION}x{RESOLUTION}",
            "ss_base_model_version": "sd_v1",
            "ss_v2": "False",
            "ss_network_module": "networks.lora",
            "ss_network_dim": "2",
            "ss_network_alpha": alpha,
            "ss_sd_model_name": "sd",
            "ss_output_name": "birds",
            "ss_steps": "4",
        }
        assert {key: header[key] for key in facts} == facts
        assert not any(str(birds.parent) in value for value in header.values())


def test_the_card_names_the_file_for_comfyui_and_the_trigger(birds):
    card = (birds / "export" / "README.md").read_text()
    assert "`birds.safetensors` holds the same for ComfyUI" in card
    assert "The captions of the training said: sks dog" in card


def test_the_adapters_of_a_checkpoint_are_a_model_to_draw_from(birds, place):
    folder = birds / CHECKPOINT_ADAPTERS / "step-00000002"
    model = trained_model(folder)
    assert (model.adapters, model.folder) == (folder, place / "sd")


def test_files_have_the_dtype_that_is_asked_for_and_a_finished_run_writes_them_again(place, birds):
    before = load_file(birds / "export" / ADAPTERS)
    changed = _recipe(place, "birds", folder=birds.parent, save_dtype="bfloat16")
    assert train_here(changed, resume="latest") == 4
    for name, tensor in load_file(birds / "export" / ADAPTERS).items():
        assert tensor.dtype is torch.bfloat16
        assert torch.equal(tensor, before[name].bfloat16())
    comfy = load_file(birds / "export" / "birds.safetensors")
    assert {tensor.dtype for name, tensor in comfy.items() if not name.endswith(".alpha")} == {torch.bfloat16}
    assert {tensor.dtype for name, tensor in comfy.items() if name.endswith(".alpha")} == {torch.float32}


def test_a_pipeline_that_comfyui_reads_no_adapters_of_is_refused_before_training(place, monkeypatch):
    monkeypatch.delitem(FORMS, "StableDiffusionPipeline")
    with pytest.raises(ModelError, match=r"lora\.formats: ComfyUI reads no adapters of StableDiffusionPipeline"):
        open_member(_recipe(place, "refused"), place / "sd")


def test_a_rank_stabilised_adapter_has_the_alpha_with_which_readers_give_its_scale():
    """Readers divide alpha by the rank, not by its root."""
    unet = tiny_unet()
    name = "mid_block.attentions.0.proj_in"
    sizes = unet.get_submodule(name).weight.shape
    tensors = {
        f"{name}.lora_A.default.weight": torch.ones(4, *sizes[1:]),
        f"{name}.lora_B.default.weight": torch.ones(sizes[0], 4, 1, 1),
    }
    layers = layer_adapters(tensors, LoraSettings(rank=4, alpha=8, rank_stabilized=True))
    written = to_foreign({"unet": layers}, {"unet": unet}, pipeline="StableDiffusionPipeline")
    assert written["lora_unet_mid_block_attentions_0_proj_in.alpha"] / 4 == 8 / 4**0.5


def test_numbers_that_float16_cannot_hold_are_refused_with_the_remedy():
    with pytest.raises(ModelError, match=r'lora\.save_dtype: a has numbers beyond what float16 .* "bfloat16"'):
        stored_as(torch.float16, {"a": torch.tensor([1e5])})


def test_files_that_cannot_be_written_end_the_run_with_the_checkpoint_in_its_place(place):
    made = _recipe(place, "blocked", asynchronous=False)
    made.run.folder.mkdir()
    (made.run.folder / CHECKPOINT_ADAPTERS).write_text("in the way")
    with pytest.raises(CheckpointError) as error:
        train_here(made)
    first, last = str(error.value).splitlines()
    assert f"the adapters {made.run.folder / CHECKPOINT_ADAPTERS / 'step-00000001'} could not be written: " in first
    assert last == f"the last good checkpoint is {made.run.folder / 'checkpoints' / 'step-00000001'}"


@pytest.mark.slow
def test_the_whole_differences_of_dora_are_those_that_diffusers_draws_with(place, tmp_path):
    lora = {"dora": True, "dora_as_difference": True, "target_modules": "all", "rank": 1, "alpha": 2.0}
    made = _recipe(place, "dora", folder=tmp_path, **lora)
    assert train_here(made) == 4
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(place / "sd")
    parts = {"lora_unet_": pipeline.unet, "lora_te_text_model_": pipeline.text_encoder}
    own = [
        {name.removeprefix("text_model."): p.detach().clone() for name, p in module.named_parameters()}
        for module in parts.values()
    ]
    pipeline.load_lora_weights(str(tmp_path / "dora" / "export" / ADAPTERS))
    pipeline.fuse_lora(components=["unet", "text_encoder"])
    pipeline.unload_lora_weights()
    changed = {}
    for (prefix, module), before in zip(parts.items(), own, strict=True):
        for name, parameter in module.named_parameters():
            plain = name.removeprefix("text_model.")
            if not torch.equal(parameter, before[plain]):
                key = prefix + plain.removesuffix(".weight").replace(".", "_") + ".diff"
                changed[key] = parameter.detach() - before[plain]
    written = load_file(tmp_path / "dora" / "export" / "dora.safetensors")
    assert changed.keys() <= written.keys()
    assert {key.partition("_")[2].partition("_")[0] for key in changed} == {"unet", "te"}
    for key, tensor in written.items():
        there = changed.get(key, torch.zeros(()))
        assert (tensor - there).abs().max() <= 2e-6, key
    late = tmp_path / "dora" / CHECKPOINT_ADAPTERS / "step-00000004" / "dora-step-00000004.safetensors"
    assert all(torch.equal(tensor, written[key]) for key, tensor in load_file(late).items())
    with pytest.raises(ModelError, match=r"lora\.start: .* it holds whole differences of weights"):
        train_here(
            _recipe(place, "again", folder=tmp_path, start=str(tmp_path / "dora" / "export" / "dora.safetensors"))
        )
