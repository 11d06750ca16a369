"""Tiny diffusers pipelines of the families that are described as data."""

from pathlib import Path

import diffusers
import torch
from kit.tiny_models import randomise_pipeline, tiny_t5, tiny_text_encoder, tiny_vae
from kit.tiny_pipelines import CLIP, PIECES, WORDS
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    LlamaConfig,
    LlamaModel,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    MistralConfig,
    PixtralVisionConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from diffusionpipe.models.base.family import Clip
from diffusionpipe.models.families.sana_instruction import INSTRUCTION
from diffusionpipe.models.opening.folder import REGISTRY

BYTES = sorted(ByteLevel.alphabet())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if m.content is string else m.content[0].text }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>{% endif %}{% endif %}"
)
DECODER = {
    "vocab_size": len(BYTES) + len(SPECIAL),
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
"""Of Qwen's encoders, which read no pictures here."""


def qwen_tokenizer(side: str = "right", *more: str) -> Qwen2Tokenizer:
    """One token a byte, and one for each further text, padded on that side."""
    vocabulary = {token: number for number, token in enumerate([*BYTES, *SPECIAL, *more])}
    marks = {"pad_token": SPECIAL[0], "extra_special_tokens": [*SPECIAL[1:], *more]}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], padding_side=side, **marks)
    tokenizer.chat_template = CHAT
    return tokenizer


def clip_vae(kind: type) -> diffusers.ModelMixin:
    """A VAE for clips that shrinks pictures four times, 4 latent channels."""
    numbers = {"latents_mean": [0.1, 0.2, -0.1, 0.0], "latents_std": [1.5, 2.0, 0.5, 1.0]}
    sizes = {
        "base_dim": 4,
        "z_dim": 4,
        "dim_mult": [1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True],
    }
    if kind is diffusers.AutoencoderKLWan:
        sizes |= {"scale_factor_spatial": 4, "scale_factor_temporal": 2}
    return kind(**sizes, **numbers)


def qwen_image() -> diffusers.QwenImagePipeline:
    """A Qwen-Image."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLConfig(
        text_config=DECODER | {"rope_parameters": rope, "rope_scaling": rope}, vision_config=VISION
    )
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02),
        vae=clip_vae(diffusers.AutoencoderKLQwenImage),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=qwen_tokenizer(),
        transformer=diffusers.QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=3,
            num_attention_heads=2,
            attention_head_dim=8,
            joint_attention_dim=16,
            axes_dims_rope=(4, 2, 2),
        ),
    )


def wan(**transformer: object) -> diffusers.WanPipeline:
    """A Wan 2.1 from text; `transformer` overrides the transformer's configuration."""
    config = UMT5Config(
        vocab_size=len(PIECES), d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    return diffusers.WanPipeline(
        tokenizer=T5Tokenizer(vocab=PIECES, extra_ids=0, model_max_length=512),
        text_encoder=UMT5EncoderModel(config),
        vae=clip_vae(diffusers.AutoencoderKLWan),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=diffusers.WanTransformer3DModel(
            **{
                "num_attention_heads": 2,
                "attention_head_dim": 12,
                "in_channels": 4,
                "out_channels": 4,
                "text_dim": 16,
                "freq_dim": 16,
                "ffn_dim": 32,
                "num_layers": 3,
                "rope_max_seq_len": 32,
                **transformer,
            }
        ),
    )


def wan_from_frames() -> diffusers.WanImageToVideoPipeline:
    """A Wan 2.1 from known frames, without CLIP: it reads 4 latents, 2 frames of a mask and 4 latents of a clip."""
    parts = wan(in_channels=4 + 2 + 4).components
    own = {name: part for name, part in parts.items() if name != "transformer_2"}
    return diffusers.WanImageToVideoPipeline(**own, image_encoder=None, image_processor=None)


def ltx() -> diffusers.LTXPipeline:
    """An LTX-Video, whose VAE has the statistics of its latents among its weights."""
    blocks = {"block_out_channels": (4, 8, 8), "spatio_temporal_scaling": (True,) * 3, "layers_per_block": (1,) * 4}
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=4,
        patch_size=4,
        down_block_types=("LTXVideoDownBlock3D",) * 3,
        downsample_type=("conv",) * 3,
        decoder_inject_noise=(False,) * 4,
        upsample_residual=(False,) * 3,
        upsample_factor=(1,) * 3,
        **blocks,
        **{f"decoder_{name}": value for name, value in blocks.items()},
    )
    vae.latents_mean.copy_(torch.tensor([0.1, 0.2, -0.1, 0.0]))
    vae.latents_std.copy_(torch.tensor([1.5, 2.0, 0.5, 1.0]))
    return diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
        vae=vae,
        text_encoder=tiny_t5(vocab_size=len(PIECES)),
        tokenizer=_t5_tokenizer(128),
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            cross_attention_dim=16,
            num_layers=2,
            caption_channels=20,
        ),
    )


