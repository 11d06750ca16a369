"""How a process becomes a rank of a job."""

import os
import socket

import pytest

from diffusionpipe.errors import ConfigError, PeerError
from diffusionpipe.runtime import process_group
from diffusionpipe.runtime.process_group import Membership, joined


@pytest.mark.parametrize(("lives", "error"), [(False, PeerError), (True, ConfigError)])
def test_a_rank_that_cannot_reach_its_launcher_looks_whether_it_lives(monkeypatch, lives, error):
    """The ranks of a launcher that was killed while they started had waited five minutes for it."""
    monkeypatch.setattr(process_group, "_TRIAL", 0.1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens
        launcher = os.getppid() if lives else os.getpid()
        member = Membership(
            rank=1, world_size=2, address="127.0.0.1", port=free.getsockname()[1], store_rank=None, launcher=launcher
        )
        match = "cannot reach" if lives else rf"the launcher \(process {launcher}\) has ended"
        with pytest.raises(error, match=match), joined(member, device="cpu", arrival=1.0):
            pass
