"""What a message says of the checkpoints that a failed run leaves."""

from diffusionpipe.trainer.checkpoints.checkpoint_folder import KeptCheckpoints, kept_of, latest
from diffusionpipe.trainer.checkpoints.manifest import Manifest, write_manifest


def test_a_run_without_a_checkpoint_is_started_again(tmp_path):
    assert kept_of(tmp_path / "never made").remedy() == "No checkpoint was saved. Start again."
    (tmp_path / "checkpoints" / ".step-00000004.writing").mkdir(parents=True)
    assert kept_of(tmp_path).remedy() == "No checkpoint was saved. Start again."


def test_the_latest_checkpoint_is_named_even_if_it_cannot_be_read(tmp_path):
    for step in (4, 12):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    assert kept_of(tmp_path).remedy() == "The checkpoint of step 12 is kept. Resume with --resume latest."


def test_an_earlier_checkpoint_is_offered_where_the_latest_may_be_ruined():
    assert KeptCheckpoints((4,)).remedy(may_be_ruined=True) == KeptCheckpoints((4,)).remedy()
    earlier = "Resume with --resume latest, or from an earlier one with --resume 4."
    assert KeptCheckpoints((4, 8)).remedy(may_be_ruined=True) == f"The checkpoint of step 8 is kept. {earlier}"


def test_the_latest_checkpoint_is_the_one_that_was_written_last_after_a_return_to_an_earlier_step(tmp_path):
    for sequence, step in enumerate((4, 12, 8)):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        write_manifest(folder, Manifest(step=step, sequence=sequence, files=()))
    assert latest(tmp_path).name == "step-00000008"
    assert kept_of(tmp_path).steps == (4, 12, 8)
