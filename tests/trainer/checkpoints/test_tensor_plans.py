"""What the ranks of a save tell each other is all that torch's own plans say."""

import json
from dataclasses import replace

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from diffusionpipe.errors import CheckpointError
from diffusionpipe.runtime.comm.exchange import form_of, rows_of
from diffusionpipe.trainer.checkpoints.tensor_plans import (
    Offer,
    Written,
    check_replicas,
    offers_of,
    plan_of,
    results_of,
    share_of,
    shares_of,
    written_by,
)

TENSORS = [
    {"a": torch.zeros(3, 2), "shared": torch.ones(2, 2, dtype=torch.bfloat16), "step": torch.tensor(1.0)},
    {"b": torch.zeros(0, 5, dtype=torch.float64), "shared": torch.ones(2, 2, dtype=torch.bfloat16)},
    {"shared": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.nn.Parameter(torch.zeros(7)), "i": torch.arange(3)},
]


def sent(value, form):
    return form.read(json.loads(json.dumps(form.write(value))))


@pytest.fixture
def planned(tmp_path):
    """Each rank's planner and writer with its own plan."""
    ranks = []
    for rank, tensors in enumerate(TENSORS):
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        writer = FileSystemWriter(tmp_path, thread_count=1)
        planner.set_up_planner(tensors, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0)
        ranks.append((planner, writer, writer.prepare_local_plan(planner.create_local_plan())))
    return ranks


def test_every_rank_gets_the_plan_that_torch_would_have_sent_it(planned):
    plans = [plan for _, _, plan in planned]
    offers = [sent(offers_of(plan), rows_of(Offer)) for plan in plans]
    assert [plan_of(of_rank) for of_rank in offers] == plans
    check_replicas(offers)
    decided, metadata = planned[0][0].create_global_plan([plan_of(of_rank) for of_rank in offers])
    expected, expected_metadata = planned[0][0].create_global_plan(plans)
    assert metadata == expected_metadata
    shares = sent(shares_of(offers, decided), form_of(tuple[tuple[int, ...], ...]))
    assert [share_of(plan, share) for plan, share in zip(plans, shares, strict=True)] == expected
    hints = [
        [item.index.index for item in share_of(plan, share).items] for plan, share in zip(plans, shares, strict=True)
    ]
    assert hints == [[item.index.index for item in plan.items] for plan in expected]  # equality leaves them out
    assert sum(map(len, shares)) == len({name for tensors in TENSORS for name in tensors})


def test_results_arrive_as_they_were_written_and_no_rank_reports_those_of_another(planned):
    planner, writer, plan = planned[0]
    decided, _ = planner.create_global_plan([plan])
    (share,) = writer.prepare_global_plan(decided)
    results = writer.write_data(planner.finish_plan(share), planner).wait()
    written = sent(written_by(results), rows_of(Written))
    assert results_of(written, share, "__0_") == results
    with pytest.raises(CheckpointError, match="has written other tensors than planned; check that all ranks"):
        results_of(written[1:], share, "__0_")
    with pytest.raises(CheckpointError, match="has written other tensors than planned; check that all ranks"):
        results_of((*written, written[0]), share, "__0_")
    for file in ("__1_0.distcp", "../__0_0.distcp", "__0_/../../x"):
        with pytest.raises(CheckpointError, match="its file is one of __0_"):
            results_of((replace(written[0], file=file), *written[1:]), share, "__0_")
    with pytest.raises(CheckpointError, match="cannot lie in"):
        results_of((replace(written[0], offset=-1), *written[1:]), share, "__0_")


@pytest.mark.parametrize("wrong", [{"dtype": "os"}, {"dtype": "nn"}, {"shape": (-1,)}])
def test_a_tensor_that_cannot_be_is_refused(wrong):
    offer = Offer(name="w", dtype="float32", shape=(2,), requires_grad=False, is_pinned=False)
    with pytest.raises(CheckpointError, match="w: there is no tensor of type"):
        plan_of([replace(offer, **wrong)])
