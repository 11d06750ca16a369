"""The models and pictures of the recorded trainings, made by rule: the same bits on every machine.

Nothing here is shared with the other tests, so that a change to their models leaves the recordings alone. Numbers come
from SHAKE-256 of their names, uniform and scaled by operations that IEEE 754 rounds in one way only; torch's and
numpy's normal numbers differ between processors. `digest` of what is made is recorded beside the losses: a change here
is told apart from a change in training.
"""

import json
from collections.abc import Iterable
from hashlib import sha256, shake_256
from pathlib import Path
from string import ascii_lowercase

import diffusers
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

RESOLUTION = 8
NUM_PICTURES = 12
NUM_CLASSES = 5
BETAS = [number * 2.0**-16 for number in range(1, 1001)]
"""Of the noise schedule, in the folder as numbers: torch's `linspace` differs between processors in the last bit."""
WORDS = [*ascii_lowercase, *(f"{letter}</w>" for letter in ascii_lowercase), "<|startoftext|>", "<|endoftext|>"]
PIECES = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), *((letter, -2.0) for letter in ascii_lowercase)]
UNET = {
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "layers_per_block": 1,
    "cross_attention_dim": 8,
    "attention_head_dim": 2,
    "norm_num_groups": 4,
}


def numbers(name: str, count: int) -> NDArray[np.float64]:
    """`count` numbers uniform in [0, 1), a function of the name."""
    words = np.frombuffer(shake_256(name.encode()).digest(8 * count), dtype="<u8")
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def save_model(kind: str, folder: Path) -> str:
    """Writes the diffusers folder of a kind of model; the digest of its weights and betas."""
    pipeline = _PIPELINES[kind]()
    parts = {name: part for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}
    for name, part in parts.items():
        _fill(part, f"{kind}.{name}")
    pipeline.save_pretrained(folder)
    weights = [
        (f"{name}.{key}", tensor.detach().numpy().astype("<f4").tobytes())
        for name, part in parts.items()
        for key, tensor in part.named_parameters()
    ]
    return digest([*weights, ("betas", json.dumps(pipeline.scheduler.config.get("trained_betas")).encode())])


def save_pictures(folder: Path) -> str:
    """Writes pictures with captions, labels and pictures that steer; the digest of them all."""
    (folder / "steering").mkdir(parents=True)
    rows, contents = [], []
    for number in range(NUM_PICTURES):
        name = f"{number:02d}.png"
        for file in (name, f"steering/{name}"):
            values = shake_256(f"pictures/{file}".encode()).digest(RESOLUTION * RESOLUTION * 3)
            pixels = np.frombuffer(values, dtype=np.uint8).reshape(RESOLUTION, RESOLUTION, 3)
            Image.fromarray(pixels).save(folder / file)
            contents.append((file, values))
        row = {"file_name": name, "text": f"{ascii_lowercase[number]} b", "label": number % NUM_CLASSES}
        rows.append(json.dumps({**row, "conditioning_image": f"steering/{name}"}))
    text = "\n".join(rows) + "\n"
    (folder / "metadata.jsonl").write_text(text, encoding="utf-8")
    return digest([*contents, ("metadata", text.encode())])


def digest(contents: Iterable[tuple[str, bytes]]) -> str:
    """Of names and bytes, in whatever order."""
    found = sha256()
    for name, content in sorted(contents):
        found.update(f"{name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()


def _fill(module: torch.nn.Module, name: str) -> None:
    """Values of variance 1 / fan-in for matrices; small ones for vectors, around 1 for the scales of norms."""
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            values = (2 * numbers(f"{name}.{key}", parameter.numel()) - 1) * np.sqrt(3.0)
            if parameter.ndim > 1:
                values = values / np.sqrt(float(parameter[0].numel()))
            else:
                values = 0.1 * values + float("norm" in key and key.endswith("weight"))
            parameter.copy_(torch.from_numpy(values.reshape(parameter.shape)))


def _vae(**config: object) -> diffusers.AutoencoderKL:
    return diffusers.AutoencoderKL(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=2,
        latent_channels=4,
        scaling_factor=0.7,
        **config,
    )


def _clip(**config: object) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(WORDS),
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=6,
            bos_token_id=len(WORDS) - 2,
            eos_token_id=len(WORDS) - 1,
            pad_token_id=len(WORDS) - 1,
            **config,
        )
    )


def _clip_tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(WORDS)}, merges=[], model_max_length=6)


def _stable_diffusion() -> dict[str, object]:
    unet = diffusers.UNet2DConditionModel(**UNET, up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), sample_size=4)
    return {
        "vae": _vae(),
        "text_encoder": _clip(),
        "tokenizer": _clip_tokenizer(),
        "unet": unet,
        "scheduler": diffusers.DDIMScheduler(clip_sample=False, steps_offset=1, trained_betas=BETAS),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def _unet() -> diffusers.StableDiffusionPipeline:
    return diffusers.StableDiffusionPipeline(**_stable_diffusion())


def _controlnet() -> diffusers.StableDiffusionControlNetPipeline:
    controlnet = diffusers.ControlNetModel(**UNET, conditioning_embedding_out_channels=(4, 4))
    return diffusers.StableDiffusionControlNetPipeline(**_stable_diffusion(), controlnet=controlnet)


def _dit() -> diffusers.DiTPipeline:
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=4,
        num_layers=3,
        sample_size=4,
        patch_size=2,
        num_embeds_ada_norm=NUM_CLASSES,
    )
    scheduler = diffusers.DDIMScheduler(clip_sample=False, trained_betas=BETAS)
    return diffusers.DiTPipeline(vae=_vae(), transformer=transformer, scheduler=scheduler)


def _t5() -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(PIECES),
            d_model=20,
            d_kv=4,
            d_ff=16,
            num_layers=2,
            num_heads=2,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=16,
            feed_forward_proj="gated-gelu",
        )
    )


def _flux() -> diffusers.FluxPipeline:
    transformer = diffusers.FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=20,
        pooled_projection_dim=8,
        guidance_embeds=True,
        axes_dims_rope=(4, 2, 2),
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(shift_factor=0.2, use_quant_conv=False),
        text_encoder=_clip(),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=_t5(),
        tokenizer_2=T5Tokenizer(vocab=PIECES, extra_ids=0, model_max_length=512),
        transformer=transformer,
    )


def _sd3() -> diffusers.StableDiffusion3Pipeline:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=4,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=4,
        num_attention_heads=2,
        caption_projection_dim=8,
        joint_attention_dim=20,
        pooled_projection_dim=16,
        pos_embed_max_size=6,
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=_vae(shift_factor=0.2, use_quant_conv=False),
        text_encoder=CLIPTextModelWithProjection(_clip(projection_dim=8).config),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(_clip(projection_dim=8).config),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=_t5(),
        tokenizer_3=T5Tokenizer(vocab=PIECES, extra_ids=0, model_max_length=256),
    )


_PIPELINES = {"unet": _unet, "dit": _dit, "flux": _flux, "controlnet": _controlnet, "sd3": _sd3}
KINDS = ("unet", "dit", "flux", "controlnet")
"""Of the recorded trainings."""
