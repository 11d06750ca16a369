"""Loss and gradients are those of one process on the plain full batch, for every layout."""

import copy
import weakref
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from threading import get_ident

import pytest
import torch
from kit.descriptions import described
from kit.layout_cases import can_run, layouts_of
from kit.layouts import CPU, assert_same_step, feed_rows, reference_step, run_step, step_in_threads
from kit.tiers import quick_and_slow
from kit.tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion
from kit.toy import toy_graph
from torch import Tensor, nn

from diffusionpipe.costs import TensorSpec
from diffusionpipe.ir import PlanPhase
from diffusionpipe.models.cut.sequential import sequential_graph
from diffusionpipe.models.graphs.graph import canonical_names
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.ordering import Goal, HalfStage, Instance, Placing, schedule_of, search
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.engine.transfers import Transfers
from diffusionpipe.runtime.engine.worker import build_worker
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import activations_in_flight

MODELS = {"stable diffusion": tiny_stable_diffusion, "dit": tiny_dit, "toy": toy_graph}
FAMILIES = ("stable diffusion", "dit")


@cache
def prepared_model(name):
    graph = MODELS[name]()
    inputs = raw_inputs(graph, 16)
    return graph, described(graph), inputs, reference_step(graph, inputs)


@pytest.fixture(scope="module", params=FAMILIES)
def prepared(request):
    return prepared_model(request.param)


@pytest.fixture(scope="module")
def prepared_toy():
    return prepared_model("toy")


_AGREE: set[tuple[object, ...]] = set()
"""What `assert_transparent` has found to agree."""


def assert_transparent(prepared, layout, *, again=None):
    """The layout's step is that of one process. Several schedules give the same orders: these are run once."""
    graph, model, inputs, expected = prepared
    plan = build_plan(model, layout)
    train = replace(plan.train, name="")
    key = (id(graph), train, plan.mesh, plan.batch, plan.blocks, plan.checkpointed, again)
    if key not in _AGREE:
        assert_same_step(step_in_threads(graph, model, layout, inputs, again=again), expected)
        _AGREE.add(key)


CHAINS = ("gpipe", "1f1b")
OTHERS = sorted(set(REGISTRY) - set(CHAINS))


STAGES_OF_CHAINS = [(chain, stages) for stages in (1, 2, 3, 4) for chain in CHAINS]


@pytest.mark.parametrize(
    ("schedule", "stages"), quick_and_slow(STAGES_OF_CHAINS, quick=[("gpipe", 1), ("gpipe", 2), ("1f1b", 3)])
)
def test_gradients_are_those_of_one_process_for_every_layout(prepared, schedule, stages):
    for layout in layouts_of(stages, schedule):
        assert_transparent(prepared, layout)


@pytest.mark.parametrize("schedule", OTHERS)
def test_gradients_are_those_of_one_process_for_every_schedule(schedule, prepared_toy):
    """The first stage replicated, in two groups."""
    assert_transparent(prepared_toy, layouts_of(2, schedule)[4], again=True)


def largest(prepared, schedule):
    """Over as many ranks as the model has layers for."""
    return next(layout for stages in (4, 3, 2) if can_run(layout := layouts_of(stages, schedule)[0], prepared[1]))


@pytest.mark.parametrize("schedule", OTHERS)
def test_gradients_with_skips_are_those_of_one_process_for_every_schedule(schedule, prepared_toy):
    assert_transparent(prepared_toy, largest(prepared_toy, schedule))


@pytest.mark.parametrize(
    "schedule", quick_and_slow(["zb-v", "bitpipe", "chimera", "dualpipe", "interleaved"], quick=["zb-v"])
)
def test_gradients_of_models_of_diffusion_are_those_of_one_process(schedule, prepared):
    """One schedule of each kind of placement; all others differ from these in their orders alone, see the toy."""
    assert_transparent(prepared, largest(prepared, schedule))


