"""Draws pictures from prompts or labels: makes conditions, denoises latents, and decodes pictures.

This module draws through the pipeline that trains; `folder_drawing` draws in one process from a diffusers folder,
`ranks_drawing` over several ranks, and `cascade_drawing` with several models, each of which enlarges the pictures of
the one before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diffusionpipe.models.base.self_conditioning import CONDITIONED, ESTIMATE
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.objective import Objective
from diffusionpipe.models.opening.folder import family_of
from diffusionpipe.runtime.machine.error_file import is_shortage
from diffusionpipe.trainer.inference.conditions import SampleRequest, raw_conditions, small_conditions
from diffusionpipe.trainer.inference.decoding import decoded, open_vae
from diffusionpipe.trainer.inference.denoise import PipelinePredictor, Predict, SamplingSettings, Spacing, draw
from diffusionpipe.trainer.inference.diffusers_pipeline import Order, draw_by_pipeline, warn_of_shortage
from diffusionpipe.trainer.inference.drawing_in_time import latents_in_time
from diffusionpipe.trainer.inference.frozen_part import frozen_part
from diffusionpipe.trainer.inference.parallel_in_time import ALONE, BlockRanks
from diffusionpipe.trainer.model.members import clip_of
from diffusionpipe.trainer.recipe import RecipePrecision

if TYPE_CHECKING:
    from diffusionpipe.trainer.model.members import Member
    from diffusionpipe.trainer.setup.session import Session

MOVING = ("noisy", "timesteps", ESTIMATE)
"""The names of the tensors that change from one denoising step to the next."""

Picture = NDArray[np.uint8]
"""The uint8 levels of a picture, (H, W, 3), or of a clip, (F, H, W, 3)."""
_PICTURE = 3
"""The number of dimensions of a picture's array."""
_FRAMES_SHOWN = 4


def still(picture: Picture) -> Picture:
    """A picture itself, or up to four frames of a clip side by side, from the first to the last, (H, up to 4 W, 3)."""
    if picture.ndim == _PICTURE:
        return picture
    count = min(_FRAMES_SHOWN, len(picture))
    places = np.linspace(0, len(picture) - 1, count).round().astype(int)
    return np.concatenate([picture[place] for place in places], axis=1)


def decode(folder: Path, latents: Tensor, variant: str | None = None) -> list[Picture]:
    """The pictures of latents as uint8 levels, decoded by the folder's own VAE.

    For families that diffusers' own pipeline draws, `latents` are decoded pictures with values in [0, 1] already.
    """
    return in_levels(latents if family_of(folder).call is not None else decode_exactly(folder, latents, variant))


def decoded_if_possible(folder: Path, latents: Tensor, variant: str | None = None) -> list[Picture] | None:
    """The pictures of latents as uint8 levels; None, with a warning, if this rank has no memory to decode them."""
    try:
        return decode(folder, latents, variant)
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        warn_of_shortage(error)
        return None
    finally:
        if latents.is_cuda:
            torch.cuda.empty_cache()  # training needs the memory that decoding has taken


def in_levels(values: Tensor) -> list[Picture]:
    """Pictures as uint8 levels from values in [0, 1], (N, H, W, 3), or clips, (N, F, H, W, 3)."""
    return [picture.numpy() for picture in (values * 255).round().byte()]


def decode_exactly(folder: Path, latents: Tensor, variant: str | None = None) -> Tensor:
    """The pictures of latents, (N, H, W, 3) with values in [0, 1] on the CPU, before they are rounded to 256 levels.

    Latents of a model without a VAE are the pictures themselves.
    """
    if "vae" not in family_of(folder).components:
        pictures = (latents.float() / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).cpu()
        return pictures.expand(-1, -1, -1, 3)  # grey pictures have one channel
    vae = open_vae(folder, latents.device, variant)
    shift = getattr(vae.config, "shift_factor", None) or 0.0
    # The latents are (encoded - shift) * scaling factor.
    pictures = decoded(vae, latents.float() / vae.config.scaling_factor + shift)  # (N, 3, H, W)
    return (pictures / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1)


def latents_in_session(
    session: "Session",
    member: "Member",
    wish: SampleRequest,
    settings: SamplingSettings,
    small: Tensor | None = None,
    *,
    size: int = 0,
    on_step: Callable[[int, int], None] | None = None,
) -> Tensor | None:
    """The latents of samples that one of the session's models draws, on ranks that hold them; None on other ranks.

    Where diffusers' pipeline draws, the result is decoded pictures on the first rank, or None without memory for them.

    `small`: the small pictures that the model reads; None for other models. `size`: the index of the samples' size.
    `on_step` is called with the number of denoising steps done and the number of all.

    The first pipeline draws. Other data-parallel groups get None, unless the groups share its parameters: then all draw
    the same, so that they gather the parameters together.
    """
    worker = session.worker
    if worker.place.group != 0 and session.plan.mesh.shard == 1:
        return None
    backbone = next(one for one in session.model.backbones if one.name == member.name)
    graph, model = member.graph.of_sizes[size], worker.of_sizes[size]
    raw = _conditions(member, graph, wish, settings, small)
    moving = [name for name in (backbone.noisy, backbone.timesteps, backbone.estimate) if name is not None]
    fed = [name for name in worker.sample(backbone.name).store if name not in moving]
    autocast = Arithmetic(precision=session.recipe.training.precision).context(session.job.device)
    with torch.no_grad(), autocast:
        on_device = {name: value.to(session.job.device) for name, value in raw.items()}
        frozen = frozen_part(session.graph.of_sizes[size], fed, on_device, moving, worker.frozen_weights)
    predict = PipelinePredictor(
        worker,
        session.transport,
        backbone,
        conditions={name: value for name, value in frozen.tensors.items() if name in fed},
        num_rows=len(next(iter(raw.values()))),
        device=session.job.device,
        lead=frozen.leader(autocast, worker.sample(backbone.name).schedule.placement.pipelines[0].microbatches[0]),
        is_everywhere=family_of(member.folder).call is not None,
        size=size,
    )
    del on_device, frozen  # the stages have copies
    order = Order(
        folder=member.folder,
        variant=member.recipe.model.variant,
        settings=settings,
        num_samples=len(wish),
        latents=model.tensor(backbone.noisy).shape,
        resolution=member.recipe.data.resolution,
        clip=graph.size or clip_of(member.recipe),
        device=session.job.device,
        needs_pictures=False,
    )
    is_first = worker.place.group == 0
    return drawn_by_stages(order, predict, graph, model=member.name, is_shown=is_first, on_step=on_step)


