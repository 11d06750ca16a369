"""A small Stable Diffusion whose frozen part takes about a third of its trained part's time, and a batch for it."""

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel

from diffusionpipe.models.families.stable_diffusion import stable_diffusion_graph
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings

RESOLUTION, TEXT_LENGTH, VOCABULARY = 64, 16, 64


def small_stable_diffusion() -> LayerGraph:
    """The same weights at every call."""
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(48, 96, 96),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
    )
    unet = UNet2DConditionModel(
        block_out_channels=(64, 128),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=2,
        cross_attention_dim=64,
        attention_head_dim=4,
        norm_num_groups=8,
        sample_size=RESOLUTION // 4,
    )
    text_encoder = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=TEXT_LENGTH,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    components = {"text_encoder": text_encoder, "vae": vae, "unet": unet}
    objective = Objective(ObjectiveSettings(), {})
    return stable_diffusion_graph(components, objective=objective, resolution=RESOLUTION)


def raw_batch(graph: LayerGraph, size: int) -> dict[str, Tensor]:
    """One batch of the graph's raw inputs."""
    generator = torch.Generator().manual_seed(0)
    batch = {}
    for spec in graph.inputs:
        shape = (size, *spec.shape)
        if spec.name == "input_ids":
            batch[spec.name] = torch.randint(VOCABULARY, shape, generator=generator)
        else:
            batch[spec.name] = torch.rand(shape, generator=generator)
    return batch