def _llama_tokenizer() -> Qwen2Tokenizer:
    """One token a byte, but 95 for what HunyuanVideo puts before a caption, as with the published tokenizer."""
    prefix = REGISTRY["HunyuanVideoPipeline"].prompts["input_ids"].template.partition("{}")[0]
    tokens = [*BYTES, *SPECIAL, prefix[:-94]]
    tokenizer = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[],
        pad_token=SPECIAL[0],
        extra_special_tokens=tokens[len(BYTES) + 1 :],
    )
    assert len(tokenizer(prefix).input_ids) == 95
    return tokenizer


def hunyuan_video() -> diffusers.HunyuanVideoPipeline:
    """A HunyuanVideo of the first version."""
    tokenizer = _llama_tokenizer()
    return diffusers.HunyuanVideoPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
        vae=diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 3,
            up_block_types=("HunyuanVideoUpBlock3D",) * 3,
            block_out_channels=(4, 4, 4),
            layers_per_block=1,
            norm_num_groups=2,
            spatial_compression_ratio=4,
            mid_block_add_attention=False,
        ),
        text_encoder=LlamaModel(LlamaConfig(**DECODER | {"num_hidden_layers": 4, "vocab_size": len(tokenizer)})),
        tokenizer=tokenizer,
        text_encoder_2=tiny_text_encoder(**CLIP, max_position_embeddings=77),
        tokenizer_2=CLIPTokenizer(vocab={word: i for i, word in enumerate(WORDS)}, merges=[], model_max_length=77),
        transformer=diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(4, 2, 2),
        ),
    )


def z_image() -> diffusers.ZImagePipeline:
    """A Z-Image."""
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=tiny_vae(shift_factor=0.2, use_quant_conv=False),
        text_encoder=Qwen3Model(Qwen3Config(**DECODER, head_dim=8)),
        tokenizer=qwen_tokenizer(),
        transformer=diffusers.ZImageTransformer2DModel(
            in_channels=4,
            dim=24,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            axes_dims=[4, 4, 4],
            axes_lens=[600, 32, 32],
        ),
    )


def _t5_tokenizer(length: int) -> T5Tokenizer:
    return T5Tokenizer(vocab=PIECES, extra_ids=0, model_max_length=length)


def chroma() -> diffusers.ChromaPipeline:
    """A Chroma."""
    return diffusers.ChromaPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=tiny_vae(shift_factor=0.2, use_quant_conv=False),
        text_encoder=tiny_t5(vocab_size=len(PIECES)),
        tokenizer=_t5_tokenizer(512),
        transformer=diffusers.ChromaTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=20,
            axes_dims_rope=(4, 2, 2),
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=1,
        ),
    )


def aura_flow() -> diffusers.AuraFlowPipeline:
    """An AuraFlow."""
    config = UMT5Config(
        vocab_size=len(PIECES), d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu"
    )
    return diffusers.AuraFlowPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.73),
        vae=tiny_vae(),
        text_encoder=UMT5EncoderModel(config),
        tokenizer=_t5_tokenizer(256),
        transformer=diffusers.AuraFlowTransformer2DModel(
            sample_size=8,
            num_mmdit_layers=1,
            num_single_dit_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=16,
            caption_projection_dim=16,
            pos_embed_max_size=64,
        ),
    )


def pixart_sigma() -> diffusers.PixArtSigmaPipeline:
    """A PixArt-Sigma."""
    return diffusers.PixArtSigmaPipeline(
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
        vae=tiny_vae(),
        text_encoder=tiny_t5(vocab_size=len(PIECES)),
        tokenizer=_t5_tokenizer(300),
        transformer=diffusers.PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            cross_attention_dim=16,
            sample_size=8,
            caption_channels=20,
            use_additional_conditions=False,
        ),
    )


def flux2_vae() -> diffusers.AutoencoderKLFlux2:
    """A VAE whose latents are normalised in patches."""
    vae = diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=2,
    )
    vae.bn.running_mean.copy_(torch.linspace(-0.3, 0.3, 16))
    vae.bn.running_var.copy_(torch.linspace(0.5, 2.0, 16))
    return vae


def flux2_transformer(**config: object) -> diffusers.Flux2Transformer2DModel:
    """One block of two streams, two of one."""
    return diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=48,
        timestep_guidance_channels=16,
        axes_dims_rope=(2, 2, 2, 2),
        **config,
    )


