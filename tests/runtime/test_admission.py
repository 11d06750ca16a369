"""A rank is let in if it knows the job's token, and named if it does not."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kit.forked import Forked
from torch.distributed import HashStore

from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.job.admission import TOKEN, Applicant, admit, new_token, private_keys
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.trainer.launching.launch import _logs_specs

SECRET, OTHER = "a" * 32, "b" * 32
HOST = socket.gethostname()
REMEDY = f"Set {TOKEN} to the same text for every rank of the job, or for none."
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}


def answers(*tokens: str | None, store: HashStore | None = None) -> list[str | None]:
    """What each candidate is told, None if it is let in."""
    meeting = store or HashStore()

    def one(rank: int) -> str | None:
        try:
            admit(meeting, Applicant(rank=rank, world_size=len(tokens), token=tokens[rank]), arrival=5, proving=0.5)
        except ConfigError as error:
            return str(error) if error.is_common else None
        return None

    with ThreadPoolExecutor(len(tokens)) as threads:
        return list(threads.map(one, range(len(tokens))))


@pytest.mark.parametrize("token", [SECRET, None])
def test_ranks_that_know_the_same_are_let_in(token: str | None):
    assert answers(token, token, token) == [None] * 3
    assert answers(token) == [None]


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ((SECRET, SECRET, OTHER), f"rank 2 ({HOST}) has another token than rank 0"),
        ((SECRET, None, SECRET), f"rank 1 ({HOST}) has no token"),
        ((None, SECRET, None), f"rank 1 ({HOST}) has a token, but rank 0 has none"),
        ((SECRET, None, OTHER), f"rank 1 ({HOST}) has no token; rank 2 ({HOST}) has another token than rank 0"),
    ],
)
def test_all_are_told_who_does_not_know_the_token(tokens: tuple[str | None, ...], problem: str):
    assert answers(*tokens) == [f"{problem}. {REMEDY}"] * 3


def test_a_guest_that_only_says_hello_is_named_and_shown_without_its_escapes():
    store = HashStore()
    store.set("hello/1", "0 evil\x1b[2J")
    with pytest.raises(ConfigError, match=r"rank 1 \(evil\?\[2J\) sent no proof of the token"):
        admit(store, Applicant(rank=0, world_size=2, token=SECRET), arrival=1, proving=0.05)


def test_a_proof_of_an_earlier_start_proves_nothing():
    earlier, later = HashStore(), HashStore()
    assert answers(SECRET, SECRET, store=earlier) == [None, None]
    for key in ("hello/1", "proof/1"):
        later.set(key, earlier.get(key))
    with pytest.raises(ConfigError, match=r"rank 1 .* has another token"):
        admit(later, Applicant(rank=0, world_size=2, token=SECRET), arrival=1, proving=0.05)


def test_a_first_rank_that_does_not_know_the_token_is_not_believed():
    store = HashStore()
    store.set("hello/0", "0 evil")
    store.set("answer", "admitted none")
    with pytest.raises(ConfigError, match=r"rank 0 \(evil\) has another token than rank 1, or none"):
        admit(store, Applicant(rank=1, world_size=2, token=SECRET), arrival=1, proving=0.05)


def test_missing_ranks_are_named():
    with pytest.raises(ConfigError, match=r"rank\(s\) 1, 2 of 3 did not connect within 0 s"):
        admit(HashStore(), Applicant(rank=0, world_size=3), arrival=0.01)


def told(store, rank, world_size):
    with pytest.raises(ConfigError) as caught:
        admit(store, Applicant(rank=rank, world_size=world_size), arrival=5, proving=0.5)
    return str(caught.value)


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_ranks_that_were_started_for_other_numbers_of_ranks_are_named(sizes):
    """The one that counted more had waited five minutes, and the other had named a missing proof of the token."""
    store = HashStore()
    store.set("size/0", str(sizes[0]))
    assert told(store, 1, sizes[1]).startswith(f"rank 0 was started for {sizes[0]} ranks and rank 1 for {sizes[1]}")
    store = HashStore()
    for key, value in {"size/1": str(sizes[1]), "hello/1": "0 heron", "hello/2": "0 heron"}.items():
        store.set(key, value)
    expected = f"rank 1 (heron) was started for {sizes[1]} ranks and rank 0 for {sizes[0]}"
    assert told(store, 0, sizes[0]).startswith(expected)


def test_two_processes_with_one_rank_are_named():
    store = HashStore()
    with ThreadPoolExecutor(3) as threads:
        first = [threads.submit(admit, store, Applicant(rank=rank, world_size=2), arrival=5) for rank in (0, 1)]
        assert [one.result() for one in first] == [None, None]
    assert told(store, 1, 2).startswith(f"two processes came as rank 1 of 2, one of them on {HOST}")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        ({"MASTER_PORT": "75211"}, "MASTER_PORT=75211 is not a port; ports are 1 to 65535"),  # 10000 + a job's number
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is not set"),  # $SLURM_LOCALID outside of srun
    ],
)
def test_variables_that_hold_no_sense_are_named(changed, problem):
    with pytest.raises(ConfigError, match=problem):
        membership(TORCHRUN | changed)


def test_without_the_token_a_process_does_not_meet_the_others():
    store = HashStore()
    private_keys(store, SECRET).set("beat", "1")
    assert private_keys(store, SECRET).check(["beat"])
    assert not any(private_keys(store, other).check(["beat"]) for other in (OTHER, None))


def test_the_token_is_never_shown():
    member = membership(TORCHRUN | {TOKEN: SECRET})
    assert member.token == SECRET
    assert SECRET not in repr(member) + repr(Applicant(rank=0, world_size=2, token=SECRET))
    assert membership(TORCHRUN).token is None


@pytest.mark.parametrize("token", ["", "short"])
def test_a_short_token_is_refused(token: str):
    with pytest.raises(
        ConfigError, match=f"{TOKEN} has {len(token)} characters; set it to a random text of 16 or more"
    ):
        membership(TORCHRUN | {TOKEN: token})


def given(folder: Path, environ: dict[str, str]) -> list[str]:
    """The tokens of two ranks of a launcher."""
    envs: dict[int, dict[str, str]] = {0: {}, 1: {}}
    _logs_specs(devices=(0, 1), log_folder=folder, environ=environ).reify(envs)
    return [environment[TOKEN] for environment in envs.values()]


def test_each_launch_makes_a_token_of_its_own_unless_the_user_has_one(tmp_path: Path):
    first, second = given(tmp_path, {}), given(tmp_path, {})
    assert first[0] == first[1] != second[0] == second[1]
    assert len(first[0]) == len(new_token()) == 32
    assert given(tmp_path, {TOKEN: SECRET}) == [SECRET] * 2


@pytest.mark.slow
def test_ranks_under_torchrun_with_other_tokens_end_with_status_2():
    script = """
import os
from diffusionpipe.runtime.job.process_group import joined, leave
from diffusionpipe.runtime.job.membership import membership
member = membership(os.environ)
try:
    with joined(member, device="cpu"):
        print("joined", flush=True)
except BaseException as error:
    leave(error, member)
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        Forked(script, os.environ | TORCHRUN | {"MASTER_PORT": port, "RANK": str(rank), TOKEN: token})
        for rank, token in enumerate((SECRET, OTHER))
    ]
    for rank in ranks:
        out, error = rank.communicate(timeout=30)
        assert (rank.returncode, out) == (2, "")
        assert error.strip() == f"rank 1 ({HOST}) has another token than rank 0. {REMEDY}"
