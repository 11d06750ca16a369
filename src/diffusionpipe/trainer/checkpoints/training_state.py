"""The state for resuming a training, as tensors.

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
    """None on a rank without trainable parameters."""
    ema: Ema | ReadWeights | None
    """None if the recipe wants no average."""


def training_tensors(state: TrainingState) -> dict[str, Tensor]:
    """All tensors of a rank's checkpoint by name, e.g. "model.NAME", "ema.NAME", "optimizer.NAME.ENTRY"."""
    return {
        **_weights(state),
        **_prefixed(OPTIMIZER, optimizer_tensors(state.optimizer, state.trainable)),
        **_prefixed(GROUP, group_tensors(state.optimizer)),
    }


def check_finite(tensors: Mapping[str, Tensor], step: int) -> None:
    """Refuses weights and averages with a NaN or an infinity among the tensors after `step`.

    Every rank calls it.

    Raises:
        NonFiniteWeightsError: on all ranks alike, with the alphabetically first of the names that ranks have found.
    """
    refuse_not_finite(agree(lambda: first_weight_not_finite(tensors)), step)


def refuse_not_finite(found: Sequence[str | None], step: int) -> None:
    """Raises if a rank has found a weight that is not finite; `found` has each rank's name of one, None for none.

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
    """Puts a checkpoint into this rank's model, optimizer and average, and returns the rest of its state.

    The rest are the values that were saved beside the tensors, as in state.json. Every rank calls it; the
    ranks that saved may have been more or fewer, and split otherwise. `is_verified`: `resuming.checkpoint_of` has
    compared its checksums already.

    Raises:
        CheckpointError: on all ranks, for a damaged checkpoint, or one of another model, optimizer or recipe.
    """
    if not is_verified:
        verify_together(path)
    return together(_loading(path, state))


def _loading(path: Path, state: TrainingState) -> Callable[[], State]:
    """The local part of `load_training`."""

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
    """The tensors that exist from the start: weights and their averages."""
    return {
        **_prefixed(MODEL, {name: tensor.detach() for name, tensor in state.model.items()}),
        **_prefixed(EMA, state.ema.tensors() if state.ema is not None else {}),
    }


def _without(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the prefix, under their names without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under longer names."""
    return {prefix + name: tensor for name, tensor in tensors.items()}
