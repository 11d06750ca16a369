from dataclasses import replace

import pytest
from planner import synthetic

from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.baselines import (
    best_baselines,
    data_parallel,
    gpipe_starts,
    pipeline,
    places,
    spp_starts,
    zero3,
)
from diffusionpipe.planner.search.judge import Judge

LATENCY = 2e-5


def chain_judge(*, batch=8, num_ranks=2, memory=80.0, intra_gb=1e-6, parameters=(100, 200, 300, 400), **workload):
    """Forward 1, 2, 3, 4 s a sample, each gradient as long (the first layer's input needs none)."""
    profile = synthetic.chain([1.0, 2.0, 3.0, 4.0], parameters=parameters, frozen=0.5)
    cluster = synthetic.cluster(num_ranks, memory=memory, intra_gb=intra_gb)
    return Judge(setting=Setting(profile=profile, cluster=cluster, workload=synthetic.workload(batch, **workload)))


def test_data_parallelism_without_overlap_adds_everything_up():
    found = data_parallel(chain_judge(), is_overlapped=False)
    compute = 4 * (10 + 10 + 9)  # 4 samples a rank
    sums = LATENCY + 2 * (1 / 2) * 1000 * 4 / 1000.0  # one bucket, at 1000 bytes a second
    assert found.frozen == 4 * 0.5
    assert found.step == pytest.approx(4 * 0.5 + compute + sums)


def test_overlap_hides_all_sums_but_what_the_last_layers_leave():
    parameters = [10**7, 10**7, 10**7, 10**7]  # 40 MB of gradients a layer: a bucket each
    judge = chain_judge(parameters=parameters, intra_gb=0.01)  # 4 s a bucket
    found = data_parallel(judge, is_overlapped=True)
    assert found.step == pytest.approx(4 * 0.5 + 4 * 29 + LATENCY + 4.0, abs=1e-3)
    after = data_parallel(judge, is_overlapped=False)
    assert after.step - found.step == pytest.approx(3 * (LATENCY + 4.0), abs=1e-3)


def test_memory_decides_how_often_gradients_are_accumulated():
    roomy, tight = (data_parallel(chain_judge(memory=m, batch=64), is_overlapped=True) for m in (80.0, 2.1e-5))
    assert roomy.sizes == "2 copies"
    assert "accumulated over" in tight.sizes
    assert tight.overflow <= 0 < data_parallel(chain_judge(memory=1e-5, batch=64), is_overlapped=True).overflow


def test_sharding_needs_less_memory_than_copies_and_gathers_beside_the_forward():
    judge = chain_judge(num_ranks=4, parameters=[10**8] * 4, intra_gb=0.01)
    copies, shards = data_parallel(judge, is_overlapped=True), zero3(judge)
    assert shards.overflow < copies.overflow
    each = 3 / 4 * 10**8 / 1e7  # seconds for a byte of every parameter of a layer
    assert copies.step == pytest.approx(copies.frozen + 36 + 4 * 2 * 4 * each, rel=0.01)  # after the first backward
    assert shards.step == pytest.approx(shards.frozen + 4 * (2 * 2 + 4) * each, rel=0.01)  # all the time


def test_sharding_over_free_links_takes_only_its_computation():
    found = zero3(chain_judge(intra_gb=1e9))
    assert found.step == pytest.approx(4 * 0.5 + 4 * 29, rel=1e-4)


def test_sharding_waits_for_the_first_gather():
    fast, slow = (zero3(chain_judge(intra_gb=gb)).step for gb in (1e9, 1e-6))
    assert slow - fast >= 100 * 2 / 2 / 1000.0


