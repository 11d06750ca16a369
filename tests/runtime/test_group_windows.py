"""TiMePReSt's nF1B: windows in which k forwards and k backwards take turns, on weights as old as a formula says."""

import sys
import threading
from collections import defaultdict

import pytest
import torch
from kit import windowed
from kit.tiers import quick_and_slow
from kit.windowed import batches_of, distances_of, is_within_limits, layout_of, model_of, pipeline_of, recurrence

from diffusionpipe.ir import Op
from diffusionpipe.ir.versions import Versions, staleness_of
from diffusionpipe.planner import build_plan
from diffusionpipe.runtime.compute.stage import LayerStage
from diffusionpipe.runtime.weights.versions import BlockVersions

STEPS = 6
NAMES = ("sgd", "momentum", "adamw")


@pytest.fixture(autouse=True)
def batches_of_twelve(monkeypatch):
    """Twelve samples are 2, 3, 4 or 6 equal micro-batches."""
    monkeypatch.setattr(windowed, "BATCH", 12)


def written_out(k, stages, microbatches):
    """The ages of nF1B: group g of stage s runs its forwards before the backwards of group g - (p - 1 - s)."""
    groups, table = microbatches // k, {}
    for stage in range(stages):
        lead = stages - 1 - stage
        first = 10 * stages * groups  # far from the start
        ages = [(first + g) // groups - (first + g - lead) // groups for g in range(groups)]
        table[stage, Op.F] = tuple(age for age in ages for _ in range(k))
        table[stage, Op.B] = (0,) * microbatches
    return table


def distances(k, stages, microbatches, table, **others):
    graph, model, _ = model_of("dit")
    batches = batches_of(graph, STEPS)
    plan = build_plan(model, layout_of(Versions.NEWEST, stages, microbatches, schedule=f"kfkb-{k}", **others))
    start, expected = recurrence(graph, plan, batches, NAMES, {0, STEPS}, table=table)
    found = pipeline_of(graph, model, plan, batches, NAMES, (STEPS,))
    return distances_of(plan, NAMES, start, expected, found)


SIZES = [(2, 3, 4), (3, 3, 3), (2, 2, 2), (3, 2, 6), (2, 4, 2)]
"""k, stages, micro-batches."""


@pytest.mark.parametrize(("k", "stages", "microbatches"), quick_and_slow(SIZES, quick=SIZES[:2]))
def test_the_weights_are_those_of_the_written_out_recurrence(k, stages, microbatches):
    assert is_within_limits(distances(k, stages, microbatches, written_out(k, stages, microbatches)))


@pytest.mark.slow
@pytest.mark.parametrize("op", [Op.F, Op.B])
def test_an_age_that_is_off_by_one_is_noticed(op):
    """Of one stage and one micro-batch alone."""
    table = written_out(2, 3, 4)
    ages = table[1, op]
    table[1, op] = (*ages[:-1], ages[-1] + 1)
    assert min(distances(2, 3, 4, table).values()) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("versions", [row for row in Versions if row is not Versions.FLUSHED])
def test_groups_train_by_every_other_kind_of_versions_too(versions):
    graph, model, _ = model_of("dit")
    names = ("momentum", "adamw")
    batches = batches_of(graph, STEPS)
    layout = layout_of(versions, 3, 6, schedule="kfkb", replicas=(1, 2, 1))
    plan = build_plan(model, layout)
    start, expected = recurrence(graph, plan, batches, names, {0, 4, STEPS})
    found = pipeline_of(graph, model, plan, batches, names, (4, STEPS))
    assert is_within_limits(distances_of(plan, names, start, expected, found))


@pytest.mark.parametrize(("k", "stages", "microbatches"), quick_and_slow(SIZES, quick=SIZES[:1]))
def test_ages_of_the_table_are_those_that_are_counted_in_a_run(k, stages, microbatches, monkeypatch):
    """A version is known by the value of a weight, which each step changes."""
    events, values, here = defaultdict(list), defaultdict(list), threading.local()

    class Watched(BlockVersions):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.rank = here.rank
            values[self.rank].append(self.value())

        def value(self):
            return float(self._parameters[0].flatten()[0].detach())

        def bind(self, version):
            super().bind(version)
            if sys._getframe(1).f_code.co_name == "bound":  # for a forward or a backward, not for a flush
                events[self.rank].append(self.value())

        def step(self, update):
            super().step(update)
            values[self.rank].append(self.value())

    run_stage = LayerStage.__call__

    def watched_stage(stage, tensors, deferred=None):
        if torch.is_grad_enabled():  # encoders run without gradients
            events[here.rank].append(Op.F)
        return run_stage(stage, tensors, deferred)

    def main_of(rank, *arguments, **options):
        here.rank = rank
        return run_windows(*arguments, **options)

    run_windows = windowed.run_windows
    monkeypatch.setattr("diffusionpipe.runtime.engine.worker.BlockVersions", Watched)
    monkeypatch.setattr(LayerStage, "__call__", watched_stage)
    monkeypatch.setattr(windowed, "run_windows", lambda g, m, p, rank, *a, **o: main_of(rank, g, m, p, rank, *a, **o))
    graph, model, _ = model_of("dit")
    plan = build_plan(model, layout_of(Versions.NEWEST, stages, microbatches, schedule=f"kfkb-{k}"))
    pipeline_of(graph, model, plan, batches_of(graph, STEPS), ("sgd",), (STEPS,))
    table = staleness_of(plan.train)
    for rank in range(stages):
        assert len(set(values[rank])) == STEPS + 1  # every version has a value of its own
        reads = {Op.F: [], Op.B: []}
        for event, following in zip(events[rank], [*events[rank][1:], None], strict=True):
            if event is not Op.F:
                reads[Op.F if following is Op.F else Op.B].append(values[rank].index(event))
        for op, versions in reads.items():
            ages = table[rank, op]
            assert len(versions) == STEPS * microbatches
            for number, version in enumerate(versions):
                batch, microbatch = divmod(number, microbatches)
                assert version == max(0, batch - ages[microbatch])
