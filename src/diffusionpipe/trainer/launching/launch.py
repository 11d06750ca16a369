"""Starts the ranks of a job on this machine through torch's elastic agent, and says why it ended.

    launcher (main thread: signals, the final word)
      └─ elastic agent (a thread: starts, polls, terminates)
           ├─ rank 0   its output passes through, a terminal stays a terminal
           └─ rank 1…  output in LOG_FOLDER/rank_1.out and .err

The agent's own report is a table of pids and "traceback: see the documentation"; ours is the error of the rank that
failed first. It comes from the note that the rank left (`runtime.machine.error_file`), or else from its exit status.
The agent runs in a thread: its signal handlers end the job without waiting for a checkpoint longer than a fixed time.
"""

import contextlib
import errno
import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.errors import ConfigError
from diffusionpipe.files.output_file import reason_of
from diffusionpipe.runtime.job.admission import TOKEN, given_token, new_token
from diffusionpipe.runtime.job.interfaces import GLOO, check_interfaces
from diffusionpipe.runtime.machine.cores import num_cores
from diffusionpipe.runtime.machine.error_file import LAUNCHED, read_error_file
from diffusionpipe.trainer.launching.forwarded_signals import ForwardedSignals
from diffusionpipe.trainer.launching.frozen_ranks import FrozenRanks
from diffusionpipe.trainer.launching.rank_failures import (
    RankFailure,
    error_of,
    first_failure,
    output_file,
    status_of_signals,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # no stub has it
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import LogsSpecs

LOGS = "logs"
"""The folder for the ranks' output, in the folder of the run."""
_HOST = "127.0.0.1"
_ELASTIC = "torch.distributed.elastic"
"""The package of torch's agent, and the beginning of its loggers' names."""


def is_under_torchrun(environ: Mapping[str, str]) -> bool:
    """Whether the environment has torchrun's RANK, WORLD_SIZE and MASTER_ADDR, so that this process joins a job."""
    return all(name in environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def launch(
    command: Sequence[str],
    *,
    ranks: int,
    log_folder: Path,
    environ: Mapping[str, str],
    port: int | None = None,
    devices: Sequence[int] = (),
) -> int:
    """Run `command` in `ranks` processes and return the exit status when all have ended.

    0: all ranks ended well. 75: they were asked to stop, saved and stopped. 128 + n: signal n ended the job.

    Args:
        command: the program and its arguments, the same for every rank.
        ranks: how many processes, one per device.
        log_folder: for the output of the ranks above 0; made if missing.
        environ: this process's environment variables, to see which ones the user has set; the ranks inherit them.
        port: the port where the ranks meet; None: any free one.
        devices: the number of each rank's device on this machine; (): 0, 1, ...

    Raises:
        ConfigError: there is no rank, the port is in use, the folder cannot be made, the environment names a wrong
            interface or token, or the rank that failed first raised one: its text.
        TrainingError: all ranks raised it, for the loss or the weights; the same would happen again.
        PeerError: a rank failed in another way; the text names it.
    """
    if ranks < 1:
        raise ConfigError(f"{ranks} ranks are too few; use --ranks 1 or more.")
    try:
        log_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {log_folder} cannot be made: {reason_of(error)}; choose another") from error
    check_interfaces(environ, (GLOO,))
    # Held from here on: another program could take a port that is only chosen.
    store = _meeting_point(port)
    with _quiet_agent(), ForwardedSignals() as signals:
        agent = _agent(
            command, devices=devices or range(ranks), log_folder=log_folder, environ=environ, port=store.port
        )
        result, frozen = _run(agent, signals, lambda: any(_error_file(log_folder, r).exists() for r in range(ranks)))
    if not result.is_failed():
        return 0
    failures = _failures(result, frozen, ranks, log_folder)
    status = status_of_signals(failures, signals.ending)
    if status is not None:
        return status
    raise error_of(first_failure(failures), log_folder)


def threads_per_rank(ranks: int, environ: Mapping[str, str]) -> int | None:
    """The number of OpenMP threads for each rank if `ranks` share this machine's cores equally, at least 1.

    None where OMP_NUM_THREADS is set in the environment variables `environ`.
    """
    if "OMP_NUM_THREADS" in environ:
        return None
    return max(1, num_cores() // ranks)


def _failures(result: "RunResult", frozen: Mapping[int, str], ranks: int, log_folder: Path) -> list[RankFailure]:
    """The ranks of a job that failed, in ascending order.

    These are the ranks whose failure the agent of torch saw (`result`), and the ranks that it then terminated, if they
    had left a note before. `frozen`: rank -> why it was killed as frozen. `ranks`: the number of ranks.
    """
    failures: list[RankFailure] = []
    first = next(iter(result.failures), None)  # the agent saw it end before it terminated the others
    for rank in range(ranks):
        seen, note = result.failures.get(rank), read_error_file(_error_file(log_folder, rank))
        if seen is not None:
            exit_code, when = seen.exitcode, float(seen.timestamp)
        elif note is not None:
            exit_code, when = -signal.SIGTERM, note.time  # the agent's SIGTERM came after the rank had failed by itself
        else:
            continue
        is_first, why = rank == first, frozen.get(rank)
        failures.append(
            RankFailure(rank=rank, exit_code=exit_code, time=when, note=note, is_first=is_first, frozen=why)
        )
    return failures


def _meeting_point(port: int | None) -> "TCPStore":
    """The key-value store where the ranks meet, on this port of the loopback interface; None: any free port.

    The agent's rendezvous in this process shares it (multi_tenant).

    Raises:
        ConfigError: the port is in use or cannot be used.
    """
    from diffusionpipe.runtime.job.job_store import tcp_store

    try:
        return tcp_store(_HOST, port or 0, is_holder=True, timeout=timedelta(minutes=1), multi_tenant=True)
    except OSError as error:
        problem = "is in use" if error.errno == errno.EADDRINUSE else "cannot be used"
        raise ConfigError(
            f"port {port} {problem} ({error.strerror}); choose another with --port, or leave it out."
        ) from error


def _agent(
    command: Sequence[str], *, devices: Sequence[int], log_folder: Path, environ: Mapping[str, str], port: int
) -> "LocalElasticAgent":
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    return LocalElasticAgent(
        spec=WorkerSpec(
            role="rank",
            local_world_size=len(devices),
            entrypoint=command[0],
            args=tuple(argument.replace("$", "$$") for argument in command[1:]),  # the agent substitutes ${...}
            rdzv_handler=StaticTCPRendezvous(_HOST, port, 0, 1, uuid.uuid4().hex, 60),
            max_restarts=0,  # `restarts` does that, with pauses and from a checkpoint
            monitor_interval=0.1,
            master_addr=_HOST,
            master_port=port,
        ),
        logs_specs=_logs_specs(devices=devices, log_folder=log_folder, environ=environ),
    )


def _logs_specs(*, devices: Sequence[int], log_folder: Path, environ: Mapping[str, str]) -> "LogsSpecs":
    """The object that gives torch's agent the files of the ranks' output and notes, and sets their environment.

    `devices`: the number of each rank's device. `environ`: the environment variables of this process.
    """
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

    added = {
        LAUNCHED: str(os.getpid()),
        TOKEN: given_token(environ) or new_token(),
        "TORCH_CPP_LOG_LEVEL": environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),
        **_nccl_variables(log_folder, environ),
    }
    threads = threads_per_rank(len(devices), environ)
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
                environment.update(added, TORCHELASTIC_ERROR_FILE=str(notes[rank]), LOCAL_RANK=str(devices[rank]))
                if rank > 0:
                    environment["PYTHONUNBUFFERED"] = "1"  # or a killed rank's last words are lost

            def files(stream: str) -> dict[int, str]:
                # "": the launcher's own terminal.
                return {rank: str(output_file(log_folder, rank, stream)) if rank > 0 else "" for rank in envs}

            return LogsDest(
                stdouts=files("out"), stderrs=files("err"), error_files={rank: str(p) for rank, p in notes.items()}
            )

    return RankLogs(str(log_folder))


def _nccl_variables(log_folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with which NCCL reports its failures, by name; {} without GPUs.

    A variable that the user has set in `environ` keeps its value. torch's own report of a transfer that never ends goes
    to the rank's log, and its flight recorder writes the last transfers of each rank to the folder.
    """
    import torch

    if not torch.cuda.device_count():
        return {}
    file = str(log_folder / "flight_recorder_")
    wanted = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": file,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": file,  # its name in older versions
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    }
    return {name: environ.get(name, value) for name, value in wanted.items()}


def _run(
    agent: "LocalElasticAgent", signals: ForwardedSignals, is_failing: Callable[[], bool]
) -> tuple["RunResult", Mapping[int, str]]:
    """Run all ranks to their end; returns the agent's report, and rank -> why it was killed as frozen.

    It returns when every process of every rank is gone. `is_failing`: whether a rank has left a note of its failure.

    Raises:
        ConfigError: the ranks cannot be started.
    """
    results: list[RunResult] = []
    errors: list[BaseException] = []
    frozen = FrozenRanks()

    def work() -> None:
        try:
            results.append(agent.run())
        except BaseException as error:
            errors.append(error)

    def pids() -> list[int]:
        """Process ids of the ranks, each of which leads a process group."""
        return [worker.id for worker in agent.get_worker_group().workers if isinstance(worker.id, int)]

    thread = threading.Thread(target=work, name="elastic agent")
    thread.start()
    # The handlers of signals run in this thread, between these short waits.
    while thread.is_alive():
        thread.join(0.1)
        signals.forward(pids())
        frozen.look(pids(), is_failing)
    for group in pids():  # the data workers of a rank that was killed
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    _close_logs(agent)
    if errors and isinstance(errors[0], OSError):
        raise ConfigError(f"the ranks cannot be started: {errors[0]}") from errors[0]
    if errors:
        raise errors[0]
    return results[0], frozen.killed


def _close_logs(agent: "LocalElasticAgent") -> None:
    """Close the launcher's ends of the ranks' logs, which torch leaves open for ranks that have ended by themselves."""
    context = getattr(agent, "_pcontext", None)
    for handler in getattr(context, "subprocess_handlers", {}).values():
        for file in (handler._stdout, handler._stderr):
            if file is not None:
                file.close()


@contextlib.contextmanager
def _quiet_agent() -> Iterator[None]:
    """Hides log messages of torch's agent while it is entered. Messages of this process itself still appear."""
    for module in ("agent.server.local_elastic_agent", "rendezvous.static_tcp_rendezvous"):
        import_module(f"{_ELASTIC}.{module}")  # each module makes its logger on import
    names = [name for name in logging.root.manager.loggerDict if name.startswith(f"{_ELASTIC}.")]
    names.append("torchelastic-events-null")  # it is made with the first event
    with contextlib.ExitStack() as stack:
        for logger in map(logging.getLogger, names):
            logger.addFilter(_hidden)
            stack.callback(logger.removeFilter, _hidden)
        yield


def _hidden(_: logging.LogRecord) -> bool:
    return False


def _error_file(log_folder: Path, rank: int) -> Path:
    return log_folder / f"rank_{rank}.error.json"
