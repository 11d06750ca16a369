"""Stable Diffusion 3 (Esser et al., 2024, https://arxiv.org/abs/2403.03206)."""

from typing import Any

from torch import Tensor

from diffusionpipe.models.cut.streams import BlockStreams
from diffusionpipe.models.families.described import Components, Described, Shape, family, latents, t5_width
from diffusionpipe.models.families.sd3_text import pooled_width, texts, width_problems


def _predict(transformer: Any, *, noisy: Tensor, timesteps: Tensor, text_states: Tensor, pooled_text: Tensor) -> Tensor:
    prediction: Tensor = transformer(noisy, text_states, pooled_text, timesteps, return_dict=False)[0]
    return prediction


def _problems(components: Components, shape: Shape) -> list[str]:
    problems, config, size = width_problems(components), components["transformer"].config, shape[-1]
    if size % config.patch_size or size // config.patch_size > config.pos_embed_max_size:
        problems.append(
            f"transformer: latents of size {size} are not a multiple of the patch size {config.patch_size} up to "
            f"{config.patch_size * config.pos_embed_max_size}"
        )
    return problems


FAMILY = family(
    Described(
        vae="AutoencoderKL",
        transformer="SD3Transformer2DModel",
        texts=texts(),
        predict=_predict,
        reads=("text_states", "pooled_text"),
        patch=None,
        guidance=7.0,
        needs={
            "in_channels": latents(why="the VAE's latent channels"),
            "out_channels": latents(why="the VAE's latent channels"),
            "joint_attention_dim": t5_width("text_encoder_3"),
            "pooled_projection_dim": pooled_width,
        },
        problems=_problems,
        streams=BlockStreams(first=("time_text_embed", "context_embedder", "pos_embed"), joined=("norm_out",)),
    )
)
