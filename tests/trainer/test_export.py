import json
import os
import shutil

import pytest
import torch
from kit.tiny_runs import recipe_of
from torch import nn

from diffusionpipe.errors import CheckpointError, ModelError
from diffusionpipe.models.objectives.objective import Prediction
from diffusionpipe.trainer.checkpoints.checkpoint import save
from diffusionpipe.trainer.exports.export import Export, export


def text_parts():
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=8)
    end = vocabulary["<|endoftext|>"]
    config = CLIPTextConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=end - 1, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    return tokenizer, CLIPTextModel(config)


def autoencoder():
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def stable_diffusion(tmp_path_factory):
    from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    torch.manual_seed(0)
    tokenizer, text_encoder = text_parts()
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
        attention_head_dim=2, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    pipeline = StableDiffusionPipeline(
        vae=autoencoder(), text_encoder=text_encoder, tokenizer=tokenizer, unet=unet,
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1, beta_schedule="scaled_linear"), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "tiny-sd"
    pipeline.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dit(tmp_path_factory):
    from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
        num_embeds_ada_norm=1000,
    )  # fmt: skip
    pipeline = DiTPipeline(transformer, autoencoder(), DDIMScheduler(clip_sample=False))
    folder = tmp_path_factory.mktemp("models") / "tiny-dit"
    pipeline.save_pretrained(folder)
    return folder


def trained(module, component, shift):
    return {f"{component}.{name}": tensor.detach() + shift for name, tensor in module.named_parameters()}


def checkpoint_of(run, component, module, *, ema=True):
    tensors = {f"model.{name}": tensor for name, tensor in trained(module, component, 0.01).items()}
    if ema:
        tensors |= {f"ema.{name}": tensor for name, tensor in trained(module, component, 0.02).items()}
    return save(run, 40, tensors, {"step": 40}, keep=1)


def unet_of(folder):
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel.from_pretrained(folder, subfolder="unet")


def settings(source, prediction=Prediction.EPSILON, component="unet", **options):
    return Export(source_model=source, trained={component: f"{component}."}, prediction=prediction, **options)


def equal_weights(module, expected, component):
    return all(torch.equal(p, expected[f"{component}.{name}"]) for name, p in module.named_parameters())


@pytest.mark.parametrize("prediction", [Prediction.EPSILON, Prediction.V_PREDICTION])
def test_stable_diffusion_opens_the_export_and_samples_from_the_averages(stable_diffusion, tmp_path, prediction):
    from diffusers import StableDiffusionPipeline

    source = unet_of(stable_diffusion)
    checkpoint = checkpoint_of(tmp_path / "run", "unet", source)
    recipe = recipe_of(stable_diffusion, tmp_path / "data", tmp_path / "run", training={"seed": 1})
    folder = export(checkpoint, tmp_path / "export", settings(stable_diffusion, prediction, recipe=recipe))
    pipeline = StableDiffusionPipeline.from_pretrained(folder)
    assert equal_weights(pipeline.unet, trained(source, "unet", 0.02), "unet")
    assert pipeline.scheduler.config.prediction_type == str(prediction)
    assert pipeline.scheduler.config.beta_schedule == "scaled_linear"
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline("a b", num_inference_steps=2, output_type="np", generator=torch.Generator().manual_seed(0)).images
    assert images.shape == (1, 16, 16, 3)
    assert (folder / "unet" / "diffusion_pytorch_model.safetensors").is_file()
    card = (folder / "README.md").read_text()
    assert all(text in card for text in ("tiny-sd", "40 steps", "seed = 1", "moving average", "from_pretrained"))


