"""The model of the benchmark: diffusers' DiT with some 60 M parameters, cut into stages."""

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL, DiTTransformer2DModel
from torch import Tensor, nn

from diffusionpipe.costs import ModelGraph
from diffusionpipe.ir import Edge
from diffusionpipe.models.families.dit import dit_graph
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.graphs.graph import LayerGraph
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings
from diffusionpipe.planner.assembly.partition import balanced_cuts
from diffusionpipe.runtime.compute.stage import LayerStage

CHANNELS, SIZE, NUM_CLASSES = 4, 8, 1000
LOSS_LAYER = "objective.loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backbone:
    """The trained layers, from noisy latents to losses."""

    graph: LayerGraph
    model: ModelGraph

    @property
    def transformer(self) -> nn.Module:
        """The module with all parameters."""
        return self.graph.components["transformer"]

    def blocks(self, num_stages: int) -> tuple[tuple[str, ...], ...]:
        """Names of the layers of each stage, cut by counted work."""
        names = self.model.backbone_layers
        flops = {layer.name: layer.flops for layer in self.model.layers}
        starts = balanced_cuts([flops[name] for name in names], num_stages)
        return tuple(names[a:b] for a, b in zip(starts, (*starts[1:], len(names)), strict=True))

    def edges(self, blocks: tuple[tuple[str, ...], ...]) -> tuple[Edge, ...]:
        """What stages read from each other."""
        return tuple(
            Edge(
                producer=producer,
                consumer=consumer,
                tensors=names,
                gradients=tuple(name for name in names if self.model.tensor(name).needs_gradient),
            )
            for (producer, consumer), names in sorted(self.model.flows(blocks).items())
        )

    def stage(self, names: tuple[str, ...], outputs: tuple[str, ...]) -> LayerStage:
        """Some layers as one stage."""
        layers = [layer for layer in self.graph.layers if layer.name in names]
        return LayerStage(layers, self.graph.components, outputs=outputs)


def backbone(num_layers: int, width: int) -> Backbone:
    """The model with the same random weights in every process."""
    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        num_attention_heads=width // 64,
        attention_head_dim=64,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=num_layers,
        sample_size=SIZE,
        patch_size=2,
        num_embeds_ada_norm=NUM_CLASSES,
    )
    with torch.device("meta"):  # pictures are not encoded here: the VAE only says which latents there are
        vae = AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=CHANNELS)
    objective = Objective(ObjectiveSettings(), {})
    graph = dit_graph({"vae": vae, "transformer": transformer}, objective=objective, resolution=SIZE)
    return Backbone(graph=graph, model=describe(graph))


def batch_of(size: int) -> dict[str, Tensor]:
    """What the backbone reads of a batch, as the frozen layers would have made it."""
    generator = torch.Generator().manual_seed(1)
    shape = (size, CHANNELS, SIZE, SIZE)
    return {
        "noisy": torch.randn(shape, generator=generator),
        "timesteps": torch.randint(0, 1000, (size,), generator=generator),
        "labels": torch.randint(0, NUM_CLASSES, (size,), generator=generator),
        "target": torch.randn(shape, generator=generator),
        "loss_weight": torch.ones(size),
    }