@pytest.mark.parametrize("placing", [Placing.LINEAR, Placing.V, Placing.LOOP], ids=str)
def test_gradients_are_those_of_one_process_for_searched_orders(prepared, placing):
    graph, model, inputs, expected = prepared
    halves = [
        HalfStage(forward=f, input_grad=3, weight_grad=w, activation=4, kept_after_input_grad=2)
        for f, w in ((2, 5), (3, 1), (1, 4), (4, 2))
    ]
    instance = Instance(
        ranks=2,
        microbatches=4,
        placement=placing,
        stages=tuple(halves),
        comm=1,
        memory_limit=(20, 12),
        objective=Goal.MAKESPAN,
        seconds=0.2,
    )
    orders = schedule_of(search(instance))
    for data_parallel in (1, 2):
        layout = Layout(batch=16, stages=2, microbatches=4, orders=orders, data_parallel=data_parallel)
        assert_same_step(step_in_threads(graph, model, layout, inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", OTHERS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_gradients_are_those_of_one_process_for_every_schedule_and_layout(prepared_toy, schedule, stages):
    """Every schedule over 1 to 4 stages, in two of the five layouts each; these change from case to case.

              stages   1    2    3    4
    schedule 0        0 2  1 3  2 4  3 0
    schedule 1        1 3  2 4  3 0  4 1
    """
    place = OTHERS.index(schedule) + stages - 1
    for number in (place % 5, (place + 2) % 5):
        layout = layouts_of(stages, schedule)[number]
        if can_run(layout, prepared_toy[1]):  # a second iteration of every schedule is above
            assert_transparent(prepared_toy, layout, again=False)


def test_checkpointed_layers_change_no_gradient(prepared):
    graph, model, inputs, expected = prepared
    layout = Layout(batch=16, stages=2, microbatches=4, checkpointed=("*",))
    assert_same_step(step_in_threads(graph, model, layout, inputs), expected)


def test_an_iteration_never_reads_or_moves_the_global_generator(prepared):
    graph, model, inputs, expected = prepared
    torch.manual_seed(1)
    before = torch.get_rng_state()
    step_in_threads(graph, model, Layout(batch=16, stages=2, microbatches=2), inputs)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert_same_step(step_in_threads(graph, model, Layout(batch=16, stages=2, microbatches=2), inputs), expected)


def is_trained(plan, message):
    return not plan.train.placement.is_frozen(message.source)


@pytest.mark.parametrize(
    "schedule", quick_and_slow(REGISTRY, quick=["gpipe", "1f1b", "interleaved", "zb-v", "chimera", "dualpipe"])
)
def test_received_activations_are_bounded_by_what_is_in_flight(schedule, monkeypatch):
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)]).double()
    spec = TensorSpec(name="x", shape=(4,), dtype="float64")
    graph = sequential_graph(module, inputs=spec, target=spec, loss=lambda p, t: ((p - t) ** 2).mean(1))
    model = described(graph)
    plan = build_plan(model, Layout(batch=64, stages=4, microbatches=16, schedule=schedule))
    inputs = raw_inputs(graph, 64)
    living, most = defaultdict(dict), Counter()  # of each thread the storages of received activations

    def watched(self, slot, route, name, *, buffer_of=Transfers.buffer_of):
        buffer = buffer_of(self, slot, route, name)

        def received():
            own, thread = living[get_ident()], get_ident()
            storage = buffer().untyped_storage()
            own[storage._cdata] = weakref.ref(storage, lambda _, key=storage._cdata: own.pop(key))
            most[thread] = max(most[thread], len(own))
            return slot.inputs[name]

        return received

    def main(rank, transport):
        worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU)
        for _ in range(3):
            run_step(worker, inputs)
        return most[get_ident()]

    monkeypatch.setattr(Transfers, "buffer_of", watched)
    held = run_threads(4, main)
    in_flight = activations_in_flight(REGISTRY[schedule](4, 16, 4))
    stages = plan.train.placement.stages
    receivers = {stages[m.destination].worker for m in plan.train.messages if not m.is_gradient and is_trained(plan, m)}
    for worker in range(4):
        bound = in_flight[worker] + 1 if worker in receivers else 0  # one is on its way while the last is computed
        assert held[worker] <= bound, worker
        assert held[worker] or not bound


def adamw_losses_of_one_process(graph, batches) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in canonical_names(graph.components) if p.requires_grad], lr=1e-3)
    losses = []
    for inputs in batches:
        size = len(next(iter(inputs.values())))
        loss = run_layers(graph.layers, graph.components, inputs, targets=["loss"])["loss"].sum() / size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("build", [tiny_dit, pytest.param(tiny_stable_diffusion, marks=pytest.mark.slow)])
def test_float32_loss_curves_agree_over_twenty_steps(build):
    graph = build(torch.float32)
    model = described(graph)
    batches = [raw_inputs(graph, 8, seed) for seed in range(20)]
    expected = torch.tensor(adamw_losses_of_one_process(copy.deepcopy(graph), batches))
    for layout in (
        Layout(batch=8, stages=2, microbatches=4),
        Layout(batch=8, stages=3, microbatches=2, replicas=(2, 1, 1), schedule="gpipe"),
    ):
        plan = build_plan(model, layout)

        def main(rank, transport, plan=plan):
            worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU)
            optimizer = torch.optim.AdamW(list(worker.parameters.values()), lr=1e-3)
            losses = []
            for inputs in batches:
                losses.append(run_step(worker, inputs)[0])
                optimizer.step()
            return losses

        found = torch.tensor(run_threads(plan.mesh.num_ranks, main)).sum(0)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_a_forward_only_schedule_gives_the_losses_of_one_process(prepared):
    graph, model, inputs, _ = prepared
    expected: Tensor = run_layers(graph.layers, graph.components, inputs, targets=["loss"])["loss"]
    plan = build_plan(model, Layout(batch=16, stages=3, microbatches=4, replicas=(1, 2, 1)))

    def main(rank, transport):
        worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU)
        feed_rows(worker, inputs, PlanPhase.VALIDATE)
        return worker.validate.run()

    rows = {output.rows.start: output.value for outputs in run_threads(4, main) for output in outputs}
    torch.testing.assert_close(
        torch.cat([rows[start] for start in sorted(rows)]), expected.detach(), rtol=1e-12, atol=0
    )
