"""Pictures of tiny families as `sample` draws them, and as diffusers does."""

from inspect import signature

import diffusers
import torch

from diffusionpipe.models.folder import REGISTRY, model_index, scheduler_config
from diffusionpipe.models.latents import encoding_of
from diffusionpipe.models.pipeline_defaults import default_guidance
from diffusionpipe.trainer import drawing
from diffusionpipe.trainer.conditions import Wish
from diffusionpipe.trainer.data.randomness import normal
from diffusionpipe.trainer.drawing import Arithmetic
from diffusionpipe.trainer.folder_drawing import draw_from_folder
from diffusionpipe.trainer.guidance import guidance_of
from diffusionpipe.trainer.sampling import SamplingSettings

SIZE = 32
PROMPTS, NEGATIVES = ("A cat ", "b  c"), ("", "Dog")


def settings_of(folder, guidance, **more):
    is_distilled = default_guidance(folder).embedded is not None
    strength = guidance_of(folder, None, guidance) if is_distilled else guidance_of(folder, guidance, 1.0)
    return SamplingSettings(
        steps=4,
        guidance=strength.scale,
        embedded_guidance=strength.embedded,
        unguided=strength.unguided,
        seed=0,
        scheduler=scheduler_config(folder),
        **more,
    )


def drawn_here(monkeypatch, folder, guidance, size=SIZE):
    """What `sample` draws, before it is rounded to 256 levels."""
    monkeypatch.setattr(drawing, "in_levels", list)
    settings = settings_of(folder, guidance)
    negatives = negatives_of(getattr(diffusers, model_index(folder)["_class_name"])) if settings.is_guided else ()
    wish = Wish(prompts=PROMPTS, negatives=negatives)
    # Rows as most pipelines take them: products of matrices round by their number of rows.
    rows = Arithmetic(rows=len(PROMPTS))
    device = torch.device("cpu")
    return torch.stack(draw_from_folder(folder, wish, settings, resolution=size, device=device, arithmetic=rows))


def negatives_of(kind):
    """What diffusers' pipeline of this class can be told."""
    return NEGATIVES if "negative_prompt" in signature(kind.__call__).parameters else [""] * len(PROMPTS)


def drawn_by_diffusers(folder, guidance, size=SIZE):
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    call = REGISTRY[type(pipeline).__name__].call
    shape = encoding_of(pipeline.vae, size, "float32").latents
    noise = normal(seed=0, purpose="sampling", step=0, positions=range(len(PROMPTS)), shape=shape)
    told = {"negative_prompt": list(NEGATIVES)} if any(negatives_of(type(pipeline))) else {}
    pictures = pipeline(
        prompt=list(PROMPTS),
        **told,
        latents=call.takes(noise),
        num_inference_steps=4,
        height=size,
        width=size,
        output_type="pt",
        **({call.scale: guidance} if call.scale else {}),
        **call.options,
    )[0]
    pictures = pictures[:, 0] if pictures.ndim == 5 else pictures
    return pictures.permute(0, 2, 3, 1)
