"""Under autocast each weight is cast once in an iteration; losses and gradients are those of torch.autocast alone."""

import copy

import pytest
import torch
from kit.descriptions import described
from kit.layouts import CPU, feed_rows, merge, run_step
from kit.tiny_models import raw_inputs, tiny_dit
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from diffusionpipe.models.cut.sequential import sequential_graph
from diffusionpipe.models.graphs.graph import canonical_names
from diffusionpipe.models.graphs.run import run_layers
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.runtime.comm.threads import run_threads
from diffusionpipe.runtime.compute.casts import Casts
from diffusionpipe.runtime.compute.stage import Precision
from diffusionpipe.runtime.engine.worker import build_worker

BATCH, MICROBATCHES = 8, 4
NARROW = Precision(autocast=torch.bfloat16)


class Image(nn.Module):
    def forward(self, x):
        return x.unflatten(-1, (1, 4, 4))


class Raw(nn.Module):
    """A weight that is read without a module, and a module that is used twice."""

    def __init__(self):
        super().__init__()
        self.mix, self.inner = nn.Parameter(torch.randn(32, 32) / 6), nn.Linear(32, 32)

    def forward(self, x):
        return self.inner(torch.tanh(self.inner(nn.functional.linear(x, self.mix))))


def chain_graph():
    torch.manual_seed(0)
    module = nn.Sequential(
        Image(),
        nn.Conv2d(1, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv2d(4, 2, 3, padding=1),
        nn.Sequential(nn.SiLU(), nn.Flatten(), nn.Linear(32, 32), nn.LayerNorm(32)),
        Raw(),
        nn.Linear(32, 16, bias=False),
    )
    for parameter in module[3][2].parameters():
        parameter.requires_grad_(False)
    return sequential_graph(module, inputs=(16,), target=(16,), loss=lambda p, t: ((p - t) ** 2).mean(1))


def autocast_step(graph, inputs):
    """A plain loop: autocast around the forward of every micro-batch, then its backward."""
    loss = 0.0
    rows = BATCH // MICROBATCHES
    for start in range(0, BATCH, rows):
        part = {name: value[start : start + rows] for name, value in inputs.items()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = run_layers(graph.layers, graph.components, part, targets=["loss"])["loss"]
        (losses.sum() / BATCH).backward()
        loss += float(losses.detach().double().sum()) / BATCH
    return loss, {name: p.grad for p, name in canonical_names(graph.components).items() if p.requires_grad}


def assert_bits(found, expected, twice=()):
    """`twice`: weights of modules that are used twice, whose two gradients may be added in float32 or in bfloat16."""
    assert found.loss == expected[0]
    assert found.gradients.keys() == expected[1].keys()
    for name, gradient in found.gradients.items():
        if name in twice:
            assert (gradient - expected[1][name]).norm() <= 1e-2 * gradient.norm()
        else:
            assert torch.equal(gradient, expected[1][name]), name


@pytest.mark.parametrize("checkpointed", [(), ("*",)], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("1f1b", 3), ("zb-h1", 2), ("interleaved", 2)])
def test_losses_and_gradients_have_the_bits_of_a_plain_autocast_loop(schedule, stages, checkpointed):
    graph = chain_graph()
    model, inputs = described(graph, autocast=torch.bfloat16), raw_inputs(graph, BATCH)
    layout = Layout(batch=BATCH, stages=stages, microbatches=MICROBATCHES, schedule=schedule, checkpointed=checkpointed)
    plan = build_plan(model, layout)

    def main(rank, transport):
        worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU, precision=NARROW)
        run_step(worker, inputs)
        return run_step(worker, inputs)

    # Threads share autocast's cache, which recomputed layers use: whether it has the first cast of two is chance there.
    is_in_float32 = schedule.startswith("zb") or (checkpointed and stages > 1)
    twice = ("model.4.inner.weight", "model.4.inner.bias") if is_in_float32 else ()
    assert_bits(merge(run_threads(stages, main)), autocast_step(chain_graph(), inputs), twice)


def test_the_gradients_of_a_real_model_are_those_of_a_plain_autocast_loop():
    graph = tiny_dit(torch.float32)
    model, inputs = described(graph, autocast=torch.bfloat16), raw_inputs(graph, BATCH)
    plan = build_plan(model, Layout(batch=BATCH, stages=2, microbatches=MICROBATCHES, encode_chunk=2))

    def main(rank, transport):
        worker = build_worker(copy.deepcopy(graph), model, plan, rank, transport, device=CPU, precision=NARROW)
        return run_step(worker, inputs)

    found, expected = merge(run_threads(2, main)), autocast_step(copy.deepcopy(graph), inputs)
    assert found.loss == pytest.approx(expected[0], rel=1e-6)
    for name, gradient in found.gradients.items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-5, atol=1e-8)