def test_sharding_takes_the_encoders_in_parts_where_they_are_too_large():
    def shards(memory: float):
        cluster = synthetic.cluster(4, memory=memory, intra_gb=1)
        return zero3(Judge(setting=Setting(profile=synthetic.unet(), cluster=cluster, workload=synthetic.workload(4))))

    roomy = shards(80)
    tight = shards(roomy.held[0] / 10**9 - 0.1)
    assert roomy.sizes == "4 copies"
    assert tight.sizes == "4 copies, encoders in parts"
    weights = 2 * (340_000_000 // 23 * 23 + 8 * 4_000_000)
    assert roomy.held[0] - tight.held[0] == weights - weights // 4 - 2 * 2 * (340_000_000 // 23)
    assert tight.overflow <= 0
    assert tight.frozen > roomy.frozen
    assert tight.frozen == pytest.approx(31 * LATENCY + 3 / 4 * weights / 1e9, rel=0.1)  # gathers are what it takes


def test_sharding_also_shards_the_frozen_weights_of_the_trained_part():
    profile = synthetic.chain([1.0] * 4, parameters=[10**8] * 4)
    graph = profile.graph
    parameters = tuple(replace(one, is_trainable=one.name == "layer0.weight") for one in graph.parameters)
    profile = replace(profile, graph=replace(graph, parameters=parameters))
    judge = Judge(setting=Setting(profile=profile, cluster=synthetic.cluster(4), workload=synthetic.workload(4)))
    saved = judge.footprint.stage_bytes(0, judge.tables.num_layers, 1, 1, 1) - zero3(judge).held[0]
    states, frozen = 16 * 10**8, 2 * 3 * 10**8
    two_layers, gradients = 2 * 2 * 10**8, 4 * 10**8
    assert saved == (states + frozen) * 3 // 4 - two_layers - gradients


def casting(judge, **casts):
    setting = judge.setting
    return Judge(setting=replace(setting, profile=synthetic.with_casts(setting.profile, **casts)))


@pytest.mark.parametrize(("checkpointed", "passes"), [((), 1), (("layer1", "layer2"), 1.5)], ids=["kept", "recomputed"])
def test_copies_of_the_model_cast_in_every_forward_also_where_they_recompute(checkpointed, passes):
    plain = chain_judge(intra_gb=1e9, memory=1e-3, checkpointed=checkpointed)
    more = casting(plain, seconds=3.0, num_bytes=200)
    one, other = (data_parallel(judge, is_overlapped=False) for judge in (plain, more))
    assert one.sizes == other.sizes == "2 copies"
    assert other.step - one.step == pytest.approx(passes * 4 * 3.0)
    assert other.held[0] - one.held[0] == (4 if not checkpointed else 2 + 1) * 200  # of recomputed ones one at a time


def test_shards_are_cast_in_parts_before_each_gather_and_no_copy_is_kept():
    plain = chain_judge(num_ranks=4, intra_gb=1e9)
    one, other = (zero3(judge) for judge in (plain, casting(plain, seconds=2000.0, num_bytes=200)))
    gathers, last = 8 * 2000.0 / 4, 2.0
    # All compute hides behind gathers, but for the last layer's.
    assert other.step - 2 * 0.5 == pytest.approx(gathers + last, rel=1e-6)
    assert other.held == one.held


def test_gpipe_cuts_by_time_alone():
    judge = chain_judge()
    assert gpipe_starts(judge, Arrangement(data_parallel=1, units=2), 4) == (0, 3)


def test_spp_moves_the_cut_away_from_a_large_sum():
    profile = synthetic.chain([1.0, 1.0, 1.0, 1.0], parameters=[1, 1, 1, 10**9], frozen=1e-6)
    setting = Setting(profile=profile, cluster=synthetic.cluster(4, intra_gb=1), workload=synthetic.workload(8))
    arrangement = Arrangement(data_parallel=2, units=2)
    assert spp_starts(Judge(setting=setting), arrangement, 4) in {(0, 1), (0, 2)}


def test_a_pipeline_baseline_is_the_best_of_its_sizes():
    setting = Setting(profile=synthetic.unet(), cluster=synthetic.cluster(4), workload=synthetic.workload(32))
    judge = Judge(setting=setting)
    best = pipeline(judge, "GPipe", "gpipe", gpipe_starts, places(judge))
    each = [pipeline(judge, "GPipe", "gpipe", gpipe_starts, [place]) for place in places(judge)]
    assert best.step == min(one.step for one in each if one.overflow <= 0)


def test_every_baseline_encodes_before_the_backbone():
    setting = Setting(profile=synthetic.unet(), cluster=synthetic.cluster(4), workload=synthetic.workload(32))
    slower = replace(setting, profile=synthetic.unet(vae_ms=110.0))
    for one, other in zip(best_baselines(setting), best_baselines(slower), strict=True):
        assert other.step - one.step == pytest.approx(8 * 0.1)
        assert one.frozen < one.step


def test_a_batch_that_ranks_cannot_share_has_no_data_parallel_baseline():
    judge = chain_judge(batch=9)
    assert data_parallel(judge, is_overlapped=True) is None
    assert zero3(judge) is None
    assert [one.name for one in best_baselines(judge.setting)] == ["GPipe", "1F1B + SPP"]
