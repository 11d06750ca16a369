"""Memory in which messages arrive, over steps that mix sizes: it is the same in each epoch."""

import weakref
from dataclasses import replace

import pytest
from kit.descriptions import described
from kit.layouts import CPU
from kit.size_cases import MIXED, OF_EIGHT, graph_of
from kit.sized_steps import feed, own_copy, samples_of

from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.engine.worker import build_worker


class Counting:
    """A transport that counts the bytes in which messages have arrived and that are still there."""

    def __init__(self, transport):
        self.transport, self.live, self.peak, self.known = transport, 0, 0, set()

    def recv(self, buffer, source):
        if id(buffer) not in self.known:  # rows of frozen outputs are the same memory each time
            self.known.add(id(buffer))
            self.live += buffer.nbytes
            weakref.finalize(buffer, self.gone, id(buffer), buffer.nbytes)
        self.peak = max(self.peak, self.live)
        return self.transport.recv(buffer, source)

    def gone(self, identity, num_bytes):
        self.known.discard(identity)
        self.live -= num_bytes

    def __getattr__(self, name):
        return getattr(self.transport, name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unet", "transformer"])
def test_receive_buffers_and_rows_do_not_grow_after_the_first_epoch(kind):
    graph = graph_of(kind)
    models = [described(replace(own, others=())) for own in graph.of_sizes]
    plan = build_plan(models[0], Layout(**OF_EIGHT))
    steps = [(sizes, samples_of(graph, sizes, number)) for number, sizes in enumerate((*MIXED, (0,) * 8))]

    def main(rank, transport):
        counting = Counting(transport)
        worker = build_worker(own_copy(graph), models[0], plan, rank, counting, device=CPU, others=models[1:])
        rows, epochs = worker.train.store.num_bytes, []
        for _ in range(3):
            counting.peak = counting.live
            for step in steps:
                feed(worker, worker.train, *step)
                worker.reset_gradients()
                worker.train.run()
            epochs.append(counting.peak)
        assert worker.train.store.num_bytes == rows
        return epochs

    for first, *later in run_threads(plan.mesh.num_ranks, main):
        assert first > 0
        assert later == [first, first]
