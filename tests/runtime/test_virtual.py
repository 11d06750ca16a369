from collections import Counter
from time import perf_counter

import pytest
import torch
from kit.greedy_orders import greedy

from diffusionpipe.costs import Costs, StageCosts, TensorSpec
from diffusionpipe.ir import COMPUTE_OPS, Op
from diffusionpipe.passes import communicate
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.rehearsals.virtual import VirtualCompute, precise_wait, virtual_executor
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.schedules.building.shapes import SPLIT, Pipe, wave
from diffusionpipe.simulator import simulate

TENSORS = {
    "input": TensorSpec(name="input", shape=(3,)),
    "hidden": TensorSpec(name="hidden", shape=(3,), needs_gradient=True),
    "loss": TensorSpec(name="loss", shape=(), needs_gradient=True),
}


SPLIT_V = "v, split"
SCHEDULES = {
    **REGISTRY,
    SPLIT_V: lambda p, m, size: greedy([Pipe(workers=wave(p, 2), microbatches=(size,) * m, ops=SPLIT)]),
}


def costs_of(num_stages):
    """Different waits for every stage, so that a mix-up shows."""
    return Costs(
        stages=tuple(
            StageCosts(forward=100 + s, backward=200 + s, input_grad=300 + s, weight_grad=400 + s)
            for s in range(num_stages)
        )
    )


def rehearse(name, num_stages, num_microbatches):
    """Every worker's waits, outputs and spans."""
    schedule = SCHEDULES[name](num_stages, num_microbatches, 2)
    costs = costs_of(len(schedule.placement.stages))
    schedule = communicate(schedule, simulate(schedule, costs))

    def main(rank, transport):
        waits = []
        executor = virtual_executor(
            schedule, rank, costs=costs, tensors=TENSORS, transport=transport, inputs=("input",), wait=waits.append
        )
        outputs = executor.run()
        return waits, outputs, executor.recording.spans()[0]

    return schedule, run_threads(num_stages, main)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_rehearsal_waits_for_every_compute_action_in_the_order_of_the_schedule(name):
    schedule, results = rehearse(name, 2, 8)
    first = {Op.F: 100, Op.B: 200, Op.I: 300, Op.W: 400}
    for worker, (waits, _, _) in enumerate(results):
        computes = [action for action in schedule.orders[worker] if action.op in COMPUTE_OPS]
        assert waits == [first[action.op] + action.stage for action in computes]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_only_last_stages_write_losses_one_for_each_sample(name):
    schedule, results = rehearse(name, 2, 8)
    losses: Counter[int] = Counter()
    for pipeline in schedule.placement.pipelines:
        losses[schedule.placement.stages[pipeline.stages[-1]].worker] += len(pipeline.microbatches)
    assert [len(outputs) for _, outputs, _ in results] == [losses[worker] for worker in range(2)]
    found = [output for _, outputs, _ in results for output in outputs]
    assert {(output.name, output.value.shape) for output in found} == {("loss", (2,))}
    assert sorted(output.rows.start for output in found) == list(range(0, 16, 2))


@pytest.mark.parametrize("name", ["1f1b", SPLIT_V])
def test_a_rehearsal_measures_a_span_for_every_action(name):
    schedule, results = rehearse(name, 2, 3)
    for worker, (_, _, spans) in enumerate(results):
        assert tuple(span.action for span in spans) == schedule.orders[worker]


def test_virtual_compute_gives_zero_gradients_to_inputs_that_need_them_and_none_to_others():
    waits = []
    compute = VirtualCompute(forward=1, backward=2, writes=[TENSORS["hidden"], TENSORS["input"]], wait=waits.append)
    trained, fixed = torch.ones(2, 3, requires_grad=True), torch.ones(2, 3)
    hidden, other = compute(trained, fixed)
    assert waits == [1]
    assert hidden.requires_grad
    assert not other.requires_grad
    hidden.sum().backward()
    assert waits == [1, 2]
    assert torch.equal(trained.grad, torch.zeros(2, 3))
    assert fixed.grad is None


@pytest.mark.parametrize("duration", [0.0, 0.0001, 0.003])
def test_a_precise_wait_never_ends_early(duration):
    start = perf_counter()
    precise_wait(duration)
    assert perf_counter() - start >= duration
