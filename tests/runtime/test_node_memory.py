"""What the ranks of a machine have in common lies in host memory once, counted in /proc."""

import re
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from kit.crew import crew_of
from torch import nn

from diffusionpipe.errors import ConfigError
from diffusionpipe.models.graphs.graph import Layer
from diffusionpipe.runtime.comm.exchange import PLAIN, gather
from diffusionpipe.runtime.job.verdict import RankProcess
from diffusionpipe.runtime.weights import host_memory, node_memory
from diffusionpipe.runtime.weights.host_weights import HostWeights
from diffusionpipe.runtime.weights.node_memory import NAME, NodeMemory

NUM_RANKS, NUM_LAYERS, WIDTH = 4, 8, 1024
MODEL = NUM_LAYERS * WIDTH * WIDTH * 4
CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="counts in /proc"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def ranks():
    with crew_of(NUM_RANKS) as crew:
        yield crew


def own_share(wanted):
    """Bytes of a mapping that count for this process: of what several map, each has an equal share (Pss)."""
    total, is_wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_wanted = wanted in line
        elif is_wanted and line.startswith("Pss:"):
            total += 1024 * int(line.split()[1])
    return total


def private_memory():
    """Bytes in memory without a file.

    A fork has them from its first moment, so they do not grow where another process that shares its pages ends, as
    shares do, and code that is used for the first time is not among them.
    """
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return 1024 * int(line.split()[1])


def run_layer(index, component, x):
    return (component[index](x),)


def encoder(is_real):
    """Layers of 32 MiB with values, or with room for them that nothing has touched."""
    torch.manual_seed(0)
    make = partial(nn.Linear, WIDTH, WIDTH, bias=False)
    with torch.device("cpu" if is_real else "meta"):
        modules = nn.Sequential(*[make() for _ in range(NUM_LAYERS)]).requires_grad_(False)
    layers = [
        Layer(
            name=str(i),
            component="encoder",
            reads=(f"x{i}",),
            writes=(f"x{i + 1}",),
            modules=(str(i),),
            run=partial(run_layer, i),
        )
        for i in range(NUM_LAYERS)
    ]
    return layers, {"encoder": modules if is_real else modules.to_empty(device="cpu")}


def hosted(job):
    """Whether this rank has filled the memory, what it maps and has taken, the mapping's inode, and a layer's sum."""
    memory = NodeMemory(job.membership.rank)
    before = private_memory()
    layers, components = encoder(memory.is_first)
    weights = HostWeights(layers, components, CPU, node=memory)
    weights["7"].present()
    (found,) = layers[-1].run(components["encoder"], torch.ones(1, WIDTH))
    weights["7"].release()
    del weights._staging, weights._views
    gather(None, PLAIN)  # all have it mapped
    taken = own_share(NAME), private_memory() - before
    inode = {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if NAME in line}
    gather(None, PLAIN)
    return memory.is_first, taken, inode, found.sum().item()


def test_four_ranks_with_offloaded_encoders_hold_one_copy(ranks):
    found = ranks.run(hosted)
    assert [is_first for is_first, *_ in found] == [True, False, False, False]
    assert sum(mapped for _, (mapped, _), *_ in found) == pytest.approx(MODEL, rel=0.01)
    for is_first, (_, added), *_ in found:
        assert is_first or added < 0.3 * MODEL  # buffers and what a first layer computes with
    assert len(set.union(*(inodes for _, _, inodes, _ in found))) == 1
    layers, components = encoder(is_real=True)
    (expected,) = layers[-1].run(components["encoder"], torch.ones(1, WIDTH))
    assert {value for *_, value in found} == {expected.sum().item()}


def on_two_machines(job):
    """Whether each of two ranks fills memory where the others belong to other machines."""
    rank = job.membership.rank
    real = node_memory.this_member
    with mock.patch.object(
        node_memory,
        "this_member",
        lambda rank: RankProcess(rank=rank, host="a", pid=real(rank).pid, machine=f"machine {rank // 2}"),
    ):
        memory = NodeMemory(rank)
    pages = memory.pages(8)
    if memory.is_first:
        pages[:8] = rank + 1
    memory.settle()
    return memory.is_first, pages[0].item()


def test_each_machine_has_a_copy_of_its_own(ranks):
    assert ranks.run(on_two_machines) == [(True, 1), (False, 1), (True, 3), (False, 3)]


def where_files_of_others_cannot_be_opened(job):
    rank = job.membership.rank
    refused = PermissionError(1, "Operation not permitted")
    with mock.patch.object(node_memory.os, "open", side_effect=refused) if rank == 2 else mock.MagicMock():
        memory = NodeMemory(rank)
    with (
        mock.patch.object(host_memory, "free_memory", return_value=3 * 4096),
        pytest.raises(ConfigError, match=r"of host memory for each of 4 ranks, of which"),
    ):
        memory.pages(8)
    pages = memory.pages(8)
    pages[:8] = rank + 1
    memory.settle()
    return memory.is_first, pages[0].item()


def test_where_one_rank_cannot_open_it_each_has_a_copy_if_there_is_room_for_all(ranks):
    assert ranks.run(where_files_of_others_cannot_be_opened) == [(True, rank + 1) for rank in range(NUM_RANKS)]


def with_too_little_memory(job):
    memory = NodeMemory(job.membership.rank)
    with mock.patch.object(host_memory, "free_memory", return_value=2**20):
        if memory.is_first:
            with pytest.raises(ConfigError, match=r"needs 2\.0 GiB of host memory, of which 0\.0 GiB are free"):
                memory.pages(2**31)
    gather(None, PLAIN)


def test_too_little_host_memory_is_said_before_any_is_taken(ranks):
    assert ranks.run(with_too_little_memory) == [None] * NUM_RANKS


def locked(job):
    """Whether this rank has the memory page-locked, and what the last layer computes of it on the GPU."""
    memory = NodeMemory(job.membership.rank)
    layers, components = encoder(memory.is_first)
    weights = HostWeights(layers, components, torch.device("cuda", 0), node=memory)
    weights["7"].present()
    (found,) = layers[-1].run(components["encoder"], torch.ones(1, WIDTH, device="cuda"))
    weights["7"].release()
    gather(None, PLAIN)
    return components["encoder"][7].weight.is_pinned(), found.sum().item()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_every_rank_locks_the_pages_that_they_share(ranks):
    layers, components = encoder(is_real=True)
    (expected,) = layers[-1].run(components["encoder"], torch.ones(1, WIDTH))
    for is_pinned, value in ranks.run(locked):
        assert is_pinned
        assert value == pytest.approx(expected.sum().item(), rel=1e-4)
