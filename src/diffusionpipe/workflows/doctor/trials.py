"""The trials of the ranks of `diffusionpipe doctor` together: messages, sums, a small pipeline, a checkpoint."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from diffusionpipe.units import Bytes, Seconds
from diffusionpipe.workflows.doctor.facts import Facts
from diffusionpipe.workflows.doctor.findings import Finding, Status, links_finding

if TYPE_CHECKING:
    import torch

    from diffusionpipe.costs import ModelGraph
    from diffusionpipe.models.graphs.graph import LayerGraph
    from diffusionpipe.runtime.comm.transport import ProcessTransport
    from diffusionpipe.runtime.job.process_group import Job, Meeting

Late: TypeAlias = Callable[[Finding], None]

LIMIT_ON_CPU: Seconds = 40.0
LIMIT_ON_GPU: Seconds = 60.0
"""Time limit of each trial in seconds: NCCL makes communicators in it, and kernels are loaded."""
SHARED_REMEDY = "put the run folder on a file system that all machines mount"
SMALL: Bytes = 8
LARGE_ON_CPU: Bytes = 2**22
LARGE_ON_GPU: Bytes = 2**26
"""The size of a large message: more than NCCL buffers, so that crossing messages really wait for each other."""
MOST_PAIRS = 120
"""The most pairs of ranks that are all timed; with more, only pairs of neighbours are timed."""
REPEATS = 5
PROBE: Bytes = 2**16
TIME_OF_LINKS: Seconds = 8.0
"""The time in which all pairs of ranks together are timed, in seconds."""
MICROBATCHES = 2
WIDTH = 8


def opened_group(meeting: "Meeting", timeout: Seconds, found: list[Finding], late: Late) -> "Job | None":
    """Open the job's process group; returns the job, or None after adding the reason to `found`.

    `late`: called, in another thread, with a finding if it does not end within the limit of a trial. `timeout`: seconds
    of one transfer in the group.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.runtime.job.process_group import opened

    job, own = None, ""
    with _limit("cuda" if meeting.sight.index is not None else "cpu", "groups", late):
        try:
            job = opened(meeting, timeout=timeout)
        except (ConfigError, RuntimeError) as error:
            own = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        said = meeting.everyone("doctor/groups", own)
    problems = [f"rank {rank}: {problem}" for rank, problem in enumerate(said) if problem]
    if problems:
        remedy = "look at the network between the machines, its firewall and its interfaces"
        found.append(Finding(name="groups", status=Status.FAIL, text=problems[0], remedy=remedy))
        return None
    return job


def trials(job: "Job", folder: Path, facts: Sequence[Facts], found: list[Finding], late: Late) -> None:
    """Try messages, sums, links, a pipeline and the run folder, and add a finding for each to `found`.

    Every rank calls it, and all get the same findings. After a fault the rest is not tried. `late` is called, in
    another thread, with the finding of a trial that does not end.
    """
    from diffusionpipe.runtime.comm.transport import ProcessTransport

    ranks = tuple(range(job.membership.world_size))
    hosts = tuple(one.host for one in facts)
    trial = partial(_tried, job, late)
    with _limit(job.device.type, "groups", late):
        transport = ProcessTransport(job.device, summing=(ranks,))
    look = "look at the network, its firewall and its interfaces"
    found.append(trial("messages", lambda: _ring(job, transport), look))
    if found[-1].status is Status.OK:
        found.append(
            trial("sums", lambda: _sums(job, transport, ranks), "set NCCL_DEBUG=INFO and look at the first warning")
        )
    if found[-1].status is not Status.OK:  # a group is broken after an error: what comes next would say nothing
        found.append(not_tried("links, pipeline and folder", f"the {found[-1].name} fail"))
        return
    with _limit(job.device.type, "links", late):
        found.append(links_finding(_rates(job, transport), hosts))
    found.append(trial("pipeline", lambda: _pipeline(job), "look at the device: its results differ from a CPU's"))
    transport.close()
    if found[-1].status is not Status.OK:
        found.append(not_tried("folder", "the pipeline fails"))
        return
    found.append(trial("shared folder", lambda: _shared(folder), SHARED_REMEDY))
    if found[-1].status is not Status.OK:  # ranks cannot find what the others have saved, whatever the disk does
        found.append(not_tried("checkpoint", "the folder is not shared"))
        return
    remedy = "choose another --folder: this one loses what is written"
    found.append(trial("checkpoint", lambda: _checkpoint(job, folder), remedy))


