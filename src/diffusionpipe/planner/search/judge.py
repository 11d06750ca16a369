"""What a search asks of the candidates of one setting: their time, their memory, and where to cut the model."""

from dataclasses import dataclass
from functools import cached_property

from diffusionpipe.costs.tied import tied_blocks
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.estimates import Estimates
from diffusionpipe.planner.search.footprint import Footprint
from diffusionpipe.planner.search.questions import Questions
from diffusionpipe.planner.search.tables import Tables
from diffusionpipe.planner.search.two_sided import PairPartition


@dataclass(frozen=True, kw_only=True)
class Judge:
    """All three, made once for a setting."""

    setting: Setting

    @cached_property
    def has_ties(self) -> bool:
        """Whether several layers train a parameter in common."""
        return bool(tied_blocks(self.setting.graph, [(name,) for name in self.setting.graph.backbone_layers]))

    @cached_property
    def tables(self) -> Tables:
        """What the candidates share."""
        return Tables(setting=self.setting)

    @cached_property
    def footprint(self) -> Footprint:
        """Their memory."""
        return Footprint(tables=self.tables)

    @cached_property
    def estimates(self) -> Estimates:
        """Their time."""
        return Estimates(tables=self.tables, footprint=self.footprint)

    @cached_property
    def questions(self) -> Questions:
        """Where to cut the model."""
        return Questions(tables=self.tables, footprint=self.footprint)

    @cached_property
    def pairs(self) -> dict[object, tuple[PairPartition, ...]]:
        """Partitions of two backbones by what was asked, which a search with fills asks as one without."""
        return {}
