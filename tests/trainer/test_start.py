"""What a run hands to the command line before its first step."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from diffusionpipe.costs.loading import JobDataWorkers, Spread
from diffusionpipe.trainer.course import run as run_module
from diffusionpipe.trainer.setup import start as start_module
from diffusionpipe.trainer.setup.start import loading_of

CPU = SimpleNamespace(device=torch.device("cpu"))


BATCH = Spread(least=0.2, usual=0.25, most=0.3)


@pytest.mark.parametrize(
    ("job", "workers", "is_known"),
    [(CPU, 1, True), (CPU, 0, False), (SimpleNamespace(device=torch.device("cuda")), 1, False)],
    ids=["a worker", "no worker", "a GPU"],
)
def test_data_workers_count_where_they_share_cores_with_ranks(job, workers, is_known):
    known = JobDataWorkers(machines=("here",), cores=(2,), batches=(BATCH,), workers=1)
    with mock.patch.multiple(start_module, batch_time=lambda loader: BATCH, num_cores=lambda: 2):
        assert loading_of(job, SimpleNamespace(workers=workers), ("here",)) == (known if is_known else None)


def test_a_run_announces_what_the_data_workers_of_its_training_take():
    started = []
    data = SimpleNamespace(train=SimpleNamespace(dataset=SimpleNamespace(samples=())), validation=None)
    session = SimpleNamespace(job=CPU, recipe=None, model=None, plan=None)
    state = SimpleNamespace(session=session, data=data, step=0, hooks=SimpleNamespace(announce=started.append))
    with (
        mock.patch.object(run_module, "_loader", lambda of: SimpleNamespace(workers=1) if of is state else None),
        mock.patch.object(run_module, "places", return_value=(("here",), ("EPYC",))),
        mock.patch.multiple(start_module, batch_time=lambda loader: BATCH, num_cores=lambda: 1),
    ):
        run_module._announce(state, None)
    assert [start.loading.batches for start in started] == [(BATCH,)]
