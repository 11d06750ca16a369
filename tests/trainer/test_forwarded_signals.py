import os
import signal

import pytest

from diffusionpipe.trainer.forwarded_signals import ForwardedSignals, pause


@pytest.fixture
def sent(monkeypatch):
    """What is sent, instead of sending it."""
    found = []
    monkeypatch.setattr(os, "kill", lambda pid, number: found.append(("rank", pid, number)))
    monkeypatch.setattr(os, "killpg", lambda group, number: found.append(("group", group, number)))
    return found


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