def flux2_klein() -> diffusers.Flux2KleinPipeline:
    """A FLUX.2 [klein], whose language model is as deep as its layers are counted."""
    return diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=flux2_vae(),
        text_encoder=Qwen3ForCausalLM(Qwen3Config(**DECODER | {"num_hidden_layers": 28}, head_dim=8)),
        tokenizer=qwen_tokenizer(),
        transformer=flux2_transformer(guidance_embeds=False),
    )


def flux2() -> diffusers.Flux2Pipeline:
    """A FLUX.2 [dev] with another tokenizer of chats than the published one, which pads on the left."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Mistral3Config(
        text_config=MistralConfig(**DECODER | {"num_hidden_layers": 31}, head_dim=8),
        vision_config=PixtralVisionConfig(**vision, head_dim=8, image_size=16, patch_size=4),
    )
    return diffusers.Flux2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=flux2_vae(),
        text_encoder=Mistral3ForConditionalGeneration(config),
        tokenizer=qwen_tokenizer("left"),
        transformer=flux2_transformer(),
    )


def _gemma_tokenizer() -> GemmaTokenizer:
    """One token a letter, and one a line of Sana's instruction."""
    letters = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(chr(code) for code in range(33, 127)), "\u2581"]
    lines = INSTRUCTION.splitlines(keepends=True)
    vocabulary = {token: number for number, token in enumerate(letters)}
    return GemmaTokenizer(vocab=vocabulary, merges=[], extra_special_tokens=lines)


def sana() -> diffusers.SanaPipeline:
    """A Sana."""
    tokenizer, sizes = _gemma_tokenizer(), (4, 8, 8)
    vae = diffusers.AutoencoderDC(
        latent_channels=4,
        encoder_block_types="ResBlock",
        decoder_block_types="ResBlock",
        encoder_block_out_channels=sizes,
        decoder_block_out_channels=sizes,
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        encoder_qkv_multiscales=((), (), ()),
        decoder_qkv_multiscales=((), (), ()),
        scaling_factor=0.41,
    )
    config = Gemma2Config(**DECODER | {"vocab_size": len(tokenizer)}, head_dim=8)
    return diffusers.SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=Gemma2Model(config),
        vae=vae,
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=diffusers.SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=16,
            sample_size=8,
        ),
    )


def krea2() -> diffusers.Krea2Pipeline:
    """A Krea 2, whose language model is as deep as its layers are counted; the suffix of captions has 5 tokens."""
    tokenizer = qwen_tokenizer("right", "assistant")
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    config = Qwen3VLConfig(
        text_config=DECODER
        | {"vocab_size": len(tokenizer), "num_hidden_layers": 36, "head_dim": 8}
        | {"rope_parameters": rope, "rope_scaling": rope},
        vision_config=VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    )
    return diffusers.Krea2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400),
        vae=clip_vae(diffusers.AutoencoderKLQwenImage),
        text_encoder=Qwen3VLModel(config),
        tokenizer=tokenizer,
        transformer=diffusers.Krea2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            timestep_embed_dim=16,
            text_hidden_dim=16,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=16,
            axes_dims_rope=(4, 2, 2),
        ),
    )


PIPELINES = {
    "QwenImagePipeline": qwen_image,
    "WanPipeline": wan,
    "ZImagePipeline": z_image,
    "ChromaPipeline": chroma,
    "AuraFlowPipeline": aura_flow,
    "PixArtSigmaPipeline": pixart_sigma,
    "LTXPipeline": ltx,
    "HunyuanVideoPipeline": hunyuan_video,
    "Flux2KleinPipeline": flux2_klein,
    "Flux2Pipeline": flux2,
    "SanaPipeline": sana,
    "Krea2Pipeline": krea2,
}
RESOLUTIONS = {"LTXPipeline": 64, "SanaPipeline": 32}
"""Of pictures that the tests train and draw; else 16 and 32."""
CLIPS = {
    "WanPipeline": Clip(width=32, height=16, frames=5),
    "LTXPipeline": Clip(width=96, height=64, frames=17),
    "HunyuanVideoPipeline": Clip(width=64, height=32, frames=9),
}
"""The families of clips, with a size of two or three frames of latents that are not square."""


def save_described(kind: str, folder: Path) -> Path:
    """A folder of the tiny pipeline, with random weights."""
    pipeline = wan_from_frames() if kind == "WanImageToVideoPipeline" else PIPELINES[kind]()
    randomise_pipeline(pipeline)
    with torch.no_grad():
        for parameter in pipeline.vae.decoder.parameters():  # calm as a trained one: rounding errors stay small
            parameter.mul_(0.7 if parameter.ndim > 1 else 1.0)
    pipeline.save_pretrained(folder)
    return folder