def not_tried(name: str, why: str) -> Finding:
    """The finding that a trial was left out; `why`: the fault that makes it senseless."""
    return Finding(name=name, status=Status.WARN, text=f"not tried, because {why}", remedy="mend that first")


def _tried(job: "Job", late: Late, name: str, trial: Callable[[], str], remedy: str) -> Finding:
    """The finding of a trial, the same on all ranks: ok with the text that `trial` returns, or a fault with an error.

    It is the error of the first rank whose `trial` raises one; `remedy` is added. `late`: called, in another thread,
    with a finding if the trial does not end.
    """
    from diffusionpipe.errors import DiffusionPipeError

    own = text = ""
    with _limit(job.device.type, name, late):
        try:
            text = trial()
        except (DiffusionPipeError, RuntimeError, AssertionError, OSError) as error:
            own = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        said = job.everyone(f"doctor/{name}", own)  # not over the process group, which an error has broken
    problems = [f"rank {rank}: {problem}" for rank, problem in enumerate(said) if problem]
    if problems:
        return Finding(name=name, status=Status.FAIL, text=problems[0], remedy=remedy)
    return Finding(name=name, status=Status.OK, text=text)


@contextmanager
def _limit(device: str, name: str, late: Late) -> Iterator[None]:
    """A context that calls `late` with a fault named `name` if its block does not end within the device's time limit.

    NCCL may wait for ever for a rank that it cannot reach.
    """
    limit = LIMIT_ON_GPU if device == "cuda" else LIMIT_ON_CPU
    remedy = "look at the network between the machines, its firewall and its interfaces"
    finding = Finding(name=name, status=Status.FAIL, text=f"not over after {limit:.0f} s", remedy=remedy)
    timer = threading.Timer(limit, late, (finding,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _ring(job: "Job", transport: "ProcessTransport") -> str:
    """Send small and large messages to both neighbours at once, and receive theirs; returns a sentence on success.

    Every rank calls it. A damaged message is an AssertionError.
    """
    import torch

    rank, size = job.membership.rank, job.membership.world_size
    if size == 1:
        return "one rank sends none"
    neighbours = sorted({(rank - 1) % size, (rank + 1) % size})
    large = LARGE_ON_GPU if job.device.type == "cuda" else LARGE_ON_CPU
    for length in (SMALL, large):
        # The rank is the content, cut to what one byte holds.
        sent = torch.full((length,), rank % 128, dtype=torch.uint8, device=job.device)
        arrived = {other: torch.empty_like(sent) for other in neighbours}
        # All receives are posted before the first send, so that no order of ranks can block.
        works = [transport.recv(buffer, other) for other, buffer in arrived.items()]
        works += [transport.send(sent, other) for other in neighbours]
        for work in works:
            work.wait()
        for other, buffer in arrived.items():
            assert bool((buffer == other % 128).all()), f"a message of {length} bytes from rank {other} is damaged"
    return f"{SMALL} B and {large / 2**20:.0f} MiB in both directions at once around a ring of {size}"


def _sums(job: "Job", transport: "ProcessTransport", ranks: tuple[int, ...]) -> str:
    import torch

    if len(ranks) == 1:
        return "one rank sums nothing"
    own = torch.arange(2**16, dtype=torch.float64, device=job.device)
    total = own * (1 + job.membership.rank)
    transport.all_reduce(total, ranks).wait()
    expected = own * sum(1 + rank for rank in ranks)
    assert torch.equal(total, expected), "the sum over all ranks is wrong"
    part = own * (1 + job.membership.rank)
    transport.reduce(part, 0, ranks).wait()
    assert job.membership.rank > 0 or torch.equal(part, expected), "the sum at rank 0 is wrong"
    transport.broadcast(total, len(ranks) - 1, ranks).wait()
    return f"over {len(ranks)} ranks, at one rank, and from one to all"


def _rates(job: "Job", transport: "ProcessTransport") -> dict[tuple[int, int], float]:
    """Pair of ranks -> bytes a second between them, of the fastest of some round trips; pairs are timed one by one.

    The messages are so long that all pairs together take about `TIME_OF_LINKS`, or longer on very slow links.
    """
    import torch

    from diffusionpipe.runtime.comm.exchange import PLAIN, gather

    rank, size = job.membership.rank, job.membership.world_size
    pairs = list(combinations(range(size), 2))
    if len(pairs) > MOST_PAIRS:
        # All pairs of a large job would take too long; a chain still uses each rank.
        pairs = [(one, one + 1) for one in range(size - 1)]
    largest = LARGE_ON_GPU if job.device.type == "cuda" else LARGE_ON_CPU
    buffer = torch.zeros(largest, dtype=torch.uint8, device=job.device)
    own: list[float] = []
    for one, other in pairs:
        key = f"doctor/{one}-{other}"
        # Both ends say that they are here, so the first trip does not measure a wait for the other.
        job.store.set(f"{key}/{rank}", "")
        if rank in (one, other):
            job.store.get(f"{key}/{one + other - rank}")
            trip = partial(_round_trip, transport, one=one, other=other, is_first=rank == one)
            trip(buffer[:PROBE])  # NCCL connects
            if rank == one:
                rate = 2 * PROBE / trip(buffer[:PROBE])
                # Each pair has an equal part of the time, for `REPEATS` trips there and back.
                fitting = int(rate * TIME_OF_LINKS / len(pairs) / (2 * REPEATS))
                job.store.set(f"{key}/length", str(min(max(fitting, PROBE), largest)))
            else:
                trip(buffer[:PROBE])
            length = int(job.store.get(f"{key}/length"))
            # The shortest trip: others may have been disturbed.
            own.append(2 * length / min(trip(buffer[:length]) for _ in range(REPEATS)))
    own_pairs = [pair for pair in pairs if rank in pair]
    texts = gather(" ".join(f"{a}-{b}={rate:.0f}" for (a, b), rate in zip(own_pairs, own, strict=True)), PLAIN)
    found: dict[tuple[int, int], float] = {}
    for entry in " ".join(map(str, texts)).split():
        ends, text = entry.split("=")
        one, other = map(int, ends.split("-"))
        # Both ends have timed the pair; the better figure has fewer disturbances in it.
        found[one, other] = max(float(text), found.get((one, other), 0.0))
    return found


def _round_trip(
    transport: "ProcessTransport", buffer: "torch.Tensor", *, one: int, other: int, is_first: bool
) -> float:
    import torch

    started = perf_counter()
    for turn in (is_first, not is_first):
        work = (
            transport.send(buffer, other if is_first else one)
            if turn
            else transport.recv(buffer, other if is_first else one)
        )
        work.wait()
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    return perf_counter() - started


def _model() -> "tuple[LayerGraph, ModelGraph]":
    import torch
    from torch import nn

    from diffusionpipe.costs import TensorSpec
    from diffusionpipe.models.cut.sequential import sequential_graph
    from diffusionpipe.models.graphs.describe import describe

    # The same weights on every rank, without a message.
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.SiLU())]
    spec = TensorSpec(name="input", shape=(WIDTH,), dtype="float64")
    graph = sequential_graph(
        nn.Sequential(*layers), inputs=spec, target=spec, loss=lambda found, wanted: (found - wanted).square().mean(-1)
    )
    return graph, describe(graph)


