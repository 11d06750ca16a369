"""Which models fit a cluster, trained as a whole and by adapters, with the nearest layout where one does not.

The work of each model is counted once in either way, and its times are computed for all known cards: another cluster
starts at once. Adapters keep fewer activations and need no gradients of frozen weights, so they have their own profile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from diffusionpipe.costs.clusters import computes_in_bfloat16, known_cards
from diffusionpipe.costs.devices import DEVICES
from diffusionpipe.planner.choosing.advice import RANK, nearest_layout, recomputed
from diffusionpipe.planner.choosing.batches import BatchPlan, with_batch
from diffusionpipe.planner.choosing.recomputation import best_way
from diffusionpipe.workflows.planning.profile_cache import cache_folder, kept_profile
from diffusionpipe.workflows.planning.stated_model import StatedModel, known_rates, profile_name, profiles_of_devices
from diffusionpipe.workflows.planning.stated_setting import stated_setting
from diffusionpipe.workflows.telling import SILENCE, Telling

if TYPE_CHECKING:
    from pathlib import Path

    from diffusionpipe.costs import Cluster, Profile
    from diffusionpipe.planner.choosing.advice import Nearest
    from diffusionpipe.planner.pricing.setting import Setting

WHOLE, ADAPTERS = "whole", "adapters"
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """Whether one model, trained whole or by adapters, fits on a cluster: its plan, or the layout that lacks least."""

    model: str
    trained: str
    """`WHOLE` or `ADAPTERS`."""
    tried: BatchPlan | None
    """The best plan and its batch; None where nothing fits."""
    nearest: Nearest | None
    """Where nothing fits, the layout that lacks least."""


def models_named(text: str) -> tuple[str, ...]:
    """The names of shipped models in an option: of all for "all", else of some with commas between.

    Raises:
        ConfigError: one is not shipped.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.models.opening.configured import configured_lora, configured_models

    known = configured_models()
    if text == ALL:
        return tuple(name for name in known if configured_lora(name) is None)  # others are the same with adapters
    names = tuple(word.strip() for word in text.split(",") if word.strip())
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(
            f"--models: there is no shipped model {wrong[0]!r}; give {ALL}, or some of {', '.join(known)}"
        )
    if not names:
        raise ConfigError(f"--models: no model is named; give {ALL}, or some of {', '.join(known)}")
    return names


def answers(
    names: Sequence[str],
    cluster: Cluster,
    *,
    batch: int | None = None,
    tell: Telling = SILENCE,
    uses_cache: bool = True,
) -> Iterator[ModelAnswer]:
    """Yield, as soon as each is found, whether each model fits, at `batch` samples or one for each device.

    Raises:
        ConfigError: the cluster's devices are not known.
        ModelError: a model cannot be cut.
    """
    folder = cache_folder(os.environ) if uses_cache else None
    for name in names:
        ways = ((WHOLE, None), (ADAPTERS, RANK)) if _takes_adapters(name) else ((WHOLE, None),)
        for trained, rank in ways:
            profile = profile_on(name, cluster, folder, tell, lora_rank=rank)
            size = batch or cluster.num_ranks
            setting = stated_setting(profile, cluster, size, checkpoint=(), has_ema=False, optimizer="AdamW")
            yield _answer(name, trained, setting, is_stated=batch is not None)


def profile_on(
    name: str, cluster: Cluster, folder: Path | None, tell: Telling = SILENCE, *, lora_rank: int | None = None
) -> Profile:
    """The computed profile of a shipped model for the cluster's device.

    With a `folder` it is kept there, and so are profiles for all other known cards, which are computed with it; None:
    it is always computed. `lora_rank`: the rank of its adapters; None to train it as a whole.

    Raises:
        ConfigError: the cluster's devices are not known.
    """
    from diffusionpipe.errors import ConfigError

    rates = known_rates(cluster)
    if rates is None:
        raise ConfigError(f"--models: the devices of the cluster {cluster.name} are not known; give one of cards")
    is_narrow = computes_in_bfloat16(cluster)
    precision = "bfloat16" if is_narrow else "float32"
    stated = StatedModel(name=name, lora_rank=lora_rank, has_narrow_store=is_narrow, precision=precision)
    # Cards that compute in the same arithmetic count the same operations, which are counted once for all.
    alike = [DEVICES[card] for card in known_cards() if DEVICES[card].has_bfloat16 or not is_narrow]

    def make() -> Profile:
        made = profiles_of_devices(stated, [one.name for one in alike] if folder else [rates.name], tell)
        for one, profile in zip(alike, made, strict=False):
            # The asked card is kept by the call below.
            if folder is not None and one.name != rates.name:
                kept_profile(profile_name(stated, one), partial(replace, profile), folder)
        return next(profile for profile in made if profile.device == rates.title)

    return kept_profile(profile_name(stated, rates) if folder else "", make, folder)[0]


def _takes_adapters(name: str) -> bool:
    from diffusionpipe.models.opening.configured import configured_pipeline

    return configured_pipeline(name) not in ("DiTPipeline", "StableDiffusionControlNetPipeline")


def _answer(name: str, trained: str, setting: Setting, *, is_stated: bool) -> ModelAnswer:
    """Whether a model fits: its plan for the batch of `setting`, or the layout that lacks least.

    Without a stated batch, a batch of one sample is tried too if the larger one does not fit. `name`: the model's;
    `trained`: `WHOLE` or `ADAPTERS`; `is_stated`: the user has stated the batch.
    """
    # A dictionary's keys: a size that is both is tried once.
    for size in dict.fromkeys((setting.workload.batch, setting.workload.batch if is_stated else 1)):
        choice = best_way(with_batch(setting, size), may_recompute=True)
        if choice is not None:
            return ModelAnswer(model=name, trained=trained, tried=BatchPlan(batch=size, choice=choice), nearest=None)
    least = with_batch(setting, setting.workload.batch if is_stated else 1)
    nearest = nearest_layout(recomputed(least) or least)
    if nearest is None:
        nearest = nearest_layout(recomputed(setting) or setting)
    return ModelAnswer(model=name, trained=trained, tried=None, nearest=nearest)
