"""Starts the ranks of a job on this machine through torch's elastic agent, and says why it ended.

    launcher (main thread: signals, the final word)
      └─ elastic agent (a thread: starts, polls, terminates)
           ├─ rank 0   its output passes through, a terminal stays a terminal
           └─ rank 1…  output in LOG_FOLDER/rank_1.out and .err

The agent's own report is a table of pids and "traceback: see the documentation"; ours is the error of the rank that
failed first. It comes from the note that the rank left (`runtime.error_file`), or else from its exit status. The agent
runs in a thread because its signal handlers end the job without waiting for a checkpoint longer than a fixed time.
"""

import contextlib
import logging
import os
import signal
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from diffusionpipe.errors import ConfigError, PeerError
from diffusionpipe.runtime.error_file import LAUNCHED, FailureNote, read_error_file
from diffusionpipe.trainer.exit_status import ExitStatus, of_signal

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # no stub has it
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsSpecs

_HOST = "127.0.0.1"
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_TAIL = 30
"""Lines of a rank's log that are shown when it left no note."""
_ESCALATION = 20
"""Seconds after the first failure from which a SIGKILL counts as the agent's own (it waits 30 s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How one rank ended that did not end well."""

    rank: int
    exit_code: int
    """Negative: the signal that killed it."""
    time: float
    note: FailureNote | None
    """What it left; None if it was killed or is no program of ours."""


def is_under_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether this process is a rank of a job already, so that it joins instead of launching one."""
    return all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def launch(
    command: Sequence[str], *, ranks: int, log_folder: Path, environ: Mapping[str, str], port: int | None = None
) -> int:
    """Run `command` in `ranks` processes and return the exit status when all have ended.

    0: all ranks ended well. 75: they were asked to stop, saved and stopped. 128 + n: signal n ended the job.

    Args:
        command: the program and its arguments, the same for every rank.
        ranks: how many processes, one per device.
        log_folder: for the output of the ranks above 0; made if missing.
        environ: this process's environment, to see what the user has set; the ranks inherit it.
        port: of the ranks' meeting point; None: any free one.

    Raises:
        ConfigError: the port is in use, or the rank that failed first raised one: its text.
        PeerError: a rank failed in another way; the text names it.
    """
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks are too few; use --ranks 1 or more.")
    log_folder.mkdir(parents=True, exist_ok=True)
    store = _meeting_point(port)
    with _quiet_agent(), _Signals() as signals:
        agent = _agent(command, ranks=ranks, log_folder=log_folder, environ=environ, port=store.port)
        result = _run(agent, signals)
    if not result.is_failed():
        return 0
    failures = _failures(result, ranks, log_folder)
    status = status_of_signals(failures, signals.ending)
    if status is not None:
        return status
    raise error_of(first_failure(failures), log_folder)


def status_of_signals(failures: Sequence[RankFailure], asked: int | None) -> int | None:
    """The exit status of a job that ended as a signal or a signal file wants it; None if it failed.

    Args:
        failures: of all ranks that did not end with 0.
        asked: the first signal that the launcher was sent; None: none.
    """
    ends = {failure.exit_code for failure in failures}
    if ExitStatus.STOPPED in ends and ends <= {ExitStatus.STOPPED, -signal.SIGTERM}:
        return ExitStatus.STOPPED  # the agent terminates the ranks that end a little later than the first
    if asked is not None and ends <= {of_signal(asked), -asked, -signal.SIGTERM, -signal.SIGKILL}:
        return of_signal(asked)
    return None


def first_failure(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that caused the others.

    A rank killed from outside comes first, then errors of a rank's own, then those that name another rank, then
    ranks that the agent terminated; within each kind the earliest.
    """
    start = min(failure.time for failure in failures)

    def order(failure: RankFailure) -> tuple[int, float]:
        note = failure.note
        if note is not None:
            return (2 if note.is_consequence else 1), note.time
        if failure.exit_code == -signal.SIGTERM:
            return 3, failure.time
        is_killed = failure.exit_code < 0 and failure.time < start + _ESCALATION
        return (0 if is_killed else 1), failure.time

    return min(failures, key=order)


def error_of(failure: RankFailure, log_folder: Path) -> ConfigError | PeerError:
    """The error that tells the user about `failure`."""
    rank, note = failure.rank, failure.note
    if note is not None:
        text = note.message if note.is_consequence or note.is_common else f"rank {rank}: {note.message}"
        return ConfigError(text) if note.exit_code == 2 else PeerError(text)
    if failure.exit_code < 0:
        number = -failure.exit_code
        why = "; the system may have run out of memory" if number == signal.SIGKILL else ""
        return PeerError(
            f"rank {rank} was killed by signal {number} ({_signal_name(number)}){why}. "
            "The other ranks have stopped; the last checkpoint is kept. Resume with --resume latest."
        )
    text = f"rank {rank} failed with exit status {failure.exit_code}"
    error = _output(log_folder, rank, "err")
    if rank == 0 or not error.is_file():
        text += "; its output is above."
    else:
        lines = error.read_text(encoding="utf-8", errors="replace").splitlines()
        text = "\n".join([f"{text}; the end of {error}:", *lines[-_TAIL:]])
    return ConfigError(text) if failure.exit_code == 2 else PeerError(text)


