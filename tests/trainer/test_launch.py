"""The launcher with small scripts as ranks: real processes through torch's elastic agent."""

import ast
import gc
import json
import logging
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from kit.forked import Forked
from kit.full_disk import REASONS, full_disk

from diffusionpipe.errors import (
    ConfigError,
    LossSpikeError,
    NonFiniteLossError,
    NonFiniteWeightsError,
    PeerError,
    TrainingError,
)
from diffusionpipe.runtime.machine.error_file import FailureNote, note_of
from diffusionpipe.trainer.launching import frozen_ranks
from diffusionpipe.trainer.launching.exit_status import ExitStatus
from diffusionpipe.trainer.launching.launch import is_under_torchrun, launch, threads_per_rank
from diffusionpipe.trainer.launching.rank_failures import RankFailure, error_of, first_failure, status_of_signals

LAUNCHER = """
import os, sys
from pathlib import Path
from diffusionpipe.errors import ConfigError, DiffusionPipeError
from diffusionpipe.trainer.launching.launch import launch
try:
    ranks, folder, script = sys.argv[1:]
    status = launch([sys.executable, "-c", script], ranks=int(ranks), log_folder=Path(folder), environ=os.environ)
except DiffusionPipeError as error:
    sys.stderr.write(f"{error}\\n")
    status = 2 if isinstance(error, ConfigError) else 1
sys.exit(status)
"""
JOB = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.job.process_group import joined, leave
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.trainer.step.stopping import Stopping
member, status = membership(os.environ), 0
try:
    with joined(member, device="cpu") as job, Stopping(folder=None).listening() as stopping:
        rank = member.rank
        dist.all_reduce(torch.ones(1))
        print("joined", flush=True)
        {body}
except BaseException as error:
    leave(error, member)
sys.exit(status)
"""


def job(body: str) -> str:
    return JOB.format(body=body.strip().replace("\n", "\n        "))


def start(script: str, folder: Path, ranks: int = 2) -> Forked:
    return Forked(["-c", LAUNCHER, str(ranks), str(folder), script], os.environ)


def ended(process: Forked) -> tuple[int, str, str]:
    try:
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode is not None
    return process.returncode, out, error


def without_notice(error: str) -> str:
    """Without rank 0's word on the SIGTERM by which the agent ends who is left, where it has heard that in time."""
    lines = error.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("saving and stopping after this step"))


def wait_for(file: Path, text: str) -> None:
    """Until the file holds that text."""
    deadline = time.monotonic() + 60
    while not file.exists() or text not in file.read_text():
        assert time.monotonic() < deadline, f"{file} never held {text!r}"
        time.sleep(0.02)


def test_rank_0_speaks_and_the_others_write_logs(tmp_path: Path) -> None:
    script = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], '$HOME', '${local_rank}')"
    assert ended(start(script, tmp_path)) == (0, "rank 0 of 2 $HOME ${local_rank}\n", "")
    assert (tmp_path / "rank_1.out").read_text() == "rank 1 of 2 $HOME ${local_rank}\n"


def test_the_launcher_closes_the_logs_of_its_ranks(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert launch([sys.executable, "-c", ""], ranks=2, log_folder=tmp_path, environ=os.environ) == 0
        gc.collect()
    assert [str(warning.message) for warning in found if warning.category is ResourceWarning] == []


def test_a_programs_own_messages_are_logged_while_its_ranks_run_and_the_agents_are_not(tmp_path: Path, caplog) -> None:
    said = threading.Event()

    def speak() -> None:
        while not said.wait(0.1):
            logging.getLogger("of.a.user").error("a callback speaks")

    speaker = threading.Thread(target=speak)
    speaker.start()
    try:
        with caplog.at_level(logging.DEBUG), pytest.raises(PeerError):
            launch([sys.executable, "-c", "raise SystemExit(1)"], ranks=2, log_folder=tmp_path, environ=os.environ)
    finally:
        said.set()
        speaker.join()
    assert {record.name for record in caplog.records} == {"of.a.user"}
    agents = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    assert agents
    assert not any(logging.getLogger(name).filters for name in agents)


def test_a_terminal_stays_a_terminal_for_rank_0(tmp_path: Path) -> None:
    parent, child = pty.openpty()
    script = "import os, sys; print(sys.stdout.isatty(), sys.stderr.isatty())"
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, "2", str(tmp_path), script], stdout=child, stderr=child, stdin=child
    )
    os.close(child)
    assert process.wait(timeout=60) == 0
    assert os.read(parent, 1000) == b"True True\r\n"
    os.close(parent)
    assert (tmp_path / "rank_1.out").read_text() == "False False\n"