def test_dit_opens_the_export_and_samples(dit, tmp_path):
    from diffusers import DiTPipeline, DiTTransformer2DModel

    source = DiTTransformer2DModel.from_pretrained(dit, subfolder="transformer")
    checkpoint = checkpoint_of(tmp_path / "run", "transformer", source)
    folder = export(checkpoint, tmp_path / "export", settings(dit, component="transformer"))
    pipeline = DiTPipeline.from_pretrained(folder)
    assert equal_weights(pipeline.transformer, trained(source, "transformer", 0.02), "transformer")
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline([3], num_inference_steps=2, output_type="np", generator=torch.Generator().manual_seed(0)).images
    assert images.shape == (1, 16, 16, 3)


@pytest.mark.parametrize(("ema", "use_ema"), [(True, False), (False, True)])
def test_without_an_average_the_weights_themselves_are_exported(stable_diffusion, tmp_path, ema, use_ema):
    source = unet_of(stable_diffusion)
    checkpoint = checkpoint_of(tmp_path / "run", "unet", source, ema=ema)
    folder = export(checkpoint, tmp_path / "export", settings(stable_diffusion, use_ema=use_ema))
    assert equal_weights(unet_of(folder), trained(source, "unet", 0.01), "unet")
    assert "the weights as trained" in (folder / "README.md").read_text()


