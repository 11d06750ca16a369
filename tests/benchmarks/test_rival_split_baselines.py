import pytest
from planner import synthetic

from benchmarks.rivals.split_baselines import diffusion_pipe, naive_split
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.rivals.baselines import data_parallel
from diffusionpipe.planner.search.judge import Judge

MB = 10**6


def judge(*, batch=4, num_ranks=2, memory=80.0, parameters=(100, 100, 100, 100), speeds=None, frozen_parameters=8):
    """Forward 1, 2, 3, 4 s a sample, each gradient as long (the first layer's input needs none); encoders 0.5 s."""
    profile = synthetic.chain(
        [1.0, 2.0, 3.0, 4.0], parameters=parameters, frozen=0.5, frozen_parameters=frozen_parameters
    )
    cluster = synthetic.cluster(num_ranks, memory=memory, speeds=speeds, intra_gb=1e9)
    return Judge(setting=Setting(profile=profile, cluster=cluster, workload=synthetic.workload(batch)))


def test_a_naive_split_takes_as_long_as_one_device():
    found = naive_split(judge())
    assert found.step == pytest.approx(4 * 0.5 + 4 * 29, rel=1e-3)
    assert found.busy == pytest.approx(found.step / 2, rel=1e-3)


def test_a_naive_split_puts_the_encoders_where_there_is_room():
    found = naive_split(judge(memory=0.1, parameters=[MB] * 4, frozen_parameters=30 * MB))
    assert found.overflow <= 0
    assert sum(found.held) > 4 * 16 * MB + 60 * MB
    assert min(found.held) < 60 * MB  # one card holds them, and fewer layers


def test_a_faster_device_makes_a_naive_split_faster():
    assert naive_split(judge(speeds=[2.0, 1.0])).step < naive_split(judge()).step


def test_diffusion_pipe_cuts_by_parameters_with_the_encoders_in_the_first_layer():
    even = diffusion_pipe(judge(batch=16), least=2).candidate
    assert even.starts == (0, 2)
    heavy = diffusion_pipe(judge(batch=16, frozen_parameters=200), least=2).candidate
    assert heavy.starts == (0, 1)


def test_every_microbatch_of_diffusion_pipe_waits_for_its_encoders_in_the_first_stage():
    # Encoders of 100 s a sample: the first stage is all that counts.
    profile = synthetic.chain([1.0, 1.0], frozen=100.0)
    setting = Setting(profile=profile, cluster=synthetic.cluster(2, intra_gb=1e9), workload=synthetic.workload(4))
    found = diffusion_pipe(Judge(setting=setting), least=2)
    assert found.frozen == pytest.approx(400.0)
    assert found.step >= 400 + 4 * 2.0


def test_one_stage_of_diffusion_pipe_is_data_parallelism_that_sums_after_the_backward():
    case = judge(batch=4, parameters=[MB] * 4)
    copies = diffusion_pipe(case)
    assert copies.sizes == "1 stage x 2, 1 micro-batch"
    assert copies.step == pytest.approx(data_parallel(case, is_overlapped=False).step, rel=1e-3)


def test_the_encoders_of_diffusion_pipe_are_on_its_first_stage_alone():
    found = diffusion_pipe(judge(parameters=[MB] * 4, frozen_parameters=MB, batch=16), least=2)
    layers = 16 * MB
    assert found.held[0] == pytest.approx(2 * layers + 2 * MB, rel=0.01)
    assert found.held[1] == pytest.approx(2 * layers, rel=0.01)
