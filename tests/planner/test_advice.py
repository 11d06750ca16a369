import re
from dataclasses import replace

import pytest
from golden.plans import recorded_profile
from planner import synthetic

from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.holding import Workload
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.choosing.advice import nearest_layout, nothing_fits, with_adapters
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.nearest import least_overflow
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.planner.search.search import search


def tight_setting(*, memory=1.0, ranks=2, encoders=4 * 10**7, batch=8):
    """Eight layers that take 12.8 GB with gradients and optimizer state."""
    return Setting(
        profile=synthetic.chain([0.01] * 8, parameters=[10**8] * 8, frozen_parameters=encoders),
        cluster=synthetic.cluster(ranks, memory=memory),
        workload=synthetic.workload(batch),
    )


@pytest.fixture(scope="module")
def advice():
    return nothing_fits(tight_setting())


def with_projections(profile):
    """The profile with every second trained weight as a projection of attention, as diffusers names it."""
    named = {}
    for index, one in enumerate(p for p in profile.graph.parameters if p.is_trainable):
        if index % 2:
            side = round(one.shape[0] ** 0.5)
            name = f"unet.{one.name.removesuffix('.weight')}.attn.to_q.weight"
            named[one.name] = replace(one, name=name, shape=(side, side))
    graph = replace(
        profile.graph,
        parameters=tuple(named.get(p.name, p) for p in profile.graph.parameters),
        layers=tuple(
            replace(layer, parameters=tuple(named[n].name if n in named else n for n in layer.parameters))
            for layer in profile.graph.layers
        ),
    )
    return replace(profile, graph=graph)


def test_the_parts_of_the_fullest_device_add_up_to_the_figures_of_the_advice(advice):
    nearest = nearest_layout(tight_setting())
    first, second, *_ = advice.splitlines()
    assert first == (
        f"No layout fits in memory: the nearest, {nearest.layout}, needs {(nearest.use.total - 1e9) / 2**30:.1f} GiB "
        f"more than worker {nearest.worker} has."
    )
    pattern = r"Worker \d would hold (?P<total>[0-9.]+) GiB: (?P<parts>.*)\. Its device, synthetic, has 0.93 GiB"
    whole = re.match(pattern, second)
    parts = [float(part.rsplit(" ", 1)[1]) for part in whole["parts"].split(", ")]
    assert f"{sum(parts):.2f}" == whole["total"]
    assert f"- devices with {float(whole['total']):.1f} GiB for training: the nearest layout, as above" in advice


def test_the_nearest_layout_may_be_sharded():
    profile = synthetic.chain([0.01] * 3, parameters=[10**7, 3 * 10**8, 10**7])
    setting = replace(tight_setting(ranks=4), profile=profile)
    split = tuple(
        replace(layer, parameters=("layer1.weight", "layer1.bias")) if layer.name == "layer1" else layer
        for layer in profile.graph.layers
    )
    half = next(p for p in profile.graph.parameters if p.name == "layer1.weight")
    halves = (
        replace(half, shape=(half.shape[0] // 2,)),
        replace(half, name="layer1.bias", shape=(half.shape[0] // 2,)),
    )
    others = tuple(p for p in profile.graph.parameters if p is not half)
    graph = replace(profile.graph, layers=split, parameters=(*others, *halves))
    setting = replace(setting, profile=replace(profile, graph=graph))
    nearest, chain = nearest_layout(setting), least_overflow(setting)
    assert nearest.candidate.sharded is Sharded.ALL
    assert nearest.proposal.overflow < chain[1].overflow
    never = nearest_layout(replace(setting, given=Given(sharded=Sharded.NONE)))
    assert never.candidate.sharded is Sharded.NONE


def test_recomputing_is_proposed_where_it_makes_the_model_fit_with_its_memory():
    setting = Setting(
        profile=synthetic.transformer(forward_ms=100, gigaparameters=1),
        cluster=synthetic.cluster(2, memory=12),
        workload=synthetic.workload(2),
    )
    assert search(setting).winner is None
    again = replace(setting, workload=replace(setting.workload, checkpointed=("*",)))
    fits = nothing_fits(setting).partition("These changes would fit")[2].partition("These help")[0]
    assert f"--checkpoint '*'): {nearest_layout(again).use.total / 2**30:.1f} GiB" in fits


@pytest.mark.parametrize("name", ["flux.1-dev"])
def test_the_memory_with_adapters_is_near_that_of_a_profile_with_adapters_and_not_below(name):
    """The LoRA profile is made by peft on the model itself, ours from the profile of full training."""
    cluster, workload = load_cluster("l40sx8"), Workload(batch=8, checkpointed=("*",)).narrow(2)
    full, adapted = (
        Setting(profile=recorded_profile(one), cluster=cluster, workload=workload)
        for one in (f"{name}-rtx4090", f"{name}-lora-rtx4090")
    )
    guess = with_adapters(full)
    candidate, _ = least_overflow(adapted)
    layout = candidate.layout(adapted)
    theirs, ours = (max(use.total for use in propose(one, layout).memory) for one in (adapted, guess))
    assert theirs <= ours < 1.25 * theirs
    assert with_adapters(adapted) is None


def test_lora_is_named_with_its_memory_where_the_projections_are_known():
    plain = tight_setting()
    setting = replace(plain, profile=with_projections(plain.profile))
    adapted = with_adapters(setting)
    trained = [p for p in adapted.graph.parameters if p.is_trainable]
    assert trained
    assert all(".attn.to_q.lora_" in p.name and 16 in p.shape for p in trained)
    figure = f"{nearest_layout(adapted).use.total / 2**30:.1f} GiB"
    assert f'- LoRA ([lora] rank = 16, model.frozen_dtype = "bfloat16" in a recipe): {figure}' in nothing_fits(setting)


def test_lora_is_named_without_a_figure_where_they_are_not_known(advice):
    assert "- LoRA ([lora] rank = 16 in a recipe): only small matrices have gradients and optimizer state" in advice


def test_more_devices_are_proposed_as_many_as_are_enough():
    setting = tight_setting(memory=4, batch=16)
    assert search(setting).winner is None
    assert re.search(r"- 4 such devices instead of 2: 3\.\d GiB", nothing_fits(setting))


def test_encoders_in_host_memory_are_named_where_the_cluster_does_not_say_how_fast_copies_are(advice):
    assert "- encoders in host memory, which are 76.3 MiB on each device" in advice
    assert "`diffusionpipe cluster` measures it" in advice
    assert "encoders in host memory" not in nothing_fits(tight_setting(encoders=8))
