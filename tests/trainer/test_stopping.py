import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.forked import completed

from diffusionpipe.errors import PeerError
from diffusionpipe.trainer.step.stopping import Decision, Stopping, Votes


def with_one_more_stop(votes: Votes) -> Votes:
    saves, stops, draws = votes
    return saves, stops + 1, draws


@pytest.mark.parametrize(
    ("number", "decision"),
    [
        (signal.SIGTERM, Decision(saves=True, stops=True)),
        (signal.SIGINT, Decision(saves=True, stops=True)),
        (signal.SIGHUP, Decision(saves=True, stops=True)),
        (signal.SIGUSR1, Decision(saves=True, stops=False)),
    ],
)
def test_a_signal_takes_effect_at_the_next_agreement(number: int, decision: Decision) -> None:
    with Stopping(folder=None).listening() as stopping:
        assert stopping.decision(stopping.votes()) == Decision(saves=False, stops=False)
        signal.raise_signal(number)
        assert stopping.decision(stopping.votes()) == decision


def test_a_run_under_nohup_goes_on_when_its_terminal_is_closed() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stopping(folder=None).listening() as stopping:
            signal.raise_signal(signal.SIGHUP)
            assert stopping.decision(stopping.votes()) == Decision(saves=False, stops=False)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_saving_is_wished_once_and_stopping_for_good() -> None:
    with Stopping(folder=None).listening() as stopping:
        signal.raise_signal(signal.SIGUSR1)
        assert [stopping.decision(stopping.votes()).saves for _ in range(2)] == [True, False]
        signal.raise_signal(signal.SIGTERM)
        assert [stopping.decision(stopping.votes()).stops for _ in range(2)] == [True, True]


def test_one_rank_is_enough_to_stop_all() -> None:
    with Stopping(folder=None).listening() as stopping:
        assert stopping.decision(with_one_more_stop(stopping.votes())) == Decision(saves=True, stops=True)


@pytest.mark.parametrize(("name", "stops"), [("save", False), ("save_quit", True)])
def test_a_signal_file_counts_once_and_goes(tmp_path: Path, name: str, stops: bool) -> None:
    with Stopping(folder=tmp_path).listening() as stopping:
        (tmp_path / name).touch()
        assert stopping.decision(stopping.votes()) == Decision(saves=True, stops=stops)
        assert not (tmp_path / name).exists()


def test_a_file_that_asks_for_pictures_neither_saves_nor_stops_and_counts_once(tmp_path: Path) -> None:
    with Stopping(folder=tmp_path).listening() as stopping:
        (tmp_path / "draw").touch()
        assert stopping.decision(stopping.votes()) == Decision(saves=False, stops=False, draws=True)
        assert not (tmp_path / "draw").exists()
        assert stopping.decision(stopping.votes()) == Decision(saves=False, stops=False)


def test_votes_to_save_to_stop_and_to_draw_are_counted_apart() -> None:
    names = ("_wants_save", "_wants_stop", "_wants_drawing")
    for wishes in itertools.product((False, True), repeat=3):
        with Stopping(folder=None).listening() as one:
            for name, wish in zip(names, wishes, strict=True):
                setattr(one, name, wish)
            saves, stops, draws = one.votes()
        found = Stopping(folder=None).decision((5000 * saves, 5000 * stops, 5000 * draws))
        assert (found.saves, found.stops, found.draws) == (wishes[0] or wishes[1], wishes[1], wishes[2])


def test_a_leftover_signal_file_does_not_stop_the_next_run(tmp_path: Path) -> None:
    (tmp_path / "save_quit").touch()
    with Stopping(folder=tmp_path).listening() as stopping:
        assert stopping.decision(stopping.votes()) == Decision(saves=False, stops=False)
    assert not (tmp_path / "save_quit").exists()