def test_frozen_parts_are_copied_byte_for_byte_and_no_double_weights(stable_diffusion, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(stable_diffusion, model)
    (model / "vae" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"half")
    (model / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"old")
    checkpoint = checkpoint_of(tmp_path / "run", "unet", unet_of(model))
    folder = export(checkpoint, tmp_path / "export", settings(model))
    for part in ("vae", "text_encoder", "tokenizer"):
        names = os.listdir(folder / part)
        assert set(names) == set(os.listdir(stable_diffusion / part))
        assert all((folder / part / n).read_bytes() == (stable_diffusion / part / n).read_bytes() for n in names)


def test_a_trained_text_encoder_is_exported_too(stable_diffusion, tmp_path):
    from transformers import CLIPTextModel

    unet, text = unet_of(stable_diffusion), CLIPTextModel.from_pretrained(stable_diffusion / "text_encoder")
    tensors = {**trained(unet, "unet", 0.01), **trained(text, "text_encoder", 0.01)}
    checkpoint = save(tmp_path, 1, {f"model.{name}": t for name, t in tensors.items()}, {}, keep=1)
    both = Export(
        source_model=stable_diffusion,
        trained={"unet": "unet.", "text_encoder": "text_encoder."},
        prediction=Prediction.EPSILON,
    )
    folder = export(checkpoint, tmp_path / "export", both)
    assert equal_weights(CLIPTextModel.from_pretrained(folder / "text_encoder"), tensors, "text_encoder")
    assert equal_weights(unet_of(folder), tensors, "unet")


def test_the_configuration_of_a_trained_part_is_the_source_folders_with_the_type_of_the_weights(
    stable_diffusion, tmp_path
):
    from transformers import CLIPTextModel

    source = tmp_path / "source"
    shutil.copytree(stable_diffusion, source)
    unet_config = (source / "unet" / "config.json").read_text().replace("{", '{"of_another_version": 1,', 1)
    (source / "unet" / "config.json").write_text(unet_config)
    text_config = json.loads((source / "text_encoder" / "config.json").read_text())
    text_config = {key: value for key, value in text_config.items() if key != "dtype"} | {"torch_dtype": "float16"}
    (source / "text_encoder" / "config.json").write_text(json.dumps(text_config))
    tensors = trained(unet_of(stable_diffusion), "unet", 0.01)
    text = CLIPTextModel.from_pretrained(stable_diffusion / "text_encoder")
    tensors |= {name: tensor.bfloat16() for name, tensor in trained(text, "text_encoder", 0.01).items()}
    checkpoint = save(tmp_path, 1, {f"model.{name}": t for name, t in tensors.items()}, {}, keep=1)
    both = Export(
        source_model=source,
        trained={"unet": "unet.", "text_encoder": "text_encoder."},
        prediction=Prediction.EPSILON,
    )
    folder = export(checkpoint, tmp_path / "export", both)
    assert (folder / "unet" / "config.json").read_text() == unet_config
    written = json.loads((folder / "text_encoder" / "config.json").read_text())
    assert written == text_config | {"torch_dtype": "bfloat16"}


def test_a_flow_model_has_the_flow_scheduler_and_says_who_can_sample_it(stable_diffusion, tmp_path):
    from diffusers import FlowMatchEulerDiscreteScheduler

    checkpoint = checkpoint_of(tmp_path / "run", "unet", unet_of(stable_diffusion))
    folder = export(checkpoint, tmp_path / "export", settings(stable_diffusion, Prediction.FLOW_MATCHING, shift=3.0))
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
    assert scheduler.config.shift == 3.0
    assert json.loads((folder / "model_index.json").read_text())["scheduler"] == [
        "diffusers",
        "FlowMatchEulerDiscreteScheduler",
    ]
    card = (folder / "README.md").read_text()
    assert "diffusionpipe sample" in card
    assert "cannot sample it" in card


def test_noise_prediction_trained_from_a_flow_folder_gets_the_scheduler_it_was_trained_with(stable_diffusion, tmp_path):
    from diffusers import DDPMScheduler

    unet = unet_of(stable_diffusion)
    checkpoint = checkpoint_of(tmp_path / "run", "unet", unet)
    flow = export(checkpoint, tmp_path / "flow", settings(stable_diffusion, Prediction.FLOW_MATCHING))
    folder = export(checkpoint, tmp_path / "export", settings(flow))
    scheduler = DDPMScheduler.from_pretrained(folder, subfolder="scheduler")
    assert torch.equal(scheduler.betas, DDPMScheduler().betas)
    assert not scheduler.config.clip_sample


def test_a_failing_export_leaves_the_earlier_one_and_no_rest(stable_diffusion, tmp_path):
    unet = unet_of(stable_diffusion)
    destination = tmp_path / "results" / "export"
    export(checkpoint_of(tmp_path / "run", "unet", unet), destination, settings(stable_diffusion))
    card = (destination / "README.md").read_text()
    tensors = {f"model.{name}": t for name, t in trained(unet, "unet", 0.0).items() if "conv_out" not in name}
    incomplete = save(tmp_path / "other", 1, tensors, {}, keep=1)
    with pytest.raises(CheckpointError, match=r"lacks 2 of \d+ tensors of unet: unet\.conv_out"):
        export(incomplete, destination, settings(stable_diffusion))
    assert (destination / "README.md").read_text() == card
    assert os.listdir(destination.parent) == ["export"]


def test_an_export_replaces_an_earlier_one(stable_diffusion, tmp_path):
    checkpoint = checkpoint_of(tmp_path / "run", "unet", unet_of(stable_diffusion))
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "old").touch()
    folder = export(checkpoint, tmp_path / "export", settings(stable_diffusion))
    assert not (folder / "old").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "run"]


def test_a_checkpoint_of_another_model_and_a_damaged_one_are_refused(stable_diffusion, tmp_path):
    other = save(tmp_path / "a", 1, {"model.unet.x": torch.zeros(1)}, {}, keep=1)
    with pytest.raises(CheckpointError, match="was it trained from another model"):
        export(other, tmp_path / "export", settings(stable_diffusion))
    unet = unet_of(stable_diffusion)
    unet.conv_in = nn.Conv2d(4, 8, 1)
    wrong_shape = checkpoint_of(tmp_path / "b", "unet", unet)
    with pytest.raises(CheckpointError, match=r"conv_in\.weight"):
        export(wrong_shape, tmp_path / "export", settings(stable_diffusion))
    (other / "state.json").write_text("")
    with pytest.raises(CheckpointError, match=r"state\.json"):
        export(other, tmp_path / "export", settings(stable_diffusion))
    with pytest.raises(ModelError, match=r"no component prior; it has .*unet"):
        export(wrong_shape, tmp_path / "export", settings(stable_diffusion, component="prior"))
    assert not (tmp_path / "export").exists()