def drawn_by_stages(
    order: Order,
    predict: PipelinePredictor,
    graph: LayerGraph,
    *,
    model: str,
    is_shown: bool = True,
    on_step: Callable[[int, int], None] | None = None,
) -> Tensor | None:
    """The latents or pictures that `drawn` returns, with predictions through the stages of a pipeline.

    `is_shown`: whether the pipeline's first worker decodes them.
    """
    return drawn(
        order,
        predict,
        graph,
        model=model,
        feed_back=predict.remember if predict.reads_estimate else None,
        holds_latents=predict.holds_latents,
        is_shown=is_shown and predict.shows,
        on_step=on_step,
    )


def _conditions(
    member: "Member", graph: LayerGraph, wish: SampleRequest, settings: SamplingSettings, small: Tensor | None
) -> dict[str, Tensor]:
    """The raw inputs of the conditions of one model, named as in the graph of all models."""
    raw = with_mask(raw_conditions(wish, graph, member.folder, settings))
    if small is not None:
        raw |= small_conditions(small, member.graph, member.folder, settings, member.name)
    return {member.component(name): value for name, value in raw.items()}


def drawn(
    order: Order,
    predict: Predict,
    graph: LayerGraph,
    *,
    model: str,
    feed_back: Callable[[Tensor], None] | None,
    holds_latents: bool = True,
    is_shown: bool = True,
    on_step: Callable[[int, int], None] | None = None,
    crew: BlockRanks = ALONE,
) -> Tensor | None:
    """The latents of samples by our loop, or pictures (N, H, W, 3) in [0, 1] by diffusers' pipeline.

    The model's family decides between the two. Ranks that hold no latents, or decode no pictures, get None. `feed_back`
    is called with each step's estimate, for a denoiser that reads it. `is_shown`: this rank decodes. `crew`: the ranks
    that share the steps, if these are computed at the same time.
    """
    if order.settings.tolerance is not None:
        refined = latents_in_time(
            predict,
            order.settings,
            num_samples=order.num_samples,
            latent_shape=order.latents,
            device=order.device,
            spacing=spacing_of(graph),
            crew=crew,
            model=model,
            on_step=on_step,
        )
        order.release()
        return refined
    if family_of(order.folder).call is not None:
        return draw_by_pipeline(order, predict, decodes=is_shown, on_step=on_step)
    latents = draw(
        predict,
        order.settings,
        num_samples=order.num_samples,
        latent_shape=order.latents,
        holds_latents=holds_latents,
        spacing=spacing_of(graph),
        feed_back=None if feed_back is None else partial(_remembered, graph, feed_back),
        device=order.device,
        model=model,
        on_step=on_step,
    )
    order.release()
    return latents


def with_mask(raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The raw inputs, and for each row a 1 as `CONDITIONED`: the denoiser reads its own estimate, if it reads any."""
    return {**raw, CONDITIONED: torch.ones(len(next(iter(raw.values()))))}


def _remembered(
    graph: LayerGraph, remember: Callable[[Tensor], None], prediction: Tensor, noisy: Tensor, timestep: Tensor
) -> None:
    """Hands the estimate of the clean samples, made from a guided prediction, to `remember`.

    It is the `FeedBack` of a denoiser that reads its own estimate.
    """
    objective = graph.components["objective"]
    assert isinstance(objective, Objective)
    times = timestep.to(noisy.device).expand(len(noisy))
    remember(objective.estimate(prediction, noisy, times))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The number of rows that go through the denoiser at a time, and their precision; equal ones give equal bits."""

    rows: int | None = None
    """The number of rows at a time, the last ones filled up; None: all rows at once."""
    precision: RecipePrecision = RecipePrecision.FLOAT32

    @property
    def narrow(self) -> torch.dtype | None:
        """The dtype of autocast, bfloat16; None without autocast."""
        return torch.bfloat16 if self.precision is RecipePrecision.BFLOAT16 else None

    def context(self, device: torch.device) -> torch.autocast:
        """A context of torch's autocast for the device; it does nothing where layers compute in float32."""
        is_narrow = self.narrow is not None
        return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_narrow, cache_enabled=False)


PLAIN = Arithmetic()
"""The arithmetic with all rows at once, in float32."""


def spacing_of(graph: LayerGraph) -> Spacing:
    """The facts about a model by which diffusers' pipeline spaces its time steps."""
    return Spacing(num_tokens=graph.num_tokens, has_even_sigmas=graph.has_even_sigmas)
