"""A step with self-conditioning is the written-out two passes, for every layout."""

from functools import cache

import pytest
import torch
from kit.descriptions import described
from kit.layout_cases import layouts_of, scattered
from kit.layouts import Step, assert_same_step, step_in_threads, steps_ahead
from kit.tiny_models import raw_inputs, tiny_dit, tiny_stable_diffusion

from diffusionpipe.ir import Op, Sharded
from diffusionpipe.models.base.self_conditioning import self_conditioned
from diffusionpipe.models.compose.cascade import cascade_graph
from diffusionpipe.models.graphs.graph import canonical_names
from diffusionpipe.models.graphs.run import needed_layers, run_layers
from diffusionpipe.models.graphs.widening import widen
from diffusionpipe.models.objectives.objective import ObjectiveSettings, Prediction
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.assembly.layout import BackboneLayout

BATCH = 16
CONVOLUTIONS = {"unet": "conv_in", "transformer": "pos_embed.proj"}
MODELS = {"stable diffusion": (tiny_stable_diffusion, "unet"), "dit": (tiny_dit, "transformer")}


def conditioned_graph(name="dit", share=0.5, prediction=Prediction.V_PREDICTION, **others):
    """With weights for the estimate that are not zero, so that it counts."""
    build, component = MODELS[name]
    objective = ObjectiveSettings(prediction=prediction, self_conditioning=share)
    graph = self_conditioned(build(objective=objective, **others), component, CONVOLUTIONS[component])
    with torch.no_grad():
        weight = graph.components[component].get_submodule(CONVOLUTIONS[component]).weight
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype) / 4)
    return graph


def inputs_of(graph, share, groups=1):
    """Rows as `Session.positions_of` puts them: in every group those without an estimate first."""
    inputs, rows = raw_inputs(graph, BATCH), BATCH // groups
    mask = (torch.arange(rows) >= rows - rows * share).to(torch.float32).repeat(groups)
    return {**inputs, "conditioned": mask}


def two_passes(graph, inputs):
    """The reference: a pass without gradients on zeros, then the pass that reads its estimate; in one process."""
    zeros = {"estimate": torch.zeros_like(inputs["noise"])}
    with torch.no_grad():
        estimate = run_layers(graph.layers, graph.components, inputs | zeros, targets=["estimate"])["estimate"]
    given = inputs | {"estimate": estimate}
    loss = run_layers(graph.layers, graph.components, given, targets=["loss"])["loss"].sum() / BATCH
    trained = {name: p for p, name in canonical_names(graph.components).items() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()))
    return Step(float(loss.detach()), dict(zip(trained, gradients, strict=True)))


@cache
def prepared(name, share, groups=1):
    graph = conditioned_graph(name, share)
    inputs = inputs_of(graph, share, groups)
    return graph, described(graph), inputs, two_passes(graph, inputs)


def assert_transparent(name, share, layout):
    graph, model, inputs, expected = prepared(name, share, layout.data_parallel)
    assert_same_step(step_in_threads(graph, model, layout, inputs), expected)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_two_passes(name, stages, share):
    for layout in layouts_of(stages, "1f1b")[:: 1 if stages == 2 else 3]:
        assert_transparent(name, share, layout)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-h1", "chimera", "hanayo"])
def test_other_families_take_probes_too(schedule):
    assert_transparent("dit", 0.5, Layout(batch=BATCH, stages=2, microbatches=4, schedule=schedule))


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("stages", [1, 2])
def test_sharded_blocks_are_probed(stages, share):
    layout = Layout(batch=BATCH, stages=stages, microbatches=4, data_parallel=2, sharded=Sharded.ALL, buckets=2)
    assert_transparent("stable diffusion", share, layout)


def test_a_micro_batch_that_is_conditioned_in_part_reads_zeros_for_the_rest():
    assert_transparent("dit", 0.375, Layout(batch=BATCH, stages=2, microbatches=4))


@pytest.mark.parametrize("checkpointed", [(), ("*",)])
def test_buckets_and_recomputation(checkpointed):
    layout = Layout(batch=BATCH, stages=2, microbatches=4, buckets=2, data_parallel=2, checkpointed=checkpointed)
    assert_transparent("stable diffusion", 0.5, layout)


@pytest.mark.parametrize("seed", range(2))
def test_filled_steps_are_those_of_the_two_passes(seed):
    graph, model, inputs, expected = prepared("stable diffusion", 0.5)
    others = raw_inputs(graph, BATCH, seed=1) | {"conditioned": inputs["conditioned"]}
    plan = build_plan(model, Layout(batch=BATCH, stages=2, microbatches=4), filler=scattered(seed))
    found = steps_ahead(graph, model, plan, [inputs, others, inputs])
    for step, reference in zip(found, [expected, two_passes(graph, others)], strict=True):
        assert_same_step(step, reference)


