"""[models.NAME] of a recipe: several models that train together, each a backbone of its own.

[models.base]                          [model]                 a recipe with one such section
path = "models/a"          equals      path = "models/a"       is the recipe with [model]
resolution = 64                        [data]
                                       resolution = 64
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from diffusionpipe.combinations.features import Feature
from diffusionpipe.combinations.refused import refusal
from diffusionpipe.trainer.recipe.group_section import ELSEWHERE, GroupSection
from diffusionpipe.trainer.recipe.model_section import ModelKeys
from diffusionpipe.trainer.recipe.overrides import Table
from diffusionpipe.trainer.recipe.section import Auto, Count, Positive

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class MemberSection(GroupSection, ModelKeys):
    """[models.NAME]: one of several models that train together."""

    resolution: Auto[Count] = None
    """Side of this model's pictures, which are reduced from pictures of `data.resolution`; `"auto"`:
    `data.resolution`."""
    clip_norm: Auto[Positive] = None
    """The norm of this model's gradients above which they are scaled down; `"auto"`: `training.clip_norm`."""
    microbatches: Auto[Count] = None
    """Micro-batches of this model; `"auto"`: `pipeline.microbatches`."""


def without_models(table: Table) -> tuple[Table, Table, list[tuple[str, str]]]:
    """(a recipe's table without [models], the sections of several models by name, (key, line) of each fault in them).

    If [models] has one model, its keys move to the sections where a recipe with [model] has them, and the second value
    is {}. If it has several, the table gets a [model] that only names their paths.
    """
    models = table.get("models")
    if models is None:
        return table, {}, []
    rest = {key: value for key, value in table.items() if key != "models"}
    problems = list(_problems(models, has_model="model" in table))
    if problems or not isinstance(models, dict):
        return {**rest, "model": rest.get("model", {"path": ""})}, {}, problems
    if len(models) > 1:
        paths = ", ".join(str(section.get("path", "")) for section in models.values())
        return {**rest, "model": {"path": paths}}, models, []  # the schema wants a [model], and messages name its path
    (alone,) = models.values()
    result: dict[str, Any] = {**rest, "model": {key: v for key, v in alone.items() if key not in ELSEWHERE}}
    for key, (section, general) in ELSEWHERE.items():
        if key in alone and alone[key] != "auto":
            outer, value = result.get(section, {}), alone[key]
            if isinstance(outer, dict):
                known = outer.get(general)
                both = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
                result[section] = {**outer, general: both}
    return result, {}, []


def _problems(models: object, *, has_model: bool) -> Iterator[tuple[str, str]]:
    if not isinstance(models, dict) or not models or not all(isinstance(value, dict) for value in models.values()):
        yield "models", "models: expected one section for each model, [models.NAME]"
        return
    if has_model:
        yield "model", "model: a recipe has [model] or [models.NAME], not both; make it one of them, or remove it"
    for name in models:
        if not NAME.fullmatch(name):
            yield f"models.{name}", f"models.{name}: a model's name is made of letters, digits and _, e.g. base"


def refused_with_models(models: Mapping[str, MemberSection], sections: Mapping[str, Any]) -> Iterator[str]:
    """A line "section.key: problem" for each key in `sections` that a recipe with several models cannot use yet."""
    pipeline, lora = sections.get("pipeline"), sections.get("lora")
    data, training = sections.get("data"), sections.get("training")
    if pipeline is not None and pipeline.plan == "auto":
        if len(models) > 2:
            yield "pipeline.plan: sizes are searched for two models, not for more; remove it and give the sizes"
        for name in (name for name, own in models.items() if own.microbatches is not None):
            yield f'models.{name}.microbatches: the search chooses it; remove it, or remove pipeline.plan = "auto"'
    if pipeline is not None and pipeline.plan_file is not None:
        for name in (name for name, own in models.items() if own.microbatches is not None):
            yield f"models.{name}.microbatches: the plan in {pipeline.plan_file} has its own; remove it"
    if pipeline is not None and pipeline.orders is not None:
        yield f"pipeline.orders: {refusal(Feature.SEVERAL_MODELS, Feature.ORDERS_FILE)}"
    if pipeline is not None and pipeline.may_cache:
        yield f"pipeline.encoders: {refusal(Feature.CACHE, Feature.SEVERAL_MODELS)}"
    if pipeline is not None and pipeline.replan == "suggest":
        yield f"pipeline.replan: {refusal(Feature.REPLAN, Feature.SEVERAL_MODELS)}"
    if pipeline is not None and pipeline.splits:
        yield "pipeline.splits: it names layers of one model; remove it, and the layers are cut by their work"
    if lora is not None and lora.rank is not None:
        yield f"lora.rank: {refusal(Feature.SEVERAL_MODELS, Feature.LORA)}"
    if data is not None and data.masks is not None:
        yield f"data.masks: {refusal(Feature.SEVERAL_MODELS, Feature.MASKS)}"
    if data is not None:
        too_large = [name for name, own in models.items() if (own.resolution or data.resolution) > data.resolution]
        yield from (
            f"models.{name}.resolution: it is above data.resolution, {data.resolution}, in which pictures are read; "
            "set data.resolution to the largest"
            for name in too_large
        )
    if pipeline is not None and training is not None and pipeline.plan is None:
        copies = pipeline.data_parallel or 1
        for name, own in models.items():
            parts = (own.microbatches or pipeline.sizes.microbatches) * copies
            if training.batch % parts:
                yield (
                    f"models.{name}.microbatches: a batch of {training.batch} samples cannot be cut into "
                    f"{parts // copies} micro-batches for each of {copies} pipelines; use a divisor of "
                    f"{training.batch // copies}"
                )
            elif bad := sorted({replicas for replicas in pipeline.replicas if training.batch // parts % replicas}):
                yield (
                    f"models.{name}.microbatches: a micro-batch of {training.batch // parts} samples cannot be shared "
                    f"by {' or '.join(map(str, bad))} replicas; use fewer micro-batches, or other numbers of replicas"
                )
