"""The facts in the header of a file of adapters: ModelSpec 1.0.1, kohya's `ss_` keys, and checksums of the tensors.

All values are strings. Programs show title, trigger phrase and date, and take the family from `modelspec.architecture`
(https://github.com/Stability-AI/ModelSpec) or `ss_base_model_version` (https://github.com/kohya-ss/sd-scripts). Nothing
there names a path of this machine, a picture or a caption.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from safetensors.torch import save
from torch import Tensor

from diffusionpipe.models.objectives.objective import Prediction
from diffusionpipe.models.parameters.lora import LoraSettings
from diffusionpipe.trainer.recipe import Recipe

_TIMES = 1000
_LEGACY_START, _LEGACY_BYTES, _LEGACY_DIGITS = 0x100000, 0x10000, 8
_MIXED = {"bfloat16": "bf16"}
_PREDICTIONS = {Prediction.EPSILON: "epsilon", Prediction.V_PREDICTION: "v"}


@dataclass(frozen=True, slots=True)
class BaseKind:
    """The kind of a base model in other programs' words."""

    architecture: str
    """The name of the architecture in the header of adapters, without "/lora"."""
    version: str | None = None
    """The value of kohya's key ss_base_model_version; None where kohya's scripts have none."""
    names: str = "diffusers"
    """"diffusers", or the address of the authors' program if the file for ComfyUI names layers as the authors do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFacts:
    """The facts about trained adapters that the header of their file states."""

    pipeline: str
    """The class of the pipeline in model_index.json."""
    config: Mapping[str, Any]
    """The configuration of the denoiser."""
    base_model: str
    """The public name of the base model."""
    settings: LoraSettings
    prediction: Prediction
    step: int
    """The number of training steps."""
    date: datetime
    """The time at which the checkpoint was written."""
    name: str
    """The name by which programs list the file."""
    recipe: Recipe | None = None
    """The recipe of the run; None where there is none."""


def base_kind(pipeline: str, config: Mapping[str, Any], prediction: Prediction) -> BaseKind:
    """The words of other programs for the base model of a pipeline.

    `config`: the configuration of its denoiser, by which models of one pipeline are told apart.

    Where no program has published a word for it, the architecture is the pipeline's name.
    """
    is_v = prediction is Prediction.V_PREDICTION
    match pipeline:
        # The text encoder of version 2 is wider.
        case "StableDiffusionPipeline" if config.get("cross_attention_dim") == 1024:
            architecture = "stable-diffusion-v2-768-v" if is_v else "stable-diffusion-v2-512"
            return BaseKind(architecture, "sd_v2_v" if is_v else "sd_v2")
        case "StableDiffusionPipeline":
            return BaseKind("stable-diffusion-v1", "sd_v1")
        case "StableDiffusionXLPipeline":
            return BaseKind("stable-diffusion-xl-v1-base", "sdxl_base_v1-0")
        case "StableDiffusion3Pipeline":
            size = "5-medium" if config.get("dual_attention_layers") else "5-large"
            size = "medium" if size == "5-large" and config.get("num_layers") == 24 else size
            return BaseKind(f"stable-diffusion-3-{size}", names="https://github.com/Stability-AI/sd3.5")
        case "FluxPipeline":
            kind = "dev" if config.get("guidance_embeds") else "schnell"
            return BaseKind(f"flux-1-{kind}", "flux1", "https://github.com/black-forest-labs/flux")
        case "ChromaPipeline":
            return BaseKind("chroma", "chroma", "https://huggingface.co/lodestones/Chroma")
        case "Flux2Pipeline":
            return BaseKind("Flux.2-dev", names="https://github.com/black-forest-labs/flux2")
        case "Flux2KleinPipeline":
            size = "4b" if config.get("num_attention_heads", 24) <= 24 else "9b"
            return BaseKind(f"Flux.2-klein-{size}", names="https://github.com/black-forest-labs/flux2")
        case "WanPipeline":
            return BaseKind("wan2.1", names="https://github.com/Wan-Video/Wan2.1")
        case "HunyuanVideoPipeline":
            return BaseKind("hunyuan-video", names="https://github.com/Tencent/HunyuanVideo")
        case "LTXPipeline":
            return BaseKind("LTX-Video", names="https://github.com/Lightricks/LTX-Video")
        case "QwenImagePipeline":
            return BaseKind("Qwen-Image")
        case "ZImagePipeline":
            return BaseKind("Z-Image")
    return BaseKind(pipeline.removesuffix("Pipeline"))


def header(facts: AdapterFacts, tensors: Mapping[str, Tensor], *, has_alpha: bool, is_original: bool) -> dict[str, str]:
    """The metadata of a safetensors file with these adapters: ModelSpec's and kohya's keys, all values texts.

    `has_alpha`: whether the file has alphas beside the matrices; without them alpha is the rank. `is_original`: whether
    layers have the names of the model's authors.
    """
    kohya = _kohya(facts, has_alpha=has_alpha)
    # Both hashes are sd-scripts': of a file with its keys alone, of the tensors or of 64 KiB from the first MiB on.
    content = save(dict(tensors), metadata=kohya)
    start = 8 + int.from_bytes(content[:8], "little")
    digest = hashlib.sha256(memoryview(content)[start:]).hexdigest()
    legacy = content[_LEGACY_START : _LEGACY_START + _LEGACY_BYTES]
    return {
        "format": "pt",
        **kohya,
        "sshs_model_hash": digest,
        "sshs_legacy_hash": hashlib.sha256(legacy).hexdigest()[:_LEGACY_DIGITS],
        **_modelspec(facts, is_original=is_original),
        "modelspec.hash_sha256": f"0x{digest}",
    }


def _modelspec(facts: AdapterFacts, *, is_original: bool) -> dict[str, str]:
    kind = base_kind(facts.pipeline, facts.config, facts.prediction)
    found = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{kind.architecture}/lora",
        "implementation": kind.names if is_original else "diffusers",
        "title": facts.name,
        "description": f"Adapters (LoRA) of rank {facts.settings.rank} for {facts.base_model}",
        "date": facts.date.isoformat(timespec="seconds"),
    }
    if facts.prediction in _PREDICTIONS:
        found["prediction_type"] = _PREDICTIONS[facts.prediction]
    recipe = facts.recipe
    if recipe is not None:
        data, (first, last) = recipe.data, recipe.objective.time_range
        found["resolution"] = f"{data.resolution}x{data.height or data.resolution}"
        if (first, last) != (0, 1):
            found["timestep_range"] = f"{round(first * _TIMES)},{max(round(last * _TIMES) - 1, 0)}"
        if recipe.trigger is not None:
            found["trigger_phrase"] = recipe.trigger
    return {f"modelspec.{key}": value for key, value in found.items()}


def _kohya(facts: AdapterFacts, *, has_alpha: bool) -> dict[str, str]:
    settings = facts.settings
    kind = base_kind(facts.pipeline, facts.config, facts.prediction)
    found = {
        "ss_v2": str((kind.version or "").startswith("sd_v2")),
        "ss_network_module": "networks.lora_flux" if kind.version in ("flux1", "chroma") else "networks.lora",
        "ss_network_dim": str(settings.rank),
        "ss_network_alpha": f"{settings.scale * settings.rank if has_alpha else settings.rank:g}",
        "ss_network_args": json.dumps({}),
        "ss_output_name": facts.name,
        "ss_sd_model_name": facts.base_model,
        "ss_steps": str(facts.step),
    }
    if kind.version is not None:
        found["ss_base_model_version"] = kind.version
    recipe = facts.recipe
    if recipe is not None:
        training, data = recipe.training, recipe.data
        found |= {
            "ss_max_train_steps": str(training.steps or facts.step),  # of a recipe with epochs, where it ended
            "ss_learning_rate": f"{recipe.optimizer.learning_rate:g}",
            "ss_optimizer": recipe.optimizer.name,
            "ss_lr_scheduler": recipe.learning_rate.schedule,
            "ss_lr_warmup_steps": str(recipe.learning_rate.warmup_steps),
            "ss_total_batch_size": str(training.batch),
            "ss_mixed_precision": _MIXED.get(training.precision, "no"),
            "ss_seed": str(training.seed),
            "ss_resolution": f"({data.resolution}, {data.height or data.resolution})",
        }
        if data.clip_skip is not None:
            found["ss_clip_skip"] = str(data.clip_skip)
        if data.caption_chunks > 1:
            found["ss_max_token_length"] = str(75 * data.caption_chunks)  # tokens of captions, without marks
    return {key: str(value) for key, value in found.items()}
