"""Training on one GPU. None of these has run on a GPU yet."""

import subprocess
import sys

import pytest
import torch
from kit.tiny_runs import losses_of, recipe_of, save_dit, save_pictures, train, train_here

from diffusionpipe.profiler.clock import Clock
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import joined
from diffusionpipe.trainer.recipe import recipe_to_toml
from diffusionpipe.trainer.reporting.metrics import read_metrics
from diffusionpipe.trainer.step.host_sum import HostSum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train_on_gpu(recipe):
    with joined(membership({}), device="cuda") as job:
        return train(job, recipe)


@pytest.mark.parametrize("is_checked_later", [False, True])
def test_losses_are_those_of_a_cpu_and_times_and_memory_are_the_devices(tmp_path, is_checked_later):
    sources = save_dit(tmp_path / "model"), save_pictures(tmp_path / "data")
    training = {"steps": 6, "clip_norm": 1e9, "post_validation": is_checked_later}
    train_here(recipe_of(*sources, tmp_path / "cpu", training=training))
    train_on_gpu(recipe_of(*sources, tmp_path / "gpu", training=training))
    assert list(losses_of(tmp_path / "gpu").values()) == pytest.approx(
        list(losses_of(tmp_path / "cpu").values()), rel=1e-3
    )
    for row in read_metrics(tmp_path / "gpu"):
        assert 0 <= row["bubble"] <= 1
        assert 0 < row["iteration_s"] <= row["step_s"]
        assert 0 < row["memory_allocated_gib"] <= row["memory_peak_gib"]


def test_a_sum_reaches_the_host_beside_later_work():
    with joined(membership({}), device="cuda") as job:
        own = torch.arange(3, dtype=torch.float64, device=job.device)
        total = HostSum(own, [4.0, 5.0])
        torch.cuda._sleep(10**8)
        assert total.wait().tolist() == [0, 1, 2, 4, 5]
        assert total.wait().device.type == "cpu"


def test_a_device_of_short_kernels_is_timed_apart_from_its_host():
    device = torch.device("cuda", 0)
    clock, tensor = Clock.of(device), torch.zeros(8, device=device)

    def compute():
        for _ in range(100):
            tensor.add_(1)

    for _ in range(3):
        clock.was_late = False
        _, took = clock.apart(compute)
    assert not clock.was_late
    assert 0 < took.device < took.host
    assert 1e-4 < took.host < 0.1


def test_deterministic_runs_repeat_their_losses(tmp_path):
    sources = save_dit(tmp_path / "model"), save_pictures(tmp_path / "data")
    for name in ("one", "other"):
        recipe = recipe_of(*sources, tmp_path / name, training={"steps": 4, "deterministic": True})
        file = tmp_path / f"{name}.toml"
        file.write_text(recipe_to_toml(recipe), encoding="utf-8")
        command = [sys.executable, "-m", "diffusionpipe", "train", str(file), "--device", "cuda"]
        subprocess.run(command, check=True, timeout=100)
    assert losses_of(tmp_path / "one") == losses_of(tmp_path / "other")
