"""Tiny models of real diffusers and transformers classes, with weights, and batches for them."""

from collections.abc import Mapping

import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    DiffusionPipeline,
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
)
from kit.cuts import traced_once
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from diffusionpipe.models.families import flux, sd3
from diffusionpipe.models.families.controlnet import controlnet_graph
from diffusionpipe.models.families.dit import dit_graph
from diffusionpipe.models.families.sdxl import sdxl_graph
from diffusionpipe.models.families.stable_diffusion import stable_diffusion_graph
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction

TEXT_LENGTH = 6
VOCABULARY = 20
NUM_CLASSES = 5


def tiny_vae(**config: object) -> AutoencoderKL:
    """Shrinks pictures twice, 4 latent channels."""
    defaults = {
        "block_out_channels": (4, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "layers_per_block": 1,
        "norm_num_groups": 2,
        "latent_channels": 4,
        "scaling_factor": 0.7,
    }
    return AutoencoderKL(**defaults | config)


def tiny_text_encoder(**config: object) -> CLIPTextModel:
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": TEXT_LENGTH,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    return CLIPTextModel(CLIPTextConfig(**defaults | config))


def tiny_unet(**config: object) -> UNet2DConditionModel:
    """Two levels, the first with attention."""
    defaults = {
        "block_out_channels": (8, 16),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
        "sample_size": 4,
    }
    return UNet2DConditionModel(**defaults | config)


def tiny_transformer(**config: object) -> DiTTransformer2DModel:
    """Three blocks over patches of 2."""
    defaults = {
        "num_attention_heads": 2,
        "attention_head_dim": 4,
        "in_channels": 4,
        "num_layers": 3,
        "sample_size": 4,
        "patch_size": 2,
        "num_embeds_ada_norm": NUM_CLASSES,
    }
    return DiTTransformer2DModel(**defaults | config)


def tiny_stable_diffusion(
    dtype: torch.dtype = torch.float64,
    randomise: bool = True,
    *,
    objective: ObjectiveSettings | None = None,
    resolution: int = 8,
    unet: Mapping[str, object] | None = None,
    train: tuple[str, ...] = ("unet",),
) -> LayerGraph:
    """A Stable Diffusion of some 20,000 parameters; `unet` overrides the U-Net's configuration."""
    components = {"text_encoder": tiny_text_encoder(), "vae": tiny_vae(), "unet": tiny_unet(**unet or {})}
    _prepare(components, dtype, randomise)
    return stable_diffusion_graph(
        components,
        objective=Objective(objective or ObjectiveSettings(), {}),
        resolution=resolution,
        train=train,
        dtype=_name(dtype),
    )


def narrow_stable_diffusion_2() -> LayerGraph:
    """The layers of Stable Diffusion 2.1 by their names, with few channels and for pictures of 64 pixels."""
    narrow = {"block_out_channels": (4, 4, 8, 8), "norm_num_groups": 2}
    vae = {kind: (kind,) * 4 for kind in ("DownEncoderBlock2D", "UpDecoderBlock2D")}
    components = {
        "text_encoder": tiny_text_encoder(num_hidden_layers=23),
        "vae": tiny_vae(
            **narrow,
            layers_per_block=2,
            down_block_types=vae["DownEncoderBlock2D"],
            up_block_types=vae["UpDecoderBlock2D"],
        ),
        "unet": tiny_unet(
            **narrow,
            layers_per_block=2,
            down_block_types=("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",),
            up_block_types=("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3,
        ),
    }
    _prepare(components, torch.float64, randomise=True)
    return stable_diffusion_graph(
        components,
        objective=Objective(ObjectiveSettings(), {}),
        resolution=64,
        train=("unet",),
        dtype="float64",
    )


def tiny_dit(
    dtype: torch.dtype = torch.float64,
    randomise: bool = True,
    *,
    objective: ObjectiveSettings | None = None,
    resolution: int = 8,
    transformer: Mapping[str, object] | None = None,
) -> LayerGraph:
    """A class-conditional DiT; `transformer` overrides the transformer's configuration."""
    components = {"vae": tiny_vae(), "transformer": tiny_transformer(**transformer or {})}
    _prepare(components, dtype, randomise)
    return dit_graph(
        components,
        objective=Objective(objective or ObjectiveSettings(), {}),
        resolution=resolution,
        dtype=_name(dtype),
    )


def _name(dtype: torch.dtype) -> str:
    """Raw inputs are float32 for narrower weights."""
    return "float64" if dtype is torch.float64 else "float32"


def _prepare(components: Mapping[str, nn.Module], dtype: torch.dtype, randomise: bool) -> None:
    for index, component in enumerate(components.values()):
        component.to(dtype)
        if randomise:
            randomise_parameters(component, seed=index)


def randomise_parameters(module: nn.Module, seed: int = 0) -> None:
    """Random values of sensible sizes for all parameters, none of them zero or one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim > 1:
                values *= parameter[0].numel() ** -0.5
            else:
                values = 0.1 * values + ("norm" in name and name.endswith("weight"))
            parameter.copy_(values)


def randomise_pipeline(pipeline: DiffusionPipeline) -> None:
    """`randomise_parameters` of each component."""
    for seed, part in enumerate(pipeline.components.values()):
        if isinstance(part, nn.Module):
            randomise_parameters(part, seed)


def raw_inputs(graph: LayerGraph, batch: int, seed: int = 0) -> dict[str, Tensor]:
    """One batch of the graph's raw inputs, a function of the arguments."""
    generator = torch.Generator().manual_seed(seed)
    largest = {**dict.fromkeys(("input_ids", "input_ids_2", "input_ids_3"), VOCABULARY), "labels": NUM_CLASSES + 1}
    batches = {}
    for spec in graph.inputs:
        shape, dtype = (batch, *spec.shape), getattr(torch, spec.dtype)
        if spec.name in largest:
            batches[spec.name] = torch.randint(largest[spec.name], shape, generator=generator)
        elif spec.name in ("time", "condition"):
            batches[spec.name] = torch.rand(shape, generator=generator, dtype=dtype)
        elif spec.name == "input_mask":
            batches[spec.name] = (torch.rand(shape, generator=generator) < 0.7).to(dtype)
            batches[spec.name][:, :2] = 1  # a caption has an end
        elif spec.name == "mask":
            batches[spec.name] = torch.randint(2, shape, generator=generator).to(dtype)
        elif spec.name == "pixels":
            batches[spec.name] = torch.rand(shape, generator=generator, dtype=dtype) * 2 - 1
        else:
            batches[spec.name] = torch.randn(shape, generator=generator, dtype=dtype)
    return batches


def tiny_projected_text_encoder(**config: object) -> CLIPTextModelWithProjection:
    """As wide as `tiny_text_encoder`, with a pooled embedding of 4."""
    plain = tiny_text_encoder(projection_dim=4, **config).config
    return CLIPTextModelWithProjection(plain)


def tiny_sdxl(
    dtype: torch.dtype = torch.float64,
    randomise: bool = True,
    *,
    resolution: int = 8,
    unet: Mapping[str, object] | None = None,
    text_encoders: Mapping[str, object] | None = None,
) -> LayerGraph:
    """A Stable Diffusion XL with attention of 1 and of 3 transformer blocks; overrides as in the others."""
    components = {
        "text_encoder": tiny_text_encoder(**text_encoders or {}),
        "text_encoder_2": tiny_projected_text_encoder(**text_encoders or {}),
        "vae": tiny_vae(),
        "unet": tiny_sdxl_unet(**unet or {}),
    }
    _prepare(components, dtype, randomise)
    return sdxl_graph(
        components, objective=Objective(ObjectiveSettings(), {}), resolution=resolution, dtype=_name(dtype)
    )


def tiny_sdxl_unet(**config: object) -> UNet2DConditionModel:
    """Two levels with attention of 1 and of 3 transformer blocks."""
    defaults = {
        "down_block_types": ("CrossAttnDownBlock2D",) * 2,
        "up_block_types": ("CrossAttnUpBlock2D",) * 2,
        "transformer_layers_per_block": (1, 3),
        "use_linear_projection": True,
        "cross_attention_dim": 16,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 2,
        "projection_class_embeddings_input_dim": 4 + 6 * 2,
    }
    return tiny_unet(**defaults | config)


def tiny_controlnet(**config: object) -> ControlNetModel:
    """The way down of `tiny_unet`; shrinks the condition twice, as `tiny_vae` does pictures."""
    defaults = {
        "block_out_channels": (8, 16),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "layers_per_block": 1,
        "cross_attention_dim": 8,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
        "conditioning_embedding_out_channels": (4, 4),
    }
    return ControlNetModel(**defaults | config)


def tiny_controlled(
    dtype: torch.dtype = torch.float64,
    randomise: bool = True,
    *,
    resolution: int = 8,
    unet: Mapping[str, object] | None = None,
    controlnet: Mapping[str, object] | None = None,
) -> LayerGraph:
    """A ControlNet on a Stable Diffusion; `unet` and `controlnet` override their configurations."""
    components = {
        "text_encoder": tiny_text_encoder(),
        "vae": tiny_vae(),
        "unet": tiny_unet(**unet or {}),
        "controlnet": tiny_controlnet(**controlnet or {}),
    }
    _prepare(components, dtype, randomise)
    return controlnet_graph(
        components, objective=Objective(ObjectiveSettings(), {}), resolution=resolution, dtype=_name(dtype)
    )


def tiny_t5(**config: object) -> T5EncoderModel:
    """A gated T5 encoder of width 20, wider than two tiny CLIPs."""
    defaults = {
        "vocab_size": VOCABULARY,
        "d_model": 20,
        "d_kv": 4,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 2,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "feed_forward_proj": "gated-gelu",
    }
    return T5EncoderModel(T5Config(**defaults | config))


def tiny_sd3(
    dtype: torch.dtype = torch.float64,
    randomise: bool = True,
    *,
    resolution: int = 8,
    transformer: Mapping[str, object] | None = None,
) -> LayerGraph:
    """A Stable Diffusion 3; `transformer` overrides the transformer's configuration."""
    components = {
        "text_encoder": tiny_projected_text_encoder(),
        "text_encoder_2": tiny_projected_text_encoder(),
        "text_encoder_3": tiny_t5(),
        "vae": tiny_vae(shift_factor=0.2, use_quant_conv=False),
        "transformer": tiny_sd3_transformer(**transformer or {}),
    }
    _prepare(components, dtype, randomise)
    with traced_once():
        return sd3.FAMILY.graph(components, objective=_flow(), resolution=resolution, dtype=_name(dtype))


def tiny_sd3_transformer(**config: object) -> SD3Transformer2DModel:
    """Three blocks over patches of 2."""
    defaults = {
        "sample_size": 4,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 4,
        "num_attention_heads": 2,
        "caption_projection_dim": 8,
        "joint_attention_dim": 20,
        "pooled_projection_dim": 8,
        "pos_embed_max_size": 6,
    }
    return SD3Transformer2DModel(**defaults | config)


def tiny_flux(
    dtype: torch.dtype = torch.float64,
    randomise: bool = True,
    *,
    resolution: int = 8,
    transformer: Mapping[str, object] | None = None,
) -> LayerGraph:
    """A FLUX.1 with guidance embeddings; `transformer` overrides the transformer's configuration."""
    components = {
        "text_encoder": tiny_text_encoder(),
        "text_encoder_2": tiny_t5(),
        "vae": tiny_vae(shift_factor=0.2, use_quant_conv=False),
        "transformer": tiny_flux_transformer(**transformer or {}),
    }
    _prepare(components, dtype, randomise)
    with traced_once():
        return flux.FAMILY.graph(components, objective=_flow(), resolution=resolution, dtype=_name(dtype))


FILLING_UNET = {"in_channels": 9}
"""Of a U-Net that reads a mask and a picture with a hole, of `tiny_vae`."""
FILLING_FLUX = {"in_channels": 48, "out_channels": 16}
"""Of a FLUX.1 Fill: patches of 4 latents, of 4 of the picture with a hole, and of 2 x 2 pixels of the mask."""


def tiny_flux_transformer(**config: object) -> FluxTransformer2DModel:
    """Two blocks of either kind."""
    defaults = {
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 2,
        "attention_head_dim": 8,
        "num_attention_heads": 2,
        "joint_attention_dim": 20,
        "pooled_projection_dim": 8,
        "guidance_embeds": True,
        "axes_dims_rope": (4, 2, 2),
    }
    return FluxTransformer2DModel(**defaults | config)


def _flow() -> Objective:
    return Objective(ObjectiveSettings(prediction=Prediction.FLOW_MATCHING), {})
