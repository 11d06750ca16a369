"""`diffusionpipe cluster`: measure the links between ranks, or list the clusters that come with the package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffusionpipe.cli.verbs.stated_devices import Devices, LinkName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from diffusionpipe.costs import AllReduce, Cluster, Link
    from diffusionpipe.profiler import Trial


def cluster(
    name: Annotated[
        str | None,
        typer.Argument(
            help='The cluster to show: a file, a name from --list, or a card with its number, e.g. rtx3090x4; add ":4" '
            "for four such nodes."
        ),
    ] = None,
    devices: Devices = None,
    link: LinkName = None,
    out: Annotated[Path | None, typer.Option("--out", "--write", help="Write the cluster file.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=1024,
            help="Processes to start, to measure the links between them; default: one per GPU. Not under torchrun.",
        ),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the clusters that come with DiffusionPipe.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    port: Annotated[
        int | None,
        typer.Option(
            help="TCP port on which the ranks connect (master port); default: any free port. Not under torchrun."
        ),
    ] = None,
) -> None:
    """Measure the links between ranks and write a cluster file for `plan`, or show known clusters."""
    from diffusionpipe.cli.verbs.outputs import check_outputs
    from diffusionpipe.cli.verbs.stated_devices import cluster_named
    from diffusionpipe.costs.clusters import load_cluster

    check_outputs(out)
    name = cluster_named(name, devices, link, other="NAME")
    if show_list:
        _print_list()
    elif name is not None:
        chosen = load_cluster(name)
        _print_cluster(chosen)
        _write(chosen, out)
    else:
        _measure(out, ranks, device, port)


def _print_list() -> None:
    from diffusionpipe.costs.clusters import known_cards, load_cluster, shipped_clusters
    from diffusionpipe.costs.devices import DEVICES

    names = shipped_clusters()
    width = max(map(len, names))
    for name in names:
        typer.echo(f"{name:{width}}  {_devices(load_cluster(name))}")
    typer.echo(f'\nAdd ":4" for four such nodes, e.g. {names[0]}:4.\n\nOr name 1 to 8 of a card, e.g. rtx3090x4:')
    width = max(map(len, known_cards()))
    for card in known_cards():
        rates = DEVICES[card]
        number = "" if rates.has_bfloat16 else "; no bfloat16: float32 throughout"
        memory = f"{rates.usable / 2**30:.1f} GiB for training"
        typer.echo(f"{card:{width}}  {rates.title} ({memory}), {rates.link}, {rates.basis}{number}")


def _devices(cluster: Cluster) -> str:
    """The devices of a cluster in words: "4 x NVIDIA L40S (44.4 GiB)"."""
    counts: dict[tuple[str, int], int] = {}
    for device in cluster.devices:
        counts[device.name, device.memory] = counts.get((device.name, device.memory), 0) + 1
    return ", ".join(f"{count} x {name} ({memory / 2**30:.1f} GiB)" for (name, memory), count in counts.items())


def _print_cluster(cluster: Cluster) -> None:
    from diffusionpipe.costs.cluster import slow_links

    # Nodes ascend from 0, so the last rank's node counts them.
    nodes = cluster.nodes[-1] + 1
    typer.echo(f"{cluster.name}: {_devices(cluster)} in {nodes} node{'s' * (nodes > 1)}")
    rows: list[tuple[str, Link | AllReduce]] = [
        ("messages in a node", cluster.intra),
        ("sums in a node", cluster.intra_reduce),
    ]
    # One node has no links between nodes.
    if cluster.nodes[-1]:
        rows += [("messages between nodes", cluster.inter), ("sums between nodes", cluster.inter_reduce)]
    for what, line in rows:
        typer.echo(f"{what:23} {line.latency * 1e6:9.1f} us + bytes / {line.bandwidth / 1e9:.2f} GB/s")
    if cluster.pairs:
        rates = [pair.bandwidth / 1e9 for pair in cluster.pairs]
        typer.echo(f"{'pairs of ranks':23} {'':14} bytes / {min(rates):.2f} to {max(rates):.2f} GB/s")
    for (first, second), (rate, usual) in slow_links(cluster).items():
        typer.echo(
            f"slow: ranks {first}-{second} {'':>19} bytes / {rate / 1e9:.2f} GB/s; usual are {usual / 1e9:.2f} GB/s"
        )
    slowest = min(device.host_bandwidth for device in cluster.devices)
    if slowest:
        typer.echo(f"{'from host memory':23} {'':14} bytes / {slowest / 1e9:.2f} GB/s")


def _write(cluster: Cluster, out: Path | None) -> None:
    from diffusionpipe.costs.files import write_cluster

    if out is not None:
        write_cluster(cluster, out)
        typer.echo(f"Written to {out}")


def _measure(out: Path | None, ranks: int | None, device: str, port: int | None) -> None:
    """Start the ranks that measure the links between them, or run this process as one rank if torchrun started it.

    Raises:
        ConfigError: options of the launcher under torchrun, fewer than two ranks, or too little host memory.
        typer.Exit: the ranks failed.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.workflows.machine import check_processes
    from diffusionpipe.workflows.ranks import is_rank, run_on_ranks

    if is_rank():
        if ranks is not None or port is not None:
            raise ConfigError("torchrun has started the ranks already; leave out --ranks and --port")
        _join(out, device)
        return
    count = ranks or _default_ranks(device)
    check_processes(count)
    if count < 2:
        raise ConfigError("one rank has no links to measure; use --ranks 2 or more, or --list for known clusters")
    arguments = ["cluster", "--device", device, *(["--out", str(out)] if out is not None else [])]
    if status := run_on_ranks(arguments, count, port):
        raise typer.Exit(status)


def _default_ranks(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device != "cpu" else 1


def _join(out: Path | None, device: str) -> None:
    """Run this process as one rank of the measurement; rank 0 prints the cluster and writes it to `out`."""
    import socket

    from diffusionpipe.runtime.job.membership import membership
    from diffusionpipe.runtime.job.process_group import joined, leave
    from diffusionpipe.workflows.ranks import measured_cluster

    member = membership(os.environ)
    try:
        with joined(member, device=device) as job:
            name = out.stem if out is not None else socket.gethostname()
            trials, measured = measured_cluster(job, name)
            if member.rank == 0:
                _print_trials(trials)
                _print_cluster(measured)
                _write(measured, out)
    except (Exception, KeyboardInterrupt) as error:
        leave(error, member)


def _print_trials(trials: Sequence[Trial]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("transfer", "ranks", "bytes", "microseconds", "GB/s")
    for trial in trials:
        rate = trial.num_bytes / trial.seconds / 1e9
        table.add_row(trial.what, str(trial.ranks), f"{trial.num_bytes:,}", f"{trial.seconds * 1e6:.1f}", f"{rate:.3f}")
    Console().print(table)
