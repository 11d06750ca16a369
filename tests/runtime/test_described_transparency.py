"""Loss and gradients of the families described as data are those of one process, for every layout."""

from math import isfinite

import pytest
import torch
from kit.descriptions import described
from kit.handed_views import SECOND, layout_in_orders
from kit.layout_cases import scattered
from kit.layouts import assert_same_step, reference_step, step_in_threads, steps_ahead
from kit.opened_family import Opened
from kit.tiers import quick_and_slow
from kit.tiny_described import PIPELINES

from diffusionpipe.ir import Sharded
from diffusionpipe.planner import Layout, build_plan

BATCH = 4
SHARED = {"batch": BATCH, "microbatches": 2, "encode_chunk": 1}
LAYOUTS = {
    "ZB-V over 2 ranks": Layout(**SHARED, stages=2, schedule="zb-v"),
    "1F1B over 3 stages, all recomputed": Layout(**SHARED, stages=3, schedule="1f1b", checkpointed=("*",)),
    "1F1B in two groups, sharded": Layout(
        **SHARED | {"microbatches": 1}, stages=2, schedule="1f1b", data_parallel=2, sharded=Sharded.ALL
    ),
}


BLOCKS = ("transformer.transformer_blocks.0", "transformer.transformer_blocks.1", "transformer.proj_out")
HANDED_ON = {
    "PixArtSigmaPipeline": BLOCKS,
    "LTXPipeline": BLOCKS,
    "ZImagePipeline": ("transformer.noise_refiner.0", "transformer.layers.0", "transformer.all_final_layer.2-1"),
}
"""Families in which a block writes a view of what a layer before it has made of captions or times, for later blocks;
with these cuts it comes in a message, and a later block is on the same rank."""


@pytest.mark.parametrize("kind", quick_and_slow(PIPELINES, quick=["PixArtSigmaPipeline"]))
def test_gradients_are_those_of_one_process_in_three_layouts_and_filled(monkeypatch, kind, tmp_path):
    # Some norms compute in float32, where sums over other numbers of samples round otherwise.
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    opened = Opened(kind, tmp_path)
    model, inputs = described(opened.graph), opened.batch(BATCH)
    expected = reference_step(opened.graph, inputs)
    assert isfinite(expected.loss)
    for layout in LAYOUTS.values():
        assert_same_step(step_in_threads(opened.graph, model, layout, inputs, again=True), expected)
    for second in SECOND if kind in HANDED_ON else ():
        layout = layout_in_orders(second, HANDED_ON[kind], BATCH)
        assert_same_step(step_in_threads(opened.graph, model, layout, inputs, again=True), expected)
    filled = build_plan(model, Layout(**SHARED, stages=2), filler=scattered(1))
    following = opened.batch(BATCH, seed=2)
    first, second = steps_ahead(opened.graph, model, filled, [inputs, following, inputs])
    assert_same_step(first, expected)
    assert_same_step(second, reference_step(opened.graph, following))
