"""The place of a process in its job, from the environment variables that torchrun and our launcher set."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.job.admission import given_token
from diffusionpipe.runtime.machine.error_file import LAUNCHED

_JOB = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """One process's place in its job: rank, number of ranks, address of the job's store, launcher and token."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The number of the rank's device on this machine."""
    address: str = ""
    """The host of the job's key-value store; `port` is the store's port."""
    port: int = 0
    store_rank: int | None = 0
    """The rank that holds the store; None: torch's elastic agent does."""
    attempt: int = 0
    """How often torchrun has restarted the job."""
    error_file: Path | None = None
    """The file into which a failing rank writes its error for torchrun or our launcher; None: there is none."""
    launcher: int | None = None
    """The process id of our launcher, which prints this rank's errors as long as it lives; None: another started it."""
    token: str | None = field(default=None, repr=False)
    """The secret that every rank of the job must have; None: there is none."""

    @property
    def is_launched(self) -> bool:
        """Whether our launcher started this rank."""
        return self.launcher is not None

    @property
    def is_heard(self) -> bool:
        """Whether our launcher started this rank and still lives, so that it prints why the rank has ended."""
        return self.launcher == os.getppid()


def membership(environ: Mapping[str, str]) -> Membership:
    """The rank of this process and its job, from the environment variables that torchrun sets; one rank without them.

    Raises:
        ConfigError: some of them are set and others missing, their values make no sense, or the token is too short.
    """
    error_file = Path(environ["TORCHELASTIC_ERROR_FILE"]) if environ.get("TORCHELASTIC_ERROR_FILE") else None
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return Membership(error_file=error_file)
    problems = [f"{name} is not set" for name in _JOB if not environ.get(name)]
    rank, world_size, port, local_rank, attempt = (
        _number(environ, name, problems)
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    )
    if not problems and not rank < world_size:
        problems.append(f"RANK={rank} is not below WORLD_SIZE={world_size}")
    # Checked apart, because a port may be wrong even where other variables are missing.
    if environ.get("MASTER_PORT", "").isdecimal() and not 0 < port < 2**16:
        problems.append(f"MASTER_PORT={port} is not a port; ports are 1 to 65535")
    if not problems and world_size > 1 and not environ.get("LOCAL_RANK"):
        problems.append("LOCAL_RANK is not set; it chooses this rank's device")
    if problems:
        found = "; ".join(problems)
        raise ConfigError(
            f"the environment variables of the job are incomplete: {found}. Start with torchrun or --ranks N."
        )
    return Membership(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        address=environ["MASTER_ADDR"],
        port=port,
        store_rank=None if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0,
        attempt=attempt,
        error_file=error_file,
        token=given_token(environ),
        launcher=int(environ[LAUNCHED]) if environ.get(LAUNCHED, "").isdecimal() else None,
    )


def _number(environ: Mapping[str, str], name: str, problems: list[str]) -> int:
    text = environ.get(name) or "0"
    if not text.isdecimal():
        problems.append(f"{name}={text!r} is not a number")
        return 0
    return int(text)
