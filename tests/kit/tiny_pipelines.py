"""Tiny diffusers pipelines of the larger models, with tokenizers of single letters."""

from string import ascii_lowercase

import diffusers
from kit.tiny_models import (
    FILLING_FLUX,
    FILLING_UNET,
    tiny_controlnet,
    tiny_flux_transformer,
    tiny_projected_text_encoder,
    tiny_sd3_transformer,
    tiny_sdxl_unet,
    tiny_t5,
    tiny_text_encoder,
    tiny_unet,
    tiny_vae,
)
from transformers import CLIPTokenizer, T5Tokenizer

WORDS = [*ascii_lowercase, *(f"{letter}</w>" for letter in ascii_lowercase), "<|startoftext|>", "<|endoftext|>"]
CLIP = {"vocab_size": len(WORDS), "bos_token_id": len(WORDS) - 2, "eos_token_id": len(WORDS) - 1}
PIECES = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), *((letter, -2.0) for letter in ascii_lowercase)]


def _clip_tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(WORDS)}, merges=[], model_max_length=6)


def _t5_tokenizer() -> T5Tokenizer:
    return T5Tokenizer(vocab=PIECES, extra_ids=0, model_max_length=512)


def sdxl() -> diffusers.StableDiffusionXLPipeline:
    """A Stable Diffusion XL."""
    return diffusers.StableDiffusionXLPipeline(
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(**CLIP),
        text_encoder_2=tiny_projected_text_encoder(**CLIP),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        unet=tiny_sdxl_unet(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
        add_watermarker=False,
    )


def controlled() -> diffusers.StableDiffusionControlNetPipeline:
    """A Stable Diffusion with a ControlNet."""
    return diffusers.StableDiffusionControlNetPipeline(
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(**CLIP),
        tokenizer=_clip_tokenizer(),
        unet=tiny_unet(),
        controlnet=tiny_controlnet(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sd3() -> diffusers.StableDiffusion3Pipeline:
    """A Stable Diffusion 3."""
    return diffusers.StableDiffusion3Pipeline(
        transformer=tiny_sd3_transformer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=tiny_vae(shift_factor=0.2, use_quant_conv=False),
        text_encoder=tiny_projected_text_encoder(**CLIP),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=tiny_projected_text_encoder(**CLIP),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=tiny_t5(vocab_size=len(PIECES)),
        tokenizer_3=_t5_tokenizer(),
    )


def flux() -> diffusers.FluxPipeline:
    """A FLUX.1."""
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=tiny_vae(shift_factor=0.2, use_quant_conv=False),
        text_encoder=tiny_text_encoder(**CLIP),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=tiny_t5(vocab_size=len(PIECES)),
        tokenizer_2=_t5_tokenizer(),
        transformer=tiny_flux_transformer(),
    )


def inpainting() -> diffusers.StableDiffusionInpaintPipeline:
    """A Stable Diffusion that fills holes."""
    return diffusers.StableDiffusionInpaintPipeline(
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(**CLIP),
        tokenizer=_clip_tokenizer(),
        unet=tiny_unet(**FILLING_UNET),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl_inpainting() -> diffusers.StableDiffusionXLInpaintPipeline:
    """A Stable Diffusion XL that fills holes."""
    return diffusers.StableDiffusionXLInpaintPipeline(
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(**CLIP),
        text_encoder_2=tiny_projected_text_encoder(**CLIP),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        unet=tiny_sdxl_unet(**FILLING_UNET),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
        add_watermarker=False,
    )


def flux_fill() -> diffusers.FluxFillPipeline:
    """A FLUX.1 Fill."""
    return diffusers.FluxFillPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=tiny_vae(shift_factor=0.2, use_quant_conv=False),
        text_encoder=tiny_text_encoder(**CLIP),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=tiny_t5(vocab_size=len(PIECES)),
        tokenizer_2=_t5_tokenizer(),
        transformer=tiny_flux_transformer(**FILLING_FLUX),
    )


FILLING = {"inpainting": inpainting, "sdxl inpainting": sdxl_inpainting, "flux fill": flux_fill}
"""Pipelines that fill holes of pictures."""
PIPELINES = {"sdxl": sdxl, "controlnet": controlled, "sd3": sd3, "flux": flux}
