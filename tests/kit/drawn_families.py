"""Pictures of tiny models of every kind: as `sample` draws them on 1, 2 and 3 ranks, and as diffusers' pipelines do."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import torch
from diffusers.pipelines.dit import pipeline_dit
from kit.crew import Crew, crew_of, nest
from kit.cuts import traced_once
from kit.descriptions import described
from kit.tiny_described import CLIPS, RESOLUTIONS
from numpy.typing import NDArray
from PIL import Image

from diffusionpipe.models.opening.folder import REGISTRY, model_index, scheduler_config
from diffusionpipe.models.opening.pipeline_defaults import default_guidance
from diffusionpipe.models.parts.latents import encoding_of
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.data.randomness import normal
from diffusionpipe.trainer.inference import drawing, ranks_drawing
from diffusionpipe.trainer.inference.cascade_drawing import draw_from_folders
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.drawing import Arithmetic
from diffusionpipe.trainer.inference.folder_drawing import Source, open_source
from diffusionpipe.trainer.inference.ranks_drawing import Ranks, draw_on_ranks
from diffusionpipe.trainer.model.guidance import guidance_of
from diffusionpipe.trainer.recipe import RecipePrecision
from diffusionpipe.workflows.drawing.ranks import _plan

PROMPTS, NEGATIVES = ("a cat ", "b  c"), ("", "dog")
LABELS = (0, 1)
STEPS = 4
RATE = 10.0
"""Frames of a second of clips, which some models are told."""
GUIDED = 1.5
RANKS = (1, 2, 3)

Pictures = tuple[NDArray[np.float32], ...]
"""Of each model that draws, (N, H, W, 3) or (N, F, H, W, 3), values in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be drawn."""

    sources: tuple[Source, ...]
    wish: SampleRequest
    settings: tuple[SamplingSettings, ...]
    guidance: float

    @property
    def kind(self) -> str:
        """The class of the last model's pipeline."""
        return str(model_index(self.sources[-1].folder)["_class_name"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """The same pictures, drawn in every way."""

    ranks: tuple[Pictures, ...]
    """On as many ranks as `RANKS` says, in float32."""
    narrow: tuple[Pictures, ...]
    """The same in bfloat16, and in one process as `--like` draws them again; () where nobody asked."""
    here: Pictures
    """In one process, in float32."""
    reference: NDArray[np.float32] | None
    """By diffusers' pipeline, or by an adapter of it; None where diffusers has none."""


def settings_of(folder: Path, guidance: float, *, has_negative: bool = True, **more: Any) -> SamplingSettings:
    """Four steps, with this scale of guidance."""
    is_distilled = default_guidance(folder).embedded is not None
    given, scale = (None, guidance) if is_distilled else (guidance, 1.0)
    strength = guidance_of(folder, given, scale, has_negative=has_negative)
    return SamplingSettings(
        steps=STEPS,
        guidance=strength.scale,
        embedded_guidance=strength.embedded,
        unguided=strength.unguided,
        seed=0,
        scheduler=scheduler_config(folder),
        **more,
    )


def asked_of(
    folder: Path, size: int, guidance: float = GUIDED, adapters: Path | None = None, *, has_negative: bool = True
) -> Asked:
    """Two pictures or clips of a folder's model, of its prompts or labels; `size` is that of pictures."""
    settings = settings_of(folder, guidance, has_negative=has_negative)
    kind = str(model_index(folder)["_class_name"])
    has_text = any(name.startswith("tokenizer") for name in model_index(folder))
    negatives = _negatives_of(getattr(diffusers, kind)) if settings.is_guided and has_text and has_negative else ()
    return Asked(
        sources=(Source(folder=folder, resolution=size, adapters=adapters, clip=CLIPS.get(kind)),),
        wish=SampleRequest(prompts=PROMPTS, negatives=tuple(negatives), frame_rate=RATE)
        if has_text
        else SampleRequest(labels=LABELS),
        settings=(settings,),
        guidance=guidance,
    )


def guidances_of(kind: str) -> tuple[float, ...]:
    """With classifier-free guidance, where the family has it, and without."""
    call = REGISTRY[kind].call
    if call is None:
        return GUIDED, 1.0
    return (GUIDED, call.unguided) if call.scale else (call.unguided,)


def size_of(kind: str) -> int:
    """Side of the pictures, in pixels."""
    return {"DiTPipeline": 8, **RESOLUTIONS}.get(kind, 16)


def _negatives_of(kind: type) -> Sequence[str]:
    """What diffusers' pipeline of this class can be told."""
    return NEGATIVES if "negative_prompt" in signature(kind.__call__).parameters else [""] * len(PROMPTS)


def drawn_everywhere(asked: Sequence[Asked], by: Callable[[Asked], NDArray[np.float32]] | None) -> list[Drawn]:
    """What is asked, drawn by ranks that are forked from one process which has traced the models; `by` diffusers."""
    return nest(_drawn_everywhere, asked, by)


def _drawn_everywhere(asked: Sequence[Asked], by: Callable[[Asked], NDArray[np.float32]] | None) -> list[Drawn]:
    torch.set_num_threads(1)
    trace(asked)
    with crew_of(1, is_forked=True) as one, crew_of(2, is_forked=True) as two, crew_of(3, is_forked=True) as three:
        return [drawn_by(each, (one, two, three), by, is_narrow=each is asked[0]) for each in asked]


def trace(asked: Sequence[Asked]) -> None:
    """Traces and describes the models that draw."""
    with traced_once():
        for one in asked:
            small: torch.Tensor | None = None
            for source, settings in zip(one.sources, one.settings, strict=True):
                opened = open_source(source, one.wish, settings, small)
                for autocast in (None, torch.bfloat16):
                    described(opened.graph, autocast=autocast, device="cpu")
                if len(one.sources) > 1:
                    small = torch.zeros(len(one.wish), 3, source.resolution, source.resolution)


def drawn_by(
    asked: Asked, crews: Sequence[Crew], by: Callable[[Asked], NDArray[np.float32]] | None, *, is_narrow: bool
) -> Drawn:
    """What is asked, drawn by each of these crews, and by the first one's only rank without a pipeline."""
    alone = crews[0]
    again = Arithmetic(rows=1, precision=RecipePrecision.BFLOAT16)
    narrow = [*(_by_ranks(crew, asked, RecipePrecision.BFLOAT16) for crew in crews if is_narrow)]
    return Drawn(
        ranks=tuple(_by_ranks(crew, asked, RecipePrecision.FLOAT32) for crew in crews),
        narrow=(*narrow, _first(alone.run(_drawn_here, asked, again))) if narrow else (),
        here=_first(alone.run(_drawn_here, asked, None)),
        reference=None if by is None else _first(alone.run(_drawn_by_diffusers, asked, by)),
    )


def _by_ranks(crew: Crew, asked: Asked, precision: RecipePrecision) -> Pictures:
    return _first(crew.run(_drawn_in_job, asked, precision))


def _first(results: Sequence[Any]) -> Any:
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert not any(result is not None for result in results[1:]), "rank 0 shows the pictures"
    return results[0]


@contextmanager
def _unrounded() -> Iterator[None]:
    """Pictures before they are rounded to 256 levels."""
    with (
        mock.patch.object(drawing, "in_levels", list),
        mock.patch.object(ranks_drawing, "describe", described),
        traced_once(),
    ):
        yield


def _drawn_in_job(job: Job, asked: Asked, precision: RecipePrecision) -> Pictures | None:
    """As `sample --ranks`."""
    ranks = Ranks(job=job, make_plan=_plan, arithmetic=Arithmetic(precision=precision))
    with _unrounded():
        drawn = draw_on_ranks(asked.sources, asked.wish, asked.settings, ranks)
    return None if drawn is None else _arrays(drawn)


def _drawn_here(_: Job, asked: Asked, arithmetic: Arithmetic | None) -> Pictures:
    return drawn_here(asked, arithmetic)


def drawn_here(asked: Asked, arithmetic: Arithmetic | None = None) -> Pictures:
    """As `sample` in one process, by default with rows as most pipelines take them."""
    arithmetic = arithmetic or Arithmetic(rows=len(asked.wish))  # products of matrices round by their number of rows
    device = torch.device("cpu")
    with _unrounded():
        return _arrays(
            draw_from_folders(asked.sources, asked.wish, asked.settings, device=device, arithmetic=arithmetic)
        )


def _arrays(drawn: Sequence[Sequence[Any]]) -> Pictures:
    return tuple(torch.stack(list(one)).numpy() for one in drawn)


def _drawn_by_diffusers(_: Job, asked: Asked, by: Callable[[Asked], NDArray[np.float32]]) -> NDArray[np.float32]:
    with torch.no_grad():
        return by(asked)


def by_diffusers(asked: Asked) -> NDArray[np.float32]:
    """What diffusers' pipeline of the folder draws from the same noise."""
    (source,) = asked.sources
    pipeline = diffusers.DiffusionPipeline.from_pretrained(source.folder)
    pipeline.set_progress_bar_config(disable=True)
    if source.adapters is not None:
        pipeline.load_lora_weights(source.adapters)
    noise, told = told_of(asked)
    with mock.patch.object(pipeline_dit, "randn_tensor", return_value=noise):
        pictures = pipeline(num_inference_steps=STEPS, output_type="np", **told)[0]
    pictures = np.asarray(pictures)
    return pictures[:, 0] if pictures.ndim == 5 and source.clip is None else pictures


def told_of(asked: Asked) -> tuple[torch.Tensor, Mapping[str, Any]]:
    """The noise that pictures begin with, and all that diffusers' pipeline is told beside the number of steps."""
    (source,) = asked.sources
    kind = getattr(diffusers, asked.kind)
    vae = getattr(diffusers, model_index(source.folder)["vae"][1]).from_pretrained(source.folder / "vae")
    shape = encoding_of(vae, source.resolution, "float32", source.clip).latents
    noise = normal(seed=0, purpose="sampling", step=0, positions=range(len(asked.wish)), shape=shape)
    call = REGISTRY[asked.kind].call
    if asked.kind == "DiTPipeline":
        return noise, {"class_labels": list(LABELS), "guidance_scale": asked.guidance}
    told = {"negative_prompt": list(NEGATIVES)} if any(asked.wish.negatives) else {}
    size, clip = source.resolution, source.clip
    common = {"prompt": list(PROMPTS), "height": size, "width": size, **told}
    if asked.wish.conditions:
        common["image"] = [Image.open(path) for path in asked.wish.conditions]
    if call is not None:
        scale = {call.scale: asked.guidance} if call.scale else {}
        sizes = {} if clip is None else {"height": clip.height, "width": clip.width, "num_frames": clip.frames}
        if "frame_rate" in signature(kind.__call__).parameters:
            sizes["frame_rate"] = asked.wish.frame_rate
        return noise, {**common, **scale, **call.options, **sizes, "latents": call.takes(noise)}
    if asked.kind == "FluxPipeline":
        packed = kind._pack_latents(noise, *noise.shape)
        return noise, {**common, "true_cfg_scale": asked.guidance, "latents": packed}
    return noise, {**common, "guidance_scale": asked.guidance, "latents": noise}


def difference(ours: Pictures, theirs: Pictures) -> float:
    """The largest, in [0, 1]."""
    return max(float(np.abs(one - other).max()) for one, other in zip(ours, theirs, strict=True))


def check(drawn: Drawn) -> None:
    """All ways draw the same, bfloat16 the same bits.

    Raises:
        AssertionError: they do not.
    """
    theirs = drawn.here if drawn.reference is None else (*drawn.here[:-1], drawn.reference)
    everywhere = (drawn.here, *drawn.ranks)
    assert {ours[-1].shape for ours in everywhere} == {theirs[-1].shape}
    wide = [difference(ours, theirs) for ours in everywhere]
    # Rounding of float32 adds up over the models of a cascade: 1.07e-5 on a processor with AVX-512.
    assert max(wide) < 1e-5 * len(drawn.here), f"in one process and on {RANKS} ranks: {wide}"
    assert theirs[-1].std() > 0.02
    if drawn.narrow:
        narrow = [difference(drawn.narrow[0], again) for again in drawn.narrow]
        assert narrow == [0] * len(narrow), f"in bfloat16 on {RANKS} ranks and in one process: {narrow}"
        assert difference(drawn.narrow[0], drawn.here) > 1e-5


def of_cascade(folder: Path) -> Asked:
    """A base model of 8 pixels and one of super-resolution of 16, in folders of these names."""
    sources = (
        Source(folder=folder / "base", resolution=8, name="base"),
        Source(folder=folder / "super", resolution=16, name="super", small=8),
    )
    has_text = any(name.startswith("tokenizer") for name in model_index(folder / "base"))
    first, second = (settings_of(one.folder, GUIDED) for one in sources)
    return Asked(
        sources=sources,
        wish=SampleRequest(prompts=PROMPTS, negatives=NEGATIVES) if has_text else SampleRequest(labels=LABELS),
        settings=(first, replace(second, noise_level=40)),
        guidance=GUIDED,
    )
