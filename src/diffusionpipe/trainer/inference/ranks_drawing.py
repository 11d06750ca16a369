"""Draws pictures from diffusers folders over several ranks, each of which holds a stage of the denoiser.

    rank 0   encoders, gone ─> stage 0 ──┐                 ┌──> scheduler's step ... ──> VAE
    rank 1   encoders, gone ─> stage 1   └─> tensors ──────┘

Every rank encodes all prompts by itself, before it has its stage: so no rank ever holds more than the encoders or its
part of the denoiser. A micro-batch has the same rows on any number of ranks, because products of matrices round by
their number of rows: so the pictures have the same bits on any number of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diffusionpipe.costs import ModelGraph
from diffusionpipe.errors import ModelError
from diffusionpipe.ir import Plan
from diffusionpipe.ir.files import plan_from_text, plan_to_text
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.opening.folder import family_of
from diffusionpipe.runtime.comm.places import channels_of, holders_of, trained_layers
from diffusionpipe.runtime.comm.transport import ProcessTransport
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.engine.worker import Worker, build_worker
from diffusionpipe.runtime.job.agreement import from_first, on_all
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.inference.cascade_drawing import OnStep, brought, part_of
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import PipelinePredictor, SamplingSettings
from diffusionpipe.trainer.inference.drawing import MOVING, Arithmetic, Picture, decode, drawn_by_stages
from diffusionpipe.trainer.inference.folder_drawing import OpenedSource, Source, latents_from_folder, open_source
from diffusionpipe.trainer.inference.frozen_part import frozen_part
from diffusionpipe.trainer.inference.known_pixels import with_known
from diffusionpipe.trainer.inference.parallel_in_time import BlockRanks

MakePlan = Callable[[ModelGraph, int, int, int], Plan]
"""A function of the planning half: (model, number of ranks, rows of all pictures, rows at a time) -> plan."""

_MICROBATCHES = 32
"""The largest number of micro-batches of a denoising step: more hardly shorten it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The job whose ranks draw, the function that makes their plan, and the arithmetic of the denoiser."""

    job: Job
    make_plan: MakePlan
    arithmetic: Arithmetic

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.job.membership.rank == 0


def rows_together(count: int) -> int:
    """The number of rows of a micro-batch, with which `count` rows make at most 32 micro-batches.

    It is the same on any number of ranks.

    >>> [rows_together(count) for count in (1, 16, 32, 33, 320)]
    [1, 1, 1, 2, 10]
    """
    return -(-count // _MICROBATCHES)


def draw_on_ranks(
    sources: Sequence[Source],
    wish: SampleRequest,
    settings: Sequence[SamplingSettings],
    ranks: Ranks,
    *,
    on_step: OnStep | None = None,
) -> tuple[list[Picture], ...] | None:
    """The pictures of each of the models in these folders on rank 0; None on other ranks.

    Every rank of the job calls it.

    Each model after the first enlarges the pictures of the one before. `settings`: one entry for each model.

    Raises:
        ConfigError: a folder, prompts or labels do not suit, or there are too many ranks for the model.
        PeerError: another rank alone has found such a fault.
    """
    drawn: list[list[Picture]] = []
    small: Tensor | None = None
    for index, source in enumerate(sources):
        opened = _opened(source, wish, settings[index], small)
        own = part_of(on_step, settings, index)
        if settings[index].tolerance is None:
            latents = _latents(opened, len(wish), settings[index], ranks, own)
        else:
            latents = _latents_in_time(source, wish, settings[index], ranks, own)
        if ranks.is_first:
            assert latents is not None, "the first worker shows the pictures"
            drawn.append(with_known(decode(source.folder, latents, source.variant), wish.known))
        if index < len(sources) - 1:
            shape = opened.order(settings[index], len(wish), ranks.job.device).latents
            small = brought(latents, (len(wish), *shape), ranks.job)
    return tuple(drawn) or None


def _opened(source: Source, wish: SampleRequest, settings: SamplingSettings, small: Tensor | None) -> OpenedSource:
    return on_all(lambda: open_source(source, wish, settings, small))


def _latents_in_time(
    source: Source, wish: SampleRequest, settings: SamplingSettings, ranks: Ranks, on_step: OnStep | None
) -> Tensor:
    """The latents on every rank, each of which has the whole denoiser and computes blocks of the steps."""
    member = ranks.job.membership
    crew = BlockRanks(member.rank, member.world_size)
    return latents_from_folder(
        source, wish, settings, device=ranks.job.device, arithmetic=ranks.arithmetic, on_step=on_step, crew=crew
    )


def _latents(
    opened: OpenedSource, num_samples: int, settings: SamplingSettings, ranks: Ranks, on_step: OnStep | None
) -> Tensor | None:
    """The latents, or pictures where diffusers' pipeline draws, on the ranks that hold them; None on other ranks."""
    job, arithmetic = ranks.job, ranks.arithmetic
    opened.store()
    model = _described(opened, arithmetic, job.device.type)
    count = num_samples * settings.copies
    size = job.membership.world_size
    # Made on one rank, so that all have the same.
    plan = plan_from_text(from_first(lambda: plan_to_text(ranks.make_plan(model, size, count, rows_together(count)))))
    conditions = on_all(lambda: opened.conditions(job.device, arithmetic))
    transport = ProcessTransport(job.device, summing=tuple(holders_of(plan).values()))
    transport.warm_up(channels_of(plan))
    worker = _worker(opened, model, plan, transport, ranks)
    (backbone,) = model.backbones
    autocast = arithmetic.context(job.device)
    fed = [name for name in worker.sample(backbone.name).store if name not in MOVING]
    with torch.no_grad(), autocast:
        frozen = frozen_part(opened.graph, fed, conditions, MOVING)
    predict = PipelinePredictor(
        worker,
        transport,
        backbone,
        conditions=frozen.tensors,
        num_rows=count,
        device=job.device,
        lead=frozen.leader(autocast, rows_together(count)),
        is_everywhere=family_of(opened.source.folder).call is not None,
    )
    del conditions, frozen  # the stages have copies

    def release() -> None:
        opened.release()
        worker.sample(backbone.name).store.clear()

    order = replace(opened.order(settings, num_samples, job.device), release=release)
    with torch.no_grad():
        return drawn_by_stages(order, predict, opened.graph, model=opened.source.name, on_step=on_step)


def _described(opened: OpenedSource, arithmetic: Arithmetic, device: str) -> ModelGraph:
    try:
        return describe(opened.graph, autocast=arithmetic.narrow, device=device)
    except ModelError as error:
        raise ModelError(f"{opened.source.folder}: {error}") from error


def _worker(opened: OpenedSource, model: ModelGraph, plan: Plan, transport: ProcessTransport, ranks: Ranks) -> Worker:
    """The worker of this rank, with the weights of its stage and of layers that belong to no stage."""
    rank, device, narrow = ranks.job.membership.rank, ranks.job.device, ranks.arithmetic.narrow
    others = frozenset(model.backbone_layers).difference(trained_layers(plan, rank))
    # Of this rank's stage, and those that run beside the stages on every rank.
    layers = [layer for layer in opened.trained if layer.name not in others]
    on_all(lambda: opened.materialize(layers, device, ranks.arithmetic))
    precision = Precision(device=device.type, autocast=narrow)
    return build_worker(opened.graph, model, plan, rank, transport, device=device, precision=precision)