def threads_per_rank(ranks: int, environ: Mapping[str, str]) -> int | None:
    """OpenMP threads for each of `ranks` on this machine; None where the user has chosen."""
    if "OMP_NUM_THREADS" in environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def _failures(result: "RunResult", ranks: int, log_folder: Path) -> list[RankFailure]:
    """Those that the agent saw, and of the ranks that it then terminated those that had left a note."""
    failures: list[RankFailure] = []
    for rank in range(ranks):
        seen, note = result.failures.get(rank), read_error_file(_error_file(log_folder, rank))
        if seen is not None:
            failures.append(RankFailure(rank=rank, exit_code=seen.exitcode, time=seen.timestamp, note=note))
        elif note is not None:
            failures.append(RankFailure(rank=rank, exit_code=-signal.SIGTERM, time=note.time, note=note))
    return failures


def _meeting_point(port: int | None) -> "TCPStore":
    """A store that holds the port; the agent's rendezvous in this process shares it (multi_tenant)."""
    from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]  # no stub has the latter

    try:
        return TCPStore(_HOST, port or 0, None, True, timedelta(minutes=1), wait_for_workers=False, multi_tenant=True)
    except DistNetworkError as error:
        raise ConfigError(
            f"port {port} is in use ({str(error).splitlines()[0]}); choose another with --port, or leave it out."
        ) from error


def _agent(
    command: Sequence[str], *, ranks: int, log_folder: Path, environ: Mapping[str, str], port: int
) -> "LocalElasticAgent":
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    return LocalElasticAgent(
        spec=WorkerSpec(
            role="rank",
            local_world_size=ranks,
            entrypoint=command[0],
            args=tuple(argument.replace("$", "$$") for argument in command[1:]),  # the agent substitutes ${...}
            rdzv_handler=StaticTCPRendezvous(_HOST, port, 0, 1, uuid.uuid4().hex, 60),
            max_restarts=0,
            monitor_interval=0.1,
            master_addr=_HOST,
            master_port=port,
        ),
        logs_specs=_logs_specs(ranks=ranks, log_folder=log_folder, environ=environ),
    )


def _logs_specs(*, ranks: int, log_folder: Path, environ: Mapping[str, str]) -> "LogsSpecs":
    """Where the agent sends the ranks' output and looks for their notes, and what it adds to their environment."""
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    added = {LAUNCHED: str(os.getpid()), "TORCH_CPP_LOG_LEVEL": environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")}
    threads = threads_per_rank(ranks, environ)
    if threads is not None:
        added["OMP_NUM_THREADS"] = str(threads)

    class RankLogs(LogsSpecs):
        @property
        def root_log_dir(self) -> str:
            return str(log_folder)

        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            notes = {rank: _error_file(log_folder, rank) for rank in envs}
            for rank, environment in envs.items():
                notes[rank].unlink(missing_ok=True)
                environment.update(added, TORCHELASTIC_ERROR_FILE=str(notes[rank]))
                if rank > 0:
                    environment["PYTHONUNBUFFERED"] = "1"  # or a killed rank's last words are lost

            def files(stream: str) -> dict[int, str]:
                return {rank: str(_output(log_folder, rank, stream)) if rank > 0 else "" for rank in envs}

            return LogsDest(
                stdouts=files("out"), stderrs=files("err"), error_files={rank: str(p) for rank, p in notes.items()}
            )

    return RankLogs(str(log_folder))


def _run(agent: "LocalElasticAgent", signals: "_Signals") -> "RunResult":
    """What the agent reports, once every process of every rank is gone."""
    results: list[RunResult] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(agent.run())
        except BaseException as error:
            errors.append(error)

    def groups() -> list[int]:
        return [worker.id for worker in agent.get_worker_group().workers if isinstance(worker.id, int)]

    thread = threading.Thread(target=work, name="elastic agent")
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        signals.forward(groups())
    for group in groups():  # the data workers of a rank that was killed
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    if errors and isinstance(errors[0], OSError):
        raise ConfigError(f"the ranks cannot be started: {errors[0]}") from errors[0]
    if errors:
        raise errors[0]
    return results[0]


class _Signals:
    """Catches signals while it is entered and forwards them to the ranks, which are in sessions of their own."""

    def __init__(self) -> None:
        self.ending: int | None = None
        """The first signal that asked for the end."""
        self._pending: list[int] = []
        self._interrupts = 0
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            heard = [n for n in _FORWARDED if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]  # nohup
            self._before = {number: signal.signal(number, self._catch) for number in heard}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def forward(self, groups: Sequence[int]) -> None:
        """Send what has arrived to the ranks' process groups; kept until there are any."""
        while groups and self._pending:
            number = self._pending.pop(0)
            for group in groups:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, number)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._pending.append(number)
            return
        self.ending = self.ending or number
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            number = signal.SIGKILL
        self._pending.append(signal.SIGTERM if number == signal.SIGHUP else number)


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _output(log_folder: Path, rank: int, stream: str) -> Path:
    return log_folder / f"rank_{rank}.{stream}"


def _error_file(log_folder: Path, rank: int) -> Path:
    return log_folder / f"rank_{rank}.error.json"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
