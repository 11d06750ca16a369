"""Clips become levels: the frames that were asked for, cut alike, whatever the file."""

import numpy as np
import pytest
import torch
from kit.tiny_clips import CODECS, grey_frames, save_clips, write_clip

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.batches.batch import Augmentation, BatchSource, Rows, make_batch
from diffusionpipe.trainer.data.decoding.clips import FrameSelection, load_clip, problem_of_clip
from diffusionpipe.trainer.data.decoding.images import PictureError
from diffusionpipe.trainer.data.scan.dataset import examine, scan

SIZE = (32, 16)


def numbers(levels, step=8):
    """Which frames of `grey_frames` these are."""
    means = levels.float().mean(dim=(0, 2, 3)) / step
    assert (means - means.round()).abs().max() < 0.3
    return means.round().int().tolist()


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """30 frames, 12 a second, with a key frame every fourth."""
    return write_clip(tmp_path_factory.mktemp("clip") / "a.mp4", grey_frames(30), rate=12)


@pytest.mark.parametrize("start", [0, 1, 3, 4, 17, 25])
def test_each_frame_of_the_file_is_taken_from_any_start(clip, start):
    levels = load_clip(clip, size=SIZE, taken=FrameSelection(frames=5), start=(start + 0.5) / 26)
    assert levels.shape == (3, 5, 16, 32)
    assert levels.dtype == torch.uint8
    assert numbers(levels) == list(range(start, start + 5))


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (12.0, [0, 1, 2, 3, 4]),
        (6.0, [0, 2, 4, 6, 8]),
        (4.0, [0, 3, 6, 9, 12]),
        (8.0, [0, 1, 3, 4, 6]),  # shown at 0, 1.5, 3, 4.5, 6 of the file's frames
        (24.0, [0, 0, 1, 1, 2]),
    ],
)
def test_frames_of_another_rate_are_those_shown_at_their_times(clip, rate, expected):
    assert numbers(load_clip(clip, size=SIZE, taken=FrameSelection(frames=5, rate=rate))) == expected


def test_the_last_start_ends_with_the_last_frame(clip):
    levels = load_clip(clip, size=SIZE, taken=FrameSelection(frames=5, rate=4.0), start=0.9999)
    assert numbers(levels) == [17, 20, 23, 26, 29]


@pytest.mark.parametrize(("ending", "codec"), CODECS.items())
def test_files_of_other_kinds_are_read(tmp_path, ending, codec):
    path = write_clip(tmp_path / f"a.{ending}", grey_frames(12, step=16), rate=10, codec=codec)
    assert problem_of_clip(path, FrameSelection(frames=12)) is None
    for start in (0, 3, 7):
        levels = load_clip(path, size=SIZE, taken=FrameSelection(frames=5), start=(start + 0.5) / 8)
        assert numbers(levels, step=16) == list(range(start, start + 5))


def test_an_animated_gif_is_a_clip(tmp_path):
    from PIL import Image

    frames = [Image.fromarray(frame) for frame in grey_frames(8, step=16)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=100)
    levels = load_clip(tmp_path / "a.gif", size=SIZE, taken=FrameSelection(frames=4), start=0.99)
    assert numbers(levels, step=16) == [4, 5, 6, 7]


def test_all_frames_are_cut_and_mirrored_alike(tmp_path):
    board = np.random.default_rng(0).integers(0, 256, (3, 8, 24, 3), dtype=np.uint8)
    path = write_clip(tmp_path / "a.mp4", list(board.repeat(4, axis=1).repeat(4, axis=2)))
    whole = load_clip(path, size=(96, 32), taken=FrameSelection(frames=3))
    cut = load_clip(path, size=(32, 32), taken=FrameSelection(frames=3), crop=(0.5, 0.5))
    assert torch.equal(cut, whole[..., 32:64])
    assert torch.equal(load_clip(path, size=(96, 32), taken=FrameSelection(frames=3), flip=True), whole.flip(3))
    assert (whole.permute(1, 2, 3, 0).numpy().astype(int) - board.repeat(4, 1).repeat(4, 2)).__abs__().max() <= 4


