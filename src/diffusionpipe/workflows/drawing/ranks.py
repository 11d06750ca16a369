"""The ranks that `diffusionpipe sample` draws on: this process, or several ranks, each with a part of the model."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from diffusionpipe.costs import ModelGraph
    from diffusionpipe.ir import Plan
    from diffusionpipe.models.base.family import CaptionReading
    from diffusionpipe.trainer.inference.cascade_drawing import OnStep
    from diffusionpipe.trainer.inference.conditions import SampleRequest
    from diffusionpipe.trainer.inference.denoise import SamplingSettings
    from diffusionpipe.trainer.inference.drawing import Picture
    from diffusionpipe.trainer.inference.folder_drawing import Source
    from diffusionpipe.trainer.recipe import RecipePrecision
    from diffusionpipe.workflows.drawing.run_recipe import SampleSize
    from diffusionpipe.workflows.drawing.trained_model import TrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingRequest:
    """Pictures to draw: the model, prompts or labels, settings of sampling, size, precision and device."""

    model: "TrainedModel"
    wish: "SampleRequest"
    """The prompts or labels, one for each picture."""
    settings: "Sequence[SamplingSettings]"
    """Settings of the model and of the models before it, in the order of sampling."""
    size: "SampleSize"
    precision: "RecipePrecision"
    """The arithmetic of the denoiser."""
    captions: "CaptionReading"
    """How the models read texts."""
    device: str
    """The kind of device: "auto", "cpu" or "cuda"."""

    @property
    def sources(self) -> "list[Source]":
        """The folder, size and adapters of each model that draws, in the order of sampling."""
        from diffusionpipe.trainer.inference.folder_drawing import Source
        from diffusionpipe.trainer.recipe import RecipePrecision

        return [
            Source(
                folder=one.folder,
                resolution=one.resolution or self.size.resolution,
                adapters=one.adapters,
                name=one.name,
                small=None if one.before is None else one.before.resolution,
                clip=self.size.clip,
                captions=self.captions,
                variant=one.variant,
                frozen=one.frozen if self.precision is RecipePrecision.BFLOAT16 else None,
            )
            for one in self.model.chain
        ]


def is_rank() -> bool:
    """Whether this process is one of several that a launcher started to draw together."""
    from diffusionpipe.trainer.launching.launch import is_under_torchrun

    return is_under_torchrun(os.environ)


Work: TypeAlias = "Callable[[int | None], AbstractContextManager[OnStep]]"
"""A function (rank; None for a process without one) -> a context that shows progress by the function that it gives.

