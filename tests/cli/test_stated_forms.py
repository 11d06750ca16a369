"""Models that are stated with frozen weights in one byte or four bits a number: their bytes, their times, errors."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from golden.plans import recorded_profile
from torch import nn
from typer.testing import CliRunner

from diffusionpipe import cli
from diffusionpipe.cli.verbs.plan_widths import line_of
from diffusionpipe.costs.cluster import with_memory
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.forms import Form
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding import Workload
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.graphs.graph import own_parameters
from diffusionpipe.planner.choosing.combined import stored_in
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.workflows.planning.question import PlanQuestion
from diffusionpipe.workflows.planning.stated_model import StatedModel, named_model, stated_graph
from diffusionpipe.workflows.planning.stated_setting import stated_setting
from diffusionpipe.workflows.planning.widths import PlannedWidth, fastest_of, tried_widths


def _frozen_bytes(name, form, **options):
    """Bytes of the frozen parameters of each component as the description has them."""
    stated = StatedModel(name=name, has_narrow_store=True, form=form, **options)
    model = describe(stated_graph(stated), autocast=torch.bfloat16)
    component = {name: layer.component for layer in model.layers for name in layer.parameters}
    found = {}
    for one in model.parameters:
        if not one.is_trainable:
            found[component[one.name]] = found.get(component[one.name], 0) + one.num_bytes
    return found


def _by_hand(name, **options):
    """0.5159 x linear + 2 x convolutions + 4 x (norms and tables), by torch's modules, over the layers that run."""
    graph = stated_graph(StatedModel(name=name, has_narrow_store=False, **options))
    used = {p for layer in graph.layers for p in own_parameters(layer, graph.components[layer.component])}
    found = {}
    for component, root in graph.components.items():
        for module in root.modules():
            is_linear, is_convolution = type(module) is nn.Linear, isinstance(module, nn.Conv2d | nn.Conv3d)
            for key, parameter in module.named_parameters(recurse=False):
                if parameter not in used or parameter.requires_grad:
                    continue
                factor = 0.5159 if is_linear and key == "weight" and component != "vae" else 2 if is_linear else 4
                factor = 2 if is_convolution else factor
                found[component] = found.get(component, 0) + factor * parameter.numel()
                used.discard(parameter)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux.2-dev", "flux.1-dev", "krea-2", "qwen-image"])
def test_frozen_bytes_in_nf4_are_those_of_the_formula(name):
    found, expected = _frozen_bytes(name, Form.NF4, lora_rank=16), _by_hand(name, lora_rank=16)
    assert found.keys() == expected.keys()
    for component, size in expected.items():
        assert found[component] == pytest.approx(size, rel=1e-3), component


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen-image", "krea-2", "wan-2.1-14b"])
def test_frozen_bytes_beside_a_whole_model_are_two_a_factor_and_four_for_norms_and_tables(name):
    """To the byte, causal convolutions of VAEs included."""
    graph = stated_graph(StatedModel(name=name, has_narrow_store=True))
    used = {p for layer in graph.layers for p in own_parameters(layer, graph.components[layer.component])}
    frozen = {parameter for parameter in used if not parameter.requires_grad}
    expected, left = 0, set(frozen)
    for root in graph.components.values():
        for module in root.modules():
            width = 2 if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) else 4
            own = left.intersection(module.parameters(recurse=False))
            expected += width * sum(parameter.numel() for parameter in own)
            left -= own
    assert sum(parameter.nbytes for parameter in frozen) == expected > 0
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("form", [Form.INT8, Form.NF4])
@pytest.mark.parametrize("name", ["sd-1.5", "flux.1-dev"])
def test_a_way_out_stores_the_bytes_that_the_model_has_with_this_form(name, form):
    stated = StatedModel(name=name, has_narrow_store=True, lora_rank=16)
    described = describe(stated_graph(stated), autocast=torch.bfloat16)
    recorded = recorded_profile("flux.1-dev-lora-rtx4090")
    layers = tuple(replace(recorded.layers[0], name=layer.name) for layer in described.layers)
    profile = replace(recorded, graph=described, layers=layers, precision="bfloat16")
    setting = Setting(profile=profile, cluster=load_cluster("rtx4090x2"), workload=Workload(batch=2))
    found = sum(one.num_bytes for one in stored_in(form, setting).graph.parameters if not one.is_trainable)
    assert found == pytest.approx(sum(_frozen_bytes(name, form, lora_rank=16).values()), rel=1e-4)


def test_the_option_names_the_forms():
    stated = named_model("flux.1-dev", None, lora_rank="16", frozen_dtype="nf4")
    assert (stated.form, stated.has_narrow_store) == (Form.NF4, True)
    with pytest.raises(ConfigError, match="use bfloat16, float8, int8, nf4, none or auto"):
        named_model("flux.1-dev", None, frozen_dtype="int4")


@pytest.mark.slow
def test_the_first_line_of_a_plan_says_what_stays_wider():
    arguments = ["plan", "--model", "sd-1.5", "--resolution", "256", "--lora-rank", "16", "--cluster", "rtx4090x2"]
    result = CliRunner().invoke(cli.app, [*arguments, "--batch", "8", "--frozen-dtype", "nf4", "--no-cache"])
    assert result.exit_code == 0, result.output
    first = " ".join(result.output.split("batch 8")[0].split())
    assert re.search(r"frozen weights stored in nf4 \(1\.[0-4] of 1\.\d GiB stay wider\)", first)


def test_a_model_that_is_trained_whole_has_nothing_to_store():
    result = CliRunner().invoke(
        cli.app,
        [
            "plan",
            "--model-class",
            "SD3Transformer2DModel",
            "--cluster",
            "rtx4090x2",
            "--frozen-dtype",
            "nf4",
            "--no-cache",
        ],
    )
    assert "nothing of it is frozen; give --lora-rank" in " ".join(str(result.exception).split())


def _width(name, step):
    return PlannedWidth(
        name=name, asked=name, choice=None if step is None else SimpleNamespace(step=step), nearest=None
    )


def test_of_the_widths_that_fit_the_fastest_is_planned_and_of_near_ties_the_widest():
    def of(*steps):
        return fastest_of(
            [_width(name, step) for name, step in zip(("bfloat16", "int8", "nf4"), steps, strict=True)]
        ).name

    assert of(1.0, 0.995, 0.99) == "bfloat16"
    assert of(1.0, 0.9, 0.89) == "int8"
    assert of(None, 1.0, 1.2) == "int8"
    assert of(None, None, 1.0) == "nf4"
    assert of(None, None, None) == "nf4"


def test_each_width_has_a_line_with_its_step_or_what_it_lacks():
    profile, cluster = recorded_profile("sd-2.1-a100-80"), load_cluster("a100-80x1")
    asked = {None: 1.0, Form.INT8: 8.0, Form.NF4: 80.0}

    def ask(model):
        machines = with_memory(cluster, round(asked[model.form] * 2**30))
        setting = stated_setting(profile, machines, 1, checkpoint=(), has_ema=False, optimizer="AdamW")
        return PlanQuestion(setting=setting, may_recompute=True)

    lines = [line_of(one) for one in tried_widths(StatedModel(name="sd-2.1"), ask)]
    assert re.fullmatch(r"frozen weights in bfloat16: lacks \d+\.\d GiB: .*", lines[0])
    assert re.fullmatch(r"frozen weights in int8: lacks \d+\.\d GiB: .*", lines[1])
    assert re.fullmatch(r"frozen weights in nf4: \d+\.\d ms for a batch of 1, fullest device \d+\.\d GiB: .*", lines[2])
