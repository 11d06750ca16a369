"""What a run hands to the command line before its first step."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from diffusionpipe.trainer import run as run_module
from diffusionpipe.trainer import start as start_module
from diffusionpipe.trainer.start import loading_of

CPU = SimpleNamespace(device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("job", "workers", "cores", "loading"),
    [(CPU, 1, 1, 0.25), (CPU, 1, 2, 0.0), (CPU, 0, 1, 0.0), (SimpleNamespace(device=torch.device("cuda")), 1, 1, 0.0)],
    ids=["a worker on the rank's core", "a core of its own", "no worker", "a GPU"],
)
def test_data_workers_count_where_they_share_cores_with_ranks(job, workers, cores, loading):
    with mock.patch.multiple(start_module, batch_time=lambda loader: 0.25, num_cores=lambda: cores):
        assert loading_of(job, SimpleNamespace(workers=workers), ("here",)) == loading


def test_a_run_announces_what_the_data_workers_of_its_training_take():
    started = []
    data = SimpleNamespace(train=SimpleNamespace(dataset=SimpleNamespace(samples=())), validation=None)
    session = SimpleNamespace(job=CPU, recipe=None, model=None, plan=None)
    state = SimpleNamespace(session=session, data=data, step=0, hooks=SimpleNamespace(announce=started.append))
    with (
        mock.patch.object(run_module, "_loader", lambda of: SimpleNamespace(workers=1) if of is state else None),
        mock.patch.object(run_module, "places", return_value=(("here",), ("EPYC",))),
        mock.patch.multiple(start_module, batch_time=lambda loader: 0.25 * loader.workers, num_cores=lambda: 1),
    ):
        run_module._announce(state, None)
    assert [start.loading for start in started] == [0.25]
