"""What a message says of the checkpoints that a failed run leaves."""

import pytest

from diffusionpipe.trainer.checkpoints.checkpoint_folder import Kept, kept_of


def test_a_run_without_a_checkpoint_is_started_again(tmp_path):
    assert kept_of(tmp_path / "never made").sentences == "No checkpoint was saved. Start again."
    (tmp_path / "checkpoints" / ".step-00000004.writing").mkdir(parents=True)
    assert kept_of(tmp_path).sentences == "No checkpoint was saved. Start again."


def test_the_latest_checkpoint_is_named_even_if_it_cannot_be_read(tmp_path):
    for step in (4, 12):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert kept_of(tmp_path).sentences == "The checkpoint of step 12 is kept. Resume with --resume latest."


@pytest.mark.parametrize(
    ("steps", "way"),
    [
        ((), "start again"),
        ((4,), "resume with --resume latest"),
        ((4, 8), "resume with --resume latest, or with --resume 4 from an earlier one"),
    ],
)
def test_the_way_back_leads_to_an_earlier_checkpoint_where_there_is_one(steps, way):
    assert Kept(steps).way_back == way
