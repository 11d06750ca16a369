"""Real processes over gloo: what the other ranks do when one dies, hangs, fails, or merely is slow."""

import os
import re
import signal
import socket
import time
from pathlib import Path
from queue import Queue

import pytest
import torch.distributed as dist
from kit.forked import Forked

from diffusionpipe.errors import ConfigError, PeerError
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import failed, joined
from diffusionpipe.runtime.job.watch_post import Post
from diffusionpipe.runtime.job.watchdog import Watchdog

PREAMBLE = """
import ctypes, os, signal, sys, time
import torch
import torch.distributed as dist
from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.job.process_group import joined, leave
from diffusionpipe.runtime.job.membership import membership

member = membership(os.environ)
try:
    with joined(member, device="cpu", patience=float(os.environ["PATIENCE"])) as job:
        rank = member.rank
        dist.all_reduce(torch.ones(1))
        print("joined", flush=True)
        {body}
        print("finished", flush=True)
except BaseException as error:
    leave(error, member)
"""
GLOO = re.compile(r"(?m)^\[Gloo\] .*\n")
"""What gloo of torch 2.9 writes when ranks are connected."""
BLOCKED = "dist.all_reduce(torch.ones(1)) if rank else dist.recv(torch.ones(1), src=1)"
"""Rank 0 waits for rank 1 in C++, the others wait for rank 0."""


