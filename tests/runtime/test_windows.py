"""Training without a flush is the sequential recurrence, whose weights are as old as the table says.

w_s[v+1] = update( w_s[v],  d loss / d w_s  with forwards on { w_j[v - a_j] } and backwards on { w_j[v - b_j] } )
"""

import re

import pytest
import torch
from kit.covering import covering
from kit.layout_cases import scattered
from kit.tiers import quick_and_slow
from kit.windowed import (
    BATCH,
    RATES,
    STEPS,
    distances_of,
    is_within_limits,
    layout_of,
    model_of,
    pipeline_of,
    recurrence,
)

from diffusionpipe.holding import Ledger, Workload
from diffusionpipe.ir.unroll import unroll
from diffusionpipe.ir.versions import Versions, batches_held, versions_held
from diffusionpipe.planner import build_plan
from diffusionpipe.runtime.engine.windows import WindowExecutor
from diffusionpipe.runtime.weights.versions import BlockVersions
from diffusionpipe.simulator import simulate, uniform_costs
from diffusionpipe.timing.memory import peak_memory
from diffusionpipe.workflows.training.expectation import unmeasured


def distances(name, layout, names=tuple(RATES), stops=(STEPS,), autocast=None, filler=None):
    """Of the pipeline from the recurrence, as parts of the distance moved: optimizer -> of its parameters."""
    graph, model, batches = model_of(name)
    plan = build_plan(model, layout, filler=filler)
    start, expected = recurrence(graph, plan, batches[: stops[-1]], names, {0, *stops}, autocast)
    found = pipeline_of(graph, model, plan, batches, names, stops, autocast)
    return distances_of(plan, names, start, expected, found)


ROWS = [row for row in Versions if row is not Versions.FLUSHED]
"""Of them "predicted" trains with optimizers that have a direction."""


def optimizers_of(versions):
    return ("momentum", "adamw") if versions is Versions.PREDICTED else tuple(RATES)


MODELS = ("dit", "stable diffusion")
QUICK = [*((versions, "dit", 2, 1) for versions in ROWS), (Versions.STASHED, "dit", 3, 4)]
CASES = covering(ROWS, MODELS, (2, 3, 4), (1, 4), first=QUICK)
"""Row of the table, model, stages and micro-batches: each two of them meet."""


@pytest.mark.parametrize(("versions", "name", "stages", "microbatches"), quick_and_slow(CASES, quick=QUICK))
def test_a_window_is_the_recurrence(versions, name, stages, microbatches):
    assert is_within_limits(distances(name, layout_of(versions, stages, microbatches), optimizers_of(versions)))


@pytest.mark.parametrize("op", ["F", "B"])
def test_an_action_for_which_no_memory_is_left_is_named(monkeypatch, op):
    graph, model, batches = model_of("dit")
    plan = build_plan(model, layout_of(Versions.STASHED, 2, 2))
    instruction, number = WindowExecutor._instruction, iter(range(100))

    def scarce(self, compiler, context, encoder, action):
        wait, run = instruction(self, compiler, context, encoder, action)

        def without_memory():
            if str(action).startswith(f"1{op}0") and next(number) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            run()

        return wait, without_memory

    monkeypatch.setattr(WindowExecutor, "_instruction", scarce)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        pipeline_of(graph, model, plan, batches, ("momentum",), (STEPS,), None)
    assert re.match(
        rf"It ran out at action 1{op}0.* of stage 1, micro-batch 0\); host memory ", caught.value.__notes__[0]
    )


@pytest.mark.parametrize("versions", [Versions.STASHED, Versions.PREDICTED])
def test_copies_of_the_pipeline_recomputation_and_flushes_between(versions):
    """Two groups that share each batch; batches 3 and 5 begin with empty pipelines."""
    layout = layout_of(versions, 2, 2, data_parallel=2, checkpointed=("*",))
    assert is_within_limits(distances("dit", layout, ("momentum",), stops=(3, 5, STEPS)))


REPLICATED = [
    (Versions.STASHED, 2, 2, {"replicas": (1, 2), "data_parallel": 2}),
    (Versions.STASHED, 3, 1, {"replicas": (1, 2, 2)}),
    (Versions.VERTICAL, 2, 4, {"replicas": (2, 1)}),
    (Versions.DELAYED, 2, 2, {"replicas": (2, 2)}),
    (Versions.NEWEST, 3, 2, {"replicas": (1, 2, 1)}),
    (Versions.PREDICTED, 2, 1, {"replicas": (1, 4)}),
]


