"""The quick count of a candidate's memory against the exact one of its plan, item by item."""

from dataclasses import replace
from random import Random

import pytest
from planner.random_layouts import planned

from diffusionpipe.ir import Op
from diffusionpipe.planner.assembly.structure import generated
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.simulator import activations_in_flight

SAME = ("parameters", "gradients", "optimizer", "ema", "backup", "gathered", "copies")
"""Items without any approximation."""
CHAINS = ("1f1b", "gpipe", "dapple-a", "dapple-b", "kfkb", "sequential")
"""Families with one stage on each worker and whole backwards, whose activations are exact too."""


def both(one):
    """For each worker what the search thinks that it holds, its trained stages alone, and what it holds in the plan."""
    footprint, candidate = Judge(setting=one.setting).footprint, one.candidate
    quick = footprint.uses(candidate)
    alone = footprint.uses(replace(candidate, hosts=()))
    return list(zip(quick, alone, one.proposal.memory, strict=True))


def encodes(one, worker):
    return any(action.op is Op.ENCODE for action in one.proposal.train.orders[worker])


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("families", [CHAINS, None])
def test_the_search_counts_what_the_plan_holds(families, seed):
    one = planned(Random(seed), *([families] if families else []))
    footprint = Judge(setting=one.setting).footprint
    is_ahead = any(pipeline.is_ahead for pipeline in one.proposal.train.placement.pipelines)
    for worker, (quick, alone, exact) in enumerate(both(one)):
        assert {item: quick.items()[item] for item in SAME} == {item: exact.items()[item] for item in SAME}
        assert (quick.messages, quick.gathered) == (0, 0)
        assert quick.frozen - exact.frozen == (0 if encodes(one, worker) else footprint.frozen_bytes)
        assert alone.workspace <= exact.workspace, "it may run more samples through the frozen layers at a time"
        if not encodes(one, worker):
            assert alone.workspace == exact.workspace
        peak = one.proposal.timeline.peak_memory(worker)
        assert quick.activations == peak if families else quick.activations >= peak
        # An output that a recomputed stage only sends is dropped before its backward, to which the timeline counts it.
        if not one.setting.workload.checkpointed:
            assert exact.activations + exact.messages >= peak
        if families:
            assert alone.frozen_outputs * (1 + is_ahead) <= exact.frozen_outputs
            if not encodes(one, worker):
                assert alone.frozen_outputs * (1 + is_ahead) == exact.frozen_outputs


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 2), (4, 8), (7, 5)])
def test_the_micro_batches_in_flight_that_the_dynamic_program_assumes_are_those_of_1f1b(stages, microbatches):
    counted = activations_in_flight(generated("1f1b", stages, microbatches, 1))
    assert counted == tuple(min(stages - stage, microbatches) for stage in range(stages))
