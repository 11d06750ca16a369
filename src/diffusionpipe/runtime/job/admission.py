"""Who may be a rank: all prove that they know the job's token before anything else that they have written is read.

    rank r                                                    rank 0
    hello/r = number used once, host     ──>  all wait for the hellos of all
    proof/r = HMAC(token, r, all hellos) ──>  checks every proof
    checks the answer                    <──  answer = HMAC(token, all hellos), or which ranks are refused and why

The token itself is never sent. A proof from an earlier start proves nothing, because the hellos are new. The keys that
ranks use afterwards begin with a name made of the token (`private_keys`), so a process without it does not meet the
others by accident. This keeps out processes that should not be in the job. It does not encrypt: the network has to keep
out those who can read or change its traffic (SECURITY.md).

Without a token (torchrun, no DIFFUSIONPIPE_TOKEN) the ranks check that none of them has one.
"""

import hmac
import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

from diffusionpipe.errors import ConfigError
from diffusionpipe.units import Seconds

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # no stub has it

TOKEN = "DIFFUSIONPIPE_TOKEN"
"""The environment variable with the token; our launcher makes one for its ranks."""
SHORTEST = 16
"""Characters: a shorter token could be found by trial from a proof that was overheard."""
_NONE = "none"
_LONGEST = 1000
"""Characters of a message; longer ones are not ours."""
_HEARD: Seconds = 5.0
"""How long rank 0, which may hold the store, waits until all ranks have read why they are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicant:
    """The rank, the number of ranks and the token with which a process asks to join a job."""

    rank: int
    world_size: int
    token: str | None = field(default=None, repr=False)


def given_token(environ: Mapping[str, str]) -> str | None:
    """The job's token from the environment variable DIFFUSIONPIPE_TOKEN; None: there is none.

    Raises:
        ConfigError: it has fewer than 16 characters.
    """
    token = environ.get(TOKEN)
    if token is not None and len(token) < SHORTEST:
        raise ConfigError(f"{TOKEN} has {len(token)} characters; set it to a random text of {SHORTEST} or more.")
    return token


def new_token() -> str:
    """A random token: 32 hexadecimal digits."""
    return secrets.token_hex(16)


def private_keys(store: "Store", token: str | None) -> "Store":
    """The store with a prefix made of the token before all keys, so that only holders of the token find them.

    Without a token it is the store itself.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # no stub has it

    return store if token is None else PrefixStore(_mac(token, "keys")[:32], store)


def admit(store: "Store", me: Applicant, *, arrival: Seconds, proving: Seconds = 60.0) -> None:
    """Return when all ranks are there and have proved that they have the same token. Every rank calls it.

    Args:
        store: the key-value store where the ranks meet.
        me: this process.
        arrival: how long to wait for all ranks to come.
        proving: how long to wait for their proofs then; the others wait twice as long for rank 0's answer.

    Raises:
        ConfigError: ranks do not come, two come as one, or they were started for other numbers of ranks; rank 0 does
            not answer; or, on every rank that waits for the answer, one has another token or none.
    """
    if store.add(f"came/{me.rank}", 1) > 1:
        raise ConfigError(
            f"two processes came as rank {me.rank} of {me.world_size}, one of them on {socket.gethostname()}; give "
            "each a RANK of its own, and end what an earlier start has left."
        )
    # Before the hellos: a rank that counts differently would wait the whole `arrival` for ranks that no one has
    # started.
    store.set(f"size/{me.rank}", str(me.world_size))
    # Polling keeps signals alive: Store.wait would block the main thread in C++.
    if not _missing(store, ["size/0"], arrival, pause=0.05):
        _check_size(store, me, 0, "rank 0")
    store.set(f"hello/{me.rank}", f"{secrets.token_hex(16)} {socket.gethostname()}")
    if missing := _missing(store, [f"hello/{rank}" for rank in range(me.world_size)], arrival, pause=0.05):
        raise ConfigError(
            f"rank(s) {', '.join(map(str, missing))} of {me.world_size} did not connect within {arrival:.0f} s; "
            "start the command on every machine with the same --nnodes and --nproc-per-node."
        )
    hellos = [_text(store, f"hello/{rank}") for rank in range(me.world_size)]
    if me.rank == 0:
        for rank, hello in enumerate(hellos):
            _check_size(store, me, rank, f"rank {rank}{_host(hello)}")
    # A hash of all hellos: a proof from another start, or with a changed hello, does not fit it.
    said = sha256(json.dumps(hellos).encode()).hexdigest()
    store.set(f"proof/{me.rank}", _proof(me.token, f"rank {me.rank} of {me.world_size}", said))
    if me.rank == 0:
        _judge(store, me, hellos, said, proving)
        return
    if _missing(store, ["answer"], 2 * proving, pause=0.005):
        raise ConfigError(f"rank 0{_host(hellos[0])} did not answer within {2 * proving:.0f} s; start the job again.")
    verdict, _, answer = _text(store, "answer").partition(" ")
    store.add("heard", 1)
    if verdict != "admitted":
        raise _refusal(answer)
    if not hmac.compare_digest(answer.encode(), _proof(me.token, "answer", said).encode()):
        raise _refusal(f"rank 0{_host(hellos[0])} has another token than rank {me.rank}, or none")