def _pipeline(job: "Job") -> str:
    """Run one step of a small model on a pipeline over all ranks; returns a sentence on success.

    Gradients that differ from those of one process are an AssertionError. The pipeline has as many stages as the model
    has layers for; further ranks are copies.
    """
    import torch
    from torch import nn

    from diffusionpipe.models.graphs.run import run_layers
    from diffusionpipe.planner import Layout, build_plan
    from diffusionpipe.runtime.comm.places import holders_of
    from diffusionpipe.runtime.comm.transport import ProcessTransport
    from diffusionpipe.runtime.engine.worker import build_worker

    size = job.membership.world_size
    # The most stages that divide the ranks equally; the model has eight pairs of layers.
    stages = max(count for count in range(1, min(size, 8) + 1) if size % count == 0)
    copies = size // stages
    graph, model = _model()
    batch = 2 * MICROBATCHES * copies
    noise = torch.Generator().manual_seed(1)
    inputs = {name: torch.randn(batch, WIDTH, dtype=torch.float64, generator=noise) for name in ("input", "target")}
    whole: torch.Tensor = run_layers(graph.layers, graph.components, inputs, targets=["loss"])["loss"].sum() / batch
    trained = {f"model.{name}": p for name, p in graph.components["model"].named_parameters()}
    own_gradients = [gradient.to(job.device) for gradient in torch.autograd.grad(whole, list(trained.values()))]
    expected = dict(zip(trained, own_gradients, strict=True))
    for module in graph.components.values():
        nn.Module.to(module, job.device)
    layout = Layout(batch=batch, stages=stages, microbatches=MICROBATCHES, schedule="1f1b", data_parallel=copies)
    plan = build_plan(model, layout)
    own = ProcessTransport(job.device, summing=tuple(holders_of(plan).values()))
    worker = build_worker(graph, model, plan, job.membership.rank, own, device=job.device)
    if worker.encoded is not None:
        first = worker.place.group * batch // copies
        rows = slice(first + worker.encoded.start, first + worker.encoded.stop)
        worker.feed(worker.train, {name: value[rows] for name, value in inputs.items()})
    worker.reset_gradients()
    worker.train.run()
    for name, parameter in worker.parameters.items():
        assert parameter.grad is not None, f"{name} has no gradient"
        # float64 on both sides: only the order of sums may differ.
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)
    own.close()
    counted = f"{stages} stage{'s' * (stages > 1)} and {copies} cop{'ies' if copies > 1 else 'y'}"
    return f"the gradients of {counted} equal those of one process"


def _shared(folder: Path) -> str:
    from diffusionpipe.runtime.job.shared_file_system import check_shared_file_system

    check_shared_file_system(folder)
    return "all ranks write to one folder"


def _checkpoint(job: "Job", folder: Path) -> str:
    """Save a tensor of each rank in a checkpoint below `folder`, and read it back; returns a sentence on success.

    Every rank calls it. The checkpoint is removed at the end; a changed tensor is an AssertionError.
    """
    import shutil

    import torch

    from diffusionpipe.trainer.checkpoints.checkpoint import load, save

    rank = job.membership.rank
    value = torch.full((2**16,), float(rank), device=job.device)
    path = save(folder, 1, {f"tensor.{rank}": value}, {"step": 1}, keep=1)
    found = torch.zeros_like(value)
    load(path, {f"tensor.{rank}": found})
    assert torch.equal(found, value), "a tensor comes back changed"
    job.store.set(f"doctor/loaded/{rank}", "")
    # The folder goes when all have read it.
    if rank == 0:
        for other in range(job.membership.world_size):
            job.store.get(f"doctor/loaded/{other}")
        shutil.rmtree(path.parent)
    return "saved, verified and resumed"
