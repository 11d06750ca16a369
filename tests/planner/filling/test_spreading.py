"""Copies of the model whose encoders rest in host memory: frozen layers wait for no weights, in the memory there is."""

from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.holding import HOST
from diffusionpipe.ir import Op, Sharded
from diffusionpipe.planner import Layout
from diffusionpipe.planner.filling.filler import fill_plan, filler_of
from diffusionpipe.planner.filling.frozen_layers import frozen_layers
from diffusionpipe.planner.filling.spreading import spread_fills
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import frozen_time
from diffusionpipe.planner.pricing.storing import stored
from diffusionpipe.planner.search.proposal import propose
from diffusionpipe.timing.legal import check

GB = 10**9
BATCH, RANKS = 16, 2
ROWS = BATCH // RANKS


def setting_of(*, bandwidth=1.0, memory=80.0) -> Setting:
    """A text encoder of 0.68 GB, which comes in 0.68 s at 1 GB/s, runs in 0.03 s; so does each copy train in 0.3 s."""
    cluster = synthetic.cluster(RANKS, memory=memory, bus_gb=100)
    devices = tuple(replace(device, host_bandwidth=bandwidth * GB) for device in cluster.devices)
    cluster = replace(cluster, devices=devices)
    whole = Setting(profile=synthetic.unet(), cluster=cluster, workload=synthetic.workload(BATCH))
    return stored(whole, HOST)


def layout_of(*, sharded=Sharded.NONE, buckets=24) -> Layout:
    return Layout(batch=BATCH, stages=1, microbatches=2, data_parallel=RANKS, sharded=sharded, buckets=buckets)


@pytest.mark.parametrize("sharded", [Sharded.NONE, Sharded.ALL])
def test_frozen_layers_take_their_own_time_where_the_copy_trains_long_enough(sharded):
    setting, layout = setting_of(bandwidth=5.0), layout_of(sharded=sharded)
    whole = setting.whole
    assert whole is not None
    found = propose(setting, layout, filler_of(setting))
    check(found.train)
    names = setting.graph.frozen_layers
    own, waiting = (frozen_time(one.profile, names, ROWS) for one in (whole, setting))
    assert waiting > 1.5 * own
    assert sum(found.costs.fills) == pytest.approx(own, rel=0.01)
    # Waits of a few gathers, 2 % of the iteration, are filled with encoders on the device alone.
    assert found.iteration == pytest.approx(propose(whole, layout, filler_of(whole)).iteration, rel=0.025)
    assert found.iteration < propose(setting, layout).iteration - 0.7 * (waiting - own)


def test_with_few_places_only_some_layers_are_spread():
    setting = setting_of(bandwidth=5.0)
    few, many = (propose(setting, layout_of(buckets=n), filler_of(setting)).iteration for n in (1, 24))
    assert many < few < propose(setting, layout_of(buckets=1)).iteration


def test_every_layer_runs_once_on_every_sample_and_the_others_follow_at_the_end():
    setting = setting_of(bandwidth=5.0)
    train = propose(setting, layout_of(), filler_of(setting)).train
    one = lambda span: range(span.start, span.stop)  # noqa: E731
    done = [(layer, s) for fill in train.fills for layer in one(fill.layers) for s in one(fill.samples)]
    assert len(done) == len(set(done)) == ROWS * len(setting.graph.frozen_layers)
    components = [fill.component for fill in train.fills]
    assert components == sorted(components, key=["text_encoder", "vae", "objective"].index)
    order = [action.op for action in train.orders[0]]
    last = max(i for i, op in enumerate(order) if op in (Op.F, Op.B))
    spread = [i for i, op in enumerate(order) if op is Op.ENCODE and i < last]
    assert len(spread) > 4
    assert spread[0] > order.index(Op.B)  # activations go by then


def test_where_weights_cannot_come_in_time_they_come_all_the_while():
    setting = setting_of(bandwidth=0.5)
    found = propose(setting, layout_of(), filler_of(setting))
    text = [name for name in setting.graph.frozen_layers if name.startswith("text")]
    copying = sum(setting.profile.arriving[name] for name in text)
    bunched = propose(setting, layout_of()).iteration
    assert copying <= found.iteration < 0.9 * bunched


def test_weights_that_come_while_layers_run_leave_the_fills_as_they_are():
    setting = setting_of(bandwidth=1000.0)
    frozen = frozen_layers(setting.profile)
    seen = []

    def filler(unfilled):
        seen.append(spread_fills(setting, unfilled, frozen))
        assert filler_of(setting)(unfilled) == fill_plan(setting, unfilled, frozen).fills
        return fill_plan(setting, unfilled, frozen).fills

    propose(setting, layout_of(), filler)
    assert seen == [()]
    whole = setting.whole
    assert whole is not None
    propose(whole, layout_of(), lambda unfilled: seen.append(spread_fills(whole, unfilled, frozen)) or filler(unfilled))
    assert seen[1] == ()


def test_what_reads_spread_tensors_waits_for_them_though_the_first_blocks_are_gathered():
    setting = setting_of(bandwidth=5.0)
    profile = setting.profile
    layers = tuple(
        replace(layer, reads=(*layer.reads, "text")) if layer.name == "vae.0" else layer
        for layer in setting.graph.layers
    )
    text = [layer for layer in layers if layer.component == "text_encoder"]
    order = (*text, *(layer for layer in layers if layer not in text))
    measured = {layer.name: layer for layer in profile.layers}
    graph = replace(setting.graph, layers=order)
    reading = replace(profile, graph=graph, layers=tuple(measured[layer.name] for layer in order))
    train = propose(
        replace(setting, profile=reading), layout_of(sharded=Sharded.ALL), filler_of(replace(setting, profile=reading))
    )
    check(train.train)
    components = [fill.component for fill in train.train.fills]
    assert components.index("vae") > max(i for i, name in enumerate(components) if name == "text_encoder")
    plain = propose(setting, layout_of(sharded=Sharded.ALL), filler_of(setting)).train
    assert plain.fills[0].component == "vae"


def test_what_would_not_fit_is_not_spread():
    """All samples of a layer go together where it is spread; at the end as few as memory demands."""
    roomy = setting_of(bandwidth=5.0)
    peak = max(use.total for use in propose(roomy, layout_of(), filler_of(roomy)).memory)
    least = max(use.total for use in propose(roomy, layout_of(), lambda u: _one_by_one(roomy, u)).memory)
    assert least < peak
    tight = setting_of(bandwidth=5.0, memory=(least + peak) / 2 / GB)
    assert propose(tight, layout_of(), filler_of(tight)).overflow <= 0


def _one_by_one(setting, unfilled):
    devices = tuple(replace(device, memory=1) for device in setting.cluster.devices)
    narrow = replace(setting, cluster=replace(setting.cluster, devices=devices))
    return fill_plan(narrow, unfilled, frozen_layers(setting.profile)).fills
