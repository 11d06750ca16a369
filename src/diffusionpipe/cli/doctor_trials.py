"""What the ranks of `diffusionpipe doctor` try together: messages, sums, a small pipeline, a checkpoint."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from diffusionpipe.cli.doctor_findings import Finding, Status, links_finding
from diffusionpipe.units import Bytes

if TYPE_CHECKING:
    import torch

    from diffusionpipe.costs import ModelGraph
    from diffusionpipe.models.graph import LayerGraph
    from diffusionpipe.runtime.process_group import Job
    from diffusionpipe.runtime.transport import ProcessTransport

SMALL: Bytes = 8
LARGE_ON_CPU: Bytes = 2**22
LARGE_ON_GPU: Bytes = 2**26
"""Beyond what NCCL buffers, so that crossing messages really wait for each other."""
MOST_PAIRS = 120
"""Of more pairs only those of neighbours are timed."""
REPEATS = 5
MICROBATCHES = 2
WIDTH = 8


def trials(job: "Job", folder: Path, hosts: tuple[str, ...]) -> list[Finding]:
    """What works; every rank calls it, and all get the same."""
    from diffusionpipe.runtime.transport import ProcessTransport

    ranks = tuple(range(job.membership.world_size))
    transport = ProcessTransport(job.device, summing=(ranks,))
    found = [
        _tried("messages", lambda: _ring(job, transport), "look at the network, its firewall and its interfaces"),
        _tried("sums", lambda: _sums(job, transport, ranks), "set NCCL_DEBUG=INFO and look at the first warning"),
        links_finding(_rates(job, transport), hosts),
        _tried("pipeline", lambda: _pipeline(job), "look at the device: its results are not those of a CPU"),
    ]
    transport.close()
    return [*found, *_folder(job, folder)]


def _folder(job: "Job", folder: Path) -> list[Finding]:
    shared = shared_folder(folder)
    if shared.status is Status.FAIL:  # ranks cannot find what the others have saved, whatever the disk does
        return [
            shared,
            Finding(name="checkpoint", status=Status.WARN, text="not tried, because the folder is not shared"),
        ]
    remedy = "choose another --folder: this one loses what is written"
    return [shared, _tried("checkpoint", lambda: _checkpoint(job, folder), remedy)]


def shared_folder(folder: Path) -> Finding:
    """Whether all ranks write to one folder; every rank calls it."""
    return _tried(
        "shared folder", lambda: _shared(folder), "put the run folder on a file system that all machines mount"
    )


def _tried(name: str, trial: Callable[[], str], remedy: str) -> Finding:
    """What the trial returns is what works; an error of any rank is everybody's finding."""
    from diffusionpipe.errors import DiffusionPipeError
    from diffusionpipe.runtime.exchange import PLAIN, gather

    own: str | None = None
    text = ""
    try:
        text = trial()
    except (DiffusionPipeError, RuntimeError, AssertionError, OSError) as error:
        own = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    problems = [f"rank {rank}: {problem}" for rank, problem in enumerate(gather(own, PLAIN)) if problem is not None]
    if problems:
        return Finding(name=name, status=Status.FAIL, text=problems[0], remedy=remedy)
    return Finding(name=name, status=Status.OK, text=text)


def _ring(job: "Job", transport: "ProcessTransport") -> str:
    """Every rank sends to both neighbours at once and receives from them, small and large messages."""
    import torch

    rank, size = job.membership.rank, job.membership.world_size
    if size == 1:
        return "one rank sends none"
    neighbours = sorted({(rank - 1) % size, (rank + 1) % size})
    large = LARGE_ON_GPU if job.device.type == "cuda" else LARGE_ON_CPU
    for length in (SMALL, large):
        sent = torch.full((length,), rank % 128, dtype=torch.uint8, device=job.device)
        arrived = {other: torch.empty_like(sent) for other in neighbours}
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
    """Bytes a second of each pair, one pair after the other; the fastest of some round trips."""
    import torch

    from diffusionpipe.runtime.exchange import PLAIN, gather

    rank, size = job.membership.rank, job.membership.world_size
    pairs = list(combinations(range(size), 2))
    if len(pairs) > MOST_PAIRS:
        pairs = [(one, one + 1) for one in range(size - 1)]
    length = LARGE_ON_GPU if job.device.type == "cuda" else LARGE_ON_CPU
    buffer = torch.zeros(length, dtype=torch.uint8, device=job.device)
    own: list[float] = []
    for one, other in pairs:
        job.store.set(f"doctor/{one}-{other}/{rank}", "")
        if rank in (one, other):
            job.store.get(f"doctor/{one}-{other}/{one + other - rank}")
            times = [_round_trip(transport, buffer, one, other, is_first=rank == one) for _ in range(1 + REPEATS)]
            own.append(2 * length / min(times[1:]))
    own_pairs = [pair for pair in pairs if rank in pair]
    texts = gather(" ".join(f"{a}-{b}={rate:.0f}" for (a, b), rate in zip(own_pairs, own, strict=True)), PLAIN)
    found: dict[tuple[int, int], float] = {}
    for entry in " ".join(map(str, texts)).split():
        ends, rate = entry.split("=")
        one, other = map(int, ends.split("-"))
        found[one, other] = max(float(rate), found.get((one, other), 0.0))
    return found


def _round_trip(
    transport: "ProcessTransport", buffer: "torch.Tensor", one: int, other: int, *, is_first: bool
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
    from diffusionpipe.models.describe import describe
    from diffusionpipe.models.sequential import sequential_graph

    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.SiLU())]
    spec = TensorSpec(name="input", shape=(WIDTH,), dtype="float64")
    graph = sequential_graph(
        nn.Sequential(*layers), inputs=spec, target=spec, loss=lambda found, wanted: (found - wanted).square().mean(-1)
    )
    return graph, describe(graph)


def _pipeline(job: "Job") -> str:
    """One step of a small model over as many stages as it has layers for, against the same step in one process."""
    import torch
    from torch import nn

    from diffusionpipe.models.run import run_layers
    from diffusionpipe.planner import Layout, build_plan
    from diffusionpipe.runtime.places import holders_of
    from diffusionpipe.runtime.transport import ProcessTransport
    from diffusionpipe.runtime.worker import build_worker

    size = job.membership.world_size
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
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)
    own.close()
    counted = f"{stages} stage{'s' * (stages > 1)} and {copies} cop{'ies' if copies > 1 else 'y'}"
    return f"the gradients of {counted} are those of one process"


def _shared(folder: Path) -> str:
    from diffusionpipe.trainer.shared_file_system import check_shared_file_system

    check_shared_file_system(folder)
    return "all ranks write to one folder"


def _checkpoint(job: "Job", folder: Path) -> str:
    """Every rank saves a tensor, forgets it, and resumes from the checkpoint."""
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
    if rank == 0:
        for other in range(job.membership.world_size):
            job.store.get(f"doctor/loaded/{other}")
        shutil.rmtree(path.parent)
    return "saved, verified and resumed"
