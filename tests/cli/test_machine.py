import pytest

from diffusionpipe.errors import ConfigError
from diffusionpipe.workflows.machine import check_processes


@pytest.mark.parametrize(("ranks", "workers"), [(1000, 0), (2, 10_000)])
def test_more_processes_than_fit_in_memory_are_refused(ranks: int, workers: int) -> None:
    with pytest.raises(ConfigError, match=f"{ranks} ranks .* GiB are free on this machine; use fewer"):
        check_processes(ranks, workers, free=8 * 2**30)


def test_ranks_with_workers_that_fit_are_started() -> None:
    check_processes(8, 16, free=16 * 2**30)
