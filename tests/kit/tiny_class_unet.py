"""Tiny class-conditional U-Nets of pictures: folders as diffusers' DDPMPipeline saves them."""

from pathlib import Path

from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from kit.tiny_models import randomise_parameters

NUM_CLASSES = 10


def tiny_class_unet(*, is_super: bool = False, **config: object) -> UNet2DModel:
    """Two levels, the lower one with attention; 10 classes and the row of no class."""
    defaults: dict[str, object] = {
        "attention_head_dim": 4,
        "block_out_channels": (8, 16),
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "in_channels": 6 if is_super else 3,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "num_class_embeds": NUM_CLASSES + 1,
        "sample_size": 16 if is_super else 8,
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    return UNet2DModel(**defaults | config)


def save_class_pair(folder: Path) -> Path:
    """Folders "base" and "super" with random weights."""
    for seed, name in enumerate(("base", "super")):
        unet = tiny_class_unet(is_super=name == "super")
        randomise_parameters(unet, seed)
        DDPMPipeline(unet, DDPMScheduler()).save_pretrained(folder / name)
    return folder