def _check_size(store: "Store", me: Applicant, other: int, name: str) -> None:
    """Check that another rank was started for the same number of ranks: else both would wait for ranks in vain.

    `other`: the other rank. `name`: its name in the error.

    Raises:
        ConfigError: it was started for another number.
    """
    size = _text(store, f"size/{other}") if store.check([f"size/{other}"]) else ""
    if size and size != str(me.world_size):
        raise ConfigError(
            f"{name} was started for {size} ranks and rank {me.rank} for {me.world_size}; give all of them the same "
            "WORLD_SIZE, or the same --nnodes and --nproc-per-node."
        )


def _judge(store: "Store", me: Applicant, hellos: Sequence[str], said: str, proving: Seconds) -> None:
    """Check the proofs of all ranks, and write the answer into the store; rank 0 calls it.

    `hellos`: of all ranks. `said`: their hash. `proving`: how long to wait for proofs.

    Raises:
        ConfigError: a rank is refused; the others have read the answer.
    """
    late = _missing(store, [f"proof/{rank}" for rank in range(me.world_size)], proving, pause=0.005)
    problems = []
    for rank, hello in enumerate(hellos):
        proof = "" if rank in late else _text(store, f"proof/{rank}")
        problem = _problem(proof, me.token, _proof(me.token, f"rank {rank} of {me.world_size}", said))
        if problem is not None:
            problems.append(f"rank {rank}{_host(hello)} {problem}")
    if not problems:
        store.set("answer", f"admitted {_proof(me.token, 'answer', said)}")
        return
    # Four problems fit into `_LONGEST` characters, to which readers cut the answer.
    shown = "; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else "")
    store.set("answer", f"refused {shown}")
    deadline = time.monotonic() + min(_HEARD, proving)
    while store.add("heard", 0) < me.world_size - 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    raise _refusal(shown)


def _problem(proof: str, token: str | None, expected: str) -> str | None:
    """The fault of a rank's proof in words; None if it is right.

    `token`: rank 0's. `expected`: the right proof.
    """
    if not proof:
        return "sent no proof of the token"
    # It takes the same time for every wrong proof, so time says nothing of the right one.
    if hmac.compare_digest(proof.encode(), expected.encode()):
        return None
    if token is None:
        return "has a token, but rank 0 has none"
    return "has no token" if proof == _NONE else "has another token than rank 0"


def _refusal(problem: str) -> ConfigError:
    error = ConfigError(f"{problem}. Set {TOKEN} to the same text for every rank of the job, or for none.")
    error.is_common = True
    return error


def _proof(token: str | None, role: str, said: str) -> str:
    return _NONE if token is None else _mac(token, f"{role}: {said}")


def _mac(token: str, text: str) -> str:
    return hmac.new(token.encode(), text.encode(), sha256).hexdigest()


def _missing(store: "Store", keys: Sequence[str], patience: Seconds, *, pause: Seconds) -> list[int]:
    """The indices of the `keys` that do not appear in the store in time.

    `patience`: how long to look. `pause`: the time between two looks.
    """
    missing = list(range(len(keys)))
    deadline = time.monotonic() + patience
    while missing := [place for place in missing if not store.check([keys[place]])]:
        if time.monotonic() > deadline:
            break
        time.sleep(pause)
    return missing


def _text(store: "Store", key: str) -> str:
    """The value of a key in the store as text fit to be shown: cut to `_LONGEST`, "?" for characters that do not print.

    The key must be there.
    """
    found = store.get(key)[:_LONGEST].decode(errors="replace")
    return "".join(character if character.isprintable() else "?" for character in found)


def _host(hello: str) -> str:
    """The name of the host in a rank's hello, as " (host)"; "" if it has none."""
    host = hello.partition(" ")[2]
    return f" ({host[:100]})" if host else ""
