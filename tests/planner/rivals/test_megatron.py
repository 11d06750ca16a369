"""Megatron-LM's takeaways on a case written out by hand: stages, then chunks, then the micro-batch."""

from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.megatron import counted_layers, tensor_size
from diffusionpipe.planner.rivals.simulated import simulated

GB = 10**9


def setting_of(memory, *, batch=16, ranks=4, layers=8):
    """Equal layers of 10**8 parameters, 1.6 GB each with gradients and optimizer; 10 ms and a start of 5 ms a pass."""
    profile = synthetic.chain([0.01] * layers, parameters=[10**8] * layers, elements=100, frozen=0.001, overhead=0.005)
    cluster = synthetic.cluster(ranks, memory=memory, per_node=4, intra_gb=1000.0)
    return Setting(profile=profile, cluster=cluster, workload=synthetic.workload(batch))


@pytest.mark.parametrize(
    ("memory", "stages", "chunks", "tensor"),
    [(80, 1, 1, 1), (9, 2, 4, 2), (5, 4, 2, 4)],
    ids=["one stage", "two stages", "four stages"],
)
def test_the_fewest_stages_that_fit_have_the_most_chunks_that_divide_the_layers(memory, stages, chunks, tensor):
    (rival,) = simulated(["megatron"], setting_of(memory))
    assert rival.candidate.workers == stages
    assert rival.candidate.arrangement.data_parallel == 4 // stages
    assert len(rival.candidate.starts) == stages * chunks
    assert rival.candidate.schedule == ("interleaved" if chunks > 1 else "1f1b")
    assert f"tensor size {tensor} here" in rival.remark
    assert rival.proposal.overflow <= 0


def test_the_micro_batch_is_the_one_that_its_formula_says_is_fastest():
    # Two stages, two groups of 8 samples. A device has 4 layers. The first layer has no input gradient.
    # b samples: F 4 (5 + 10 b), I and W 8 (5 + 10 b), less one pass on the first device: slowest 12 (5 + 10 b) ms.
    # M = 8 / b must be a multiple of 2 for the chunks: b 1: 9 x 180 = 1620; b 2: 5 x 300 = 1500; b 4: 3 x 540 = 1620.
    (rival,) = simulated(["megatron"], setting_of(9))
    assert rival.candidate.microbatches == 4
    assert rival.formula == pytest.approx(1.500)


def test_chunks_that_ask_for_other_micro_batches_give_way():
    # A group has 3 samples: no number of micro-batches is a multiple of two stages.
    (rival,) = simulated(["megatron"], setting_of(9, batch=6))
    assert (rival.candidate.schedule, rival.candidate.workers) == ("1f1b", 2)


def test_layers_that_no_number_divides_differ_by_one():
    (rival,) = simulated(["megatron"], setting_of(9, layers=7))
    assert rival.candidate.starts == (0, 3)


def test_where_nothing_fits_the_row_says_what_lacks_and_the_tensor_size_of_a_node():
    (rival,) = simulated(["megatron"], setting_of(1, ranks=8))
    assert rival.proposal.overflow > 0
    assert rival.candidate.workers == 8
    assert "tensor size 4 here; DiffusionPipe has no tensor parallelism" in rival.remark


def test_copies_are_side_by_side_where_a_pipeline_crosses_nodes():
    (rival,) = simulated(["megatron"], setting_of(9, ranks=8))
    assert (rival.candidate.workers, rival.candidate.arrangement.adjacent) == (2, 4)


def test_layers_with_shapes_of_their_own_are_not_counted():
    profile = synthetic.transformer(blocks=6)
    names = [profile.graph.backbone_layers[i] for i in counted_layers(profile.graph)]
    assert names == [f"block.{i}" for i in range(6)]
    alone = synthetic.chain([0.01] * 3, parameters=[1, 2, 3])
    assert counted_layers(alone.graph) == (0, 1, 2)


def test_the_tensor_size_divides_a_node():
    cluster = replace(synthetic.cluster(12, per_node=6))
    assert [tensor_size(cluster, stages) for stages in (1, 2, 4, 6, 12)] == [1, 2, 6, 6, 6]