class Ranks:
    """The processes of one job without a launcher: rank 0 holds the store."""

    def __init__(self, body: str, num_ranks: int, patience: float = 8.0) -> None:
        script = PREAMBLE.format(body=body.strip().replace("\n", "\n        "))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        job: dict[str, object] = {
            "WORLD_SIZE": num_ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
        }
        job["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # c10d's own stack traces, silenced by the launcher too
        self.processes = [
            Forked(
                script,
                os.environ
                | {k: str(v) for k, v in job.items()}
                | {"RANK": str(rank), "LOCAL_RANK": str(rank), "PATIENCE": str(patience)},
            )
            for rank in range(num_ranks)
        ]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def await_joined(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            assert next(line for line in lines if not GLOO.match(line)) == "joined\n"
        time.sleep(1.5)  # until they are blocked, and have heard which process holds the store

    def ends(self, *ranks: int, within: float) -> list[tuple[int, str]]:
        """Exit status and standard error of the ranks, all of which end within the time."""
        deadline = time.monotonic() + within
        for rank in ranks:
            self.processes[rank].wait(max(0.0, deadline - time.monotonic()))
        return [(self.processes[r].returncode, self.processes[r].communicate()[1]) for r in ranks]


@pytest.mark.parametrize("victim", [0, 1])  # rank 0 holds the store, too
def test_sigkill_ends_blocked_ranks_within_15_s_and_names_the_rank(victim: int) -> None:
    with Ranks("dist.recv(torch.ones(1), src=(rank + 1) % 3)", 3) as ranks:
        ranks.await_joined()
        ranks.processes[victim].kill()
        others = [rank for rank in range(3) if rank != victim]
        for status, error in ranks.ends(*others, within=15):
            assert status == 1
            assert f"rank {victim} (" in error
            assert f"process {ranks.processes[victim].pid})" in error
            assert "stops too." in error
            assert "checkpoint" not in error  # this job has none


def test_a_rank_that_is_frozen_when_all_work_is_done_is_named_by_the_first() -> None:
    body = """
import threading
if rank == 1:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGSTOP)).start()
else:
    time.sleep(1.0)
"""
    with Ranks(body, 2, patience=2) as ranks:
        ranks.await_joined()
        ((status, error),) = ranks.ends(0, within=10)
    assert status == 1
    assert re.search(r"rank 1 \(.*\) has done its work but does not end: it is frozen, stopped by a signal", error)


def test_a_frozen_rank_is_named_after_the_patience() -> None:
    with Ranks("dist.recv(torch.ones(1), src=(rank + 1) % 3)", 3, patience=2) as ranks:
        ranks.await_joined()
        os.kill(ranks.processes[1].pid, signal.SIGSTOP)
        for status, error in ranks.ends(0, 2, within=15):
            assert status == 1
            assert "rank 1 (" in error
            assert "stopped answering" in error
            assert "it is frozen, stopped by a signal (state T)" in error


def test_a_frozen_store_is_noticed_although_its_clients_block() -> None:
    with Ranks("dist.recv(torch.ones(1), src=(rank + 1) % 3)", 3, patience=2) as ranks:
        ranks.await_joined()
        os.kill(ranks.processes[0].pid, signal.SIGSTOP)
        for status, error in ranks.ends(1, 2, within=15):
            assert status == 1
            assert "rank 0 (" in error
            assert "stopped answering" in error


def test_an_exception_on_one_rank_ends_the_others_with_its_text() -> None:
    body = """
if rank == 1:
    raise ConfigError("the picture cat.png is empty; remove it")
dist.recv(torch.ones(1), src=2 - rank)
"""
    with Ranks(body, 3) as ranks:
        first, failing, third = ranks.ends(0, 1, 2, within=60)
    assert failing == (2, "the picture cat.png is empty; remove it\n")
    for status, error in (first, third):
        assert status == 1
        assert "rank 1 (" in error
        assert "the picture cat.png is empty; remove it" in error


def test_a_rank_that_holds_the_global_lock_for_long_or_ends_late_is_not_declared_dead() -> None:
    body = """
if rank == 1:
    ctypes.PyDLL(None).sleep(4)  # PyDLL keeps the global lock
dist.all_reduce(torch.ones(1))
if rank == 0:
    time.sleep(2)
"""
    with Ranks(body, 2) as ranks:
        ends = [process.communicate(timeout=60) for process in ranks.processes]
        assert [process.returncode for process in ranks.processes] == [0, 0], ends
    assert [GLOO.sub("", out) for out, _ in ends] == ["joined\nfinished\n"] * 2


def test_ranks_that_disagree_are_named_on_all_ranks() -> None:
    with Ranks('job.agree("recipe", "b" if rank == 1 else "a")', 2) as ranks:
        for _, error in ranks.ends(0, 1, within=60):
            assert "do not agree on recipe: rank 0 has 'a', rank 1 has 'b'" in error


def test_one_process_needs_no_environment_and_no_port() -> None:
    with joined(membership({}), device="cpu") as job:
        job.agree("recipe", "a")
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()


@pytest.mark.timeout(30)
def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environ = {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "LOCAL_RANK": "0",
        }
        with pytest.raises(ConfigError, match=f"port {port} .*in use"), joined(membership(environ), device="cpu"):
            pass


def test_missing_ranks_are_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}
    with (
        pytest.raises(ConfigError, match=r"rank\(s\) 1, 2 of 3"),
        joined(membership(environ), device="cpu", arrival=0.2),
    ):
        pass


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"RANK": "1"}, "WORLD_SIZE is not set; MASTER_ADDR is not set; MASTER_PORT is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK='x' is not a number"),
    ],
)
def test_half_an_environment_is_refused(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        membership(environ)


def test_an_error_without_a_verdict_stays_itself() -> None:
    store = dist.HashStore()
    watchdog = Watchdog(
        post=Post(rank=0, world_size=2, interval=0.01, patience=0.05), connect=lambda: store, end=lambda _: None
    )
    watchdog.start()
    unrelated, broken = RuntimeError("shapes differ"), RuntimeError("[gloo/transport] Connection closed by peer")
    assert watchdog.translate(unrelated) is unrelated
    assert watchdog.translate(broken) is broken


def test_a_broken_connection_is_translated_into_the_rank_that_broke_it() -> None:
    store = dist.HashStore()
    first, second = (
        Watchdog(
            post=Post(rank=rank, world_size=2, interval=0.01, patience=5), connect=lambda: store, end=lambda _: None
        )
        for rank in range(2)
    )
    first.start()
    second.start()
    first.remedy = lambda: "No checkpoint was saved. Start again."
    second.report(ConfigError("no such layer"))
    told = first.translate(RuntimeError("[gloo/transport] Connection closed by peer"))
    assert isinstance(told, PeerError)
    assert "rank 1 (" in str(told)
    assert str(told).endswith("no such layer\nRank 0 stops too.\nNo checkpoint was saved. Start again.")


@pytest.mark.parametrize(
    ("key", "value"), [("verdict", "x"), ("verdict", "[]"), ("verdict", '{"fate": "kind"}'), ("member/1", "{}")]
)
def test_what_no_rank_has_written_into_the_store_ends_the_rank_instead_of_its_watch(key: str, value: str) -> None:
    store, said = dist.HashStore(), Queue[str]()
    post = Post(rank=0, world_size=2, interval=0.01, patience=0.05)
    watchdog = Watchdog(post=post, connect=lambda: store, end=said.put)
    store.set(key, value)
    store.set("beat/1", "1 {}")
    watchdog.start()
    assert "a key-value store in which a stranger has written" in said.get(timeout=20)


def test_a_failing_rank_leaves_a_note_and_stays_quiet_under_our_launcher(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    environ = {"TORCHELASTIC_ERROR_FILE": str(file), "DIFFUSIONPIPE_LAUNCHED": str(os.getppid())}
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert failed(ConfigError("no pictures"), membership(environ | job)) == (2, "")
    assert "no pictures" in file.read_text()
    assert failed(ConfigError("no pictures"), membership({})) == (2, "no pictures")


def test_a_rank_whose_launcher_is_gone_speaks_for_itself(tmp_path: Path) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    orphan = job | {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "DIFFUSIONPIPE_LAUNCHED": "999999999"}
    assert failed(PeerError("the launcher ended"), membership(orphan)) == (1, "the launcher ended")