@pytest.mark.parametrize(("versions", "stages", "microbatches", "copies"), quick_and_slow(
    REPLICATED, quick=REPLICATED[:1],
))  # fmt: skip
def test_replicas_of_a_stage_make_the_step_of_all_their_shares(versions, stages, microbatches, copies):
    layout = layout_of(versions, stages, microbatches, **copies)
    assert is_within_limits(distances("dit", layout, ("momentum", "adamw"), stops=(4, STEPS)))


FILLED = [
    ("dit", Versions.STASHED, 3, 2, {}),
    ("stable diffusion", Versions.STASHED, 2, 2, {"replicas": (1, 2), "data_parallel": 2}),
    ("stable diffusion", Versions.STASHED, 4, 1, {}),
    ("dit", Versions.STASHED, 4, 4, {"checkpointed": ("*",)}),
    ("dit", Versions.VERTICAL, 3, 1, {}),
    ("stable diffusion", Versions.DELAYED, 3, 4, {}),
    ("dit", Versions.NEWEST, 2, 1, {"data_parallel": 2}),
    ("dit", Versions.PREDICTED, 3, 1, {}),
]


@pytest.mark.parametrize(("name", "versions", "stages", "microbatches", "copies"), quick_and_slow(
    FILLED, quick=FILLED[:1],
))  # fmt: skip
def test_fills_encode_later_batches_and_the_training_is_the_recurrence(name, versions, stages, microbatches, copies):
    """Frozen work at random places, with very unequal shares; after a flush everything is encoded anew."""
    layout = layout_of(versions, stages, microbatches, **copies)
    for seed in range(2):
        found = distances(name, layout, ("momentum", "adamw"), stops=(1, 4, STEPS), filler=scattered(seed))
        assert is_within_limits(found), seed


def test_a_batch_whose_place_another_one_takes_too_early_is_noticed(monkeypatch):
    """One place too few for the batches that live at once."""
    monkeypatch.setattr("diffusionpipe.runtime.engine.windows.batches_held", lambda window: batches_held(window) - 1)
    found = distances("dit", layout_of(Versions.STASHED, 3, 1), ("sgd",), filler=scattered(0))
    assert found["sgd"] > 1e-4


@pytest.mark.parametrize("fill", [False, True])
def test_bytes_of_rows_are_those_of_the_batches_that_live_at_once(fill):
    """Of frozen outputs and raw inputs. Without fills the validation encodes alike."""
    graph, model, batches = model_of("stable diffusion")
    plan = build_plan(model, layout_of(Versions.STASHED, 3, 1), filler=scattered(1) if fill else None)
    train = unroll(plan.train, 1) if fill else plan.validate
    profile = unmeasured(model, "float64")
    timeline = simulate(train, uniform_costs(train))
    memory = peak_memory(
        train,
        timeline,
        plan.blocks,
        profile=profile,
        ledger=Ledger(graph=profile.graph, workload=Workload(batch=BATCH)),
    )
    assert batches_held(plan.train) == 4
    for use, (*_, rows) in zip(memory, pipeline_of(graph, model, plan, batches, ("sgd",), (1,)), strict=True):
        assert sum(rows.values()) == 4 * use.frozen_outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adapters", "adapters on nf4", "text encoder", "controlnet"])
def test_every_kind_of_trained_part_is_the_recurrence(name):
    assert is_within_limits(distances(name, layout_of(Versions.STASHED, 2, 2), ("momentum",), stops=(4,)))


def test_in_bfloat16_every_forward_reads_narrow_weights_of_its_version():
    found = distances("float32", layout_of(Versions.STASHED, 2, 1), ("momentum",), (4,), torch.bfloat16)
    assert found["momentum"] < 1e-3


class LateBinding(BlockVersions):
    """Binds the newest version before a backward too."""

    def bind(self, version):
        super().bind(self.newest)


def test_a_backward_on_other_weights_than_its_forward_is_noticed(monkeypatch):
    monkeypatch.setattr("diffusionpipe.runtime.engine.worker.BlockVersions", LateBinding)
    assert distances("stable diffusion", layout_of(Versions.STASHED, 2, 1), ("sgd",))["sgd"] > 1e-4


@pytest.mark.parametrize(("versions", "counts"), [(Versions.STASHED, (3, 2, 1)), (Versions.PREDICTED, (4, 3, 1))])
def test_bytes_of_versions_are_those_of_the_table(versions, counts):
    graph, model, batches = model_of("dit")
    plan = build_plan(model, layout_of(versions, 3, 1))
    found = pipeline_of(graph, model, plan, batches, ("momentum",), (2,))
    for rank, (parameters, _, held, _) in enumerate(found):
        own = sum(p.numel() * p.element_size() for p in parameters.values())
        assert held == own * versions_held(plan.train)[rank] == own * counts[rank]