@pytest.mark.slow
def test_launcher_and_ranks_listen_on_loopback_alone(tmp_path: Path) -> None:
    script = job(
        "import psutil; print([c.laddr.ip for p in (os.getpid(), os.getppid())"
        " for c in psutil.Process(p).net_connections('tcp') if c.status == 'LISTEN'], flush=True)"
    )
    status, out, error = ended(start(script, tmp_path))
    assert (status, error) == (0, "")
    found = [out.splitlines()[1], (tmp_path / "rank_1.out").read_text().splitlines()[1]]
    assert [set(ast.literal_eval(addresses)) for addresses in found] == [{"127.0.0.1"}, {"127.0.0.1"}]


def test_the_failing_rank_speaks_once_and_its_status_is_the_launchers(tmp_path: Path) -> None:
    body = """
if rank == 1:
    raise ConfigError("the picture cat.png is empty; remove it")
dist.recv(torch.ones(1), src=1)
"""
    status, out, error = ended(start(job(body), tmp_path))
    assert (status, out) == (2, "joined\n")
    assert without_notice(error) == "rank 1: the picture cat.png is empty; remove it\n"


def test_a_bug_in_a_rank_shows_its_traceback_and_status_1(tmp_path: Path) -> None:
    status, _, error = ended(start(job("if rank == 1: [][0]\ndist.recv(torch.ones(1), src=1 - rank)"), tmp_path))
    assert status == 1
    assert without_notice(error).startswith("rank 1: Traceback")
    assert error.endswith("IndexError: list index out of range\n")


@pytest.mark.slow
def test_a_full_disk_is_named_by_rank_0_itself_where_no_note_can_be_left(tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from diffusionpipe.runtime.job.process_group import leave
from diffusionpipe.runtime.job.membership import membership
try:
    Path("FOLDER/metrics.jsonl").write_text("x" * 9000)
except OSError as error:
    leave(error, membership(os.environ))
"""
    with full_disk(tmp_path):
        status, _, error = ended(start(script.replace("FOLDER", str(tmp_path)), tmp_path))
    assert status in (1, 2), error  # 1 where the first rank to end could not even write its log
    assert re.search(rf"cannot write .*: ({REASONS})", error)
    assert "Traceback" not in error
    assert "JSONDecodeError" not in error


def test_a_rank_that_could_not_write_its_log_is_named_with_the_reason(tmp_path: Path) -> None:
    failure = RankFailure(rank=1, exit_code=1, time=0.0, note=None)
    assert str(error_of(failure, tmp_path)) == "rank 1 failed with exit status 1 and wrote nothing."
    with full_disk(tmp_path):
        said = str(error_of(failure, tmp_path))
    assert re.fullmatch(rf"rank 1 failed with exit status 1 and wrote no log: cannot write .*: ({REASONS})\.", said)


def test_a_foreign_programs_failure_shows_the_end_of_its_log(tmp_path: Path) -> None:
    script = "import os, sys, time; time.sleep(int(os.environ['RANK']) or 60); sys.exit('no more coffee')"
    status, _, error = ended(start(script, tmp_path))
    assert status == 1
    assert "rank 1 failed with exit status 1" in error
    assert error.endswith("no more coffee\n")


def test_a_rank_that_somebody_terminates_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    """Both end by SIGTERM: one by somebody else's, then the other by the agent's."""
    script = (
        "import os, signal, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    print('last words', file=sys.stderr)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(PeerError, match=r"(?s)^rank 1 was killed by signal 15 \(SIGTERM\).*rank_1\.err:\nlast words$"):
        launch([sys.executable, "-c", script], ranks=2, log_folder=tmp_path, environ=os.environ)


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    body = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.recv(torch.ones(1), src=1)"
    status, _, error = ended(start(job(body), tmp_path))
    assert status == 1
    assert without_notice(error).startswith("rank 1 was killed by signal 9 (SIGKILL)")
    assert error.count("rank 1") == 1
    note = json.loads((tmp_path / "rank_0.error.json").read_text())
    assert note["is_consequence"]
    assert "rank 1 (" in note["message"]


FROZEN = """
import json, os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.3)
note = {"message": "rank 1 stopped answering", "exit_code": 1, "is_consequence": True, "time": time.time()}
note |= {"is_common": False, "would_recur": False, "timestamp": 0}
open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write(json.dumps(note))
"""


def test_a_frozen_rank_is_ended_at_once_and_named_by_the_others(tmp_path: Path) -> None:
    """Not after the 30 s of torch's agent, nor as one that was killed and may have run out of memory."""
    script = f"{FROZEN}time.sleep(1.5)\nraise SystemExit(1)"
    with pytest.raises(PeerError, match=r"^rank 1 stopped answering$"):
        launch([sys.executable, "-c", script], ranks=2, log_folder=tmp_path, environ=os.environ)


