from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.costs import Device
from diffusionpipe.errors import ConfigError
from diffusionpipe.holding import HOST
from diffusionpipe.ir import Sharded
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.planner.pricing.encoders import components_of, encode_chunks_of
from diffusionpipe.planner.pricing.given import Given
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.storing import encoder_bytes, is_heavy, stored
from diffusionpipe.planner.rivals.baselines import best_of, data_parallel
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.timing.legal import check

GB = 10**9
TEXT = "text.0"


def setting_of(*, memory=80.0, ranks=2, bandwidth=10.0, given=None, batch=8, profile=None):
    """Encoders of 0.71 GB, of which a text layer has 0.03, beside a U-Net."""
    cluster = synthetic.cluster(ranks, memory=memory, bus_gb=100)
    devices = tuple(replace(device, host_bandwidth=bandwidth * GB) for device in cluster.devices)
    return Setting(
        profile=profile or synthetic.unet(),
        cluster=replace(cluster, devices=devices),
        workload=synthetic.workload(batch),
        given=given or Given(),
    )


def test_a_layer_takes_its_own_time_or_that_of_its_copy_whichever_is_longer():
    setting = setting_of(bandwidth=2.0)
    before, after = setting.profile, stored(setting, HOST).profile
    copy = 2 * (340_000_000 // 23) / (2 * GB)
    assert after.forward(TEXT, 1) == pytest.approx(copy)
    assert before.forward(TEXT, 1) < copy < before.forward(TEXT, 1024) == after.forward(TEXT, 1024)
    trained = setting.graph.backbone_layers
    assert all(after.layer(name) == before.layer(name) for name in trained)


def test_the_device_that_copies_slowest_counts():
    setting = setting_of(bandwidth=2.0)
    first, second = setting.cluster.devices
    quick = replace(setting.cluster, devices=(first, replace(second, host_bandwidth=100 * GB)))
    assert stored(replace(setting, cluster=quick), HOST).profile == stored(setting, HOST).profile


def test_two_layers_of_the_encoders_are_on_a_device_at_a_time():
    setting = setting_of()
    graph, on_host = setting.graph, stored(setting, HOST)
    assert encoder_bytes(setting) == 2 * (8 * 4_000_000 + 23 * (340_000_000 // 23))
    assert encoder_bytes(on_host) == 2 * 2 * (340_000_000 // 23)
    assert on_host.ledger.resting(graph.frozen_layers[:3]).device == 2 * 2 * 4_000_000
    assert on_host.ledger.resting(()).device == 0


@pytest.mark.parametrize("fill", [False, True])
def test_a_plan_holds_so_much_less_and_says_so(fill):
    asked = setting_of(given=Given(encoders="host", stages=2))
    choice = choose(asked, fill=fill)
    plan = choice.plan()
    check(plan.train)
    assert plan.encoders == "host"
    assert choice.sizes.endswith(HOST.words + ", filled" if fill else HOST.words)
    largest = encoder_bytes(stored(asked, HOST))
    assert {use.frozen for use in choice.proposal.memory} == {largest}
    refused = choose(replace(asked, given=Given(encoders="device", stages=2)), fill=fill)
    assert refused.plan().encoders == "device"
    assert max(use.frozen for use in refused.proposal.memory) == encoder_bytes(asked)


def test_encoders_leave_the_devices_where_nothing_fits_beside_them_and_only_there():
    roomy, tight = setting_of(memory=80), setting_of(memory=15.5)
    assert not is_heavy(roomy)
    assert choose(roomy).plan().encoders == "device"
    alone = replace(tight, given=Given(data_parallel=2, encoders="device"))
    heavy = replace(tight, profile=_with_large_encoders(tight.profile))
    assert is_heavy(heavy)
    with pytest.raises(ConfigError, match="No layout fits"):
        choose(replace(heavy, given=replace(alone.given, sharded=Sharded.NONE)))
    found = choose(replace(heavy, given=Given(data_parallel=2, sharded=Sharded.NONE)))
    assert found.plan().encoders == "host"
    assert found.proposal.overflow <= 0
    assert HOST.words in found.comparison().ours[0].sizes


def _with_large_encoders(profile):
    parameters = tuple(p if p.is_trainable else replace(p, shape=(4 * p.shape[0],)) for p in profile.graph.parameters)
    return replace(profile, graph=replace(profile.graph, parameters=parameters))


def test_others_may_do_the_same():
    setting = setting_of(memory=15.5)
    setting = replace(setting, profile=_with_large_encoders(setting.profile))

    def copies(judge: Judge):
        return data_parallel(judge, is_overlapped=True)

    assert copies(Judge(setting=setting)).overflow > 0
    best = best_of(copies, setting)
    assert best.overflow <= 0
    assert best.sizes.endswith(HOST.words)


def test_it_is_refused_where_it_cannot_be_or_is_not_known():
    wanted = Given(encoders="host")
    with pytest.raises(ConfigError, match="does not say how fast its devices copy"):
        choose(setting_of(bandwidth=0, given=wanted))
    profile = synthetic.chain([0.01] * 6)
    everything = tuple(replace(parameter, is_trainable=True) for parameter in profile.graph.parameters)
    trained = replace(profile, graph=replace(profile.graph, parameters=everything))
    with pytest.raises(ConfigError, match="no frozen part"):
        choose(setting_of(profile=trained, given=wanted))
    with pytest.raises(ValueError, match="host_bandwidth"):
        Device(name="x", memory=1, host_bandwidth=-1)


def test_each_component_goes_in_chunks_of_its_own():
    setting = setting_of(memory=16, batch=64)
    assert list(components_of(setting.graph)) == ["vae", "text_encoder", "objective"]
    chunks = encode_chunks_of(setting)
    assert chunks["vae"] < chunks["text_encoder"] == setting.workload.encode_chunk
    plan = choose(replace(setting, given=Given(stages=2)), fill=False).plan()
    by_size = {len(fill.samples): fill.layers for fill in plan.train.fills}
    assert len(by_size[chunks["vae"]]) == 8
    assert len(by_size[chunks["text_encoder"]]) == 24
