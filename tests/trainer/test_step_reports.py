"""The reports of steps, as they stand in a run's metrics and are drawn from there."""

from types import SimpleNamespace

import torch

from diffusionpipe.trainer.course.step_reports import StepReports
from diffusionpipe.trainer.reporting.metrics import MetricsWriter
from diffusionpipe.trainer.reporting.progress import TrainingProgress
from diffusionpipe.trainer.reporting.screen import NoScreen
from diffusionpipe.trainer.step.step_result import StepResult, StepTimes
from diffusionpipe.trainer.step.stopping import Decision
from diffusionpipe.viz import loss_curve


def test_of_a_runs_own_file_losses_learning_rate_and_speed_are_drawn(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        progress = TrainingProgress(num_steps=9, batch=4, screen=NoScreen())
        session = SimpleNamespace(plan=SimpleNamespace(batch=4), job=SimpleNamespace(device=torch.device("cpu")))
        dataset = SimpleNamespace(samples=range(12), growth=())
        data = SimpleNamespace(train=SimpleNamespace(skipping=None, dataset=dataset), sizes=None)
        state = SimpleNamespace(metrics=metrics, progress=progress, session=session, data=data)
        times = iter([[StepTimes(step=step, iteration=0.4, bubble=0.1)] for step in range(1, 10)])
        reports = StepReports(state, lambda: next(times, []))
        for step in range(1, 10):
            result = StepResult(
                step=step, loss=1 / step, gradient_norm=1.0, learning_rate=step * 1e-4, seconds=0.5,
                backbones=(), decision=Decision(saves=False, stops=False),
            )  # fmt: skip
            reports.waited(step, 0.01)
            reports.write([result])
    loss_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.svg")
    written = (tmp_path / "loss.svg").read_text()
    assert [name for name in ("loss", "learning rate", "samples/s") if f">{name}</text>" not in written] == []
