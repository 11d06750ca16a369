"""Transformer classes of diffusers at tiny sizes: configuration, shapes of a sample, and what is the same for all."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

TEXT, WIDTH, TIME = 6, 16, ()
IMAGE = torch.stack(torch.meshgrid(torch.arange(1), torch.arange(4), torch.arange(4), indexing="ij"), -1).reshape(16, 3)
IMAGE_4 = torch.cat([IMAGE, torch.zeros(16, 1, dtype=torch.int64)], -1)
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
WAN = {
    "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": WIDTH,
    "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32,
}  # fmt: skip
FLUX = {
    "in_channels": 16, "num_layers": 1, "num_single_layers": 2, **HEADS, "joint_attention_dim": WIDTH,
}  # fmt: skip
CLIP_3D = {"hidden_states": (4, 2, 8, 8), "encoder_hidden_states": (TEXT, WIDTH), "timestep": TIME}
PICTURE = {"hidden_states": (4, 8, 8), "encoder_hidden_states": (TEXT, WIDTH), "timestep": TIME}
TOKENS = {"hidden_states": (16, 16), "encoder_hidden_states": (TEXT, WIDTH), "timestep": TIME}
FLUX_IDS = {"img_ids": IMAGE.float(), "txt_ids": torch.zeros(TEXT, 3)}


@dataclass(frozen=True, slots=True)
class Case:
    """How one class is called."""

    config: Mapping[str, object]
    tensors: Mapping[str, tuple[int, ...]]
    masks: tuple[str, ...] = ()
    """Arguments of shape (TEXT,) that are one where a token counts."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)


