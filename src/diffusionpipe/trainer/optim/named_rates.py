"""The learning rate schedules of transformers by their names, as functions of the step, or of the losses so far.

    cosine_with_restarts, polynomial, constant_with_warmup, inverse_sqrt, cosine_with_min_lr,
    cosine_warmup_with_min_lr, warmup_stable_decay        factor of the peak = f(step), so a resumed run needs no state
    reduce_lr_on_plateau, greedy                          factor of the peak = f(losses), kept in checkpoints

"constant", "linear" and "cosine" are our own (`learning_rate.py`), whose first step already has a rate above 0.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn

from diffusionpipe.errors import CheckpointError, RecipeError

BY_LOSS = ("reduce_lr_on_plateau", "greedy")
"""The names of schedules that read the losses."""
_KEY = "learning_rate_state"


def factor_at(step: int, name: str, arguments: str, *, peak: float, warmup_steps: int, total_steps: int) -> float:
    """The factor of the peak learning rate in update `step`, counted from 0, by a schedule of transformers.

    1 for the schedules that read losses. `arguments` are JSON.

    Raises:
        RecipeError: the schedule refuses its arguments.
    """
    if name in BY_LOSS:
        return 1.0
    return float(_factors(name, arguments, peak, warmup_steps, total_steps)(step))


@cache
def _factors(name: str, arguments: str, peak: float, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    made: Any = _scheduler(name, json.loads(arguments), peak, warmup_steps, total_steps)
    found: Callable[[int], float] = made.lr_lambdas[0]
    return found


def _scheduler(name: str, arguments: Mapping[str, Any], peak: float, warmup_steps: int, total_steps: int) -> object:
    """A new learning rate scheduler of transformers, on an optimizer of its own whose rate it sets.

    Raises:
        RecipeError: the schedule refuses its arguments.
    """
    from transformers.optimization import get_scheduler

    # The schedule wants an optimizer, whose rate it sets.
    idle = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=peak)
    try:
        return get_scheduler(
            name,
            idle,
            num_warmup_steps=warmup_steps,
            num_training_steps=total_steps,
            scheduler_specific_kwargs=dict(arguments),
        )
    except (TypeError, ValueError) as error:
        raise RecipeError(f"the schedule {name} refuses {dict(arguments)}: {error}") from error


def problem_of_schedule(name: str, arguments: Mapping[str, Any], *, warmup_steps: int, total_steps: int) -> str | None:
    """Why a schedule of transformers refuses these arguments; None if it takes them."""
    try:
        if name in BY_LOSS:
            _scheduler(name, arguments, 1.0, warmup_steps, total_steps)
        else:
            factor_at(0, name, json.dumps(arguments), peak=1.0, warmup_steps=warmup_steps, total_steps=total_steps)
    except RecipeError as error:
        return str(error)
    return None


class LossRates:
    """A learning rate schedule that reads the loss of each step, and the factor of the peak that follows from it.

    A loss is the mean over the whole batch, so every rank has the same factor. Under the name of any other schedule the
    factor is always 1.
    """

    def __init__(
        self, name: str, arguments: Mapping[str, Any], peak: float, kept: Mapping[str, object] | None = None
    ) -> None:
        """Starts the schedule `name` of transformers, or continues it with the values of a checkpoint.

        `kept`: the checkpoint's values, as `kept_rates` finds them; None: the schedule starts.

        Raises:
            CheckpointError: no run has written these values.
        """
        self._peak = peak
        # 0, 1: schedules by losses read no numbers of steps.
        made: Any = _scheduler(name, arguments, peak, 0, 1) if name in BY_LOSS else None
        self._scheduler = made
        if self._scheduler is None or kept is None:
            return
        rate = kept.get("rate")
        if not isinstance(rate, float):
            raise CheckpointError(f"the checkpoint's state.json has the learning rate {rate!r} in {_KEY!r}")
        self._scheduler.load_state_dict({key: value for key, value in kept.items() if key != "rate"})
        self._scheduler.optimizer.param_groups[0]["lr"] = rate

    @property
    def factor(self) -> float:
        """The factor of the peak for the next update; 1 for schedules that read no losses."""
        if self._scheduler is None:
            return 1.0
        return float(self._scheduler.optimizer.param_groups[0]["lr"]) / self._peak

    def note(self, loss: float) -> None:
        """Gives the schedule the loss of a step, which may change the factor."""
        if self._scheduler is not None:
            self._scheduler.step(loss)  # changes the rate of the idle optimizer

    def state(self) -> dict[str, object]:
        """The schedule's values to add to a checkpoint's state, under one key; {} if the schedule reads no losses."""
        if self._scheduler is None:
            return {}
        rate = self._scheduler.optimizer.param_groups[0]["lr"]
        return {_KEY: {**json.loads(json.dumps(self._scheduler.state_dict())), "rate": rate}}


def kept_rates(state: Mapping[str, object]) -> Mapping[str, object] | None:
    """The values in a checkpoint's state of a schedule that reads losses; None if the run had no such schedule.

    Raises:
        CheckpointError: no run has written such values.
    """
    found = state.get(_KEY)
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(f"the checkpoint's state.json has {str(found)[:100]!r} in {_KEY!r}")
    return found
