"""The state from which a training resumes, as named tensors.

They are named "model.", "optimizer." or "ema." and the parameter's name, or "optimizer_group." and the group's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor, nn

from diffusionpipe.errors import NonFiniteWeightsError
from diffusionpipe.runtime.job.agreement import agree, together
from diffusionpipe.trainer.checkpoints.checkpoint import State, read, verify_together
from diffusionpipe.trainer.checkpoints.tensor_files import stored_tensors
from diffusionpipe.trainer.optim.ema import Ema
from diffusionpipe.trainer.optim.optimizer import (
    RankOptimizer,
    empty_group_tensors,
    empty_optimizer_tensors,
    group_tensors,
    optimizer_tensors,
    restore_groups,
    restore_optimizer,
)
from diffusionpipe.trainer.optim.read_weights import ReadWeights

MODEL, OPTIMIZER, EMA, GROUP = "model.", "optimizer.", "ema.", "optimizer_group."


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """One rank's model tensors, trainable parameters, optimizer and average, by the parameters' canonical names."""

    model: Mapping[str, Tensor]
    """Parameters and buffers of the trained components."""
    trainable: Mapping[str, nn.Parameter]
    """The parameters that the optimizer changes."""
    optimizer: RankOptimizer | None
    """The optimizer of this rank; None on a rank without trainable parameters."""
    ema: Ema | ReadWeights | None
    """The average of the weights; None if the recipe wants no average."""


def training_tensors(state: TrainingState) -> dict[str, Tensor]:
    """All tensors of a rank's checkpoint, keyed by "model.NAME", "ema.NAME", "optimizer.NAME.ENTRY" and so on."""
    return {
        **_weights(state),
        **_prefixed(OPTIMIZER, optimizer_tensors(state.optimizer, state.trainable)),
        **_prefixed(GROUP, group_tensors(state.optimizer)),
    }


def check_finite(tensors: Mapping[str, Tensor], step: int) -> None:
    """Refuses weights and averages with a NaN or an infinity among this rank's tensors of a checkpoint.

    `step`: the number of updates before the checkpoint, for the message.

    Every rank calls it.

    Raises:
        NonFiniteWeightsError: on all ranks alike, with the alphabetically first of the names that ranks have found.
    """
    refuse_not_finite(agree(lambda: first_weight_not_finite(tensors)), step)


def refuse_not_finite(found: Sequence[str | None], step: int) -> None:
    """Raises an error if a rank has found a weight that is not finite.

    `found`: for each rank the name of such a weight, None for none. `step`: the number of updates, for the message.

    Raises:
        NonFiniteWeightsError: with the alphabetically first of the names.
    """
    names = [name for name in found if name is not None]
    if names:
        raise NonFiniteWeightsError(
            f"after step {step} the weights are not finite, first {min(names)}; they are not saved.\n"
            "Lower optimizer.learning_rate or set training.clip_norm."
        )


def first_weight_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor of weights or averages with a NaN or an infinity; None if all are finite."""
    return first_not_finite(
        {name: tensor for name, tensor in tensors.items() if not name.startswith((OPTIMIZER, GROUP))}
    )


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The name of the first tensor with a NaN or an infinity, None if all are finite."""
    floating = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel()}
    # A sum is finite only if all of its terms are, and on a CPU it takes a tenth of a norm's time.
    suspects = {
        name: tensor for name, tensor in floating.items() if tensor.is_cuda or not isfinite(tensor.detach().sum())
    }
    if not suspects:
        return None
    # A maximum is NaN or infinite if any number is.
    largest = torch.stack([norm.double() for norm in torch._foreach_norm(list(suspects.values()), float("inf"))])
    if bool(largest.isfinite().all()):
        return None
    return next(name for name, norm in zip(suspects, largest.tolist(), strict=True) if not isfinite(norm))


def load_training(path: Path, state: TrainingState, *, is_verified: bool = False) -> State:
    """Puts a checkpoint into this rank's model, optimizer and average, and returns the values of its state.json.

    Every rank calls it; more or fewer ranks may have written the checkpoint, with other stages. `is_verified`:
    `resuming.checkpoint_of` has compared its checksums already.

    Raises:
        CheckpointError: on all ranks, for a damaged checkpoint, or one of another model, optimizer or recipe.
    """
    if not is_verified:
        verify_together(path)
    return together(_loading(path, state))


def _loading(path: Path, state: TrainingState) -> Callable[[], State]:
    """A function that loads a verified checkpoint into this rank's `state` and returns the values of state.json."""

    def load_own() -> State:
        found = stored_tensors(path)
        stored = _without(OPTIMIZER, found)
        # Empty tensors of the form that the optimizer keeps; `read` fills them.
        optimizer = empty_optimizer_tensors(state.optimizer, state.trainable, stored)
        groups = empty_group_tensors(state.optimizer, _without(GROUP, found), is_new=not stored)
        wanted = {**_prefixed(OPTIMIZER, optimizer), **_prefixed(GROUP, groups)}
        saved = read(path, {**_weights(state), **wanted})
        restore_optimizer(state.optimizer, state.trainable, optimizer)
        restore_groups(state.optimizer, groups)
        return saved

    return load_own


def _weights(state: TrainingState) -> dict[str, Tensor]:
    """The tensors of a checkpoint that exist before the first step, by name: weights, buffers and averages."""
    return {
        **_prefixed(MODEL, {name: tensor.detach() for name, tensor in state.model.items()}),
        **_prefixed(EMA, state.ema.tensors() if state.ema is not None else {}),
    }


def _without(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, keyed by their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, keyed by their names with the prefix before them."""
    return {prefix + name: tensor for name, tensor in tensors.items()}
