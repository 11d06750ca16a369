"""Divides the blocks of a rank over data-parallel groups: in parts, or whole with one owner of each parameter."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from diffusionpipe.costs import ModelGraph
from diffusionpipe.holding.sharding import part_of_parameter
from diffusionpipe.ir import Plan, Sharded
from diffusionpipe.models.graphs.graph import LayerGraph, layer_parameters, modules_of
from diffusionpipe.runtime.comm.places import trained_layers
from diffusionpipe.runtime.comm.transport import Transport
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.weights.owned import Divided, OwnedBlock
from diffusionpipe.runtime.weights.sharding import Reductions, ShardedBlock, narrow_modules, read_copies


@dataclass(frozen=True, kw_only=True)
class Sharder:
    """Divides the blocks of one rank over its data-parallel group: in parts, or whole with one owner a parameter."""

    graph: LayerGraph
    model: ModelGraph
    plan: Plan
    rank: int
    transport: Transport
    precision: Precision
    reductions: Reductions = field(default_factory=Reductions)
    """The reductions of gradients under way, which all sharded blocks of the rank share."""

    @cached_property
    def owner_of(self) -> Mapping[str, int]:
        """Name of each parameter of this rank's trained blocks that is divided -> the rank that owns it."""
        mesh = self.plan.mesh
        worker = mesh.place(self.rank)[1]
        layers = trained_layers(self.plan, self.rank)
        parts = part_of_parameter(self.model, layers, mesh.parts, sharded=mesh.sharded)
        return {name: mesh.rank(part, worker) for name, part in parts.items()}

    def divide(self, block: int) -> Divided:
        """The block with this id, divided over the ranks that share it.

        It is in parts (`ShardedBlock`) or, if the mesh says so, only its updates are divided (`OwnedBlock`). Its
        parameters must be real and on their device.
        """
        if self.plan.mesh.sharded is Sharded.ALL:
            return self.shard(block)
        return OwnedBlock(
            layer_parameters(self.graph, self.plan.blocks[block]),
            owner_of=self.owner_of,
            rank=self.rank,
            ranks=self._ranks,
            transport=self.transport,
        )

    @property
    def _ranks(self) -> tuple[int, ...]:
        """The ranks that share this rank's blocks."""
        mesh = self.plan.mesh
        worker = mesh.place(self.rank)[1]
        return tuple(sorted(mesh.rank(group, worker) for group in range(mesh.parts)))

    def shard(self, block: int) -> ShardedBlock:
        """The block with this id in parts: parameters that another rank owns are emptied on this one."""
        names = self.plan.blocks[block]
        layers = [layer for layer in self.graph.layers if layer.name in names]
        modules = [m for layer in layers for m in modules_of(layer, self.graph.components[layer.component])]
        narrow = narrow_modules(modules) if self.precision.autocast is not None else ()
        found = ShardedBlock(
            layer_parameters(self.graph, names),
            owner_of=self.owner_of,
            rank=self.rank,
            ranks=self._ranks,
            transport=self.transport,
            reductions=self.reductions,
            narrow=[parameter for module in narrow for parameter in module.parameters(recurse=False)],
            dtype=self.precision.autocast,
        )
        read_copies(narrow, found.copies)
        return found
