"""Steps that are cut by the tokens of their samples: gradients of one process, memory of the plan."""

from dataclasses import replace

import pytest
from kit.descriptions import described
from kit.layouts import CPU, assert_same_step, merge
from kit.size_cases import OF_EIGHT, graph_of
from kit.sized_steps import feed, one_process, own_copy, samples_of
from kit.tiers import quick_and_slow

from diffusionpipe.errors import ConfigError
from diffusionpipe.ir.cells import rows_by_size
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.unequal.cutting import cutting_of
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.engine.worker import CutExecutors, build_worker

MIXED = ((0, 2, 1, 2, 2, 1, 2, 2), (1, 2, 0, 0, 0, 1, 2, 1), (0, 2, 1, 2, 1, 2, 2, 2))
"""Sizes of samples in the order of the data; the third has the counts of the first."""


def cut_steps(graph, plan, steps):
    """The steps, each cut by the sizes of its samples."""
    models = [described(replace(own, others=())) for own in graph.of_sizes]
    count = plan.batch // plan.mesh.data_parallel

    def arranged(sizes, samples):
        """The samples in the order of rows, group after group."""
        order = []
        for first in range(0, len(sizes), count):
            own = tuple(sizes[first : first + count])
            order += [first + place for place in rows_by_size(own)]
        return [sizes[place] for place in order], [samples[place] for place in order]

    def main(rank, transport):
        worker = build_worker(
            own_copy(graph),
            models[0],
            plan,
            rank,
            transport,
            device=CPU,
            others=models[1:],
            cutting=cutting_of(models, plan),
        )
        found, seen = [], []
        before = worker.train.store.num_bytes
        for sizes, samples in steps:
            feed(worker, worker.train, *arranged(sizes, samples))
            worker.reset_gradients()
            outputs = worker.train.run()
            assert worker.train.store.num_bytes == before, "rows have their places once"
            seen.append(worker.train.schedule.num_microbatches())
            loss = sum(float(output.value.double().sum()) for output in outputs) / plan.batch
            found.append((loss, {name: p.grad.clone() for name, p in worker.parameters.items() if p.grad is not None}))
        return found, seen

    ranks = run_threads(plan.mesh.num_ranks, main)
    return [merge(results) for results in zip(*(found for found, _ in ranks), strict=True)], ranks[0][1]


@pytest.mark.parametrize("kind", quick_and_slow(["unet", "transformer", "adapters on nf4"], quick=["unet"]))
def test_steps_cut_by_tokens_have_the_gradients_of_one_process(kind):
    graph = graph_of(kind)
    model = described(replace(graph, others=()))
    batches = [(sizes, samples_of(graph, sizes, number)) for number, sizes in enumerate(MIXED)]
    steps, microbatches = cut_steps(graph, build_plan(model, Layout(**OF_EIGHT | {"microbatches": 4})), batches)
    for own, batch in zip(steps, batches, strict=True):
        assert_same_step(own, one_process(graph, *batch))
    if kind == "unet":  # most tokens of the tiny transformer are text, of as many tokens in every size
        assert microbatches == [4, 5, 4], "small pictures go together"


@pytest.mark.slow
def test_two_copies_cut_their_own_samples():
    graph = graph_of("transformer")
    model = described(replace(graph, others=()))
    batches = [(sizes, samples_of(graph, sizes, number)) for number, sizes in enumerate(MIXED)]
    plan = build_plan(model, Layout(**OF_EIGHT | {"microbatches": 4}, data_parallel=2))
    steps, _ = cut_steps(graph, plan, batches)
    for own, batch in zip(steps, batches, strict=True):
        assert_same_step(own, one_process(graph, *batch))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": "zb-v"}, "splits its backwards"),
        ({"replicas": (2, 1)}, "has several stages on a rank, or replicas"),
    ],
)
def test_plans_whose_steps_cannot_be_cut_anew_are_refused(changes, said):
    model = described(replace(graph_of("unet"), others=()))
    with pytest.raises(ConfigError, match=said):
        cutting_of([model], build_plan(model, Layout(**OF_EIGHT, **changes)))


def test_at_most_sixty_four_cuts_are_kept_and_one_that_was_dropped_is_made_again():
    made = []
    executors = CutExecutors(lambda counts: counts, lambda schedule: made.append(schedule) or object())
    first = executors.executor(0, 8)
    assert executors.executor(0, 8) is first
    for number in range(1, 65):
        executors.executor(number, 8)
    assert executors.executor(64, 8) is not first
    assert len(made) == 65
    executors.executor(1, 8)  # the second is still there
    assert len(made) == 65
    assert executors.executor(0, 8) is not first
    assert made[-1] == (0, 8)
