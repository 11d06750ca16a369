"""No other machine can connect to the processes of a job of this one."""

import os
import socket
from datetime import timedelta

import pytest
from kit.crew import crew_of
from kit.listening import can_connect, listening, own_addresses, places_of_rank

from diffusionpipe.runtime.job.job_store import tcp_store
from diffusionpipe.runtime.job.local_ranks import local_ranks
from diffusionpipe.runtime.job.loopback import is_loopback, kept_local
from diffusionpipe.trainer.launching.launch import _meeting_point


def reachable(ports: set[int]) -> list[tuple[str, int]]:
    addresses = own_addresses()
    if not addresses:
        pytest.skip("this machine has no address but loopback")
    return [(address, port) for address in addresses for port in ports if can_connect(address, port)]


def test_the_launchers_store_can_be_reached_on_loopback_alone():
    store = _meeting_point(None)
    assert ("127.0.0.1", store.port) in listening()
    assert can_connect("127.0.0.1", store.port)
    assert not reachable({store.port})


def test_an_address_of_the_network_is_reached_from_the_network():
    addresses = own_addresses()
    if not addresses:
        pytest.skip("this machine has no address but loopback")
    store = tcp_store(addresses[0], 0, is_holder=True, timeout=timedelta(seconds=10))
    assert can_connect(addresses[0], store.port)


def test_local_ranks_listen_on_loopback_alone():
    """The store and the sockets of gloo, also of groups that are made later."""
    with local_ranks(2) as ranks:
        found = ranks.run(places_of_rank)
        assert all(places for places, _ in found), "no rank listens: the test would show nothing"
        assert [beyond for _, beyond in found] == [set(), set()]
        assert not reachable({port for places, _ in found for _, port in places})


def test_ranks_that_meet_at_a_loopback_address_listen_there_alone():
    with crew_of(2) as crew:
        assert [beyond for _, beyond in crew.run(places_of_rank)] == [set(), set()]


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.0.1.1", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("node0", False),
    ],
)
def test_a_name_of_a_host_is_not_taken_for_loopback(address: str, is_local: bool):
    assert is_loopback(address) == is_local


def test_the_users_choice_of_an_interface_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with kept_local("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
        assert os.environ["NCCL_SOCKET_IFNAME"].removeprefix("=") in [name for _, name in socket.if_nameindex()]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with kept_local("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] in [name for _, name in socket.if_nameindex()]
    with kept_local("node0"):
        assert "GLOO_SOCKET_IFNAME" not in os.environ
        assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_a_port_that_is_none_is_refused():
    with pytest.raises(OSError, match="70000 is not a port"):
        tcp_store("127.0.0.1", 70000, is_holder=True, timeout=timedelta(seconds=1))
