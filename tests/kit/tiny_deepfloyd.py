"""A tiny DeepFloyd IF: pipelines of diffusers' own classes, and folders of them."""

from pathlib import Path

import diffusers
from diffusers import DDPMScheduler, UNet2DConditionModel
from kit.tiny_models import randomise_parameters, tiny_t5
from kit.tiny_pipelines import PIECES
from transformers import T5Tokenizer

LEVELS = {"beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 1000}


def tiny_if_unet(**config: object) -> UNet2DConditionModel:
    """Two levels of the kinds of blocks that DeepFloyd IF has; its norms want widths of 32."""
    defaults: dict[str, object] = {
        "act_fn": "gelu",
        "addition_embed_type": "text",
        "addition_embed_type_num_heads": 2,
        "attention_head_dim": 8,
        "block_out_channels": (32, 32),
        "cross_attention_dim": 32,
        "cross_attention_norm": "group_norm",
        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        "encoder_hid_dim": 20,
        "encoder_hid_dim_type": "text_proj",
        "layers_per_block": 1,
        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
        "norm_num_groups": 8,
        "only_cross_attention": False,
        "out_channels": 6,
        "resnet_skip_time_act": True,
        "resnet_time_scale_shift": "scale_shift",
        "sample_size": 8,
        "time_embedding_act_fn": "gelu",
        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    }
    return UNet2DConditionModel(**defaults | {"in_channels": 3} | config)


def tiny_if(variance: str = "learned_range", **unet: object) -> diffusers.IFPipeline:
    """The first model, of 8 pixels."""
    return diffusers.IFPipeline(
        tokenizer=_tokenizer(),
        text_encoder=tiny_t5(vocab_size=len(PIECES)),
        unet=tiny_if_unet(**unet),
        scheduler=DDPMScheduler(variance_type=variance, **LEVELS),
        safety_checker=None,
        feature_extractor=None,
        watermarker=None,
        requires_safety_checker=False,
    )


def tiny_super_resolution(variance: str = "learned_range", **unet: object) -> diffusers.IFSuperResolutionPipeline:
    """The second model, of 16 pixels."""
    size = {"in_channels": 6, "class_embed_type": "timestep", "sample_size": 16}
    return diffusers.IFSuperResolutionPipeline(
        tokenizer=_tokenizer(),
        text_encoder=tiny_t5(vocab_size=len(PIECES)),
        unet=tiny_if_unet(**size | unet),
        scheduler=DDPMScheduler(variance_type=variance, **LEVELS),
        image_noising_scheduler=DDPMScheduler(**LEVELS),
        safety_checker=None,
        feature_extractor=None,
        watermarker=None,
        requires_safety_checker=False,
    )


def save_cascade(folder: Path, variance: str = "learned_range") -> Path:
    """Folders "base" and "super" with random weights, the text encoder the same."""
    for name, build in (("base", tiny_if), ("super", tiny_super_resolution)):
        pipeline = build(variance)
        randomise_parameters(pipeline.text_encoder, 7)
        randomise_parameters(pipeline.unet, len(name))
        pipeline.save_pretrained(folder / name)
    return folder


def _tokenizer() -> T5Tokenizer:
    return T5Tokenizer(vocab=PIECES, extra_ids=0, model_max_length=77)
