"""The part of a model card that draws a picture: a program for diffusers, or a command where it has no sampler."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diffusionpipe.models.base.family import WHOLE, CaptionReading
from diffusionpipe.models.objectives.objective import Prediction
from diffusionpipe.models.opening.pipeline_defaults import Guidance
from diffusionpipe.trainer.data.decoding.clips import PLAYED

FOLDER = "path/to/this/folder"
RUN = "path/to/the/run"
CONDITION = "path/to/the/conditioning/picture.png"
PICTURE = "path/to/a/picture.png"
MASK = "path/to/its/mask.png"
SMALL = "path/to/a/small/picture.png"
_OF_FLOWS = (
    "StableDiffusion3",
    "Flux",
    "QwenImage",
    "Wan",
    "ZImage",
    "Chroma",
    "AuraFlow",
    "LTX",
    "HunyuanVideo",
    "Sana",
    "Krea2",
)
_FROM_FRAMES = "WanImageToVideoPipeline"
"""The pipeline that draws clips from their first frame."""
OF_CLIPS = ("WanPipeline", _FROM_FRAMES, "LTXPipeline", "HunyuanVideoPipeline")
"""The pipelines that draw clips."""
FILLING = {
    "StableDiffusionPipeline": "StableDiffusionInpaintPipeline",
    "StableDiffusionXLPipeline": "StableDiffusionXLInpaintPipeline",
    "FluxPipeline": "FluxFillPipeline",
    "WanPipeline": _FROM_FRAMES,
    _FROM_FRAMES: _FROM_FRAMES,
}
"""For each pipeline, the inpainting pipeline that draws from a folder of it if its denoiser is an inpainting one."""
_WITH_RATE = "LTXPipeline"
"""The pipeline that tells the model the frames per second of a clip."""
_SUPER_RESOLUTION = "IFSuperResolutionPipeline"
_PROMPT = "a photo"
_DIT_CLASSES = 1000
_FLOW_REASON = (
    "The model predicts a flow. The {} of diffusers opens such a model, but cannot sample it: it was written for\n"
    "models that predict noise, and scales and initialises the latents accordingly."
)
_CLASSES_REASON = (
    "The model has {} classes. The DiTPipeline of diffusers opens such a model, but cannot sample it with guidance:\n"
    "it takes class 1000 for the null class."
)
_CAPTIONS_REASON = (
    "The model was trained with captions read {}. The {} of diffusers opens such a model, but reads\nprompts otherwise."
)
OF_CLASSES = ("DDPMPipeline", "DiTPipeline")
_NO_LABELS_REASON = (
    "The DDPMPipeline of diffusers opens this model, but cannot sample it: it gives the U-Net neither a class nor a\n"
    "small picture."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The picture or clip that the program on a model card draws: prompt, steps, guidance and size."""

    prompt: str = _PROMPT
    """The text to draw, for a model that reads captions."""
    label: int = 0
    """The class to draw, for a model of classes."""
    num_classes: int | None = None
    """The number of classes of a class-conditional model; None for other models."""
    steps: int = 30
    """The number of denoising steps."""
    guidance: Guidance
    """The guidance with which it draws."""
    resolution: int | None = None
    """The width in pixels; None: the pipeline chooses the size."""
    height: int | None = None
    """The height in pixels; None: the same as `resolution`."""
    frames: int | None = None
    """The number of frames of a clip; None: a picture."""
    frame_rate: float | None = None
    """The frames per second of a clip; None: `PLAYED`."""
    captions: CaptionReading = WHOLE
    """The way in which prompts are read."""


def snippet(
    example: Example,
    *,
    pipeline: str,
    prediction: Prediction,
    base_model: str | None,
    is_on_hub: bool,
    config: str | None = None,
    scheduler: Mapping[str, Any] | None,
) -> str:
    """The program in Markdown that draws the example with diffusers, or our command if diffusers cannot draw it.

    `base_model`: the model into which adapters are loaded; None for a whole model. `config`: the folder or id of the
    configurations, if the base model is one file. `scheduler`: the configuration of another scheduler than the loaded
    folder's; None to keep the folder's.
    """
    folder = FOLDER if base_model is None else RUN
    if prediction is Prediction.FLOW_MATCHING and not pipeline.startswith(_OF_FLOWS):
        return command(_FLOW_REASON.format(pipeline), example, pipeline, folder)
    if pipeline == "DDPMPipeline":
        return command(_NO_LABELS_REASON, example, pipeline, folder)
    if example.num_classes not in (None, _DIT_CLASSES):
        return command(_CLASSES_REASON.format(example.num_classes), example, pipeline, folder)
    if (how := _reading(example.captions)) is not None:
        return command(_CAPTIONS_REASON.format(how, pipeline), example, pipeline, folder)
    imports = [f"from diffusers import {pipeline}"]
    source = FOLDER if base_model is None else base_model if is_on_hub else f"path/to/{base_model}"
    opened = f'from_pretrained("{source}")'
    if base_model is not None and config is not None:
        opened = f'from_single_file("{source}", config="{config}")'
    lines = [f'pipeline = {pipeline}.{opened}  # on a GPU: .to("cuda")']
    if base_model is not None:
        lines.append(f'pipeline.load_lora_weights("{FOLDER}")')
    if scheduler is not None:
        kind = scheduler["_class_name"]
        imports[0] = f"from diffusers import {', '.join(sorted({kind, pipeline}))}"
        lines.append(f"pipeline.scheduler = {kind}.from_config({dict(scheduler)!r})")
    if "ControlNet" in pipeline or pipeline == _SUPER_RESOLUTION or pipeline in FILLING.values():
        imports.append("from diffusers.utils import load_image")
    arguments = "".join(f"    {argument},\n" for argument in _arguments(example, pipeline))
    if example.frames is not None:
        imports.append("from diffusers.utils import export_to_gif")
        rate = example.frame_rate or PLAYED
        lines += [f"frames = pipeline(\n{arguments}).frames[0]", f'export_to_gif(frames, "clip.gif", fps={rate:g})']
    else:
        # A pipeline of clips draws a picture as a clip of one frame.
        result = "frames[0][0]" if pipeline in OF_CLIPS else "images[0]"
        lines += [f"image = pipeline(\n{arguments}).{result}", 'image.save("picture.png")']
    return "\n".join(["```python", *imports, "", *lines, "```\n"])


