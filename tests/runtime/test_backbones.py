"""Two different networks that train together learn what each learns alone, over every layout."""

import copy

import pytest
from kit.cascades import BATCH, MEMBERS, batch_of, cascade, inputs_of, merged, parts_of, step_of, steps_in_process
from kit.crew import crew_of
from kit.descriptions import described
from kit.layout_cases import scattered
from kit.layouts import CPU, assert_same_step, reference_step, rows_of
from kit.tiers import quick_and_slow

from diffusionpipe.ir import Sharded
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.assembly.layout import BackboneLayout
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.engine.worker import build_worker


class Prepared:
    def __init__(self):
        self.graph = cascade()
        self.model = described(self.graph)
        self.batches = [batch_of(self.graph, seed) for seed in range(3)]
        self.expected = [{name: self.alone(name, inputs) for name in MEMBERS} for inputs in self.batches]

    def alone(self, name, inputs):
        member = MEMBERS[name]()
        return reference_step(member, inputs_of(member, name, inputs))


@pytest.fixture(scope="module")
def prepared():
    return Prepared()


def steps_in_threads(prepared, plan):
    def main(rank, transport):
        worker = build_worker(copy.deepcopy(prepared.graph), prepared.model, plan, rank, transport, device=CPU)
        if worker.prologue is None:
            return [step_of(worker, inputs) for inputs in prepared.batches[:2]]
        found = []
        worker.feed(worker.prologue, rows_of(worker, prepared.batches[0]) if worker.encoded else {})
        worker.prologue.run()
        for following in prepared.batches[1:]:
            worker.feed(worker.train, rows_of(worker, following) if worker.encoded else {})
            worker.reset_gradients()
            found.append(parts_of(worker, worker.train.run()))
        return found

    by_rank = run_threads(plan.mesh.num_ranks, main)
    return [merged(results) for results in zip(*by_rank, strict=True)]


def assert_as_alone(steps, prepared):
    for found, expected in zip(steps, prepared.expected, strict=False):
        for name in MEMBERS:
            assert_same_step(found[name], expected[name])  # to the norm of its own backbone


def layout(stages, schedule, counts=(4, 2), **sizes):
    own = tuple(BackboneLayout(name=name, microbatches=count) for name, count in zip(MEMBERS, counts, strict=True))
    return Layout(
        batch=BATCH, stages=stages, microbatches=counts[0], schedule=schedule, backbones=own, encode_chunk=3, **sizes
    )


LAYOUTS = {
    "one rank": layout(1, "together"),
    "two ranks, opposite": layout(2, "opposed"),
    "two ranks, equal micro-batches": layout(2, "opposed", (4, 4)),
    "two ranks, same direction": layout(2, "together", (2, 8)),
    "two ranks, in turn": layout(2, "1f1b"),
    "two ranks, split backward": layout(2, "zb-h1"),
    "two ranks, both twice": layout(2, "opposed", replicas=(2, 2)),
    "the first rank twice": layout(2, "opposed", replicas=(2, 1)),
    "two groups": layout(2, "opposed", data_parallel=2),
    "two groups, in buckets": layout(2, "together", data_parallel=2, buckets=2),
    "two groups, sharded": layout(2, "opposed", data_parallel=2, sharded=Sharded.ALL, buckets=2),
    "two groups, states in parts": layout(2, "opposed", data_parallel=2, sharded=Sharded.OPTIMIZER, buckets=2),
    "replicas in two groups": layout(2, "opposed", (2, 1), replicas=(2, 1), data_parallel=2),
    "four ranks, opposite": layout(4, "opposed", (8, 4)),
    "four ranks, same direction": layout(4, "together", (4, 8)),
    "four ranks, in turn": layout(4, "gpipe"),
    "four ranks, split backward": layout(4, "zb-h1"),
    "several stages on a rank": layout(2, "interleaved"),
    "recomputed": layout(2, "opposed", checkpointed=("*",)),
    "copies in two directions": layout(2, "chimera", (4, 4)),
}
QUICK = [
    "one rank",
    "two ranks, opposite",
    "two ranks, split backward",
    "two groups, sharded",
    "replicas in two groups",
]


@pytest.mark.parametrize("name", quick_and_slow(list(LAYOUTS), quick=QUICK))
def test_loss_and_gradients_of_each_backbone_are_those_of_the_model_alone(prepared, name):
    assert_as_alone(steps_in_threads(prepared, build_plan(prepared.model, LAYOUTS[name])), prepared)


FILLED = [
    "two ranks, opposite",
    "two groups",
    "the first rank twice",
    "two groups, sharded",
    "two ranks, split backward",
    "four ranks, opposite",
]


@pytest.mark.parametrize("name", quick_and_slow(FILLED, quick=FILLED[:1]))
def test_filled_with_the_frozen_work_of_both_they_are_too(prepared, name):
    plan = build_plan(prepared.model, LAYOUTS[name], filler=scattered(0))
    assert_as_alone(steps_in_threads(prepared, plan), prepared)


@pytest.mark.slow
def test_through_processes_they_are_too(prepared):
    names = ["two ranks, both twice", "two groups", "two groups, sharded", "four ranks, opposite"]
    with crew_of(4) as crew:
        by_rank = crew.run(steps_in_process, [LAYOUTS[name] for name in names])
    for results in zip(*by_rank, strict=True):
        assert_as_alone([merged(results)], prepared)
