"""The error of a step whose loss or gradient is not finite: it names the samples, gathered from all ranks."""

from collections.abc import Callable, Sequence

import torch

from diffusionpipe.errors import NonFiniteLossError
from diffusionpipe.models.graphs.graph import canonical_names
from diffusionpipe.runtime.comm.exchange import PLAIN, form_of, gather
from diffusionpipe.runtime.engine.slot import Output
from diffusionpipe.trainer.checkpoints.training_state import first_not_finite
from diffusionpipe.trainer.setup.session import Session
from diffusionpipe.trainer.step.trained_backbone import BackboneResult, TrainedBackbone

NamesOf = Callable[[int, Sequence[int]], Sequence[str]]
"""A function (step, positions) that returns the names of the samples at these positions in the step's batch."""


def bad_positions(
    session: Session, trained: Sequence[TrainedBackbone], outputs: Sequence[Output], found: BackboneResult
) -> tuple[int, ...]:
    """The positions in the step's batch of the samples whose loss on this rank is not finite; () for none.

    `outputs`: of the iteration, with the losses. `found`: the result of the backbone whose losses count.
    """
    loss_name = next(one.backbone.loss for one in trained if one.backbone.name == found.name)
    return tuple(
        session.positions_of(output.rows.start + int(row), output.rows.start + int(row) + 1)[0]
        for output in outputs
        if output.name == loss_name
        for row in (~torch.isfinite(output.value)).nonzero().flatten()
    )


NOTHING_UPDATED = "; nothing was updated"
"""The end of the message about a loss that is not finite, if no parameter was updated."""


def not_finite(
    session: Session,
    step: int,
    names_of: NamesOf,
    found: BackboneResult,
    bad: tuple[int, ...],
    consequence: str = NOTHING_UPDATED,
) -> NonFiniteLossError:
    """The error of a step whose loss or norm is not finite; it names the samples, and a weight that is not finite.

    Every rank calls it, and all get the same samples.

    Args:
        session: this rank's session.
        step: the number of the step, counted from 0.
        names_of: returns the names of samples.
        found: the result of the backbone whose loss or norm is not finite.
        bad: the positions of this rank's samples whose loss is not finite.
        consequence: the end of the message: whether parameters were updated.
    """
    names = canonical_names(session.graph.components)
    # Weights on the meta device belong to other ranks.
    frozen = {name: p for p, name in names.items() if not (p.requires_grad or p.is_meta)}
    weights = {**frozen, **session.worker.parameters}
    # Each rank has seen its own losses and weights only; `names_of` needs the positions of all.
    positions = sorted(position for rank in gather(bad, form_of(tuple[int, ...])) for position in rank)
    broken = [str(name) for name in gather(first_not_finite(weights), PLAIN) if name is not None]
    whose = f" of {found.name}" if found.name else ""
    start = f"step {step + 1}: the loss{whose} is {found.loss} and the gradient's norm {found.norm}"
    if broken:
        start += f"; weights are not finite, first {min(broken)}"
    if len(positions) == session.plan.batch > 1:
        return NonFiniteLossError(
            f"{start}. It is so for every sample of the batch, so the weights or the learning rate are the cause, "
            f"not the pictures{consequence}.\n"
            "Lower optimizer.learning_rate or set training.clip_norm."
        )
    named = f"samples {', '.join(names_of(step, positions))}" if positions else "no single sample"
    return NonFiniteLossError(
        f"{start}, from {named}{consequence}.\n"
        "Look at these samples, lower optimizer.learning_rate, or set training.clip_norm."
    )
