"""The inputs from which the planner makes a plan."""

from dataclasses import dataclass
from functools import cached_property

from diffusionpipe.costs import Cluster, ModelGraph, Profile
from diffusionpipe.holding import Ledger, Workload
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.pricing.given import NOTHING, Given
from diffusionpipe.planner.pricing.layer_table import LayerTable
from diffusionpipe.schedules.traits import holds_blocks_once, is_split
from diffusionpipe.units import Seconds

FILL_START: Seconds = 2e-4
"""Seconds of starting a fill besides its layers, if the profile is measured."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The inputs of a plan: model, profile, cluster, workload, and the sizes that are given."""

    profile: Profile
    cluster: Cluster
    workload: Workload
    given: Given = NOTHING
    """Sizes that a search keeps to."""
    may_branch: bool = True
    """Whether a search looks for stages on branches that run at the same time."""
    whole: "Setting | None" = None
    """The setting that was asked for, if this one was made of it by moving the frozen part or dividing states."""
    owners: int = 1
    """The number of copies in all its layouts, which hold the optimizer's states in parts; 1: each holds all."""

    @property
    def fill_start(self) -> Seconds:
        """The seconds of starting a fill besides its layers: 0.2 ms on a measured profile, 0 on a computed one.

        A larger number makes fewer and longer fills. Search and fills count it, but the simulator does not.
        """
        return FILL_START if self.profile.source == "measured" else 0.0

    @property
    def may_split(self) -> bool:
        """Whether a search may split backwards: only where the profile counts the bytes that they keep."""
        return self.profile.counts_kept

    @property
    def may_shard(self) -> bool:
        """Whether copies may hold parameters in parts: not where updates round them, or where another way is given."""
        return self.given.sharded in (None, Sharded.ALL) and not self.workload.rounds

    def allows_family(self, name: str) -> bool:
        """Whether a search may take the schedule family with this name."""
        is_possible = (self.may_split or not is_split(name)) and (self.owners == 1 or holds_blocks_once(name))
        return self.given.schedule in (None, name) and is_possible

    @property
    def sharded(self) -> Sharded:
        """The part of the training state that layouts hold in parts: optimizer states with owners, else none."""
        return Sharded.OPTIMIZER if self.owners > 1 else Sharded.NONE

    @property
    def graph(self) -> ModelGraph:
        """The graph of the model in the setting's profile."""
        return self.profile.graph

    @property
    def ledger(self) -> Ledger:
        """The ledger with the bytes of each parameter of the model in training with this workload."""
        return self.table.ledger

    @cached_property
    def table(self) -> LayerTable:
        """The sums of times and bytes over ranges of the trained part's layers."""
        return LayerTable(profile=self.profile, workload=self.workload, owners=self.owners)
