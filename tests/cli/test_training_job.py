"""The launcher's word on a job that has crashed."""

import pytest

import diffusionpipe.trainer.launching.launch as launch_module
from diffusionpipe.errors import PeerError
from diffusionpipe.workflows.training.job import TrainingJob, start


@pytest.mark.parametrize(
    ("saved", "remedy"),
    [
        ([], "No checkpoint was saved. Start again."),
        ([5], "The checkpoint of step 5 is kept. Resume with --resume latest."),
    ],
)
def test_a_crash_says_what_is_kept(saved, remedy, tmp_path, monkeypatch):
    def crash(*_: object, **__: object) -> int:
        for step in saved:
            (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        raise PeerError("rank 1 was killed by signal 9 (SIGKILL).")

    monkeypatch.setattr(launch_module, "launch", crash)
    job = TrainingJob(
        recipe=tmp_path / "recipe.toml",
        overrides=(),
        folder=tmp_path,
        devices=(0, 1),
        device="cpu",
        resume=None,
        take_over=False,
        port=None,
        max_restarts=0,
        uses_cache=False,
    )
    with pytest.raises(PeerError) as caught:
        start(job)
    assert str(caught.value) == f"rank 1 was killed by signal 9 (SIGKILL).\n{remedy}"
