"""Tuned data parallelism against figures by hand; durations and bytes as in the tests of the other baselines."""

from dataclasses import replace

import pytest
from golden.plans import recorded_profile
from planner import synthetic

from benchmarks.rivals.copies import (
    AHEAD,
    CACHED,
    NARROW_SUMS,
    ZERO1,
    cache_of,
    cacheable_layers,
    cached,
    encoding_ahead,
    hybrid,
    narrow_sums,
    tuned_copies,
    zero1,
)
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.holding import Item, Workload
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.baselines import data_parallel, zero3
from diffusionpipe.planner.rivals.copy_times import zero3_times
from diffusionpipe.planner.search.judge import Judge

LATENCY = 2e-5
COMPUTE = 4 * 29  # seconds of four samples' forward and backward
BUCKET = 4.0 + LATENCY  # seconds of a layer's sum: 40 MB at 0.01 GB/s, half of it by each of two ranks


def judge(*, frozen=0.5, intra_gb=0.01, memory=80.0):
    profile = synthetic.chain([1.0, 2.0, 3.0, 4.0], parameters=[10**7] * 4, frozen=frozen)
    cluster = synthetic.cluster(2, memory=memory, intra_gb=intra_gb)
    return Judge(setting=Setting(profile=profile, cluster=cluster, workload=synthetic.workload(8)))


@pytest.mark.parametrize(("frozen", "step"), [(0.5, COMPUTE + BUCKET), (2.0, COMPUTE + 8.0)])
def test_encoding_ahead_takes_the_longer_of_encoders_and_the_last_sum(frozen, step):
    found = encoding_ahead(judge(frozen=frozen))
    assert found.step == pytest.approx(step)
    plain = data_parallel(judge(frozen=frozen), is_overlapped=True)
    assert plain.step == pytest.approx(COMPUTE + BUCKET + 4 * frozen)


def test_sums_in_two_bytes_take_half_as_long_and_hold_half_a_bucket_more():
    found, plain = narrow_sums(judge()), data_parallel(judge(), is_overlapped=True)
    assert found.step == pytest.approx(2.0 + COMPUTE + 2.0 + LATENCY)
    assert found.held[0] - plain.held[0] == 25 * 2**20 // 2


def test_zero1_scatters_gradients_and_gathers_parameters_and_holds_half_of_the_state():
    found, plain = zero1(judge()), data_parallel(judge(), is_overlapped=True)
    assert found.step == pytest.approx(2.0 + COMPUTE + (2.0 + LATENCY) + (4 * 2.0 + LATENCY))
    state = 4 * 10**7 * judge().setting.workload.width(Item.OPTIMIZER)
    assert plain.held[0] - found.held[0] == state // 2
    assert found.updated == plain.updated / 2


def test_hybrid_sharding_gathers_inside_nodes_and_sums_parts_between_them():
    profile = synthetic.chain([1.0, 2.0, 3.0, 4.0], parameters=[10**7] * 4, frozen=0.5)
    cluster = synthetic.cluster(4, memory=80.0, intra_gb=0.01, per_node=2)
    two = Judge(setting=Setting(profile=profile, cluster=cluster, workload=synthetic.workload(16)))
    found, flat = hybrid(two), zero3(two)
    assert found.sizes == "2 copies in parts over 2"
    assert found.held[0] > flat.held[0]
    _, step = zero3_times(two, 4.0, [0, 1], [0, 2])
    assert found.step == pytest.approx(2.0 + step)
    assert zero3_times(two, 4.0, [0, 1])[1] < step  # without the sums between nodes
    assert hybrid(judge()) is None


def controlnet():
    return Setting(
        profile=recorded_profile("controlnet-sd-1.5-a100-80"),
        cluster=load_cluster("a100-80x8"),
        workload=Workload(batch=64),
    )


def test_only_what_noise_and_time_do_not_reach_is_cached():
    """The locked half of a ControlNet's U-Net reads noisy latents; the text encoder and the VAE do not."""
    setting = controlnet()
    kinds = {name.partition(".")[0] for name in cacheable_layers(setting)}
    assert kinds == {"text_encoder", "vae"}
    left = cached(setting).graph.frozen_layers
    assert "unet" in {name.partition(".")[0] for name in left}
    assert not {"vae", "text_encoder"} & {name.partition(".")[0] for name in left}


def test_a_cache_holds_what_the_kept_layers_read_and_costs_what_its_layers_take():
    setting = controlnet()
    found = cache_of(setting)
    latents, states = 4 * 64 * 64, 77 * 768
    assert 2 * (latents + states) <= found.sample_bytes <= 4 * (2 * latents + states)
    whole, rest = (Judge(setting=one).tables.frozen_seconds for one in (setting, cached(setting)))
    assert found.seconds == pytest.approx(whole - rest)
    assert 0 < rest < whole


def test_all_that_fit_are_listed_and_none_is_slower_than_what_it_improves():
    setting = controlnet()
    found = {one.name: one for one in tuned_copies(setting)}
    assert set(found) == {AHEAD, NARROW_SUMS, ZERO1, CACHED}
    plain = data_parallel(Judge(setting=setting), is_overlapped=True)
    assert all(found[name].step <= plain.step for name in (AHEAD, NARROW_SUMS, CACHED))
    nothing = replace(setting, workload=replace(setting.workload, batch=65))
    assert tuned_copies(nothing) == ()
