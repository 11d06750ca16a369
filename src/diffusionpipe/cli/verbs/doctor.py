"""`diffusionpipe doctor`: examine the machines, their devices and links, before a long training finds out."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from diffusionpipe.runtime.job.process_group import Meeting
    from diffusionpipe.workflows.doctor.facts import Facts
    from diffusionpipe.workflows.doctor.findings import Finding


def doctor(
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Processes to start; default: one per GPU, or 2. Not under torchrun."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    folder: Annotated[
        Path, typer.Option(help="A folder on the disk of the runs, where a checkpoint is tried.")
    ] = Path(),
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON, to attach to a question.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Include host names and addresses in the JSON report.")] = False,
    port: Annotated[
        int | None,
        typer.Option(help="TCP port on which the ranks connect; default: any free port. Not under torchrun."),
    ] = None,
) -> None:
    """Check machines, devices, links, a small pipeline and a checkpoint; each line is ok, warn or fail."""
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.workflows.ranks import is_rank, run_on_ranks

    check_outputs(out)
    if not folder.is_dir():
        raise ConfigError(f"the folder {folder} does not exist; make it, or choose another with --folder")
    if is_rank():
        if ranks is not None or port is not None:
            raise ConfigError("torchrun has started the ranks already; leave out --ranks and --port")
        _join(device, folder, Report(out, full))
        return
    count = ranks or _default_ranks(device)
    faults = _before_start(count, port)
    if faults:
        Report(out, full).write((), faults)
        raise typer.Exit(1)
    options = ["--device", device, "--folder", str(folder), *(["--out", str(out)] if out is not None else [])]
    if status := run_on_ranks(["doctor", *options, *(["--full"] if full else [])], count, port):
        raise typer.Exit(status)


def _before_start(ranks: int, port: int | None) -> list[Finding]:
    """Findings on faults of this machine with which no rank could start: network interfaces, host memory, the port."""
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.runtime.job.interfaces import GLOO, check_interfaces
    from diffusionpipe.runtime.job.loopback import loopback_listener
    from diffusionpipe.workflows.doctor.findings import Finding, Status
    from diffusionpipe.workflows.machine import check_processes

    def listen() -> None:
        try:
            loopback_listener("127.0.0.1", port).close()
        except OSError as error:
            reason = os.strerror(error.errno).lower() if error.errno else str(error)
            raise ConfigError(
                f"port {port} cannot be used: {reason}; choose another with --port, or leave it out"
            ) from error

    found = []
    checks: list[tuple[str, Callable[[], None]]] = [
        ("interfaces", lambda: check_interfaces(os.environ, (GLOO,))),
        ("host memory", lambda: check_processes(ranks)),
        ("port", listen),
    ]
    for name, check in checks:
        try:
            check()
        except ConfigError as error:
            # Our errors end with a remedy after a semicolon.
            text, _, remedy = str(error).partition("; ")
            found.append(Finding(name=name, status=Status.FAIL, text=text, remedy=remedy))
    return found


def _default_ranks(device: str) -> int:
    import torch

    return (torch.cuda.device_count() if device != "cpu" else 0) or 2


ARRIVAL = 60.0
"""Seconds within which all ranks must join: torchrun and srun start them together."""
TRANSFER_ON_CPU = 30.0
TRANSFER_ON_GPU = 600.0
"""Seconds a transfer may take. On GPUs the trial ends first, because an expired transfer of NCCL aborts its process."""
FAULTS = "the examination found faults; see the lines with fail"


def _join(device: str, folder: Path, report: Report) -> None:
    """Run this process as one rank of the examination; rank 0 shows the findings.

    Raises:
        PeerError: a finding is a fault.
    """
    from diffusionpipe.errors import ConfigError, PeerError
    from diffusionpipe.runtime.job.devices import sight
    from diffusionpipe.runtime.job.membership import membership
    from diffusionpipe.runtime.job.process_group import leave, met
    from diffusionpipe.workflows.doctor.findings import Finding, Status

    member = membership(os.environ)
    has_met = False
    try:
        try:
            with met(member, sight(device, member.local_rank), arrival=ARRIVAL) as meeting:
                has_met = True
                facts, found = _examine(meeting, folder, report)
                if member.rank == 0:
                    report.write(facts, found)
        except ConfigError as error:
            # Rank 0 alone reports, as long as the ranks cannot talk to each other.
            if has_met or member.rank > 0:
                raise
            report.write((), [Finding(name="start", status=Status.FAIL, text=str(error), remedy=START)])
            raise PeerError(FAULTS) from error
        if any(one.status == "fail" for one in found):
            raise PeerError(FAULTS)
    except (Exception, KeyboardInterrupt) as error:
        leave(error, member)


START = "the ranks must find each other before anything else can be examined"


def _examine(meeting: Meeting, folder: Path, report: Report) -> tuple[tuple[Facts, ...], list[Finding]]:
    import json

    from diffusionpipe.errors import PeerError
    from diffusionpipe.runtime.comm.exchange import form_of
    from diffusionpipe.runtime.job.process_group import ending
    from diffusionpipe.workflows.doctor.connections import connections
    from diffusionpipe.workflows.doctor.facts import Facts, facts_of
    from diffusionpipe.workflows.doctor.findings import NEEDED, findings_of
    from diffusionpipe.workflows.doctor.trials import not_tried, opened_group, trials

    form = form_of(Facts)
    own = form.write(facts_of(meeting.sight, folder, os.environ))
    facts = tuple(form.read(json.loads(text)) for text in meeting.everyone("doctor/facts", json.dumps(own)))
    found = list(findings_of(facts))

    def late(finding: Finding) -> None:
        if meeting.membership.rank == 0:
            report.write(facts, [*found, finding])
            meeting.watchdog.report(PeerError(FAULTS))
            # A transfer that hangs cannot be left otherwise.
            ending(meeting.membership)(FAULTS)

    def is_hopeless() -> bool:
        return any(one.status == "fail" and one.name in NEEDED for one in found)

    if not is_hopeless():
        found.append(connections(meeting, facts))
    if not is_hopeless():
        is_gpu = any(one.device != "cpu" for one in facts)
        job = opened_group(meeting, TRANSFER_ON_GPU if is_gpu else TRANSFER_ON_CPU, found, late)
        if job is not None:
            trials(job, folder, facts, found, late)
    else:
        found.append(not_tried("transfers and folder", "the ranks cannot compute together"))
    return facts, found


@dataclass(frozen=True, slots=True)
class Report:
    """Shows the findings of the doctor on the terminal, and writes them as JSON if a file is asked for."""

    out: Path | None
    """The JSON file to write; None for none."""
    full: bool
    """Whether the file has names of hosts, devices and interfaces, and paths."""

    def write(self, facts: Sequence[Facts], found: Sequence[Finding]) -> None:
        """Prints the findings as lines, and writes them with the facts of all ranks to the JSON file, if one is set."""
        for line in lines_of(found):
            typer.echo(line)
        if self.out is not None:
            from diffusionpipe.files.output_file import write_atomically

            write_atomically(self.out, json_of(facts, found, full=self.full))
            typer.echo(f"Written to {self.out}" + ("" if self.full else ", without names of hosts"))
        sys.stdout.flush()


def lines_of(found: Sequence[Finding]) -> list[str]:
    """The findings as lines: status, name and text, and the remedy in the next line."""
    width = max(len(one.name) for one in found)
    lines = []
    for one in found:
        lines.append(f"{one.status:4}  {one.name:{width}}  {one.text}")
        if one.remedy:
            lines.append(f"{'':4}  {'':{width}}  {one.remedy}")
    return lines


def json_of(facts: Sequence[Facts], found: Sequence[Finding], *, full: bool) -> str:
    """The facts of all ranks and the findings as JSON text.

    Unless it is to be full, it holds no name of a host, device or interface, and no path.
    """
    import json
    from dataclasses import asdict

    from diffusionpipe.workflows.doctor.facts import without_names
    from diffusionpipe.workflows.doctor.findings import findings_of

    shown = tuple(facts) if full else without_names(facts)
    named = findings_of(shown) if shown else ()
    # Findings from facts come first and are made again without names; findings of trials follow as they are.
    findings = [asdict(one) for one in (*named, *found[len(named) :])]
    if not full:
        for one in findings:
            if one["status"] == "fail" and one["name"] in TRIED:  # an error's text may hold paths and addresses
                one["text"] = _kind_of_problem(one["text"])
    return json.dumps({"ranks": [asdict(one) for one in shown], "findings": findings}, indent=1) + "\n"


def _kind_of_problem(text: str) -> str:
    """The rank and kind of a problem: of "rank 1: OSError: no space on /data" only "rank 1: OSError".

    A text without a rank stays.
    """
    rank, mark, rest = text.partition(": ")
    return f"{rank}{mark}{rest.partition(':')[0]}" if rank.startswith("rank ") else text


TRIED = ("connections", "groups", "messages", "sums", "pipeline", "shared folder", "checkpoint")
"""Names of the findings whose text may hold the text of an error."""
