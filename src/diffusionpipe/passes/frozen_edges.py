"""Edges from encoder stages to the stages that read frozen tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from diffusionpipe.ir import Edge, Pipeline, Placement


def reading_frozen(
    pipeline: Pipeline, placement: Placement, outputs: Mapping[int, tuple[str, ...]], encoders: Sequence[int]
) -> Pipeline:
    """The pipeline with an edge from every encoder stage to each stage whose block reads frozen tensors.

    `outputs` maps a stage's block id to the frozen tensors that it reads; blocks that read none may be absent.
    """
    edges = tuple(
        Edge(producer=encoder, consumer=stage, tensors=names, gradients=())
        for stage in pipeline.stages
        if (names := outputs.get(placement.stages[stage].weights, ()))
        for encoder in encoders
    )
    return replace(pipeline, edges=pipeline.edges + edges)
