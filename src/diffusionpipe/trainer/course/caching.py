"""The cache of a run: checked before anything is measured, and opened once the weights are read."""

import logging
from collections.abc import Callable
from dataclasses import replace

from diffusionpipe.ir import Plan
from diffusionpipe.runtime.job.agreement import from_first
from diffusionpipe.trainer.course.preparation import Data
from diffusionpipe.trainer.data.sizes.order import SizeOrder
from diffusionpipe.trainer.model.members import RecipeModels
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.recipe.pipeline_section import Encoders
from diffusionpipe.trainer.setup.caching import (
    Cacheable,
    CacheVerdict,
    cache_folder,
    cacheable,
    check_cache,
    open_cache,
    problem_of_cache,
)
from diffusionpipe.trainer.setup.session import Session
from diffusionpipe.trainer.step.cache_writer import CacheWriter

logger = logging.getLogger(__name__)

JudgeCache = Callable[[Recipe, Plan, Cacheable], CacheVerdict]
"""A function of the planning half that rank 0 calls: whether a cache pays in a run whose layers are measured."""


def cache_of(opened: RecipeModels, data: Data) -> Cacheable | None:
    """The results of frozen layers that the run would keep on disk; None where it keeps none.

    Every rank calls it.

    Raises:
        ConfigError: on every rank, with `encoders = "cache"`; nothing can be kept, or the disk has no room.
    """
    recipe = opened.recipe
    if not recipe.pipeline.may_cache:
        return None
    order = None if data.sizes is None else data.sizes.order  # an order of patches assigns no sizes
    assignment = order.assignment if isinstance(order, SizeOrder) else None
    found = cacheable(opened.graph, opened.model, recipe, data.train.dataset, assignment)
    if recipe.pipeline.encoders is Encoders.CACHE:
        from_first(lambda: check_cache(found, recipe))  # rank 0 looks at the disk for all
        return found
    return None if from_first(lambda: _is_left(problem_of_cache(found, recipe))) else found


def _is_left(why_not: str | None) -> bool:
    """Whether the run does without a cache: it does if there is a reason `why_not`, which this logs."""
    if why_not is not None:
        logger.info('encoders=fill reason="%s"', why_not)
    return why_not is not None


def names_of_kept(found: Cacheable | None) -> tuple[str, ...]:
    """The names of the tensors that the cache keeps; () without a cache."""
    return () if found is None else tuple(kept.name for kept in found.kept)


def with_cache(
    found: Cacheable | None, session: Session, data: Data, judge: JudgeCache | None = None
) -> tuple[Data, CacheWriter | None]:
    """The data with batches that read from the cache, and the writer that fills it; without a cache the data and None.

    Every rank calls it.

    `found`: the results that the cache would keep; None without a cache. `judge`: says whether the cache pays, where
    layers are measured; with `encoders = "auto"` a cache that does not pay is left out.

    Raises:
        ConfigError: on every rank, where the settings of the cache cannot be written.
    """
    if found is None or from_first(lambda: _is_worthless(found, session, judge)):
        return data, None
    models = (session.model, *session.others)
    parts = open_cache(
        found, session.graph.of_sizes, models, session.recipe, encodes=session.worker.encoded is not None
    )
    if session.is_first:
        logger.info(
            "cache=%s keeps=%s size_gib=%.3f%s",
            cache_folder(session.recipe),
            ",".join(kept.name for kept in found.kept),
            found.size / 2**30,
            f' encoded_anew="{"; ".join(found.encoded_anew)}"' if found.encoded_anew else "",
        )
    sizes = data.sizes
    if sizes is not None:
        sources = (replace(source, cached=part) for source, part in zip(sizes.sources, parts, strict=True))
        sizes = replace(sizes, sources=tuple(sources))
    return replace(data, train=replace(data.train, cached=parts[0]), sizes=sizes), CacheWriter(parts[0].tensors)


def _is_worthless(found: Cacheable, session: Session, judge: JudgeCache | None) -> bool:
    """Whether the cache does not pay and the recipe lets the run do without; logs the numbers of the judgement."""
    recipe = session.recipe
    if judge is None or not recipe.pipeline.is_profiled:
        return False
    verdict = judge(recipe, session.plan, found)
    for line in verdict.lines:
        logger.info("%s", line)
    return recipe.pipeline.encoders is Encoders.AUTO and _is_left(verdict.why_not)
