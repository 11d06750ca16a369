import os
import signal
import threading

import pytest

from diffusionpipe.trainer.launching.forwarded_signals import ForwardedSignals, pause


@pytest.fixture
def sent(monkeypatch):
    """What is sent, instead of sending it."""
    found = []
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append(("rank", pid, number)))
    monkeypatch.setattr(os, "killpg", lambda group, number: found.append(("group", group, number)))
    before = signal.signal(signal.SIGTSTP, lambda number, frame: None)  # or a test that fails would stop the tests
    yield found
    signal.signal(signal.SIGTSTP, before)


def test_signals_go_to_the_ranks_alone_because_their_data_workers_end_with_them(sent):
    with ForwardedSignals() as signals:
        signal.raise_signal(signal.SIGHUP)
        signals.forward([])
        assert sent == [], "kept until there are ranks"
        signals.forward([7, 8])
    assert signals.ending == signal.SIGHUP
    assert sent == [("rank", 7, signal.SIGTERM), ("rank", 8, signal.SIGTERM)]


def test_a_second_interrupt_ends_the_ranks_with_their_workers(sent):
    with ForwardedSignals() as signals:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        signals.forward([7])
    assert sent == [("rank", 7, signal.SIGINT), ("group", 7, signal.SIGKILL)]


def test_a_job_under_nohup_goes_on_when_its_terminal_is_closed(sent):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ForwardedSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            signals.forward([7])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (signals.ending, sent) == (None, [])


def test_a_pause_without_a_signal_lasts_as_long_as_it_says():
    assert pause(0.0) is None


def test_ctrl_z_stops_the_ranks_with_their_workers_before_the_launcher_and_fg_continues_them(sent):
    with ForwardedSignals() as signals:
        signal.raise_signal(signal.SIGTSTP)
        signals.forward([7, 8])
        assert sent == [
            ("group", 7, signal.SIGSTOP),
            ("group", 8, signal.SIGSTOP),
            ("rank", os.getpid(), signal.SIGTSTP),
            ("group", 7, signal.SIGCONT),
            ("group", 8, signal.SIGCONT),
        ]
        signals.forward([7, 8])
    assert len(sent) == 5
    assert signals.ending is None, "the job goes on"


def test_the_pause_before_a_restart_can_be_stopped_by_ctrl_z(sent):
    timer = threading.Timer(0.1, signal.raise_signal, [signal.SIGTSTP])
    timer.start()
    assert pause(0.4) is None
    timer.join()
    assert sent == [("rank", os.getpid(), signal.SIGTSTP)]
