"""How a process becomes a rank of a job."""

import os
import socket

import pytest

from diffusionpipe.errors import ConfigError, PeerError
from diffusionpipe.runtime.job import job_store
from diffusionpipe.runtime.job.membership import Membership
from diffusionpipe.runtime.job.process_group import joined

LAUNCHER, ANOTHER = 7, 1


@pytest.mark.parametrize(
    ("parents", "arrival", "error", "match"),
    [
        ([ANOTHER], 60, PeerError, r"the launcher \(process 7\) has ended"),
        ([LAUNCHER, ANOTHER], 60, PeerError, r"the launcher \(process 7\) has ended"),
        ([LAUNCHER], 0.1, ConfigError, "cannot reach"),
    ],
    ids=["it has ended", "it ends meanwhile", "it lives"],
)
def test_a_rank_that_cannot_reach_its_launcher_looks_whether_it_lives(monkeypatch, parents, arrival, error, match):
    """The ranks of a launcher that was killed while they started had waited five minutes for it."""
    monkeypatch.setattr(job_store, "_TRIAL", 0.1)  # torch adds up to a second of its own
    monkeypatch.setattr(os, "getppid", lambda: parents.pop(0) if len(parents) > 1 else parents[0])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens
        member = Membership(
            rank=1, world_size=2, address="127.0.0.1", port=free.getsockname()[1], store_rank=None, launcher=LAUNCHER
        )
        with pytest.raises(error, match=match), joined(member, device="cpu", arrival=arrival):
            pass
