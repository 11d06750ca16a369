"""Gives a search the figures of candidates of one setting: time, memory, and where to cut the model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial

from diffusionpipe.costs.tied import tied_blocks
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Schedule
from diffusionpipe.ordering import Instance, schedule_of, search
from diffusionpipe.planner.assembly.folded import stage_starts
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.estimates import Estimates
from diffusionpipe.planner.search.footprint import Footprint
from diffusionpipe.planner.search.questions import Questions
from diffusionpipe.planner.search.tables import Tables
from diffusionpipe.planner.search.two_sided import PairPartition


@dataclass(frozen=True, kw_only=True)
class Judge:
    """The estimates of candidates of one setting: time, memory and cuts; each part is made once."""

    setting: Setting

    @cached_property
    def has_ties(self) -> bool:
        """Whether several trained layers share a trained parameter."""
        return bool(tied_blocks(self.setting.graph, [(name,) for name in self.setting.graph.backbone_layers]))

    @cached_property
    def tables(self) -> Tables:
        """The sums of times and bytes that all candidates of the setting share."""
        return Tables(setting=self.setting)

    @cached_property
    def footprint(self) -> Footprint:
        """The counter of the candidates' memory."""
        return Footprint(tables=self.tables)

    @cached_property
    def estimates(self) -> Estimates:
        """The maker of quick estimates of the candidates' times."""
        return Estimates(tables=self.tables, footprint=self.footprint)

    @cached_property
    def questions(self) -> Questions:
        """The questions to the dynamic program that cuts the model into stages."""
        return Questions(tables=self.tables, footprint=self.footprint)

    @cached_property
    def cuts(self) -> Callable[[Arrangement, int, tuple[int, ...]], tuple[int, ...]]:
        """A function (arrangement, micro-batches, worker of each stage) -> first layer of each stage, cut by time."""
        found = cache(partial(stage_starts, self.setting.graph))

        def cuts(arrangement: Arrangement, microbatches: int, workers: tuple[int, ...]) -> tuple[int, ...]:
            samples = self.tables.unit_samples(arrangement, microbatches)
            return found(self.tables.table.sums(samples, microbatches).steps(), workers)

        return cuts

    @cached_property
    def orders(self) -> Callable[[Instance], Schedule | None]:
        """A function from an instance of the order search to its best schedule; None if one micro-batch does not fit.

        Each is searched once: with fills and without, the same stages are often asked about.
        """

        def orders(instance: Instance) -> Schedule | None:
            try:
                return schedule_of(search(instance, max_levels=1))
            except ConfigError:
                return None

        return cache(orders)

    @cached_property
    def pairs(self) -> dict[object, tuple[PairPartition, ...]]:
        """Key of a question about two backbones -> its partitions; searches with and without fills share them."""
        return {}
