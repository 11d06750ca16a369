"""Times of frames: sorted, from zero on, and evened where a file has rounded those of a constant rate."""

from fractions import Fraction
from itertools import pairwise

import av
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.numbered_clips import SIZE, Kind, constant, numbers_of, paused, uneven, write

from diffusionpipe.trainer.data.decoding.clip_times import _evened, timeline_of
from diffusionpipe.trainer.data.decoding.clips import FrameSelection, load_clip

RATES = [Fraction(12), Fraction(24000, 1001), Fraction(25), Fraction(30000, 1001), Fraction(60), Fraction(15, 2)]


@given(
    st.sampled_from(RATES),
    st.integers(3, 300),
    st.fractions(0, 1).filter(lambda share: share < 1),
    st.sampled_from([True, False]),
)
def test_times_that_a_file_has_rounded_to_milliseconds_take_the_frames_of_their_rate(rate, count, offset, is_told):
    rounded = [round((number / rate + offset) * 1000) for number in range(count)]
    times = _evened([(time - rounded[0]) / 1000 for time in rounded], [rate] if is_told else [])
    exact = [float(number / rate) for number in range(count)]
    assert times[0] == 0
    assert max(abs(ours - right) for ours, right in zip(times, exact, strict=True)) < 1e-3
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) - min(gaps) < 1e-9


@pytest.mark.parametrize("times", [paused(20), uneven(20)])
def test_uneven_times_stay_as_they_are(times):
    assert _evened([float(time) for time in times], [Fraction(12)]) == tuple(map(float, times))


def test_a_clip_is_as_long_as_its_last_frame_is_shown(tmp_path):
    kind = Kind(ending="mov", codec="prores_ks", times=constant(10, 6), every=1, form="yuv422p10le")
    clip = timeline_of(write(kind, tmp_path / "a.mov"))
    assert clip.times == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert clip.rate == pytest.approx(10)
    assert clip.seconds >= 0.5
    assert [clip.shown_at(time) for time in (0, 0.05, 0.1, 0.3999999999, 0.45, 9)] == [0, 0, 1, 4, 4, 5]


def test_a_file_that_changes_is_read_anew(tmp_path):
    kind = Kind(ending="mkv", codec="ffv1", times=constant(10, 6), every=1, form="bgr0")
    assert len(timeline_of(write(kind, tmp_path / "a.mkv")).times) == 6
    (tmp_path / "a.mkv").unlink()
    longer = Kind(ending="mkv", codec="ffv1", times=constant(10, 9), every=1, form="bgr0")
    assert len(timeline_of(write(longer, tmp_path / "a.mkv")).times) == 9


def test_frames_of_vp8_that_are_only_read_by_others_are_not_counted(tmp_path):
    """Encoders write such alternate references in two passes; here one is made of a frame that was to be shown."""
    options = {"cpu-used": "8", "crf": "10", "b": "1000000", "lag-in-frames": "0"}
    kind = Kind(ending="webm", codec="libvpx", times=uneven(12), every=6, options=options)
    source = write(kind, tmp_path / "a.webm")
    with av.open(str(source)) as old, av.open(str(tmp_path / "b.webm"), "w") as container:
        stream = container.add_stream_from_template(old.streams.video[0])
        for number, packet in enumerate(old.demux(video=0)):
            if packet.size:
                data = bytes(packet)
                hidden = av.Packet(bytes([data[0] & ~0x10, *data[1:]]) if number == 4 else data)
                hidden.pts, hidden.dts, hidden.time_base = packet.pts, packet.dts, packet.time_base
                hidden.is_keyframe, hidden.stream = packet.is_keyframe, stream
                container.mux(hidden)
    right = [number for number in range(12) if number != 4]
    assert len(timeline_of(tmp_path / "b.webm").times) == len(right)
    for start in (0, 3, 6):
        levels = load_clip(tmp_path / "b.webm", size=SIZE, taken=FrameSelection(frames=5), start=(start + 0.5) / 7)
        assert numbers_of(levels.permute(1, 2, 3, 0).numpy()) == right[start : start + 5]


def test_what_an_edit_list_leaves_out_is_not_taken(tmp_path):
    """The list of an MP4 says from which time on it is shown; here from the fifth frame."""
    times = [time - Fraction(4, 12) for time in constant(12, 26)]
    kind = Kind(ending="mp4", codec="libx264", times=times, every=6, base=Fraction(1, 12), options={"bf": "2"})
    path = write(kind, tmp_path / "a.mp4")
    with av.open(str(path)) as container:
        assert sum(packet.is_discard for packet in container.demux(video=0)) == 4
    assert len(timeline_of(path).times) == 22
    for start in (0, 1, 2, 17):
        levels = load_clip(path, size=SIZE, taken=FrameSelection(frames=5), start=(start + 0.5) / 18)
        assert numbers_of(levels.permute(1, 2, 3, 0).numpy()) == list(range(start + 4, start + 9))


def test_frames_before_the_first_key_frame_are_not_counted(tmp_path):
    """A recording that was cut without being encoded anew."""
    kind = Kind(ending="mkv", codec="libx264", times=uneven(26), every=6, options={"sc_threshold": "0", "bf": "2"})
    source = write(kind, tmp_path / "a.mkv")
    with av.open(str(source)) as old, av.open(str(tmp_path / "b.mkv"), "w") as container:
        stream = container.add_stream_from_template(old.streams.video[0])
        for number, packet in enumerate(old.demux(video=0)):
            if packet.size and number > 0:
                packet.stream = stream
                container.mux(packet)
    assert len(timeline_of(tmp_path / "b.mkv").times) == 20
    for start in (0, 5, 6, 15):
        levels = load_clip(tmp_path / "b.mkv", size=SIZE, taken=FrameSelection(frames=5), start=(start + 0.5) / 16)
        assert numbers_of(levels.permute(1, 2, 3, 0).numpy()) == list(range(start + 6, start + 11))
