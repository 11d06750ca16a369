"""`diffusionpipe doctor`: examine the machines, their devices and links, before a long training finds out."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffusionpipe.cli.doctor_facts import Facts
    from diffusionpipe.cli.doctor_findings import Finding
    from diffusionpipe.runtime.process_group import Job


def doctor(
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Processes to start; default: one per GPU, or 2. Not under torchrun."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    folder: Annotated[
        Path, typer.Option(help="A folder on the disk of the runs, where a checkpoint is tried.")
    ] = Path(),
    out: Annotated[Path | None, typer.Option(help="Write the report as JSON, to attach to a question.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Let the JSON have names of hosts and their addresses.")] = False,
    port: Annotated[
        int | None,
        typer.Option(help="TCP port on which the ranks connect; default: any free port. Not under torchrun."),
    ] = None,
) -> None:
    """Check machines, devices, links, a small pipeline and a checkpoint; each line is ok, warn or fail."""
    from diffusionpipe.cli.machine import check_processes
    from diffusionpipe.cli.outputs import check_outputs
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.runtime.interfaces import check_interfaces
    from diffusionpipe.trainer.launch import is_under_torchrun

    check_outputs(out)
    if not folder.is_dir():
        raise ConfigError(f"the folder {folder} does not exist; make it, or choose another with --folder")
    check_interfaces(os.environ)
    if is_under_torchrun(os.environ):
        if ranks is not None or port is not None:
            raise ConfigError("torchrun has started the ranks already; leave out --ranks and --port")
        _join(device, folder, out, full=full)
        return
    count = ranks or _default_ranks(device)
    check_processes(count)
    options = ["--device", device, "--folder", str(folder), *(["--out", str(out)] if out is not None else [])]
    _launch([*options, *(["--full"] if full else [])], count, port)


def _launch(options: Sequence[str], ranks: int, port: int | None) -> None:
    from tempfile import TemporaryDirectory

    from diffusionpipe.trainer.launch import launch

    with TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "diffusionpipe", "doctor", *options]
        status = launch(command, ranks=ranks, log_folder=Path(logs), environ=os.environ, port=port)
    if status:
        raise typer.Exit(status)


def _default_ranks(device: str) -> int:
    import torch

    return (torch.cuda.device_count() if device != "cpu" else 0) or 2


def _join(device: str, folder: Path, out: Path | None, *, full: bool) -> None:
    """Be one rank of the examination."""
    from diffusionpipe.errors import PeerError
    from diffusionpipe.runtime.process_group import joined, leave, membership

    member = membership(os.environ)
    try:
        with joined(member, device=device) as job:
            facts, found = _examine(job, folder)
            if member.rank == 0:
                _report(facts, found, out, full=full)
        if any(one.status == "fail" for one in found):
            raise PeerError("the examination found faults; see the lines with fail")
    except (Exception, KeyboardInterrupt) as error:
        leave(error, member)


def _examine(job: Job, folder: Path) -> tuple[tuple[Facts, ...], list[Finding]]:
    from diffusionpipe.cli.doctor_facts import Facts, facts_of
    from diffusionpipe.cli.doctor_findings import findings_of
    from diffusionpipe.cli.doctor_trials import trials
    from diffusionpipe.runtime.exchange import form_of, gather

    facts = tuple(gather(facts_of(job.device, folder, os.environ), form_of(Facts)))
    return facts, [*findings_of(facts), *trials(job, folder, tuple(one.host for one in facts))]


def _report(facts: Sequence[Facts], found: Sequence[Finding], out: Path | None, *, full: bool) -> None:
    for line in lines_of(found):
        typer.echo(line)
    if out is not None:
        from diffusionpipe.ir.output_file import write_atomically

        write_atomically(out, json_of(facts, found, full=full))
        typer.echo(f"Written to {out}" + ("" if full else ", without names of hosts"))


def lines_of(found: Sequence[Finding]) -> list[str]:
    """The report as people read it."""
    width = max(len(one.name) for one in found)
    lines = []
    for one in found:
        lines.append(f"{one.status:4}  {one.name:{width}}  {one.text}")
        if one.remedy:
            lines.append(f"{'':4}  {'':{width}}  {one.remedy}")
    return lines


def json_of(facts: Sequence[Facts], found: Sequence[Finding], *, full: bool) -> str:
    """The report as JSON. Unless it is to be full, it holds no name of a host, device or interface, and no path."""
    import json
    from dataclasses import asdict

    from diffusionpipe.cli.doctor_facts import without_names
    from diffusionpipe.cli.doctor_findings import findings_of

    shown = tuple(facts) if full else without_names(facts)
    findings = [asdict(one) for one in (*findings_of(shown), *found[len(findings_of(shown)) :])]
    if not full:
        for one in findings:
            if one["status"] == "fail" and one["name"] in TRIED:  # an error's text may hold paths and addresses
                one["text"] = one["text"].partition(": ")[2].partition(":")[0]
    return json.dumps({"ranks": [asdict(one) for one in shown], "findings": findings}, indent=1) + "\n"


TRIED = ("messages", "sums", "pipeline", "shared folder", "checkpoint")
"""Findings that may hold the text of an error."""
