import json
import logging
import re
import signal

import pytest

from diffusionpipe.errors import ConfigError, NonFiniteLossError, PeerError
from diffusionpipe.trainer.launching import restarts
from diffusionpipe.trainer.launching.restarts import (
    RunProgress,
    pause_before,
    reason_to_give_up,
    resume_of_restart,
    with_restarts,
)
from diffusionpipe.trainer.reporting.metrics import last_step


class Script:
    """A job whose launches end as listed: an exit status, or an error after coming to a step."""

    def __init__(self, folder, *ends):
        self.folder, self.ends, self.resumes, self.waits = folder, list(ends), [], []

    def launch(self, resume):
        self.resumes.append(resume)
        end = self.ends.pop(0)
        if isinstance(end, int):
            return end
        step, error = end
        (self.folder / "metrics.jsonl").write_text("".join(f'{{"step": {k}, "loss": 1}}\n' for k in range(1, step + 1)))
        raise error

    def wait(self, seconds):
        self.waits.append(seconds)

    def run(self, resume=None, max_restarts=10):
        return with_restarts(self.launch, self.folder, resume, max_restarts=max_restarts, wait=self.wait)


CRASH = PeerError("rank 1 was killed by signal 9 (SIGKILL).\nThe other ranks have stopped.")


def test_a_job_is_restarted_with_auto_after_growing_pauses_each_said_in_one_line(tmp_path, caplog):
    job = Script(tmp_path, (3, CRASH), (5, CRASH), (9, CRASH), 0)
    with caplog.at_level(logging.WARNING):
        assert job.run() == 0
    assert job.resumes == [None, "auto", "auto", "auto"]
    assert job.waits == [1, 2, 4]
    first, *_ = (record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 3
    assert first == 'restart=1 of=10 resume=auto pause_s=1 reason="rank 1 was killed by signal 9 (SIGKILL)."'


@pytest.mark.parametrize(
    "end", [75, 130, (3, ConfigError("no such folder")), (3, NonFiniteLossError("step 4: the loss is nan"))]
)
def test_only_crashes_are_restarted(tmp_path, end):
    job = Script(tmp_path, end)
    if isinstance(end, int):
        assert job.run() == end
    else:
        with pytest.raises(type(end[1])):
            job.run()
    assert job.waits == []


def test_two_restarts_in_a_row_that_come_no_further_end_the_job(tmp_path):
    job = Script(tmp_path, (8, CRASH), (7, CRASH), (9, CRASH), (6, CRASH), (9, CRASH), 0)
    with pytest.raises(PeerError, match=r"(?s)killed by signal 9.*last 2 restarts brought neither"):
        job.run()
    assert job.ends == [0]


def test_without_restarts_a_crash_is_the_error_itself_and_used_up_ones_are_named(tmp_path):
    with pytest.raises(PeerError) as caught:
        Script(tmp_path, (8, CRASH)).run(max_restarts=0)
    assert caught.value is CRASH
    with pytest.raises(PeerError, match=r"--max-restarts 1"):
        Script(tmp_path, (8, CRASH), (9, CRASH)).run(max_restarts=1)


def test_a_signal_during_the_pause_ends_the_job(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "pause_before", lambda restart: 30)
    job = Script(tmp_path, (3, CRASH), 0)

    def crash(resume):
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return job.launch(resume)

    assert with_restarts(crash, tmp_path, None, max_restarts=3) == 128 + signal.SIGTERM
    assert job.ends == [0]


@pytest.mark.parametrize(
    ("steps", "max_restarts", "gives_up"),
    [
        ([(0, 0)], 1, None),
        ([(0, 0), (0, 0)], 1, "used up"),
        ([(0, 0), (0, 0)], 9, None),
        ([(0, 0), (0, 0), (0, 0)], 9, "neither"),
        ([(8, 1), (8, 1), (8, 2)], 9, None),  # a checkpoint is progress
        ([(8, 1), (9, 1), (9, 1)], 9, None),
        ([(8, 1), (9, 1), (9, 1), (9, 1)], 9, "neither"),
    ],
)
def test_when_to_give_up(steps, max_restarts, gives_up):
    reason = reason_to_give_up([RunProgress(*pair) for pair in steps], max_restarts)
    assert reason is None if gives_up is None else gives_up in reason


def test_pauses_double_up_to_a_minute():
    assert [pause_before(n) for n in (1, 2, 3, 6, 7, 8, 5000)] == [1, 2, 4, 32, 60, 60, 60]


@pytest.mark.parametrize(
    ("resume", "has_saved", "expected"),
    [
        (None, False, "auto"),
        ("latest", False, "auto"),
        ("auto", True, "auto"),
        ("100", False, "100"),  # the newest checkpoint is one that the user has turned back from
        ("100", True, "auto"),
        ("runs/other/checkpoints", False, "runs/other/checkpoints"),
    ],
)
def test_from_where_a_restart_goes_on(resume, has_saved, expected):
    assert resume_of_restart(resume, has_saved=has_saved) == expected


def test_the_last_step_is_read_from_the_end_of_the_metrics(tmp_path):
    assert last_step(tmp_path) == 0
    rows = "".join(json.dumps({"step": step, "loss": 0.1}) + "\n" for step in range(1, 6001))
    (tmp_path / "metrics.jsonl").write_text(rows + '{"step": 7')
    assert last_step(tmp_path) == 6000
    assert re.match(r'{"step": \d+, ', rows), "as the writer writes them"