def _reading(captions: CaptionReading) -> str | None:
    """The words for the way in which captions are read; None if diffusers' pipeline reads prompts in the same way."""
    skipped = (captions.clip_skip or 1) - 1  # 1 names the last layer
    parts = [f"in {captions.chunks} chunks"] if captions.chunks > 1 else []
    parts += [f"without the last {'layer' if skipped == 1 else f'{skipped} layers'} of CLIP"] if skipped else []
    return " and ".join(parts) or None


def _arguments(example: Example, pipeline: str) -> list[str]:
    """The arguments of the pipeline's call that draws the example, as program text."""
    guidance = example.guidance
    found = [f"class_labels=[{example.label}]" if pipeline == "DiTPipeline" else _quoted(example.prompt)]
    if "ControlNet" in pipeline:
        found.append(f'image=load_image("{CONDITION}")')
    elif pipeline == _SUPER_RESOLUTION:
        found.append(f'image=load_image("{SMALL}")')
    elif pipeline in FILLING.values():
        found.append(f'image=load_image("{PICTURE}")')
        found += [f'mask_image=load_image("{MASK}")  # white in the hole'] if pipeline != _FROM_FRAMES else []
        # Below 1, as it is by default for SDXL, drawing starts from traces of the picture.
        found += ["strength=1.0"] if "Inpaint" in pipeline else []
        if example.resolution is not None:
            found += [f"height={example.height or example.resolution}", f"width={example.resolution}"]
    elif pipeline != "DiTPipeline" and example.resolution is not None:
        found += [f"height={example.height or example.resolution}", f"width={example.resolution}"]
    found.append(f"num_inference_steps={example.steps}")
    if pipeline in OF_CLIPS:
        found += [f"num_frames={example.frames or 1}", 'output_type="pil"']
    if pipeline == _WITH_RATE and example.frames is not None and example.frame_rate is not None:
        found.append(f"frame_rate={example.frame_rate:g}")
    # In these `guidance_scale` is a number that the model reads, and guidance by a second prediction has another name.
    if pipeline not in (
        "FluxPipeline",
        "FluxFillPipeline",
        "Flux2Pipeline",
        "QwenImagePipeline",
        "HunyuanVideoPipeline",
    ):
        return [*found, f"guidance_scale={guidance.scale:g}"]
    if guidance.embedded is not None:
        found.append(f"guidance_scale={guidance.embedded:g}")
    if guidance.scale != 1:
        found += ['negative_prompt=""', f"true_cfg_scale={guidance.scale:g}"]
    return found


def _quoted(text: str) -> str:
    """The text in double quotes, as a string of Python."""
    return json.dumps(text, ensure_ascii=False)


def command(reason: str, example: Example, pipeline: str, folder: str) -> str:
    """The reason why diffusers cannot draw the model, and the command `diffusionpipe sample`, in Markdown.

    For ControlNets and inpainting models it is the reason alone.
    """
    if "ControlNet" in pipeline or pipeline in FILLING.values():
        return f"{reason}\n"
    is_class = pipeline in OF_CLASSES
    what = ["--label", str(example.label)] if is_class else ["--prompt", example.prompt]
    # `--resolution` alone draws squares.
    sides = {"--resolution": example.resolution, "--height": example.height, "--frames": example.frames}
    size = [word for option, count in sides.items() if count is not None for word in (option, str(count))]
    captions = example.captions
    size += ["--caption-chunks", str(captions.chunks)] if captions.chunks > 1 else []
    size += ["--clip-skip", str(captions.clip_skip)] if captions.clip_skip else []
    words = [*what, "--steps", str(example.steps), "--guidance", f"{example.guidance.scale:g}", *size]
    out = "picture.png" if example.frames is None else "clip.gif"
    command = shlex.join(["diffusionpipe", "sample", folder, *words, "--out", out])
    where = f"; `{RUN}` is the folder of the training run" if folder == RUN else ""
    return f"{reason}\nUse DiffusionPipe{where}:\n\n```\n{command}\n```\n"
