"""Several stages on a worker, several ways through the workers, whole and split backwards: one process's gradients."""

import pytest
from kit.descriptions import described
from kit.greedy_orders import greedy
from kit.layouts import assert_same_step, reference_step, step_in_threads
from kit.tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion

from diffusionpipe.ir import Op
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.assembly import layout as layouts_module
from diffusionpipe.schedules.building.shapes import SPLIT, TRAIN, Pipe, linear, loop, wave

WAYS = {
    "linear": [linear],
    "loop": [lambda p: loop(p, 2)],
    "v": [lambda p: wave(p, 2)],
    "w": [lambda p: wave(p, 3)],
    "both directions": [linear, lambda p: tuple(reversed(linear(p)))],
    "two v": [lambda p: wave(p, 2), lambda p: wave(p, 2)],
}


def prepare(build):
    graph = build()
    inputs = raw_inputs(graph, 8)
    return graph, described(graph), inputs, reference_step(graph, inputs)


@pytest.fixture(scope="module")
def unet():
    return prepare(tiny_stable_diffusion)


@pytest.fixture(scope="module")
def dit():
    return prepare(tiny_dit)


@pytest.fixture
def layout_over(monkeypatch):
    """Makes a layout over two workers whose schedule is greedy along these ways, the batch of 8 shared evenly."""

    def layout(ways, ops, workers=2, **sizes):
        def generator(num_stages, num_microbatches, microbatch_size=1):
            count = num_microbatches // len(ways)
            return greedy(
                [Pipe(workers=way(num_stages), microbatches=(microbatch_size,) * count, ops=ops) for way in ways]
            )

        monkeypatch.setattr(layouts_module, "generated", lambda name, *sizes: {"greedy": generator}[name](*sizes))
        return Layout(batch=8, stages=workers, microbatches=4, schedule="greedy", **sizes)

    return layout


@pytest.mark.parametrize("ops", [TRAIN, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_gradients_are_those_of_one_process_wherever_the_stages_stand(unet, layout_over, ways, ops):
    graph, model, inputs, expected = unet
    assert_same_step(step_in_threads(graph, model, layout_over(ways, ops), inputs), expected)


@pytest.mark.parametrize(
    "sizes",
    [{"replicas": (2, 1)}, {"data_parallel": 2}, {"checkpointed": ("*",)}],
    ids=["replicas", "data parallel", "checkpointed"],
)
@pytest.mark.parametrize("ways", [WAYS["v"], WAYS["both directions"]], ids=["v", "both directions"])
def test_split_backwards_go_with_everything_else(dit, layout_over, ways, sizes):
    graph, model, inputs, expected = dit
    assert_same_step(step_in_threads(graph, model, layout_over(ways, SPLIT, **sizes), inputs), expected)


def test_a_stage_is_reduced_once_behind_its_last_weight_gradient(dit, layout_over):
    _, model, _, _ = dit
    train = build_plan(model, layout_over(WAYS["v"], SPLIT, data_parallel=2)).train
    for order in train.orders:
        reductions = [i for i, action in enumerate(order) if action.op is Op.REDUCE_GRAD]
        assert len(reductions) == 2
        for i in reductions:
            last = max(j for j, action in enumerate(order) if action.op is Op.W and action.stage == order[i].stage)
            assert last < i
