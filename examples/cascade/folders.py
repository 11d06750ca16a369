"""Write the two models of the cascade as diffusers folders, ready to be trained from scratch.

    python examples/cascade/folders.py --out runs/cascade-models

    base      IFPipeline                   draws 8x8 pixels from a caption
    super     IFSuperResolutionPipeline    draws 32x32 pixels from a caption and 8x8 pixels

Both have the classes of DeepFloyd IF, only smaller. They share a frozen text encoder, a T5 of random weights: ten words
need no more. The U-Nets are configurations without weights, which the training starts.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers import DDPMScheduler, IFPipeline, IFSuperResolutionPipeline, UNet2DConditionModel
from mnist import WORDINGS, WORDS
from transformers import T5Config, T5EncoderModel, T5Tokenizer

WIDTH = 32
"""Of the text encoder's states."""
UNET: dict[str, Any] = {
    "act_fn": "gelu",
    "addition_embed_type": "text",
    "addition_embed_type_num_heads": 4,
    "attention_head_dim": 16,
    "cross_attention_dim": WIDTH,
    "cross_attention_norm": "group_norm",
    "encoder_hid_dim": WIDTH,
    "encoder_hid_dim_type": "text_proj",
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "norm_num_groups": 8,
    "only_cross_attention": False,
    "out_channels": 2,
    "resnet_skip_time_act": True,
    "resnet_time_scale_shift": "scale_shift",
    "time_embedding_act_fn": "gelu",
}
DOWN, UP = "SimpleCrossAttnDownBlock2D", "SimpleCrossAttnUpBlock2D"
BASE = {
    "in_channels": 1,
    "sample_size": 8,
    "block_out_channels": (64, 96),
    "down_block_types": (DOWN, DOWN),
    "up_block_types": (UP, UP),
    "layers_per_block": 1,
}
SUPER = {
    "in_channels": 2,
    "sample_size": 32,
    "block_out_channels": (16, 16, 32),
    "down_block_types": ("ResnetDownsampleBlock2D",) * 3,
    "up_block_types": ("ResnetUpsampleBlock2D",) * 3,
    "layers_per_block": 1,
    "class_embed_type": "timestep",
}
LEVELS = {"beta_schedule": "squaredcos_cap_v2", "num_train_timesteps": 1000}


def tokenizer() -> T5Tokenizer:
    """Return a tokenizer of the captions' words."""
    words = sorted({word for wording in WORDINGS for word in wording.split()} - {"{word}"} | set(WORDS))
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *((f"▁{word}", -2.0) for word in words)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=77)


def text_encoder(vocabulary: int) -> T5EncoderModel:
    """Return the T5, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return T5EncoderModel(
            T5Config(vocab_size=vocabulary, d_model=WIDTH, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0)
        )


def write(out: Path) -> None:
    """Write both folders."""
    words = tokenizer()
    scheduler = DDPMScheduler(prediction_type="v_prediction", variance_type="fixed_small", **LEVELS)
    parts = {
        "tokenizer": words,
        "text_encoder": text_encoder(len(words)),
        "scheduler": scheduler,
        **dict.fromkeys(("safety_checker", "feature_extractor", "watermarker")),
    }
    for name, kind, unet in (("base", IFPipeline, BASE), ("super", IFSuperResolutionPipeline, SUPER)):
        more = {"image_noising_scheduler": DDPMScheduler(**LEVELS)} if name == "super" else {}
        pipeline = kind(**parts, **more, unet=UNet2DConditionModel(**UNET, **unet), requires_safety_checker=False)
        pipeline.save_pretrained(out / name)
        (out / name / "unet" / "diffusion_pytorch_model.safetensors").unlink()
        print(f"{out / name}: {kind.__name__}, {sum(p.numel() for p in pipeline.unet.parameters()):,} parameters")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write the two models of the cascade as diffusers folders.")
    parser.add_argument("--out", type=Path, default=Path("runs/cascade-models"), help="folder to write (%(default)s)")
    write(parser.parse_args().out)


if __name__ == "__main__":
    main()
