"""Each planted fault is found, and a healthy machine has none."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from kit.screen_files import assert_screen
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.cli.verbs.doctor import json_of, lines_of
from diffusionpipe.errors import CheckpointError, ConfigError
from diffusionpipe.runtime.job.devices import sight
from diffusionpipe.runtime.job.interfaces import check_interfaces, gloo_address
from diffusionpipe.runtime.job.membership import Membership
from diffusionpipe.workflows import machine
from diffusionpipe.workflows.doctor import trials as doctor_trials
from diffusionpipe.workflows.doctor.connections import connections
from diffusionpipe.workflows.doctor.facts import Facts, facts_of
from diffusionpipe.workflows.doctor.findings import Status, findings_of, links_finding

HEALTHY = tuple(
    Facts(
        host=host,
        addresses=(f"10.0.0.{number}",),
        listens=f"10.0.0.{number}",
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
        (
            on_rank(2, named=(("GLOO_SOCKET_IFNAME", "lo"),), listens="127.0.0.1"),
            "interfaces",
            "names the loopback of heron",
        ),
        (on_rank(2, named=(("GLOO_SOCKET_IFNAME", "eth0"),), listens=""), "interfaces", "of heron without an address"),
        (on_host("heron", addresses=("127.0.1.1",), listens="127.0.1.1"), "names", "heron resolves to 127.0.1.1"),
        (on_host("heron", addresses=("127.0.1.1", "10.0.0.1"), listens="127.0.1.1"), "names", "127.0.1.1, 10.0.0.1"),
        (on_rank(1, device_id="pelican-0"), "devices", "ranks 0, 1 share a GPU of pelican"),
        (on_rank(3, device="cpu", device_id=""), "devices", "rank 3 would compute on CPUs"),
        (on_rank(3, asked="cuda"), "devices", "rank 3 asked for cuda and the others did not"),
        (
            tuple(replace(one, asked="cuda", device="cpu", device_id="") for one in HEALTHY),
            "devices",
            "no rank finds a CUDA device",
        ),
        (on_host("heron", versions=(("torch", "2.9.0"),)), "versions", "torch differs: 2.13.0 on ranks 0, 1, 2.9.0"),
        (on_host("heron", shared_memory=64 * 2**20), "/dev/shm", "heron has 32 MiB of /dev/shm for each rank"),
        (on_host("pelican", host_memory=3 * 2**30), "host memory", "1.5 GiB"),
        (on_rank(0, host_memory=3 * 2**30), "host memory", "1.5 GiB"),
    ],
    ids=[
        *("interface", "loopback", "no address", "name", "two addresses", "shared device", "mixed devices", "options"),
        *("no device", "versions", "shared memory", "host memory", "memory of a container"),
    ],
)
def test_a_planted_fault_is_the_one_that_is_found(facts, name, words):
    (found,) = [one for one in findings_of(facts) if one.status is not Status.OK]
    assert (found.name, found.status) == (name, Status.FAIL)
    assert words in found.text
    assert found.remedy


def test_packages_of_optimizers_are_named_and_a_rank_without_one_is_a_warning():
    of_all = tuple(replace(one, optimizers=(("bitsandbytes", "0.50.2"),)) for one in HEALTHY)
    found = {(one.status, one.text) for one in findings_of(of_all) if one.name == "optimizers"}
    assert found == {(Status.OK, "bitsandbytes 0.50.2")}
    (lacking,) = [one for one in findings_of((*of_all[:3], HEALTHY[3])) if one.status is not Status.OK]
    assert (lacking.name, lacking.status) == ("optimizers", Status.WARN)
    assert lacking.text == "bitsandbytes differs: 0.50.2 on ranks 0, 1, 2, none on rank 3"


@pytest.mark.parametrize(("pair", "rate"), [((0, 1), 30e9), ((1, 3), 2e9)])
def test_a_link_is_compared_with_those_of_its_kind(pair, rate):
    rates = RATES | {(2, 3): 200e9, pair: rate}
    found = links_finding(rates, ("a", "a", "b", "b") if pair == (1, 3) else ("a",) * 4)
    is_slow = pair == (1, 3)  # all in one machine, 30 GB/s is usual
    assert found.status is (Status.WARN if is_slow else Status.OK)
    assert ("1-3 with 2.00 GB/s" in found.text) is is_slow


def test_the_only_link_is_compared_with_an_ethernet():
    assert links_finding({(0, 1): 5e7}, ("a", "b")).status is Status.WARN


def test_ranks_that_nccl_takes_for_two_machines_may_share_a_device():
    facts = on_rank(1, device_id="pelican-0", host_id="other")
    assert {one.status for one in findings_of(facts)} == {Status.OK}


def test_slow_links_are_given_in_a_unit_that_shows_them():
    assert "0-1 with 1.2 MB/s" in links_finding({(0, 1): 1.2e6}, ("a", "b")).text


def test_an_interface_that_does_not_exist_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="no nonesuch among"):
        check_interfaces({"GLOO_SOCKET_IFNAME": "nonesuch"})
    check_interfaces({"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "^docker"})
    found = fault_before_start(tmp_path, env={"GLOO_SOCKET_IFNAME": "nonesuch"})
    assert found["name"] == "interfaces"
    assert "names no interface of this machine" in found["text"]


def test_a_port_in_use_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        found = fault_before_start(tmp_path, "--port", port)
    assert (found["name"], found["text"]) == ("port", f"port {port} cannot be used: address already in use")


def test_memory_that_holds_no_process_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "free_memory", lambda: 2**28)
    assert fault_before_start(tmp_path)["name"] == "host memory"


def fault_before_start(tmp_path, *options, env=None):
    """The only finding of the JSON, whose line and remedy are printed."""
    out = tmp_path / "doctor.json"
    arguments = ["doctor", "--ranks", "2", "--folder", str(tmp_path), "--out", str(out), *options]
    result = CliRunner().invoke(cli.app, arguments, env=env)
    assert result.exit_code == 1, result.exception
    (found,) = json.loads(out.read_text())["findings"]
    assert found["status"] == "fail"
    assert found["text"] in result.output
    assert found["remedy"] in result.output
    return found


def test_the_address_of_gloo_is_the_first_that_is_one_of_this_machine(monkeypatch):
    def resolving(*addresses):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    resolving("203.0.113.9", "127.0.1.1")  # the first is nobody's
    assert gloo_address("", "heron") == "127.0.1.1"
    resolving("203.0.113.9")
    assert gloo_address("", "heron") == "127.0.0.1"
    assert gloo_address("lo", "heron") == "127.0.0.1"


class Ranks:
    """Two ranks without a job, as threads: what each says reaches both."""

    def __init__(self):
        self.said, self.barrier = {}, threading.Barrier(2)

    def meeting(self, rank):
        def everyone(name, text):
            self.said[name, rank] = text
            self.barrier.wait()
            return [self.said[name, other] for other in range(2)]

        return SimpleNamespace(membership=Membership(rank=rank, world_size=2), everyone=everyone)


@pytest.mark.parametrize("address", ["127.0.0.2", "203.0.113.9"])
def test_machines_that_reach_each_other_and_an_address_that_is_not_there(address):
    ranks = Ranks()
    facts = (replace(HEALTHY[0], listens="127.0.0.1"), replace(HEALTHY[2], listens=address))
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda rank: connections(ranks.meeting(rank), facts), range(2))
    assert one == other
    if address == "127.0.0.2":
        assert (one.status, one.text) == (Status.OK, "2 addresses reach each other")
    else:
        assert one.status is Status.FAIL
        assert "cannot listen at 203.0.113.9 of heron" in one.text


def test_a_trial_that_fails_on_one_rank_is_a_finding_of_all():
    said = {}

    def everyone(name, text):
        said[name] = text
        return ["", text]

    def trial():
        raise CheckpointError("run is not the same folder for all ranks: heron (ranks 1) does not share it\nmore")

    job = SimpleNamespace(device=torch.device("cpu"), everyone=everyone)
    found = doctor_trials._tried(job, print, "shared folder", trial, "mount it")
    assert (found.name, found.status, found.remedy) == ("shared folder", Status.FAIL, "mount it")
    assert found.text.startswith("rank 1: CheckpointError: run is not")
    assert found.text.endswith("does not share it")
    assert doctor_trials._tried(job, print, "sums", lambda: "right", "").text == "right"


def test_a_trial_without_an_end_is_named(monkeypatch):
    monkeypatch.setattr(doctor_trials, "LIMIT_ON_CPU", 0.05)
    late = []
    with doctor_trials._limit("cpu", "groups", late.append):
        time.sleep(0.5)
    assert [(one.name, one.status) for one in late] == [("groups", Status.FAIL)]


def test_the_json_has_names_only_if_they_are_wanted():
    facts = on_host("heron", named=(("GLOO_SOCKET_IFNAME", "ib0"),))
    for is_full in (False, True):
        text = json_of(facts, findings_of(facts), full=is_full)
        assert ("heron" in text, "10.0.0.0" in text, "ib0" in text) == (is_full,) * 3
        assert [one["status"] for one in json.loads(text)["findings"]].count("fail") == 1


def test_every_line_says_ok_or_has_a_remedy_below():
    lines = lines_of(findings_of(on_host("heron", shared_memory=2**20)))
    at = next(index for index, line in enumerate(lines) if line.startswith("fail"))
    assert "--shm-size" in lines[at + 1]
    assert sum(line.startswith("ok ") for line in lines) == 8


@pytest.mark.parametrize(
    ("name", "facts"), [("doctor_healthy", HEALTHY), ("doctor_shared_memory", on_host("heron", shared_memory=2**20))]
)
def test_the_screen_is_the_kept_one(name, facts):
    found = [*findings_of(facts), links_finding(RATES, HOSTS)]
    assert_screen(name, "\n".join(lines_of(found)))


def test_what_a_rank_sees_here_is_real(tmp_path):
    with mock.patch.dict("os.environ", {"GLOO_SOCKET_IFNAME": "lo"}):
        found = facts_of(sight("cpu", 0), tmp_path, {"GLOO_SOCKET_IFNAME": "lo"})
    assert found.listens == "127.0.0.1"
    assert found.named == (("GLOO_SOCKET_IFNAME", "lo"),)
    assert dict(found.versions)["torch"] == torch.__version__
    assert dict(found.optimizers).get("schedulefree") == version("schedulefree")
    assert min(found.disk, found.host_memory, found.open_files) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_two_ranks_of_this_machine_have_no_fault(tmp_path, capfd):
    result = CliRunner().invoke(cli.app, ["doctor", "--ranks", "2", "--device", "cpu", "--folder", str(tmp_path)])
    assert result.exit_code == 0, result.exception
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("ok ")] == []
    assert len(lines) == 16
    assert not list(tmp_path.glob("*/step-*"))
