"""The short form of `make torture`, and the harness itself: that it would see what is wrong."""

import signal
import subprocess
import sys
import time
from random import Random

import pytest
from kit.forked_jobs import ForkedCommand
from kit.jobs import HangError, Job, StrayError
from kit.moments import PLACES, Moment
from kit.signals import hear_all_signals
from torture import folders, kills, restarts, stops
from torture.cases import Case, Scene, check_kept, check_killed, check_plain
from torture.findings import CauseError, LostError, UnequalError, column_of
from torture.inputs import FLAVOURS, Inputs
from torture.kills import LAUNCHER, Kill
from torture.program import Report, all_cases, chosen


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs(tmp_path_factory.mktemp("torture"))


SHORT = (
    ("rank", lambda scene: kills.run(Kill("", Moment("writing tensors", 1, 2), 1, "short"), scene)),
    ("launcher", lambda scene: kills.run(Kill("", Moment("a backward", 0, 7), LAUNCHER, "short"), scene)),
    ("signal", lambda scene: stops.run(stops.Stop(signal.SIGTERM, Moment("a step", 0, 3), 75, flavour="short"), scene)),
    ("restart", lambda scene: restarts.once(Moment("the sum", 0, 4), "short", scene)),
)


@pytest.mark.parametrize(
    "act",
    [pytest.param(act, id=name, marks=[] if name == "rank" else pytest.mark.slow) for name, act in SHORT],
)
def test_a_job_that_is_killed_in_a_moment_names_it_keeps_its_checkpoints_and_goes_on_exactly(inputs, request, act):
    act(Scene(inputs, Random(0), request.node.callspec.id))


def test_a_second_job_in_the_folder_is_refused_and_the_first_finishes(inputs):
    folders.second("short", Moment("a step", 1, 3), Scene(inputs, Random(0), "two"), "--resume", "auto")


def test_there_are_sixty_kills_of_which_fifteen_are_of_real_processes():
    cases = all_cases()
    assert len({(case.kind, case.what) for case in cases}) == len(cases), "each is chosen by its description"
    assert sum(case.kills for case in cases) >= 60
    assert sum(case.kills for case in cases if case.kind == "real" or "real processes" in case.what) >= 15


def test_every_place_is_a_function_of_the_program(monkeypatch):
    """A moment at a function that has another name now would never come."""
    for place in PLACES:
        with monkeypatch.context() as context:
            context.setattr("kit.moments.mock.patch.object", lambda owner, name, function: Patched(owner, name))
            Moment(place, 0).arm(0, None)


class Patched:
    def __init__(self, owner, name):
        assert callable(getattr(owner, name))

    def start(self):
        pass


def test_the_table_counts_results_by_kind(tmp_path, capsys):
    report = Report(3)
    for result in ("ok", "hang", "not allowed here"):
        report.add(Case("steps", result, lambda scene: "", kills=2), result, "told", 1.0)
    lines = [line.split() for line in report.table().splitlines()]
    assert lines[-1][:5] == ["all", "3", "4", "1", "1"]
    assert lines[-1][-1] == "1"
    assert len(report.failures) == 1
    assert "2 of 3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "column"),
    [(HangError(), "hang"), (StrayError(), "stray"), (CauseError(), "wrong cause"), (LostError(), "lost"),
     (UnequalError(), "not equal"), (AssertionError(), "other")],
)  # fmt: skip
def test_each_finding_has_a_column(error, column):
    assert column_of(error) == column


NAMED = "error: rank 1 was killed by signal 9 (SIGKILL); the system may have run out of memory.\n"


@pytest.mark.parametrize(
    ("status", "error", "rank"),
    [(0, NAMED, 1), (2, NAMED, 1), (1, NAMED, 0), (1, NAMED.replace("SIGKILL", "SIGSEGV"), 1), (1, "", 1),
     (1, NAMED.replace("error: ", ""), 1)],
)  # fmt: skip
def test_a_wrong_status_rank_or_cause_is_seen(status, error, rank):
    check_killed(1, NAMED, 1)
    with pytest.raises(CauseError):
        check_killed(status, error, rank)


def test_tracebacks_and_lost_checkpoints_are_seen(tmp_path):
    check_plain(NAMED)
    with pytest.raises(CauseError):
        check_plain("Traceback (most recent call last):")
    assert check_kept([], tmp_path) == []
    with pytest.raises(LostError, match="step"):
        check_kept([4], tmp_path)
    (tmp_path / "checkpoints/step-00000004").mkdir(parents=True)
    with pytest.raises(LostError, match="step-00000004"):
        check_kept([], tmp_path)


def test_another_run_is_not_equal(inputs):
    """The reference is there: the tests above have made it."""
    folder = inputs.reference("short")
    inputs.check_equal(folder, "short")
    other = inputs.folder / "other"
    other.mkdir()
    text = (folder / "metrics.jsonl").read_text()
    (other / "metrics.jsonl").write_text(text.replace('"loss": 1', '"loss": 2'))
    with pytest.raises(UnequalError, match="loss"):
        inputs.check_equal(other, "short")


def test_hangs_and_strays_are_seen(tmp_path, inputs):
    script = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); time.sleep(float(sys.argv[1]))"
    for seconds, error in (("60", HangError), ("0", StrayError)):
        job = Program(inputs.recipe(f"program-{seconds}", "short"), script, seconds)
        with pytest.raises(error):
            job.end(1.0, lingers=0.2)
        deadline = time.monotonic() + 10
        while job.processes():
            assert time.monotonic() < deadline, "the harness leaves nothing behind"
            time.sleep(0.01)


def test_jobs_hear_signals_although_the_harness_was_started_by_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hear_all_signals()
        script = "import signal; print(signal.getsignal(signal.SIGHUP).name)"
        assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "SIG_DFL\n"
        signal.raise_signal(signal.SIGHUP)  # which the harness itself still survives
    finally:
        signal.signal(signal.SIGHUP, before)


class Program(ForkedCommand):
    """A program in place of the launcher."""

    def __init__(self, recipe, script, *arguments):
        Job.__init__(self, recipe, (), 2)
        (self.place / "err").touch()
        self.process = subprocess.Popen([sys.executable, "-c", script, *arguments], cwd=self.place)
        self.pid = self.process.pid

    def poll(self):
        return self.process.poll()


def test_cases_are_chosen_by_a_word():
    cases = [Case("steps", f"case {number}", lambda scene: "") for number in range(5)]
    assert [case.what for case in chosen(cases, ["step"], 1, 2)] == ["case 1", "case 2"]
    assert chosen(cases, ["case 4", "case 3"], 0, None) == cases[3:]
    assert "short" in FLAVOURS