CASES = {
    "AllegroTransformer3DModel": Case(
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "cross_attention_dim": 16,
            "caption_channels": WIDTH, "sample_height": 8, "sample_width": 8, "sample_frames": 2,
        },
        CLIP_3D,
    ),
    "AnyFlowTransformer3DModel": Case(
        WAN, {**CLIP_3D, "hidden_states": (2, 4, 8, 8), "timestep": (2,), "r_timestep": (2,)}
    ),
    "AuraFlowTransformer2DModel": Case(
        {
            "sample_size": 8, "in_channels": 4, "num_mmdit_layers": 1, "num_single_dit_layers": 2, **HEADS,
            "joint_attention_dim": WIDTH, "caption_projection_dim": 16, "pos_embed_max_size": 16,
        },
        PICTURE,
    ),
    "BriaTransformer2DModel": Case(
        {**FLUX, "axes_dims_rope": [0, 4, 4]}, TOKENS, fixed=FLUX_IDS
    ),
    "ChromaTransformer2DModel": Case(
        {
            **FLUX, "axes_dims_rope": (4, 2, 2), "approximator_num_channels": 8, "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        {**TOKENS, "attention_mask": (TEXT + 16,)},
        fixed=FLUX_IDS,
    ),
    "ChronoEditTransformer3DModel": Case({**WAN, "rope_temporal_skip_len": 2}, CLIP_3D),
    "CogVideoXTransformer3DModel": Case(
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": WIDTH, "num_layers": 2,
            "sample_width": 8, "sample_height": 8, "sample_frames": 8, "max_text_seq_length": TEXT,
            "temporal_compression_ratio": 4,
        },
        {**CLIP_3D, "hidden_states": (2, 4, 8, 8)},
    ),
    "CogView3PlusTransformer2DModel": Case(
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": WIDTH,
            "time_embed_dim": 8, "condition_dim": 2, "pos_embed_max_size": 8, "sample_size": 8,
        },
        {**PICTURE, "original_size": (2,), "target_size": (2,), "crop_coords": (2,)},
    ),
    "CogView4Transformer2DModel": Case(
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": WIDTH,
            "time_embed_dim": 8, "condition_dim": 2, "pos_embed_max_size": 8, "sample_size": 8,
            "rope_axes_dim": (8, 8),
        },
        {**PICTURE, "original_size": (2,), "target_size": (2,), "crop_coords": (2,)},
    ),
    "Flux2Transformer2DModel": Case(
        {**FLUX, "timestep_guidance_channels": 16, "axes_dims_rope": (2, 2, 2, 2)},
        {**TOKENS, "guidance": ()},
        fixed={"img_ids": IMAGE_4.float(), "txt_ids": torch.zeros(TEXT, 4)},
    ),
    "Flux3Transformer2DModel": Case(
        {**FLUX, "cond_in_channels": 16, "timestep_channels": 16, "axes_dims_rope": (2, 2, 2, 2)},
        TOKENS,
        fixed={"img_ids": IMAGE_4.float(), "txt_ids": torch.zeros(TEXT, 4)},
    ),
    "FluxTransformer2DModel": Case(
        {**FLUX, "pooled_projection_dim": 8, "guidance_embeds": True, "axes_dims_rope": (4, 2, 2)},
        {**TOKENS, "pooled_projections": (8,), "guidance": ()},
        fixed=FLUX_IDS,
    ),
    "HunyuanImageTransformer2DModel": Case(
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 2,
            "num_refiner_layers": 1, "text_embed_dim": WIDTH, "rope_axes_dim": (4, 4),
        },
        PICTURE, masks=("encoder_attention_mask",),
    ),
    "HunyuanVideoTransformer3DModel": Case(
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 2,
            "num_refiner_layers": 1, "text_embed_dim": WIDTH, "pooled_projection_dim": 8, "rope_axes_dim": (4, 2, 2),
        },
        {**CLIP_3D, "pooled_projections": (8,), "guidance": ()}, masks=("encoder_attention_mask",),
    ),
    "Ideogram4Transformer2DModel": Case(
        {
            "in_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
            "intermediate_size": 16, "adaln_dim": 8, "llm_features_dim": WIDTH, "mrope_section": (2, 1, 1),
        },
        {"hidden_states": (16, 4), "encoder_hidden_states": (16, WIDTH), "timestep": TIME, "position_ids": (16, 3),
         "segment_ids": (16,), "indicator": (16,)},
        dtypes=dict.fromkeys(("position_ids", "segment_ids", "indicator"), torch.int64),
    ),
    "JoyImageEditTransformer3DModel": Case(
        {
            "in_channels": 4, "hidden_size": 16, "num_attention_heads": 2, "text_dim": WIDTH, "num_layers": 2,
            "rope_dim_list": [4, 2, 2],
        },
        CLIP_3D,
    ),
    "Krea2Transformer2DModel": Case(
        {
            "in_channels": 16, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
            "num_key_value_heads": 1, "intermediate_size": 32, "timestep_embed_dim": 16, "text_hidden_dim": WIDTH,
            "num_text_layers": 3, "text_num_attention_heads": 2, "text_num_key_value_heads": 2,
            "text_intermediate_size": 16, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1,
            "axes_dims_rope": (4, 2, 2),
        },
        {**TOKENS, "encoder_hidden_states": (TEXT, 3, WIDTH)},
        fixed={"position_ids": torch.cat([torch.zeros(TEXT, 3), IMAGE.float()])},
    ),
    "LTXVideoTransformer3DModel": Case(
        {
            **HEADS, "in_channels": 16, "out_channels": 16, "cross_attention_dim": 16, "num_layers": 2,
            "caption_channels": WIDTH,
        },
        TOKENS, masks=("encoder_attention_mask",), fixed={"num_frames": 1, "height": 4, "width": 4},
    ),
    "LongCatImageTransformer2DModel": Case(
        {**FLUX, "pooled_projection_dim": 8, "axes_dims_rope": [4, 2, 2]}, TOKENS, fixed=FLUX_IDS
    ),
    "LongCatAudioDiTTransformer": Case(
        {"dit_dim": 16, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": WIDTH, "latent_dim": 8},
        {"hidden_states": (12, 8), "encoder_hidden_states": (TEXT, WIDTH), "timestep": TIME, "latent_cond": (12, 8)},
        masks=("encoder_attention_mask",),
    ),
    "MiniMaxH3Transformer3DModel": Case(
        {
            **HEADS, "hidden_size": 16, "num_layers": 2, "num_refiner_layers": 1, "ffn_dim": 32, "in_channels": 4,
            "audio_in_channels": 8, "text_dim": WIDTH, "freq_dim": 16, "time_embed_hidden_dim": 16,
            "time_embed_dim": 8, "rope_freq_dim": 1,
        },
        {"hidden_states": (16, 16), "audio_hidden_states": (4, 8), "encoder_hidden_states": (TEXT, WIDTH),
         "timestep": TIME},
        fixed={
            "timestep_indices": torch.zeros(TEXT + 20, dtype=torch.int64),
            "token_tags": torch.cat([torch.full((n,), tag) for n, tag in ((TEXT, 1), (4, 2), (16, 0))]),
            "position_ids": torch.cat([torch.zeros(TEXT + 4, 3), IMAGE.float()]),
            "text_indices": torch.arange(TEXT), "audio_indices": torch.arange(TEXT, TEXT + 4),
            "video_indices": torch.arange(TEXT + 4, TEXT + 20),
        },
    ),
    "MiniMaxMusic3Transformer1DModel": Case(
        {
            "in_channels": 8, "condition_dim": WIDTH, "num_layers": 2, "num_attention_heads": 2,
            "attention_head_dim": 8, "ff_inner_dim": 16, "rotary_dim": 4, "fourier_embedding_dim": 8,
        },
        {"hidden_states": (8, 12), "encoder_hidden_states": (12, WIDTH), "timestep": TIME},
    ),
    "MotifVideoTransformer3DModel": Case(
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 2,
            "text_embed_dim": WIDTH, "rope_axes_dim": (4, 2, 2),
        },
        CLIP_3D, masks=("encoder_attention_mask",),
    ),
    "OvisImageTransformer2DModel": Case(
        {**FLUX, "out_channels": 16, "axes_dims_rope": (4, 2, 2)}, TOKENS, fixed=FLUX_IDS
    ),
    "PRXTransformer2DModel": Case(
        {
            "in_channels": 4, "context_in_dim": WIDTH, "hidden_size": 16, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2,
            "axes_dim": [4, 4],
        },
        PICTURE, masks=("attention_mask",),
    ),
    "PixArtTransformer2DModel": Case(
        {
            **HEADS, "in_channels": 4, "num_layers": 2, "cross_attention_dim": 16, "sample_size": 8,
            "caption_channels": WIDTH, "use_additional_conditions": False,
        },
        PICTURE, masks=("encoder_attention_mask",),
        fixed={"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "PriorTransformer": Case(
        {**HEADS, "num_layers": 2, "embedding_dim": 8, "num_embeddings": TEXT, "additional_embeddings": 4},
        {"hidden_states": (8,), "timestep": TIME, "proj_embedding": (8,), "encoder_hidden_states": (TEXT, 8)},
    ),
    "QwenImageTransformer2DModel": Case(
        {
            "in_channels": 16, "out_channels": 4, "num_layers": 2, **HEADS, "joint_attention_dim": WIDTH,
            "axes_dims_rope": (4, 2, 2),
        },
        TOKENS, masks=("encoder_hidden_states_mask",), fixed={"img_shapes": [(1, 4, 4)]},
    ),
    "SD3Transformer2DModel": Case(
        {
            "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2, **HEADS,
            "joint_attention_dim": WIDTH, "caption_projection_dim": 16, "pooled_projection_dim": 8,
            "pos_embed_max_size": 8, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
        },
        {**PICTURE, "pooled_projections": (8,)},
    ),
    "SanaTransformer2DModel": Case(
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": WIDTH, "sample_size": 8,
        },
        PICTURE, masks=("encoder_attention_mask",),
    ),
    "SanaVideoTransformer3DModel": Case(
        {
            "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "num_layers": 2,
            "num_cross_attention_heads": 2, "cross_attention_head_dim": 12, "cross_attention_dim": 24,
            "caption_channels": WIDTH, "sample_size": 8, "rope_max_seq_len": 32,
        },
        CLIP_3D, masks=("encoder_attention_mask",),
    ),
    "SkyReelsV2Transformer3DModel": Case(WAN, CLIP_3D),
    "Transformer2DModel": Case(
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "cross_attention_dim": WIDTH,
            "sample_size": 8, "patch_size": 2, "norm_type": "ada_norm_single", "norm_elementwise_affine": False,
            "num_embeds_ada_norm": 1000, "caption_channels": WIDTH, "use_additional_conditions": False,
            "attention_bias": True,
        },
        PICTURE, fixed={"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}},
    ),
    "WanTransformer3DModel": Case(WAN, CLIP_3D),
    "WanVACETransformer3DModel": Case(
        {**WAN, "vace_layers": [0, 1], "vace_in_channels": 4}, {**CLIP_3D, "control_hidden_states": (4, 2, 8, 8)},
        fixed={"control_hidden_states_scale": torch.ones(2)},
    ),
    "StableAudioDiTModel": Case(
        {
            "sample_size": 12, "in_channels": 8, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
            "num_key_value_attention_heads": 1, "out_channels": 8, "cross_attention_dim": 8,
            "time_proj_dim": 8, "global_states_input_dim": 8, "cross_attention_input_dim": WIDTH,
        },
        {"hidden_states": (8, 12), "timestep": TIME, "encoder_hidden_states": (TEXT, WIDTH),
         "global_hidden_states": (1, 8)},
        fixed={"rotary_embedding": (torch.rand(13, 4), torch.rand(13, 4))},
    ),
    "HunyuanDiT2DModel": Case(
        {
            **HEADS, "in_channels": 4, "patch_size": 2, "activation_fn": "gelu-approximate", "sample_size": 8,
            "hidden_size": 16, "num_layers": 2, "mlp_ratio": 2.0, "cross_attention_dim": WIDTH,
            "cross_attention_dim_t5": WIDTH, "pooled_projection_dim": 8, "text_len": TEXT, "text_len_t5": TEXT,
        },
        {**PICTURE, "encoder_hidden_states_t5": (TEXT, WIDTH), "image_meta_size": (6,), "style": ()},
        masks=("text_embedding_mask", "text_embedding_mask_t5"),
        fixed={"image_rotary_emb": (torch.rand(16, 8), torch.rand(16, 8))},
        dtypes={"style": torch.int64},
    ),
    "AceStepTransformer1DModel": Case(
        {
            "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 8, "in_channels": 24, "audio_acoustic_hidden_dim": 8,
            "encoder_hidden_size": WIDTH,
        },
        {"hidden_states": (12, 8), "context_latents": (12, 16), "timestep": TIME, "timestep_r": TIME,
         "encoder_hidden_states": (TEXT, WIDTH)},
    ),
    "HeliosTransformer3DModel": Case(
        {
            "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": WIDTH,
            "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_dim": (4, 4, 4),
            "has_multi_term_memory_patch": False, "zero_history_timestep": False, "guidance_cross_attn": False,
        },
        CLIP_3D,
    ),
    "ConsisIDTransformer3DModel": Case(
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": WIDTH, "num_layers": 2,
            "sample_width": 8, "sample_height": 8, "sample_frames": 8, "max_text_seq_length": TEXT,
        },
        {**CLIP_3D, "hidden_states": (2, 4, 8, 8)},
    ),
    "Kandinsky5Transformer3DModel": Case(
        {
            "in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": WIDTH, "in_text_dim2": 8, "time_dim": 8,
            "model_dim": 16, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 2, 2),
        },
        {"hidden_states": (2, 8, 8, 4), "encoder_hidden_states": (TEXT, WIDTH), "timestep": TIME,
         "pooled_projections": (8,)},
        fixed={
            "visual_rope_pos": [torch.arange(2), torch.arange(4), torch.arange(4)],
            "text_rope_pos": torch.arange(TEXT),
        },
    ),
}  # fmt: skip

