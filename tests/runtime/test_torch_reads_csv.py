"""The compute-only CSV of torch's pipelining: its own reader takes ours, and we take its schedules."""

import csv
import io

import pytest
from kit.strategies import sized
from torch.distributed.pipelining import _schedule_visualizer as visualizer
from torch.distributed.pipelining import schedules as torch_schedules

from diffusionpipe.ir import Op
from diffusionpipe.ir.torch_csv import schedule_from_csv, schedule_to_csv
from diffusionpipe.schedules import REGISTRY

CHAINS = sorted(name for name in REGISTRY if len(sized(REGISTRY[name], 2, 2).placement.pipelines) == 1)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (3, 2), (4, 11)])
def test_torch_reads_our_csv_and_writes_it_back(name, num_stages, num_microbatches):
    text = schedule_to_csv(sized(REGISTRY[name], num_stages, num_microbatches))
    rows = list(csv.reader(io.StringIO(text)))
    parsed = [[torch_schedules._Action.from_str(cell) for cell in row] for row in rows]
    assert [[str(action) for action in row] for row in parsed] == rows


def test_torchs_runtime_loads_our_csv_and_lowers_it(tmp_path):
    schedule = REGISTRY["1f1b"](3, 5)
    path = tmp_path / "1f1b.csv"
    path.write_text(schedule_to_csv(schedule))
    runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime.pipeline_order, runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = {}, 3, 3, 5
    runtime._stages, runtime._defer_pp_recv = [], False
    runtime._load_csv(str(path), format="compute_only")
    assert {rank: [str(a) for a in order] for rank, order in runtime.pipeline_order.items()} == {
        worker: [str(a) for a in order] for worker, order in enumerate(schedule.orders)
    }


@pytest.mark.parametrize(
    ("torchs_name", "stages_per_rank"),
    [("Interleaved1F1B", 2), ("LoopedBFS", 2), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2)],
)
def test_torchs_own_schedules_come_through_our_csv(torchs_name, stages_per_rank):
    num_ranks, num_microbatches = 4, 8
    ops = visualizer.get_schedule_ops(torchs_name, num_ranks, num_microbatches, stages_per_rank)
    text = io.StringIO()
    csv.writer(text).writerows(ops)
    schedule = schedule_from_csv(text.getvalue(), name=torchs_name)
    assert len(schedule.placement.stages) == num_ranks * stages_per_rank
    computed = [[action for action in row if action is not None] for row in ops]
    if Op.I in schedule.placement.pipelines[0].ops:
        computed = [[part for action in row for part in split(str(action))] for row in computed]
    assert list(csv.reader(io.StringIO(schedule_to_csv(schedule)))) == [list(map(str, row)) for row in computed]


def split(action: str) -> list[str]:
    return [action.replace("B", "I"), action.replace("B", "W")] if "B" in action else [action]