class CountedCasts(TorchDispatchMode):
    """Counts, while entered, casts of tensors that lie where one of these does."""

    def __init__(self, weights):
        super().__init__()
        self.counts = {weight.data_ptr(): 0 for weight in weights}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket is torch.ops.aten._to_copy and args[0].data_ptr() in self.counts:
            self.counts[args[0].data_ptr()] += 1
        return func(*args, **kwargs or {})


def single(schedule="1f1b", checkpointed=()):
    """A worker that is alone, and its inputs."""
    graph = chain_graph()
    model = described(graph, autocast=torch.bfloat16)
    layout = Layout(batch=BATCH, stages=1, microbatches=MICROBATCHES, schedule=schedule, checkpointed=checkpointed)
    (worker,) = run_threads(
        1,
        lambda rank, transport: build_worker(
            graph, model, build_plan(model, layout), rank, transport, device=CPU, precision=NARROW
        ),
    )
    return worker, graph.components["model"], raw_inputs(graph, BATCH)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_recomputed_layers_cast_again_and_leave_the_copies_of_the_others(schedule):
    worker, model, inputs = single(schedule, ("model.1", "model.5"))
    counted = CountedCasts([model[1].weight, model[5].weight, model[2].weight])
    with counted:
        run_step(worker, inputs)
    assert list(counted.counts.values()) == [2 * MICROBATCHES, 2 * MICROBATCHES, 1]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_each_weight_is_cast_once_in_an_iteration_also_a_frozen_one(schedule):
    worker, model, inputs = single(schedule)
    weights = [model[1].weight, model[2].bias, model[3][2].weight, model[4].inner.weight, model[5].weight]
    assert not model[3][2].weight.requires_grad
    counted = CountedCasts(weights)
    with counted:
        run_step(worker, inputs)
    assert list(counted.counts.values()) == [1] * len(weights)


def test_all_micro_batches_in_flight_share_the_copies():
    """All forwards first: what they keep besides the activations is one copy."""
    worker, model, inputs = single("gpipe")
    seen = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.add((t.shape, t.data_ptr())), t)[1], lambda t: t):
        run_step(worker, inputs)
    weight = model[5].weight
    assert len([1 for shape, _ in seen if shape in (weight.shape, weight.t().shape)]) == 1


def test_an_iteration_casts_the_weights_as_they_are_then_and_leaves_no_copy():
    worker, model, inputs = single()
    run_step(worker, inputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    worker.train.rewind()
    loss, gradients = run_step(worker, inputs)
    fresh = chain_graph()
    with torch.no_grad():
        for parameter in fresh.components["model"].parameters():
            parameter.mul_(1.5)
    expected = autocast_step(fresh, inputs)
    assert loss == expected[0]
    assert all(torch.equal(gradients[name], expected[1][name]) for name in gradients)
    assert len(worker.casts) == 0


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_validation_between_steps_changes_no_gradient(context):
    worker, _, inputs = single()
    expected = run_step(worker, inputs)
    with context():
        worker.feed(worker.validate, inputs)
        losses = worker.validate.run()
    assert sum(float(output.value.double().sum()) for output in losses) / BATCH == expected[0]
    loss, gradients = run_step(worker, inputs)
    assert loss == expected[0]
    assert gradients.keys() == expected[1].keys()
    assert all(torch.equal(gradient, expected[1][name]) for name, gradient in gradients.items())


def test_a_copy_made_without_gradients_still_gives_its_weight_one():
    casts, weight = Casts(), nn.Parameter(torch.randn(3, 3))
    with torch.no_grad():
        casts.make([weight], torch.bfloat16)
    casts.of(weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(3, 3))


def test_only_float32_weights_are_copied_and_each_once():
    casts = Casts()
    weights = [torch.randn(2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    casts.make([*weights, weights[0]], torch.bfloat16)
    assert [casts.of(weight) is weight for weight in weights] == [False, True, True]
    first = casts.of(weights[0])
    casts.make(weights, torch.bfloat16)
    assert casts.of(weights[0]) is first
    casts.drop()
    assert casts.of(weights[0]) is weights[0]


def test_an_iteration_that_fails_leaves_no_copy():
    worker, model, inputs = single()
    model[4].forward = lambda x: 1 / 0
    feed_rows(worker, inputs)
    with pytest.raises(ZeroDivisionError):
        worker.train.run()
    assert len(worker.casts) == 0


def test_without_autocast_nothing_is_copied():
    graph = chain_graph()
    model = described(graph)
    plan = build_plan(model, Layout(batch=BATCH, stages=1, microbatches=MICROBATCHES))
    (worker,) = run_threads(1, lambda rank, transport: build_worker(graph, model, plan, rank, transport, device=CPU))
    worker.train.prepare()
    assert len(worker.casts) == 0
