"""The form of names that ComfyUI reads of each pipeline's adapters, and diffusers too where it can.

| pipeline | denoiser | text encoders |
|---|---|---|
| Stable Diffusion 1, 2 | `lora_unet_` + diffusers' name | `lora_te_` |
| Stable Diffusion XL | `lora_unet_` + diffusers' name | `lora_te1_`, `lora_te2_` |
| Stable Diffusion 3 | `lora_unet_` + original name | `lora_te1_`, `lora_te2_`, T5: `lora_te3_` |
| FLUX.1 | `lora_unet_` + original name | `lora_te1_`, T5: `lora_te3_` |
| FLUX.2, Chroma | `lora_unet_` + original name | |
| Qwen-Image | `lora_unet_` + diffusers' name | |
| Wan | `lora_unet_` + original name of whole blocks, else `diffusion_model.` | |
| LTX-Video, HunyuanVideo | `diffusion_model.` + original name | |
| Z-Image | `diffusion_model.` + diffusers' name | |
| AuraFlow | `transformer.` + diffusers' name | |

Names after `lora_` have underscores for dots, `.lora_down` and `.lora_up`, and an `.alpha`. The others have `.lora_A`
and `.lora_B` without one, because diffusers' readers ignore it or refuse it: the scale is multiplied in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

KOHYA = "lora_unet_"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterNaming:
    """The names of layers in files of adapters for one pipeline: prefixes, and diffusers' or the authors' names."""

    prefix: str = KOHYA
    """The text before the name of a layer of the denoiser; with "." at its end the name keeps its dots."""
    is_original: bool = True
    """Whether the layers have the names that the model's authors gave them; else diffusers'."""
    whole_blocks: tuple[str, ...] = ()
    """The ends of the names of all layers in a block. `prefix` is used only if each block in the file has exactly these
    layers; else `partial` is. (): always `prefix`."""
    partial: str = ""
    """The prefix in files with blocks that are not whole."""
    only: tuple[str, ...] = ()
    """The starts of the names that readers accept; (): all names."""
    originals: tuple[str, ...] = ()
    """The starts of diffusers' names that are replaced by original names although `is_original` is False."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Component of a text encoder -> its prefix."""
    has_one_alpha: bool = False
    """Whether all layers of a component need one alpha: diffusers' reader ignores other alphas of attention."""


_WAN = (
    *(f"self_attn.{name}" for name in "qkvo"),
    *(f"cross_attn.{name}" for name in "qkvo"),
    *("ffn.0", "ffn.2"),
)
_CLIPS = {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_"}
_SD = AdapterNaming(is_original=False, texts={"text_encoder": "lora_te_"}, has_one_alpha=True)
# diffusers' reader knows this layer by its authors' name alone.
_SDXL = AdapterNaming(is_original=False, originals=("add_embedding.",), texts=_CLIPS, has_one_alpha=True)
_FLUX = AdapterNaming(texts={"text_encoder": "lora_te1_", "text_encoder_2": "lora_te3_"})
# diffusers refuses a file with any other layer.
_WAN_FILES = AdapterNaming(
    whole_blocks=_WAN,
    partial="diffusion_model.",
    only=("blocks.", "time_embedding.", "time_projection.", "text_embedding.", "img_emb.", "head."),
)
FORMS: Mapping[str, AdapterNaming] = {
    "StableDiffusionPipeline": _SD,
    "StableDiffusionInpaintPipeline": _SD,
    "StableDiffusionXLPipeline": _SDXL,
    "StableDiffusionXLInpaintPipeline": _SDXL,
    "StableDiffusion3Pipeline": AdapterNaming(texts=_CLIPS | {"text_encoder_3": "lora_te3_"}),
    "FluxPipeline": _FLUX,
    "FluxFillPipeline": _FLUX,
    "Flux2Pipeline": AdapterNaming(),
    "Flux2KleinPipeline": AdapterNaming(),
    "ChromaPipeline": AdapterNaming(),
    "QwenImagePipeline": AdapterNaming(is_original=False),
    "WanPipeline": _WAN_FILES,
    "WanImageToVideoPipeline": _WAN_FILES,
    "LTXPipeline": AdapterNaming(prefix="diffusion_model."),
    # ComfyUI gives the layers outside of these blocks other names than the authors' files.
    "HunyuanVideoPipeline": AdapterNaming(
        prefix="diffusion_model.", only=("double_blocks.", "single_blocks.", "txt_in.individual_token_refiner.blocks.")
    ),
    "ZImagePipeline": AdapterNaming(
        prefix="diffusion_model.", is_original=False, only=("layers.", "noise_refiner.", "context_refiner.")
    ),
    "AuraFlowPipeline": AdapterNaming(prefix="transformer.", is_original=False),
}
"""The form of adapter files that other programs read, by the pipeline class in model_index.json."""


def text_layer(prefix: str, module: str, kind: str) -> str:
    """The name of a text encoder's layer in a file, e.g. "lora_te1_text_model_encoder_layers_0_self_attn_q_proj".

    `prefix`: the start of the encoder's names in the file. `module`: the layer's name in the encoder. `kind`: the
    encoder's class, e.g. "CLIPTextModel".
    """
    return prefix + with_text_model(module, kind).replace(".", "_")


def with_text_model(module: str, kind: str) -> str:
    """The name of a text encoder's layer in other programs.

    A CLIP's begins with "text_model." there, which transformers 5.6 left out.
    """
    if kind.startswith("CLIP") and not module.startswith(("text_model.", "text_projection")):
        return f"text_model.{module}"
    return module
