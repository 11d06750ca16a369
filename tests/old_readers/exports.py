"""One step of training from a folder as the hub has it, and what is exported then."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
from kit import tiny_deepfloyd, tiny_described, tiny_pipelines
from kit.drawn_families import size_of
from kit.steered import save_steered
from kit.tiny_clips import save_clips
from kit.tiny_models import randomise_pipeline, tiny_text_encoder, tiny_transformer, tiny_unet, tiny_vae
from kit.tiny_runs import recipe_of, save_pictures, train_here
from old_readers.hub_folders import write_folder

from diffusionpipe.models.opening.folder import REGISTRY

WAYS: Mapping[str, Mapping[str, Mapping[str, object]]] = {
    "whole": {},
    "adapters": {"lora": {"rank": 2}},
    "merged": {"lora": {"rank": 2, "merge": True}},
    "text encoder": {"model": {"train": ["unet", "text_encoder"]}},
}
"""Sections of the recipe by the ways to export."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model of the table."""

    name: str
    build: Callable[[], Any]
    call: Mapping[str, object]
    """Arguments of diffusers' pipeline beside the number of steps."""
    ways: tuple[str, ...] = ("whole", "adapters", "merged")

    @property
    def eager(self) -> list[str]:
        """Components whose scores are capped; the fast attention of transformers 4 forgets to."""
        return ["text_encoder"] if self.name == "SanaPipeline" else []

    @property
    def is_fast(self) -> bool:
        """Whether the published folder has the file of a fast tokenizer beside that of sentencepiece."""
        return self.name in ("Stable Diffusion 3", "FLUX.1", "ChromaPipeline", "WanPipeline", "AuraFlowPipeline")


def _stable_diffusion(**scheduler: object) -> diffusers.StableDiffusionPipeline:
    return diffusers.StableDiffusionPipeline(
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(**tiny_pipelines.CLIP),
        tokenizer=tiny_pipelines._clip_tokenizer(),
        unet=tiny_unet(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1, **scheduler),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _dit() -> diffusers.DiTPipeline:
    return diffusers.DiTPipeline(
        transformer=tiny_transformer(num_embeds_ada_norm=1000, out_channels=4),
        vae=tiny_vae(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
    )


_TEXT = {"prompt": ["a cat", "b  c"]}
_GUIDED = _TEXT | {"negative_prompt": ["", "dog"], "guidance_scale": 1.5}
_ALL = (*WAYS,)


def _described(kind: str, **more: object) -> Source:
    clip, size = tiny_described.CLIPS.get(kind), size_of(kind)
    shape: dict[str, object] = {"height": size, "width": size}
    if clip is not None:
        shape = {"height": clip.height, "width": clip.width, "num_frames": clip.frames}
    call = REGISTRY[kind].call
    options = {} if call is None else dict(call.options)
    ways = ("whole",) if kind == "PixArtSigmaPipeline" else ("whole", "adapters", "merged")
    return Source(name=kind, build=tiny_described.PIPELINES[kind], call=_TEXT | options | shape | more, ways=ways)


SOURCES: Mapping[str, Source] = {
    source.name: source
    for source in (
        Source(name="Stable Diffusion 1", build=_stable_diffusion, call=_GUIDED | {"height": 8, "width": 8}, ways=_ALL),
        Source(
            name="Stable Diffusion 2",
            build=lambda: _stable_diffusion(prediction_type="v_prediction"),
            call=_GUIDED | {"height": 8, "width": 8},
            ways=_ALL,
        ),
        Source(
            name="ControlNet",
            build=tiny_pipelines.controlled,
            call=_GUIDED | {"height": 8, "width": 8},
            ways=("whole",),
        ),
        Source(name="Stable Diffusion XL", build=tiny_pipelines.sdxl, call=_GUIDED | {"height": 16, "width": 16}),
        Source(name="Stable Diffusion 3", build=tiny_pipelines.sd3, call=_GUIDED | {"height": 16, "width": 16}),
        Source(
            name="FLUX.1",
            build=tiny_pipelines.flux,
            call=_TEXT | {"negative_prompt": ["", "dog"], "true_cfg_scale": 1.5, "height": 16, "width": 16},
        ),
        Source(name="DiT", build=_dit, call={"class_labels": [0, 1], "guidance_scale": 1.5}, ways=("whole",)),
        Source(name="DeepFloyd IF", build=tiny_deepfloyd.tiny_if, call=_GUIDED, ways=("whole",)),
        _described("PixArtSigmaPipeline", guidance_scale=1.5),
        _described("SanaPipeline", guidance_scale=1.5),
        _described("LTXPipeline", guidance_scale=1.5),
        _described("WanPipeline", guidance_scale=1.5),
        _described("ZImagePipeline", guidance_scale=1.5, sigmas=[1.0, 0.6, 0.3]),  # others by default since 0.36
        _described("HunyuanVideoPipeline"),
        _described("ChromaPipeline", guidance_scale=1.5),
        _described("AuraFlowPipeline", guidance_scale=1.5),
        # diffusers 0.36 does not hide the padding of a shorter prompt, so that all are equally long.
        _described("QwenImagePipeline", prompt=["a cat", "b dog"], negative_prompt=["fog", "dog"], true_cfg_scale=1.5),
        _described("Flux2Pipeline"),
        _described("Flux2KleinPipeline", guidance_scale=1.5),
        _described("Krea2Pipeline"),
    )
}


def write_source(source: Source, folder: Path) -> Path:
    """The folder of the model, as the hub has it, with random weights."""
    pipeline = source.build()
    randomise_pipeline(pipeline)
    return write_folder(pipeline, folder, is_fast=source.is_fast)


def write_data(source: Source, folder: Path) -> Path:
    """Pictures or clips to train with."""
    clip = tiny_described.CLIPS.get(source.name)
    if source.name == "ControlNet":
        return save_steered(folder, 8)
    if clip is None:
        return save_pictures(folder, 8)
    return save_clips(folder, 8, frames=clip.frames + 3, width=clip.width, height=clip.height)


def arrays_of(source: Source, place: Path) -> dict[str, str]:
    """Files with tensors that the pipeline gets beside its call: those that steer a ControlNet."""
    if source.name != "ControlNet":
        return {}
    path = place / "image.npy"
    np.save(path, np.random.default_rng(0).random((2, 3, 8, 8), dtype=np.float32))
    return {"image": str(path)}


def export(source: Source, way: str, model: Path, data: Path, run: Path) -> Path:
    """Trains one step and exports; returns the exported folder."""
    sizes: dict[str, object] = {"resolution": source.call.get("height", 8)}
    if clip := tiny_described.CLIPS.get(source.name):
        sizes = {"resolution": clip.width, "height": clip.height, "frames": clip.frames}
    sections = {name: dict(section) for name, section in WAYS[way].items()}
    sections["model"] = {"path": str(model)} | sections.get("model", {})
    training = {"steps": 1, "batch": 4, "ema_decay": None}
    recipe = recipe_of(model, data, run, data=sizes, training=training, **sections)
    assert train_here(recipe) == 1
    return run / "export"
