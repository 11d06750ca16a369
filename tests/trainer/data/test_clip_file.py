"""Clip files that cannot be used are refused with one sentence, before any is trained on."""

import dataclasses
from fractions import Fraction

import av
import pytest
from kit.numbered_clips import Kind, constant, uneven, write
from PIL import Image

from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.decoding.clip_file import problem_of_end
from diffusionpipe.trainer.data.decoding.clips import FrameSelection, load_clip, problem_of_clip
from diffusionpipe.trainer.data.decoding.images import PictureError
from diffusionpipe.trainer.data.scan.dataset import scan

TAKEN = FrameSelection(frames=5)
PLAIN = Kind(ending="mp4", codec="libx264", times=uneven(12), every=4, options={"bf": "2", "sc_threshold": "0"})
OTHERS = {
    "fast.mp4": dataclasses.replace(PLAIN, container={"movflags": "faststart"}),
    "fragments.mp4": dataclasses.replace(PLAIN, container={"movflags": "frag_keyframe+empty_moov"}),
    "plain.mov": PLAIN,
    "plain.mkv": PLAIN,
    "plain.webm": dataclasses.replace(PLAIN, codec="libvpx-vp9", options={"cpu-used": "8"}),
    "plain.avi": dataclasses.replace(PLAIN, codec="mpeg4", times=constant(12, 12), base=Fraction(1, 12), options={}),
    "plain.gif": dataclasses.replace(
        PLAIN, codec="gif", form="rgb8", times=constant(10, 12), base=Fraction(1, 100), options={}
    ),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write(PLAIN, tmp_path_factory.mktemp("plain") / "plain.mp4")


def copied(source, path, change, **options):
    """The clip's packets in another file; those that `change` says no to are left out."""
    with av.open(str(source)) as old, av.open(str(path), "w", **options) as container:
        stream = container.add_stream_from_template(old.streams.video[0])
        for number, packet in enumerate(old.demux(video=0)):
            if packet.size and change(number, packet) is not False:
                packet.stream = stream
                container.mux(packet)
    return path


def without_keys(_, packet):
    return not packet.is_keyframe


def at_one_time(_, packet):
    packet.pts = packet.dts = 0


def refused(path, problem):
    """The sentence about a clip, which is the same for the folder and for a batch."""
    found = problem_of_clip(path, TAKEN)
    assert found is not None
    assert problem in found
    assert "\n" not in found
    assert "Error" not in found
    with pytest.raises(PictureError, match=r"cannot be decoded: ") as raised:
        load_clip(path, size=(64, 48), taken=TAKEN)
    assert found in str(raised.value)


def test_a_clip_without_key_frames_is_refused(tmp_path, plain):
    for ending in ("mp4", "mkv"):
        refused(copied(plain, tmp_path / f"a.{ending}", without_keys), "it has no key frame to begin with")


def test_a_clip_without_time_stamps_is_refused(tmp_path, plain):
    bare = copied(plain, tmp_path / "a.h264", lambda *_: True, format="h264")
    refused(bare.rename(tmp_path / "a.mp4"), "its file does not say when its frames are shown")


def test_a_clip_whose_frames_have_all_the_same_time_is_refused(tmp_path):
    source = write(dataclasses.replace(PLAIN, codec="ffv1", form="bgr0", every=1, options={}), tmp_path / "a.mkv")
    refused(copied(source, tmp_path / "b.mkv", at_one_time), "all of its frames have the same time")


@pytest.mark.parametrize(("delays", "number"), [([0] * 6, 0), ([100, 50, 0, 100, 100, 100], 2)])
def test_a_gif_with_a_delay_of_0_is_refused(tmp_path, delays, number):
    first, *others = (Image.new("RGB", (32, 16), (level * 40,) * 3) for level in range(6))
    first.save(tmp_path / "a.gif", save_all=True, append_images=others, duration=delays)
    refused(tmp_path / "a.gif", f"its frame {number} has a delay of 0")


def test_the_delay_of_a_gifs_last_frame_does_not_count(tmp_path):
    first, *others = (Image.new("RGB", (32, 16), (level * 40,) * 3) for level in range(6))
    first.save(tmp_path / "a.gif", save_all=True, append_images=others, duration=[100] * 5 + [0])
    assert problem_of_clip(tmp_path / "a.gif", TAKEN) is None


def test_an_empty_clip_is_refused(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"")
    refused(tmp_path / "a.mp4", "it is empty")


def test_a_clip_without_pictures_is_refused(tmp_path):
    import numpy as np

    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    refused(tmp_path / "a.mp4", "it has no pictures")


def test_a_clip_that_is_turned_by_less_than_a_quarter_is_refused(tmp_path):
    turned = write(dataclasses.replace(PLAIN, shown=(30, False, False)), tmp_path / "a.mp4")
    refused(turned, "its display matrix turns it by less than a quarter")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "plain.gif" else pytest.mark.slow) for name in OTHERS]
)
def test_a_clip_that_is_cut_short_is_refused_wherever_it_is_cut(tmp_path, name):
    path = write(OTHERS[name], tmp_path / name)
    whole = path.read_bytes()
    assert problem_of_clip(path, TAKEN) is None
    for size in (len(whole) // 3, len(whole) * 2 // 3, len(whole) - 1):
        cut = tmp_path / f"{size}-{name}"
        cut.write_bytes(whole[:size])
        refused(cut, "its file is cut short")


def test_an_mp4_is_cut_short_in_any_place(tmp_path, plain):
    whole = plain.read_bytes()
    for size in range(40, len(whole), 97):
        (tmp_path / "a.mp4").write_bytes(whole[:size])
        assert problem_of_clip(tmp_path / "a.mp4", TAKEN), size


def test_what_has_no_known_end_is_not_called_cut_short(tmp_path):
    live = write(dataclasses.replace(PLAIN, container={"live": "1"}), tmp_path / "a.mkv")
    assert problem_of_end(live) is None
    assert problem_of_clip(live, TAKEN) is None


def test_a_list_of_other_files_is_no_clip(tmp_path, plain):
    plain.rename(tmp_path / "b.mp4").replace(tmp_path / "plain.mp4")
    (tmp_path / "a.mp4").write_text("ffconcat version 1.0\nfile plain.mp4\n")
    refused(tmp_path / "a.mp4", "Invalid argument")
    (tmp_path / "a.mp4").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:3\n#EXTINF:3,\nplain.mp4\n#EXT-X-ENDLIST\n")
    refused(tmp_path / "a.mp4", "Invalid data found")
    (tmp_path / "plain.mp4").replace(plain)


def test_names_with_a_colon_are_names(tmp_path, plain, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data:a.mp4").write_bytes(plain.read_bytes())
    from pathlib import Path

    assert problem_of_clip(Path("data:a.mp4"), TAKEN) is None


def test_the_folder_is_refused_with_the_names_of_its_bad_clips(tmp_path, plain):
    copied(plain, tmp_path / "a.mp4", without_keys)
    (tmp_path / "b.mp4").write_bytes(plain.read_bytes())
    (tmp_path / "c.mp4").write_bytes(plain.read_bytes()[:1000])
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("a board")
    with pytest.raises(DataError, match=r"2 clips that cannot be used") as raised:
        scan(tmp_path, "text", taken=TAKEN)
    assert "a.mp4: it has no key frame" in str(raised.value)
    assert "c.mp4: its file is cut short" in str(raised.value)
