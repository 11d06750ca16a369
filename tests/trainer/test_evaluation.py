from types import SimpleNamespace

import torch

from diffusionpipe.ir import Range
from diffusionpipe.runtime.engine.slot import Output
from diffusionpipe.trainer.course.evaluation import _add_losses
from diffusionpipe.trainer.data.batches.sized import fixed_rows


def test_rows_that_only_fill_the_last_batch_do_not_count():
    """7 rows of two times in batches of 4, so the last row of the second batch is none of the held-out samples."""
    losses = torch.arange(1.0, 9.0)
    outputs = {}
    worker = SimpleNamespace(
        feed=lambda executor, inputs: outputs.update(inputs), validate=SimpleNamespace(run=lambda: outputs["rows"])
    )
    session = SimpleNamespace(
        worker=worker,
        model=SimpleNamespace(backbones=[SimpleNamespace(loss="loss")]),
        positions_of=lambda start, stop: range(start, stop),
    )
    sums = torch.zeros(1, 2, dtype=torch.float64)
    for start in (0, 4):
        halves = [
            Output(name="loss", microbatch=i, rows=Range(2 * i, 2 * i + 2), value=losses[start + 2 * i :][:2])
            for i in (0, 1)
        ]
        fixed = fixed_rows(7, times=2, batch=4)
        _add_losses(session, {"rows": halves}, start, fixed, sums)
    assert sums.tolist() == [[1.0 + 3 + 5 + 7, 2.0 + 4 + 6]]