def test_a_signal_file_that_cannot_be_removed_does_not_save_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(f"read-only: {path}")

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr("diffusionpipe.trainer.step.stopping._LOOK", 0.0)
    with Stopping(folder=tmp_path).listening() as stopping:
        (tmp_path / "save").touch()
        assert [stopping.decision(stopping.votes()).saves for _ in range(2)] == [True, False]


def test_a_rank_whose_peer_died_never_saves() -> None:
    with Stopping(folder=None, peer_failure=lambda: PeerError("rank 1 died")).listening() as stopping:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(PeerError, match="rank 1 died"):
            stopping.decision(stopping.votes())


@pytest.fixture
def one_of_several(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is a rank of a job with others, which may end deaf to signals; here it does not."""
    monkeypatch.setattr("diffusionpipe.trainer.step.stopping._is_one_of_several", lambda: True)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("one_of_several")
@pytest.mark.parametrize("has_agreed", [True, False])
def test_a_rank_that_has_agreed_to_stop_does_not_die_of_its_late_signal(has_agreed: bool) -> None:
    with Stopping(folder=None).listening() as stopping:
        stopping.decision(with_one_more_stop(stopping.votes()) if has_agreed else stopping.votes())
    late = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    assert late == [signal.SIG_IGN if has_agreed else signal.SIG_DFL] * 2


@pytest.mark.usefixtures("one_of_several")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_rank_of_several_says_that_it_saves_only_once_all_have_agreed(
    number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A launcher sends SIGTERM to those who are left when a rank was killed: they save nothing."""
    failures = [PeerError("rank 1 died")]
    stopping = Stopping(folder=None, peer_failure=lambda: failures[0] if failures else None)
    with stopping.listening():
        signal.raise_signal(number)
        with pytest.raises(PeerError):
            stopping.decision(stopping.votes())
        assert caplog.messages == []
        failures.clear()
        stopping.decision(stopping.votes())
        stopping.decision(stopping.votes())
    assert caplog.messages == [f"saving and stopping after this step signal={signal.Signals(number).name}"]


def test_handlers_are_put_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    with Stopping(folder=None).listening():
        assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before


TWICE = """
import ctypes, os, signal, threading, time
from diffusionpipe.trainer.step.stopping import Stopping

def interrupt():
    for _ in range(2):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.{signal})
with Stopping(folder=None).listening() as stopping:
    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    {body}
    print(stopping.decision(stopping.votes()).stops)
"""
BLOCK = "mutex = ctypes.create_string_buffer(64); [ctypes.CDLL(None).pthread_mutex_lock(mutex) for _ in range(2)]"
"""The main thread never returns to Python, as in a transfer whose peer hangs."""


@pytest.mark.parametrize(
    ("signal_name", "body", "status", "output"),
    [("SIGINT", BLOCK, 130, ""), ("SIGTERM", "thread.join()", 0, "True\n")],
)
def test_a_second_interrupt_ends_even_a_blocked_process_and_a_second_sigterm_does_not(
    signal_name: str, body: str, status: int, output: str
) -> None:
    script = TWICE.format(signal=signal_name, body=body)
    ended = completed(["-c", script], check=False)
    assert (ended.returncode, ended.stdout) == (status, output), ended.stderr


FORK = """
import os, signal
from diffusionpipe.trainer.step.stopping import Stopping

with Stopping(folder=None).listening() as stopping:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"!")
        signal.pause()
        os._exit(0)
    os.read(reader, 1)
    for number in (signal.SIGINT, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        os.kill(child, number)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stopping.decision(stopping.votes()))
"""
"""In a process of its own: a copy of the test process may not fit into the memory of a small machine."""


def test_a_forked_worker_dies_of_sigterm_and_leaves_interrupts_to_its_parent() -> None:
    ended = completed(["-c", FORK], check=False)
    expected = f"{-signal.SIGTERM} {Decision(saves=False, stops=False)}\n"
    assert (ended.returncode, ended.stdout) == (0, expected), ended.stderr
