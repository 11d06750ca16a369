"""Makes the blocks of a rank into parts, where data-parallel groups hold one copy together."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from diffusionpipe.costs import ModelGraph
from diffusionpipe.holding.sharding import part_of_parameter
from diffusionpipe.ir import Plan
from diffusionpipe.models.graphs.graph import LayerGraph, layer_parameters, modules_of
from diffusionpipe.runtime.comm.places import trained_layers
from diffusionpipe.runtime.comm.transport import Transport
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.weights.sharding import Reductions, ShardedBlock, narrow_modules, read_copies


@dataclass(frozen=True, kw_only=True)
class Sharder:
    """Makes sharded blocks of one rank's blocks."""

    graph: LayerGraph
    model: ModelGraph
    plan: Plan
    rank: int
    transport: Transport
    precision: Precision
    reductions: Reductions = field(default_factory=Reductions)

    @cached_property
    def owner_of(self) -> Mapping[str, int]:
        """Parameter of this rank's trained blocks -> the rank that owns it."""
        mesh = self.plan.mesh
        worker = mesh.place(self.rank)[1]
        parts = part_of_parameter(self.model, trained_layers(self.plan, self.rank), mesh.shard)
        return {name: mesh.rank(part, worker) for name, part in parts.items()}

    def shard(self, block: int) -> ShardedBlock:
        """The block with its parameters divided over the ranks that share it.

        Its parameters must be real and on their device, and other ranks' parameters are emptied.
        """
        mesh = self.plan.mesh
        worker = mesh.place(self.rank)[1]
        names = self.plan.blocks[block]
        layers = [layer for layer in self.graph.layers if layer.name in names]
        modules = [m for layer in layers for m in modules_of(layer, self.graph.components[layer.component])]
        narrow = narrow_modules(modules) if self.precision.autocast is not None else ()
        found = ShardedBlock(
            layer_parameters(self.graph, names),
            owner_of=self.owner_of,
            rank=self.rank,
            ranks=tuple(sorted(mesh.rank(group, worker) for group in range(mesh.shard))),
            transport=self.transport,
            reductions=self.reductions,
            narrow=[parameter for module in narrow for parameter in module.parameters(recurse=False)],
            dtype=self.precision.autocast,
        )
        read_copies(narrow, found.copies)
        return found
