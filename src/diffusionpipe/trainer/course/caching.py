"""The cache of a run: checked before anything is measured, and opened once the weights are read."""

import logging
from dataclasses import replace

from diffusionpipe.runtime.job.agreement import from_first
from diffusionpipe.trainer.course.preparation import Data
from diffusionpipe.trainer.data.size_order import SizeOrder
from diffusionpipe.trainer.model.members import Model
from diffusionpipe.trainer.setup.caching import Cacheable, cache_folder, cacheable, check_cache, open_cache
from diffusionpipe.trainer.setup.session import Session
from diffusionpipe.trainer.step.cache_writer import CacheWriter

logger = logging.getLogger(__name__)


def cache_of(opened: Model, data: Data) -> Cacheable | None:
    """The tensors that the run keeps; None where it keeps none. Every rank calls it.

    Raises:
        ConfigError: on every rank; nothing can be kept, or the disk has no room.
    """
    recipe = opened.recipe
    if not recipe.pipeline.may_cache:
        return None
    order = None if data.sizes is None else data.sizes.order
    assignment = order.assignment if isinstance(order, SizeOrder) else None
    found = cacheable(opened.graph, opened.model, recipe, data.train.dataset, assignment)
    from_first(lambda: check_cache(found, recipe))
    return found


def names_of_kept(found: Cacheable | None) -> tuple[str, ...]:
    """The names of the tensors that are kept."""
    return () if found is None else tuple(kept.name for kept in found.kept)


def with_cache(found: Cacheable | None, session: Session, data: Data) -> tuple[Data, CacheWriter | None]:
    """Data whose batches take from the cache, and the writer that fills it; every rank calls it.

    Raises:
        ConfigError: on every rank, where the cache cannot be written.
    """
    if found is None:
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