REFUSED = {
    "EasyAnimateTransformer3DModel": Case(
        {
            "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "patch_size": 2,
            "num_layers": 2, "mmdit_layers": 1, "time_embed_dim": 8, "text_embed_dim": WIDTH, "sample_width": 8,
            "sample_height": 8, "time_position_encoding_type": "3d_rope",
        },
        CLIP_3D,
    ),
    "ErnieImageTransformer2DModel": Case(
        {
            "hidden_size": 16, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 32, "in_channels": 4,
            "out_channels": 4, "text_in_dim": WIDTH, "rope_axes_dim": (4, 2, 2),
        },
        {"hidden_states": (4, 4, 4), "timestep": TIME, "text_bth": (TEXT, WIDTH), "text_lens": ()},
        dtypes={"text_lens": torch.int64},
    ),
    "GlmImageTransformer2DModel": Case(
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "text_embed_dim": WIDTH,
            "time_embed_dim": 8, "condition_dim": 2, "prior_vq_quantizer_codebook_size": 20,
        },
        {**PICTURE, "target_size": (2,), "crop_coords": (2,), "prior_token_id": (16,), "prior_token_drop": (16,)},
        dtypes={"prior_token_id": torch.int64, "prior_token_drop": torch.bool},
    ),
    "LatteTransformer3DModel": Case(
        {
            **HEADS, "in_channels": 4, "out_channels": 4, "num_layers": 2, "cross_attention_dim": 16,
            "sample_size": 8, "patch_size": 2, "attention_bias": True, "activation_fn": "gelu-approximate",
            "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "num_embeds_ada_norm": 1000,
            "caption_channels": WIDTH, "video_length": 2,
        },
        CLIP_3D,
    ),
    "Lumina2Transformer2DModel": Case(
        {
            "sample_size": 8, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1,
            "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 2, "axes_dim_rope": (4, 4, 4),
            "axes_lens": (32, 16, 16), "cap_feat_dim": WIDTH,
        },
        PICTURE, masks=("encoder_attention_mask",),
    ),
    "MochiTransformer3DModel": Case(
        {
            **HEADS, "num_layers": 2, "pooled_projection_dim": 8, "in_channels": 4, "text_embed_dim": WIDTH,
            "time_embed_dim": 4, "max_sequence_length": TEXT,
        },
        CLIP_3D, masks=("encoder_attention_mask",),
    ),
    "LuminaNextDiT2DModel": Case(
        {
            "sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 16, "num_layers": 2,
            "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 8, "cross_attention_dim": WIDTH,
        },
        PICTURE, masks=("encoder_mask",),
        fixed={"image_rotary_emb": torch.rand(16, 16, 4), "cross_attention_kwargs": {"base_sequence_length": None}},
    ),
    "DiTTransformer2DModel": Case(
        {**HEADS, "in_channels": 4, "num_layers": 2, "sample_size": 8, "num_embeds_ada_norm": 5},
        {"hidden_states": (4, 8, 8), "timestep": TIME, "class_labels": ()},
        dtypes={"timestep": torch.int64, "class_labels": torch.int64},
    ),
}  # fmt: skip
"""Classes that cannot be cut."""


def inputs_of(case: Case, batch: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """One batch of the arguments that differ from sample to sample."""
    generator = torch.Generator().manual_seed(0)
    made = {
        name: torch.rand((batch, *shape), generator=generator, dtype=torch.float64)
        .mul(3 if name != "style" and case.dtypes.get(name) is torch.int64 else 0.9)
        .to(case.dtypes.get(name, dtype))
        for name, shape in case.tensors.items()
    }
    for name in case.masks:
        made[name] = torch.ones(batch, TEXT, dtype=torch.bool)
        made[name][:, -1] = torch.arange(batch) % 2 == 0
    return made
