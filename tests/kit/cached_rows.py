"""The rows that stages read in each step of a run, with a cache of encoders' results or without, but no training."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

from kit.cuts import traced_once
from kit.descriptions import described
from kit.tiny_runs import measured_briefly
from torch import Tensor

from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import joined
from diffusionpipe.trainer.course.caching import cache_of, names_of_kept, with_cache
from diffusionpipe.trainer.course.preparation import read_data
from diffusionpipe.trainer.data.batches.loader import StepLoader
from diffusionpipe.trainer.model import members
from diffusionpipe.trainer.model.members import open_model
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.reporting.screen import NoScreen
from diffusionpipe.trainer.setup.caching import Cacheable
from diffusionpipe.trainer.setup.planning import Planning
from diffusionpipe.trainer.setup.session import Session, open_session
from diffusionpipe.trainer.step.cache_writer import CacheWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The rows of all steps, and the results of encoders that were computed, read and written."""

    rows: list[dict[str, Tensor]]
    """By step: the tensors of the frozen part that stages read."""
    num_encoded: int = 0
    num_read: int = 0
    num_written: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run before its first step."""

    session: Session
    found: Cacheable | None
    cache: CacheWriter | None
    loader: StepLoader


@contextmanager
def opened_run(recipe: Recipe, *, briefly: bool = True) -> Iterator[OpenedRun]:
    """The run of a recipe on one rank; `briefly`: layers are measured once."""
    from diffusionpipe.planner.unequal.cutting import cutting_of
    from diffusionpipe.workflows.training.run_plan import make_plan

    with (
        mock.patch.object(members, "describe", described),
        traced_once(),
        measured_briefly() if briefly else nullcontext(),
        joined(membership({}), device="cpu") as job,
    ):
        opened = open_model(recipe, job)
        with NoScreen().work("reading") as work:
            opened, data = read_data(opened, work)
        recipe = opened.recipe
        recipe.run.folder.mkdir(parents=True, exist_ok=True)
        found = cache_of(opened, data)
        session = open_session(
            recipe, job, Planning(make_plan=make_plan, make_cutting=cutting_of), opened, kept=names_of_kept(found)
        )
        data, cache = with_cache(found, session, data)
        loader = StepLoader(
            source=data.train,
            batch=session.plan.batch,
            positions=session.positions,
            sizes=data.sizes,
            group=session.group_positions,
            first_step=0,
            num_steps=recipe.training.num_steps,
            workers=0,
        )
        yield OpenedRun(session=session, found=found, cache=cache, loader=loader)


def rows_seen(recipe: Recipe) -> Seen:
    """The rows of each step on one rank, whose frozen layers run before the first forward."""
    with opened_run(recipe) as run:
        worker, cache = run.session.worker, run.cache
        executor, encoded = worker.train, worker.encoded
        assert encoded is not None
        rows = []
        for batch in run.loader:
            if cache is not None:
                cache.feed(batch)
            worker.feed(executor, batch)
            store = executor.store
            executor.run()
            edges = (edge for pipeline in executor.schedule.placement.pipelines for edge in pipeline.edges)
            names = {name for edge in edges for name in edge.tensors if name in store}
            rows.append({name: view.clone() for name in sorted(names) for view in store.views(name, encoded)[:1]})
            if cache is not None:
                cache.take(store, encoded)
                cache.flush()
                cache.settle()
        counts = {} if cache is None else cache.counts()
        if cache is not None:
            cache.close()
        return Seen(rows=rows, **counts)