The latter is called with the number of denoising steps that are done, and of all."""


def draw_here(drawing: DrawingRequest, work: Work) -> "tuple[list[Picture], ...]":
    """Draw in this process; returns the pictures of each model, in the order of sampling.

    Raises:
        ConfigError: the device is not here, or has too little memory.
    """
    from diffusionpipe.trainer.inference.cascade_drawing import draw_from_folders
    from diffusionpipe.trainer.inference.drawing import Arithmetic
    from diffusionpipe.workflows.device import chosen_device
    from diffusionpipe.workflows.drawing.memory import check_memory, named_shortage

    device = chosen_device(drawing.device)
    check_memory(drawing.model.folder, len(drawing.wish), drawing.size.sample, device)
    with named_shortage(), work(None) as on_step:
        return draw_from_folders(
            drawing.sources,
            drawing.wish,
            drawing.settings,
            device=device,
            arithmetic=Arithmetic(precision=drawing.precision),
            on_step=on_step,
        )


def start_ranks(words: Sequence[str], drawing: DrawingRequest, ranks: int) -> int:
    """Start a process for each rank with `words`, the arguments of our command line; returns their exit status.

    The folder of their logs stays if a rank has crashed.

    Raises:
        ConfigError: a rank has refused to draw, there are more ranks than layers, or this process is a rank already.
        PeerError: a rank has failed.
    """
    import shutil
    from tempfile import mkdtemp

    from diffusionpipe.errors import ConfigError, PeerError
    from diffusionpipe.trainer.launching.launch import launch
    from diffusionpipe.workflows.device import chosen_device
    from diffusionpipe.workflows.drawing.memory import check_memory
    from diffusionpipe.workflows.machine import check_processes

    if is_rank():
        raise ConfigError("torchrun has started the ranks already; leave out --ranks")
    check_memory(drawing.model.folder, len(drawing.wish), drawing.size.sample, chosen_device(drawing.device))
    check_processes(ranks, 0)
    check_layers(drawing, ranks)
    logs = Path(mkdtemp(prefix="diffusionpipe-sample-"))
    command = [sys.executable, "-m", "diffusionpipe", *words]
    try:
        status = launch(command, ranks=ranks, log_folder=logs, environ=os.environ)
    except PeerError as error:
        # The logs stay, because the error names them.
        raise PeerError(f"{error}\nThe ranks' output is in {logs}.") from error
    except BaseException:
        shutil.rmtree(logs, ignore_errors=True)
        raise
    shutil.rmtree(logs, ignore_errors=True)
    return status


def check_layers(drawing: DrawingRequest, ranks: int) -> None:
    """Check that no model of the drawing has fewer layers than ranks; opens the models without weights.

    Raises:
        ConfigError: names the model and the largest number of ranks.
        RecipeError: prompts and labels do not suit the model.
    """
    from diffusionpipe.models.graphs.describe import describe
    from diffusionpipe.trainer.inference.drawing_in_time import check_ranks
    from diffusionpipe.trainer.inference.folder_drawing import open_source

    if ranks == 1:
        return
    if drawing.settings[0].tolerance is not None:
        check_ranks(drawing.settings[0], ranks)
        open_source(drawing.sources[0], drawing.wish, drawing.settings[0], tells=False)
        return
    for source, settings in zip(drawing.sources, drawing.settings, strict=True):
        _check_ranks(describe(open_source(source, drawing.wish, settings, tells=False).graph), ranks, source.name)


def _check_ranks(model: "ModelGraph", ranks: int, name: str = "") -> None:
    from diffusionpipe.errors import ConfigError

    layers = len(model.backbone_layers)
    if ranks > layers:
        denoiser = f"the denoiser of {name}" if name else "the denoiser"
        raise ConfigError(f"{ranks} ranks cannot share the {layers} layers of {denoiser}; use --ranks {layers} at most")


def draw_as_rank(drawing: DrawingRequest, work: Work) -> "tuple[tuple[list[Picture], ...] | None, int | None]":
    """Draw as one of several ranks; returns (pictures of each model, rows that went through the denoiser at a time).

    The pictures are None on all ranks but 0. The rows are None where the ranks draw parallel in time: then all rows go
    through it together.
    """
    from diffusionpipe.runtime.job.membership import membership
    from diffusionpipe.runtime.job.process_group import joined, leave
    from diffusionpipe.trainer.inference.drawing import Arithmetic
    from diffusionpipe.trainer.inference.ranks_drawing import Ranks, draw_on_ranks, rows_together
    from diffusionpipe.workflows.drawing.memory import named_shortage

    member = membership(os.environ)
    try:
        with work(member.rank) as on_step, joined(member, device=drawing.device) as job, named_shortage():
            ranks = Ranks(job=job, make_plan=_plan, arithmetic=Arithmetic(precision=drawing.precision))
            drawn = draw_on_ranks(drawing.sources, drawing.wish, drawing.settings, ranks, on_step=on_step)
    except (Exception, KeyboardInterrupt) as error:
        leave(error, member)
    if drawing.settings[-1].tolerance is not None:
        return drawn, None
    return drawn, rows_together(len(drawing.wish) * drawing.settings[-1].copies)


def _plan(model: "ModelGraph", ranks: int, rows: int, size: int) -> "Plan":
    """The plan of a pipeline over all ranks that draws `rows` rows, in micro-batches of `size` rows.

    Raises:
        ConfigError: there are more ranks than layers.
    """
    from diffusionpipe.planner.drawing.drawing import drawing_plan

    _check_ranks(model, ranks)
    return drawing_plan(model, ranks, rows, size)
