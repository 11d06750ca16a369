"""How busy ranks are while they draw, where a forward of a stage takes as long as told; all else is as it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any
from unittest import mock

from kit.crew import Crew
from kit.cuts import traced_once
from kit.descriptions import described
from kit.drawn_families import Asked

from diffusionpipe.runtime.compute.stage import LayerStage
from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.runtime.rehearsals.virtual import precise_wait
from diffusionpipe.trainer.inference import ranks_drawing
from diffusionpipe.trainer.inference.denoise import PipelinePredictor
from diffusionpipe.trainer.inference.drawing import PLAIN
from diffusionpipe.trainer.inference.ranks_drawing import Ranks, draw_on_ranks
from diffusionpipe.units import Seconds
from diffusionpipe.workflows.drawing.ranks import _plan

FORWARD: Seconds = 0.02
"""Of a micro-batch through a stage."""


@dataclass(slots=True)
class _Clock:
    """Mutable: notes forwards and the time from the first denoising step to the end of the last one."""

    busy: Seconds = 0.0
    marks: list[Seconds] = field(default_factory=list)

    def forward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A stage's forward that takes no less than `FORWARD`."""

        def timed(*arguments: Any, **options: Any) -> Any:
            start = perf_counter()
            found = run(*arguments, **options)
            precise_wait(max(0.0, start + FORWARD - perf_counter()))
            self.busy += perf_counter() - start
            return found

        return timed

    def step(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A denoising step."""

        def timed(*arguments: Any, **options: Any) -> Any:
            self.marks.append(perf_counter())
            found = run(*arguments, **options)
            self.marks.append(perf_counter())
            return found

        return timed


def _busy(job: Job, asked: Asked) -> float:
    """The share of the denoising steps in which this rank computes."""
    clock = _Clock()
    ranks = Ranks(job=job, make_plan=_plan, arithmetic=PLAIN)
    with (
        mock.patch.object(LayerStage, "__call__", clock.forward(LayerStage.__call__)),
        mock.patch.object(PipelinePredictor, "__call__", clock.step(PipelinePredictor.__call__)),
        mock.patch.object(ranks_drawing, "describe", described),
        traced_once(),
    ):
        draw_on_ranks(asked.sources, asked.wish, asked.settings, ranks)
    return clock.busy / (clock.marks[-1] - clock.marks[0])


def many(asked: Asked) -> Asked:
    """The same of 8 prompts or labels."""
    wish = asked.wish
    return replace(
        asked,
        wish=replace(wish, prompts=wish.prompts * 4, labels=wish.labels * 4, negatives=wish.negatives * 4),
    )


def busy_share(crew: Crew, asked: Asked) -> float:
    """The mean over the ranks, for 8 pictures."""
    shares: Sequence[Any] = crew.run(_busy, many(asked))
    for share in shares:
        if isinstance(share, Exception):
            raise share
    return sum(shares) / len(shares)