@cache
def two_models():
    """A cascade of both models, which read their own estimates; the step of each alone."""
    members = {"base": conditioned_graph("dit"), "super": conditioned_graph("stable diffusion")}
    alone = {name: inputs_of(member, 0.5) for name, member in members.items()}
    pixels = alone["base"]["pixels"]
    expected = {name: two_passes(member, alone[name] | {"pixels": pixels}) for name, member in members.items()}
    own = {f"{name}/{key}": value for name, inputs in alone.items() for key, value in inputs.items() if key != "pixels"}
    graph = cascade_graph(members)
    return graph, described(graph), {"pixels": pixels, **own}, expected


@pytest.mark.parametrize("schedule", ["opposed", "together", "1f1b"])
def test_two_models_read_their_own_estimates(schedule):
    graph, model, inputs, expected = two_models()
    backbones = (BackboneLayout(name="base", microbatches=4), BackboneLayout(name="super", microbatches=2))
    layout = Layout(batch=BATCH, stages=2, microbatches=4, schedule=schedule, backbones=backbones)
    found = step_in_threads(graph, model, layout, inputs)
    assert found.loss == pytest.approx(sum(step.loss for step in expected.values()), rel=1e-12)
    for name, step in expected.items():
        own = {key.partition("/")[2]: value for key, value in found.gradients.items() if key.startswith(f"{name}/")}
        assert_same_step(Step(step.loss, own), step)


def test_no_gradient_goes_through_the_estimate():
    """With it the gradients would be others, by far more than the transparency allows."""
    graph, model, inputs, expected = prepared("dit", 1.0)
    trained = {name: p for p, name in canonical_names(graph.components).items() if p.requires_grad}
    objective = graph.components["objective"]
    zeros = {"estimate": torch.zeros_like(inputs["noise"])}
    written = run_layers(graph.layers, graph.components, inputs | zeros, targets=["prediction", "noisy", "timesteps"])
    undetached = _with_gradient(objective, **written)
    loss = run_layers(graph.layers, graph.components, inputs | {"estimate": undetached}, targets=["loss"])["loss"]
    through = torch.autograd.grad(loss.sum() / BATCH, list(trained.values()))
    total = torch.stack([g.norm() for g in expected.gradients.values()]).norm()
    name, gradient = next(iter(expected.gradients.items()))
    assert (through[0] - gradient).norm() > 1e-3 * total, name
    assert not model.tensor("estimate").needs_gradient


def _with_gradient(objective, prediction, noisy, timesteps):
    alphas = objective.alphas_cumprod[timesteps].to(noisy.dtype).reshape(-1, 1, 1, 1)
    return alphas**0.5 * noisy - (1 - alphas) ** 0.5 * prediction


@pytest.mark.parametrize("prediction", list(Prediction))
def test_the_estimate_of_the_right_prediction_is_the_clean_sample(prediction):
    graph = conditioned_graph("dit", prediction=prediction)
    inputs = inputs_of(graph, 0.5)
    names = ["target", "noisy", "timesteps", "latents"]
    written = run_layers(needed_layers(graph.layers, names, inputs), graph.components, inputs, targets=names)
    estimate = graph.components["objective"].estimate(written["target"], written["noisy"], written["timesteps"])
    assert torch.allclose(estimate, written["latents"], atol=1e-4)  # alphas are float32


@pytest.mark.parametrize("samples", [1, 4])
def test_a_widened_convolution_gives_the_bits_of_the_plain_one(samples):
    """Also where one convolution of all inputs would not."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, padding=1))
    noisy, estimate = torch.randn(2, samples, 4, 64, 64)
    expected = plain(noisy)
    widen(plain, "0", 4)
    found = plain(torch.cat([noisy, estimate], dim=1))
    assert torch.equal(found, expected)
    found.sum().backward()
    assert plain[0].weight.grad[:, 4:].abs().min() > 0


def test_probes_train_nothing_and_sampling_has_none():
    _, model, *_ = prepared("dit", 0.5)
    plan = build_plan(model, Layout(batch=BATCH, stages=2, microbatches=4))
    probe = next(p for p in plan.train.placement.pipelines if p.is_probe)
    assert (probe.ops, list(probe.numbers)) == (frozenset({Op.F}), [2, 3])
    assert [list(p.numbers) for p in plan.validate.placement.pipelines if p.is_probe] == [[0, 1, 2, 3]]
    assert not any(p.is_probe for p in plan.sample[0].placement.pipelines)
