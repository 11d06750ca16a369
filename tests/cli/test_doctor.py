"""Each planted fault is found, and a healthy machine has none."""

import json
import socket
from dataclasses import replace
from unittest import mock

import pytest
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.cli import doctor_trials
from diffusionpipe.cli.doctor import json_of, lines_of
from diffusionpipe.cli.doctor_facts import Facts, facts_of
from diffusionpipe.cli.doctor_findings import Status, findings_of, links_finding
from diffusionpipe.errors import CheckpointError, ConfigError
from diffusionpipe.runtime.interfaces import check_interfaces
from diffusionpipe.trainer import shared_file_system

HEALTHY = tuple(
    Facts(
        host=host,
        addresses=(f"10.0.0.{number}",),
        interfaces=("lo", "eth0"),
        named=(("NCCL_SOCKET_IFNAME", "eth"),),
        versions=(("diffusionpipe", "0.1.0"), ("torch", "2.13.0"), ("NCCL", "2.27.5")),
        device="NVIDIA H100",
        device_id=f"{host}-{gpu}",
        device_free=79 * 2**30,
        shared_memory=64 * 2**30,
        host_memory=500 * 2**30,
        disk=900 * 2**30,
        open_files=65536,
    )
    for number, host in enumerate(("pelican", "heron"))
    for gpu in range(2)
)
RATES = {(0, 1): 200e9, (0, 2): 24e9, (0, 3): 25e9, (1, 2): 24e9, (1, 3): 25e9, (2, 3): 190e9}
HOSTS = tuple(one.host for one in HEALTHY)


def on_rank(rank, **values):
    return tuple(replace(one, **values) if number == rank else one for number, one in enumerate(HEALTHY))


def on_host(host, **values):
    return tuple(replace(one, **values) if one.host == host else one for one in HEALTHY)


def test_healthy_machines_have_no_finding():
    assert {one.status for one in (*findings_of(HEALTHY), links_finding(RATES, HOSTS))} == {Status.OK}


@pytest.mark.parametrize(
    ("facts", "name", "words"),
    [
        (on_host("heron", named=(("GLOO_SOCKET_IFNAME", "ib0"),)), "interfaces", "ib0"),
        (on_host("heron", addresses=("127.0.1.1",)), "names", "heron resolves to 127.0.1.1"),
        (on_rank(1, device_id="pelican-0"), "devices", "ranks 0, 1 share a GPU of pelican"),
        (on_rank(3, device="cpu", device_id=""), "devices", "rank 3 compute on CPUs"),
        (on_host("heron", versions=(("torch", "2.9.0"),)), "versions", "torch differs: 2.13.0 on ranks 0, 1, 2.9.0"),
        (on_host("heron", shared_memory=64 * 2**20), "/dev/shm", "heron has 32 MiB of /dev/shm for each rank"),
        (on_host("pelican", host_memory=3 * 2**30), "host memory", "1.5 GiB"),
    ],
    ids=["interface", "name", "shared device", "mixed devices", "versions", "shared memory", "host memory"],
)
def test_a_planted_fault_is_the_one_that_is_found(facts, name, words):
    (found,) = [one for one in findings_of(facts) if one.status is not Status.OK]
    assert (found.name, found.status) == (name, Status.FAIL)
    assert words in found.text
    assert found.remedy


@pytest.mark.parametrize(("pair", "rate"), [((0, 1), 30e9), ((1, 3), 2e9)])
def test_a_link_is_compared_with_those_of_its_kind(pair, rate):
    rates = RATES | {(2, 3): 200e9, pair: rate}
    found = links_finding(rates, ("a", "a", "b", "b") if pair == (1, 3) else ("a",) * 4)
    is_slow = pair == (1, 3)  # all in one machine, 30 GB/s is usual
    assert found.status is (Status.WARN if is_slow else Status.OK)
    assert ("1-3 with 2.00 GB/s" in found.text) is is_slow


def test_the_only_link_is_compared_with_an_ethernet():
    assert links_finding({(0, 1): 5e7}, ("a", "b")).status is Status.WARN


def test_an_interface_that_does_not_exist_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="no nonesuch among"):
        check_interfaces({"GLOO_SOCKET_IFNAME": "nonesuch"})
    check_interfaces({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^docker"})
    result = CliRunner().invoke(cli.app, ["doctor", "--ranks", "1"], env={"GLOO_SOCKET_IFNAME": "nonesuch"})
    assert "names no interface of this machine" in str(result.exception)


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(cli.app, ["doctor", "--ranks", "1", "--folder", str(tmp_path), "--port", port])
    assert f"port {port} is in use" in str(result.exception)


def test_a_folder_that_another_rank_does_not_see_is_named(tmp_path):
    """The check itself has its own tests with several ranks; here it finds that rank 1 has another disk."""
    lacking = CheckpointError("run is not the same folder for all ranks: heron (ranks 1) does not share it")
    with mock.patch.object(shared_file_system, "check_shared_file_system", side_effect=lacking):
        found = doctor_trials.shared_folder(tmp_path)
    assert (found.name, found.status) == ("shared folder", Status.FAIL)
    assert "heron (ranks 1) does not share it" in found.text
    assert "put the run folder on a file system that all machines mount" in found.remedy
    assert doctor_trials.shared_folder(tmp_path).status is Status.OK


def test_the_json_has_names_only_if_they_are_wanted():
    facts = on_host("heron", addresses=("127.0.1.1",), named=(("GLOO_SOCKET_IFNAME", "ib0"),))
    for is_full in (False, True):
        text = json_of(facts, findings_of(facts), full=is_full)
        assert ("heron" in text, "10.0.0.0" in text, "ib0" in text) == (is_full,) * 3
        assert [one["status"] for one in json.loads(text)["findings"]].count("fail") == 1


def test_every_line_says_ok_or_has_a_remedy_below():
    lines = lines_of(findings_of(on_host("heron", shared_memory=2**20)))
    at = next(index for index, line in enumerate(lines) if line.startswith("fail"))
    assert "--shm-size" in lines[at + 1]
    assert sum(line.startswith("ok ") for line in lines) == 7


def test_what_a_rank_sees_here_is_real(tmp_path):
    import torch

    with mock.patch.dict("os.environ", {"GLOO_SOCKET_IFNAME": "lo"}):
        found = facts_of(torch.device("cpu"), tmp_path, {"GLOO_SOCKET_IFNAME": "lo"})
    assert found.named == (("GLOO_SOCKET_IFNAME", "lo"),)
    assert dict(found.versions)["torch"] == torch.__version__
    assert min(found.disk, found.host_memory, found.open_files) > 0


@pytest.mark.slow
def test_two_ranks_of_this_machine_have_no_fault(tmp_path, capfd):
    result = CliRunner().invoke(cli.app, ["doctor", "--ranks", "2", "--device", "cpu", "--folder", str(tmp_path)])
    assert result.exit_code == 0, result.exception
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("ok ")] == []
    assert len(lines) == 14
    assert not list(tmp_path.glob("*/step-*"))
