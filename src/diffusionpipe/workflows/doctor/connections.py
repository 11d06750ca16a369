"""Whether the machines of a job reach each other, tried with plain sockets before gloo would wait for minutes."""

import json
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

from diffusionpipe.units import Seconds
from diffusionpipe.workflows.doctor.facts import Facts
from diffusionpipe.workflows.doctor.findings import Finding, Status

if TYPE_CHECKING:
    from diffusionpipe.runtime.job.process_group import Meeting

PATIENCE: Seconds = 5.0
MOST_PLACES = 64
"""The most machines between which all connections are tried; with more, only neighbours try to connect."""
UNKNOWN = ("", "unknown")


def connections(meeting: "Meeting", facts: Sequence[Facts]) -> Finding:
    """Connect one rank of each machine with one of each other, where gloo would listen; returns the finding.

    Every rank calls it, and all get the same finding. `facts`: the facts of each rank.
    """
    own = meeting.membership.rank
    places: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(facts):
        if one.listens not in UNKNOWN:
            # One rank for each address: the others of a machine would try the same connection.
            places.setdefault((one.host, one.listens), rank)
    ranks = list(places.values())
    with ExitStack() as stack:
        said = ""
        if own in ranks and len(ranks) > 1:
            said = _listening(stack, facts[own].listens)
        ports = meeting.everyone("doctor/listens", said)
        others = _partners(ranks, own)
        with ThreadPoolExecutor(max(len(others), 1)) as pool:
            found = pool.map(lambda other: _problem(own, other, facts, ports[other]), others)
        problems = [problem for problem in found if problem]
        everyones = meeting.everyone("doctor/connected", json.dumps(problems))
    problems = [problem for text in everyones for problem in json.loads(text)]
    if problems:
        remedy = (
            "set GLOO_SOCKET_IFNAME on each machine to the interface that joins them, and let the ranks of the job use "
            "all ports between them"
        )
        return Finding(name="connections", status=Status.FAIL, text=problems[0], remedy=remedy)
    text = "one machine" if len(ranks) < 2 else f"{len(ranks)} addresses reach each other"
    return Finding(name="connections", status=Status.OK, text=text)


def _partners(ranks: Sequence[int], own: int) -> list[int]:
    if own not in ranks or len(ranks) < 2:
        return []
    if len(ranks) > MOST_PLACES:
        place = ranks.index(own)
        return [ranks[place - 1], ranks[(place + 1) % len(ranks)]]
    return [rank for rank in ranks if rank != own]


def _listening(stack: ExitStack, address: str) -> str:
    """The port, as text, on which this rank listens at the address until the stack closes; or why it cannot listen."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # All others may connect before this rank accepts the first.
        listener = stack.enter_context(socket.create_server((address, 0), family=family, backlog=2 * MOST_PLACES))
    except OSError as error:
        return error.strerror or str(error)
    return str(listener.getsockname()[1])


def _problem(own: int, other: int, facts: Sequence[Facts], port: str) -> str:
    there, here = facts[other], facts[own]
    if not port.isdecimal():
        return f"rank {other}: cannot listen at {there.listens} of {there.host}: {port}"
    try:
        socket.create_connection((there.listens, int(port)), timeout=PATIENCE).close()
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        where = f"{here.host} gets to {there.host} at {there.listens}"
        return f"rank {own}: cannot connect to rank {other}: {where}: {reason.lower()}"
    return ""