@pytest.mark.parametrize(
    ("taken", "problem"),
    [
        (FrameSelection(frames=31), "it has 30 frames, 2.50 s; 31 are needed"),
        (FrameSelection(frames=12, rate=4.0), "it has 30 frames, 2.50 s, and 4 of a second are taken; 12 are needed"),
    ],
)
def test_a_clip_that_is_too_short_says_what_it_has(clip, taken, problem):
    assert problem in problem_of_clip(clip, taken)
    with pytest.raises(PictureError, match=r"are needed: use a longer clip, or set data\.frames or data\.frame_rate"):
        load_clip(clip, size=SIZE, taken=taken)
    assert problem_of_clip(clip, FrameSelection(frames=10, rate=4.0)) is None


def test_damaged_files_are_named_with_the_reason(tmp_path, clip):
    (tmp_path / "none.mp4").write_bytes(b"")
    (tmp_path / "text.mp4").write_text("no clip")
    (tmp_path / "half.mp4").write_bytes(clip.read_bytes()[: clip.stat().st_size // 2])
    for name in ("none", "text", "half"):
        assert problem_of_clip(tmp_path / f"{name}.mp4", FrameSelection(frames=2))
        with pytest.raises(PictureError, match=rf"{name}\.mp4: cannot be decoded"):
            load_clip(tmp_path / f"{name}.mp4", size=SIZE, taken=FrameSelection(frames=2))


def test_a_folder_of_clips_is_scanned_and_one_of_pictures_is_refused(tmp_path, clip):
    folder = save_clips(tmp_path / "clips", 3, frames=6)
    (folder / "a.png").touch()
    found, others = examine(folder, "text", taken=FrameSelection(frames=5))
    assert [sample.name for sample in found.samples] == ["000.mp4", "001.mp4", "002.mp4"]
    assert others.overlooked[0].startswith("1 file ends in .png: with data.frames clips are read alone")
    with pytest.raises(DataError, match=r"3 clips that cannot be used:\n    000.mp4: it has 6 frames"):
        scan(folder, "text", taken=FrameSelection(frames=7))
    (folder / "a.png").unlink()
    with pytest.raises(
        DataError, match=r"holds no pictures; .* 3 files end in .mp4, .*clips are read with data.frames"
    ):
        scan(folder, "text")


def source_of(folder, **augmentation):
    return BatchSource(
        dataset=scan(folder, "text", taken=FrameSelection(frames=5)),
        inputs=(TensorSpec(name="pixels", shape=(3, 5, 16, 16)),),
        seed=0,
        augmentation=Augmentation(**augmentation),
    )


def test_starts_are_keyed_by_sample_and_validation_begins_at_the_beginning(tmp_path):
    folder = tmp_path / "clips"
    folder.mkdir()
    write_clip(folder / "a.mp4", grey_frames(30, width=16))
    (folder / "a.txt").write_text("grey")

    def starts(step, positions, **augmentation):
        rows = Rows(samples=(0,) * len(positions), positions=positions, step=step)
        pixels = make_batch(source_of(folder, **augmentation), rows, has_levels=True)["pixels"]
        return [numbers(levels)[0] for levels in pixels]

    several = starts(3, (0, 1, 2, 3), random_start=True)
    assert len(set(several)) > 1
    assert starts(3, (2, 0), random_start=True) == [several[2], several[0]]
    assert starts(4, (0, 1, 2, 3), random_start=True) != several
    assert starts(3, (0, 1)) == [0, 0]


def rates_told(folder, **more):
    told = (TensorSpec(name="pixels", shape=(3, 5, 16, 16)), TensorSpec(name="frame_rate", shape=()))
    source = BatchSource(dataset=scan(folder, "text", taken=FrameSelection(frames=5)), inputs=told, seed=0, **more)
    return make_batch(source, Rows(samples=(1, 0), positions=(0, 1), step=0))["frame_rate"].tolist()


def test_a_model_is_told_the_rate_of_each_clip_or_the_one_that_is_taken(tmp_path):
    folder = tmp_path / "clips"
    folder.mkdir()
    for name, rate in (("a", 12), ("b", 24)):
        write_clip(folder / f"{name}.mp4", grey_frames(30, width=16), rate=rate)
        (folder / f"{name}.txt").write_text("grey")
    assert rates_told(folder) == pytest.approx([24, 12])
    assert rates_told(folder, frame_rate=8.0) == [8, 8]
    assert scan(folder, "text", taken=FrameSelection(frames=5)).rate == pytest.approx(
        12
    )  # the lower one of two in the middle