def test_a_rank_that_is_frozen_after_another_has_ended_well_is_ended_too(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(frozen_ranks, "_LAST", 0.7)
    script = f"{FROZEN.splitlines()[1]}\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGSTOP)"
    with pytest.raises(PeerError, match=r"^rank 1 was frozen"):
        launch([sys.executable, "-c", script], ranks=2, log_folder=tmp_path, environ=os.environ)


def test_a_frozen_rank_that_no_other_names_is_called_frozen(tmp_path: Path) -> None:
    text = str(error_of(failure(1, exit_code=-9, frozen="stopped by a signal (state T)"), tmp_path))
    assert text.startswith("rank 1 was frozen, stopped by a signal (state T), so the launcher ended it.")
    assert "out of memory" not in text


def test_a_rank_that_is_paused_while_all_is_well_may_go_on(tmp_path: Path) -> None:
    script = (
        "import os, signal, subprocess, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    wake = f'import os, time; time.sleep(1.5); os.kill({os.getpid()}, 18)'\n"
        "    subprocess.Popen([sys.executable, '-c', wake], start_new_session=True)\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    assert launch([sys.executable, "-c", script], ranks=2, log_folder=tmp_path, environ=os.environ) == 0


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])  # SIGHUP reaches the ranks as SIGTERM
def test_a_signal_to_the_launcher_stops_all_ranks_at_one_step_with_a_status_of_its_own(
    tmp_path: Path, number: int
) -> None:
    body = """
for step in range(10000):
    time.sleep(0.01)
    total = torch.tensor(stopping.votes())
    dist.all_reduce(total)
    if stopping.decision(tuple(total.tolist())).stops:
        print("saved", flush=True)
        status = 75
        break
"""
    process = start(job(body), tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "joined\n"
    time.sleep(0.3)
    process.send_signal(number)
    status, out, error = ended(process)
    assert (status, out) == (ExitStatus.STOPPED, "saved\n"), error
    assert (tmp_path / "rank_1.out").read_text() == "joined\nsaved\n"


def test_ctrl_c_before_the_first_step_leaves_no_word_of_a_rank(tmp_path: Path) -> None:
    """Rank 1 waits in a transfer, as while measuring; the launcher's caller says the one line."""
    body = "dist.recv(torch.ones(1), src=0) if rank else time.sleep(60)"
    process = start(job(body).replace(", Stopping(folder=None).listening() as stopping", ""), tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "joined\n"
    process.send_signal(signal.SIGINT)
    assert ended(process) == (128 + signal.SIGINT, "", "")


def test_ranks_that_do_not_listen_die_of_the_forwarded_signal(tmp_path: Path) -> None:
    process = start("import time; print('here', flush=True); time.sleep(60)", tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGTERM)
    assert ended(process) == (128 + signal.SIGTERM, "", "")


def test_a_second_interrupt_ends_ranks_that_ignore_signals(tmp_path: Path) -> None:
    script = "import signal, time; signal.signal(2, signal.SIG_IGN); print('here', flush=True); time.sleep(60)"
    process = start(script, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    wait_for(tmp_path / "rank_1.out", "here\n")  # or the first one ends it before it ignores any
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    assert ended(process)[0] == 128 + signal.SIGINT


def test_a_port_in_use_is_named_with_the_option(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is in use.*--port"):
            launch([sys.executable, "-c", ""], ranks=1, log_folder=tmp_path, environ={}, port=port)


def test_threads_are_shared_out_unless_the_user_has_chosen() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1, {}) == cores
    assert threads_per_rank(10 * cores, {}) == 1
    assert threads_per_rank(2, {"OMP_NUM_THREADS": "3"}) is None


def test_only_a_complete_job_counts_as_torchruns() -> None:
    assert is_under_torchrun({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"})
    assert not is_under_torchrun({"RANK": "0"})


@pytest.mark.parametrize(("is_common", "text"), [(True, "no such folder"), (False, "rank 1: no such folder")])
def test_a_problem_that_all_ranks_have_alike_names_none(tmp_path: Path, is_common: bool, text: str) -> None:
    error = ConfigError("no such folder")
    error.is_common = is_common
    failed = RankFailure(rank=1, exit_code=2, time=0.0, note=note_of(error))
    assert str(error_of(failed, tmp_path)) == text


@pytest.mark.parametrize("kind", [NonFiniteLossError, NonFiniteWeightsError, LossSpikeError])
def test_an_error_of_the_training_itself_names_no_rank_and_is_no_crash(
    tmp_path: Path, kind: type[TrainingError]
) -> None:
    error = error_of(RankFailure(rank=1, exit_code=1, time=0.0, note=note_of(kind("step 4: nan"))), tmp_path)
    assert isinstance(error, TrainingError)
    assert str(error) == "step 4: nan"


def failure(
    rank: int, *, exit_code: int = 1, time: float = 0.0, blames: bool | None = None, **more: object
) -> RankFailure:
    note = None
    if blames is not None:
        note = FailureNote(message="", exit_code=exit_code, is_consequence=blames, time=time)
    return RankFailure(rank=rank, exit_code=exit_code, time=time, note=note, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ends", "asked", "status"),
    [
        ([75, 75], None, 75),  # the file save_quit, or a signal to a rank
        ([75, -15], signal.SIGTERM, 75),  # the agent terminated a rank that had yet to end
        ([-15, -15], signal.SIGTERM, 143),
        ([130, -2], signal.SIGINT, 130),
        ([-9, -9], signal.SIGINT, 130),  # the second Ctrl-C
        ([-15, -15], None, None),  # somebody else terminated them
        ([75, -9], None, None),
        ([75, 1], signal.SIGTERM, None),
        ([1, -15], signal.SIGTERM, None),
    ],
)
def test_the_status_tells_stopped_ended_and_failed_jobs_apart(
    ends: list[int], asked: int | None, status: int | None
) -> None:
    failures = [failure(rank, exit_code=end) for rank, end in enumerate(ends)]
    assert status_of_signals(failures, asked) == status


def test_a_rank_that_ends_because_an_interrupted_one_did_is_no_failure() -> None:
    failures = [failure(0, exit_code=130, blames=False), failure(1, blames=True)]
    assert status_of_signals(failures, signal.SIGINT) == 130
    assert status_of_signals([failure(0, blames=False), failure(1, blames=True)], signal.SIGINT) is None


@pytest.mark.parametrize(
    "failures",
    [
        [failure(0, blames=True), failure(1, blames=False, time=3)],  # a cause after its consequence
        [failure(0, blames=False), failure(1, exit_code=-9, time=3)],  # an error that a kill has caused
        [failure(0, exit_code=-15), failure(1, time=3)],  # terminated by the agent
        [failure(0, exit_code=-9, time=30), failure(1)],  # killed by the agent after its patience
        [failure(0, exit_code=-9, frozen="T"), failure(1, blames=True, time=8)],  # the note that names the frozen rank
        [failure(0, exit_code=-15), failure(1, exit_code=-9, frozen="T")],
        [failure(0, exit_code=-15), failure(1, exit_code=-15, is_first=True)],  # terminated by somebody else
        [failure(0, blames=False, time=2), failure(1, blames=False, time=1)],  # the earlier one
    ],
)
def test_the_first_failure_is_the_cause(failures: list[RankFailure]) -> None:
    assert first_failure(failures).rank == 1


def test_no_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="0 ranks"):
        launch(["true"], ranks=0, log_folder=tmp_path, environ={})


def test_a_program_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-program"):
        launch(["no-such-program"], ranks=1, log_folder=tmp_path, environ={})
