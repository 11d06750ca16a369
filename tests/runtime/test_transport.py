import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from diffusionpipe.runtime.comm.transport import ProcessTransport
from diffusionpipe.runtime.job.local_ranks import local_ranks


def num_loops():
    """Threads in which gloo waits for its sockets: each process group has one."""
    tasks = Path("/proc/self/task")
    return sum("gloo_tcp_loop" in (tasks / task / "comm").read_text(encoding="ascii") for task in os.listdir(tasks))


def threads_of_a_transport(job):
    """Before, with a transport that sums over both ranks, and after it was closed."""
    counts = [num_loops()]
    transport = ProcessTransport(job.device, summing=((0, 1),))
    ones = torch.ones(3)
    transport.all_reduce(ones, (0, 1)).wait()
    counts.append(num_loops())
    transport.close()
    counts.append(num_loops())
    dist.barrier()
    return counts, ones.tolist()


def swap(job):
    """What this rank gets when both send first, two messages each way at once beside a barrier of the same group."""
    transport, me = ProcessTransport(job.device), job.membership.rank
    received = [torch.zeros(2**18), torch.zeros(5)]
    works = [transport.recv(buffer, 1 - me) for buffer in received]
    barrier = dist.barrier(async_op=True)
    works += [transport.send(torch.full((size,), 10.0 * me + i), 1 - me) for i, size in enumerate((2**18, 5))]
    for work in (*works, barrier):
        work.wait()
    return [set(buffer.tolist()) for buffer in received]


@pytest.fixture(scope="module")
def pair():
    with local_ranks(2) as ranks:
        yield ranks


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_messages_on_a_cpu_need_no_threads_of_their_own_and_sums_give_theirs_back(pair):
    for (before, during, after), summed in pair.run(threads_of_a_transport):
        assert summed == [2.0] * 3
        assert during - before <= 1  # torch 2.9 starts none
        assert after == before


def test_messages_of_both_directions_and_collectives_share_a_group(pair):
    assert pair.run(swap) == [[{10.0}, {11.0}], [{0.0}, {1.0}]]
