"""The ranks that hold the same weights and sum their gradients: one rule for prices and for the groups of a run."""

from diffusionpipe.ir import Placement
from diffusionpipe.ir.plan import Mesh


def holders(placement: Placement, mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """Trained block -> the global ranks that hold it, ascending, over replicas, directions and data-parallel groups."""
    found: dict[int, set[int]] = {}
    for index, stage in enumerate(placement.stages):
        if not placement.is_frozen(index):
            ranks = found.setdefault(stage.weights, set())
            ranks.update(mesh.rank(group, stage.worker) for group in range(mesh.data_parallel))
    return {block: tuple(sorted(ranks)) for block, ranks in sorted(found.items())}
