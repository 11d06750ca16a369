import pytest

from diffusionpipe.runtime.machine import cores
from diffusionpipe.runtime.machine.cores import data_workers_for


@pytest.mark.parametrize(
    ("device", "num_cores", "ranks", "workers"),
    [
        ("cpu", 96, "8", 1),
        ("cuda", 96, "8", 8),
        ("cuda", 16, "4", 3),
        ("cuda", 8, "8", 1),
        ("cuda", 4, None, 3),
        ("cuda", 4, "", 3),
        ("cuda", 1, "0", 1),
    ],
)
def test_ranks_share_the_cores_among_their_data_workers(monkeypatch, device, num_cores, ranks, workers):
    monkeypatch.setattr(cores, "num_cores", lambda: num_cores)
    assert data_workers_for(device, {} if ranks is None else {"LOCAL_WORLD_SIZE": ranks}) == workers
