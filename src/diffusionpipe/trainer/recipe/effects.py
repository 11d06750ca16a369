"""What happens when a key of the recipe changes between a run and its continuation.

    said      it may change: one line says so, and it stays changed at the next resume
    fixed     it may not: the run would be another one, with another loss or other weights
    judged    its effect may not change: other paths may name the same data, and "auto" the same objective
    silent    it may change, because it does not change how the weights are trained

A key that has no effect here is an error of a test, so a new key must be put into one of these.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import cast

from pydantic import JsonValue

from diffusionpipe.trainer.recipe.group_section import GroupSection
from diffusionpipe.trainer.recipe.models_section import MemberSection
from diffusionpipe.trainer.recipe.overrides import Table
from diffusionpipe.trainer.recipe.recipe_file import SECTIONS, recipe_from_table, tables_of
from diffusionpipe.trainer.recipe.schema import Recipe
from diffusionpipe.trainer.recipe.section import Section


class Effect(StrEnum):
    """Whether a key may change when a run continues, and whether a log line says so."""

    SAID = "said"
    FIXED = "fixed"
    JUDGED = "judged"
    SILENT = "silent"


COMPONENT = "components"
"""The section of a component's own values."""
MODEL = "models"
"""The section of one of several models."""

_OF_GROUP = "learning_rate learning_rate_schedule warmup_steps learning_rate_final optimizer_arguments ema_decay"
_OF_MODEL = "path config train low_resolution noise_augmentation"
_KEYS: Mapping[str, Mapping[Effect, str]] = {
    "model": {
        Effect.FIXED: f"{_OF_MODEL} class_embeddings freeze_class_embeddings",
        Effect.SAID: "variant frozen_dtype frozen_arithmetic",
        Effect.SILENT: "from_scratch",
    },
    MODEL: {
        Effect.FIXED: f"{_OF_MODEL} resolution",
        Effect.SAID: f"{_OF_GROUP} variant clip_norm",
        Effect.SILENT: "from_scratch microbatches",
    },
    COMPONENT: {Effect.SAID: _OF_GROUP},
    "lora": {
        Effect.FIXED: "rank start resize",
        Effect.JUDGED: "alpha target_modules exclude rank_pattern dora rank_stabilized",
        Effect.SILENT: "merge formats dora_as_difference save_dtype trigger",
    },
    "objective": {
        Effect.JUDGED: "kind",
        Effect.FIXED: "snr_gamma time_sampling logit_mean logit_std mode_scale beta_alpha beta_beta speed_pairs "
        " time_range shift weighting loss huber_delta offset_noise self_conditioning variance guidance",
    },
    "data": {
        Effect.JUDGED: "train columns sources same_size batching",
        Effect.FIXED: "resolution height frames frame_rate random_crop flip caption_dropout captions "
        "caption_chunks clip_skip masks mask_file loss_mask sizes aspects multiple max_cut min_side enlarge patches "
        "weigh",
        Effect.SAID: "validation on_error",
        Effect.SILENT: "workers max_skipped allow_growth",
    },
    "training": {
        Effect.FIXED: "seed batch weights gradients rounding",
        Effect.SAID: "steps epochs precision clip_norm clip on_spike ema_decay ema_states",
        Effect.SILENT: "deterministic post_validation activation_checkpointing noise_scale_every",
    },
    "optimizer": {
        Effect.FIXED: "name rest groups",
        Effect.SAID: "learning_rate arguments",
        Effect.SILENT: "states in_backward",
    },
    "learning_rate": {Effect.SAID: "schedule arguments warmup_steps final by_staleness"},
    "pipeline": {
        Effect.SAID: "versions delay flush_every flushed_from",
        Effect.SILENT: "plan stages microbatches schedule orders replicas data_parallel sharded splits encode_chunk "
        "fill encoders cache offload_frozen cluster use memory replan",
    },
    "validation": {Effect.SAID: "timesteps samples", Effect.SILENT: "every"},
    "sampling": {
        Effect.SILENT: "every at_start prompts negative_prompt sizes labels images masks steps guidance "
        "true_cfg_scale noise_level scheduler seed"
    },
    "checkpoint": {Effect.SILENT: "every keep asynchronous adapters"},
    "run": {Effect.SILENT: "folder trackers project name stuck_after patience"},
}
EFFECTS: Mapping[str, Mapping[str, Effect]] = {
    section: {key: effect for effect, keys in effects.items() for key in keys.split()}
    for section, effects in _KEYS.items()
}
"""Section -> key -> whether the key may change. `COMPONENT` and `MODEL` hold the keys of components and of models."""


_CLASSES: Mapping[str, type[Section]] = {**SECTIONS, COMPONENT: GroupSection, MODEL: MemberSection}


def effect_of(key: str) -> Effect:
    """Whether a dotted key, e.g. "model.components.text_encoder.learning_rate", may change when a run continues.

    Raises:
        KeyError: there is no such key.
    """
    section, name = _section_of(key)
    return EFFECTS[section][name]


def values_of(recipe: Recipe) -> dict[str, JsonValue]:
    """The values of a recipe as JSON, by dotted key, without the keys that may change silently in a continued run."""
    return {key: value for key, value in _pairs(tables_of(recipe)) if effect_of(key) is not Effect.SILENT}


def default_of(key: str) -> JsonValue:
    """The default of a dotted key, as JSON has it; None for a key that is required.

    Raises:
        KeyError: there is no such section.
    """
    section, name = _section_of(key)
    # Without validation: required keys have no value here.
    defaults: JsonValue = _CLASSES[section].model_construct().model_dump(mode="json", include={name}).get(name)
    return defaults


def with_values(recipe: Recipe, values: Mapping[str, JsonValue]) -> Recipe:
    """The recipe with the values of some dotted keys replaced by `values`, and validated again as a whole.

    Raises:
        RecipeError: the values do not fit together.
    """
    tables = recipe.model_dump(mode="json")
    del tables["model" if recipe.models else "models"]  # a recipe states one of them
    for key, value in values.items():
        *path, last = key.split(".")
        table = tables
        for name in path:
            table = table.setdefault(name, {})
        table[last] = value
    return recipe_from_table(tables, source=recipe.run.folder)


def _pairs(tables: Mapping[str, Table]) -> Iterator[tuple[str, JsonValue]]:
    for section, table in tables.items():
        for key, value in table.items():
            if key == COMPONENT and isinstance(value, dict):
                yield from _pairs({f"{section}.{key}.{name}": own for name, own in value.items()})
            else:
                yield f"{section}.{key}", cast(JsonValue, value)  # tables_of gives values of JSON


def _section_of(key: str) -> tuple[str, str]:
    parts = key.split(".")
    return (COMPONENT if COMPONENT in parts[1:-1] else parts[0]), parts[-1]
