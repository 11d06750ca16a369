"""The frames that are taken of a clip are those that its times say, whatever the codec, the file and the start.

Which frames are right follows from the times that the test wrote, not from what the reader says of the file.
"""

from fractions import Fraction

import av
import numpy as np
import pytest
from kit.numbered_clips import SIZE, Kind, board, constant, numbers_of, paused, uneven, write

from diffusionpipe.trainer.data.decoding import clip_file, clip_times, clips
from diffusionpipe.trainer.data.decoding.clips import FrameSelection, load_clip, problem_of_clip
from diffusionpipe.trainer.data.decoding.images import PictureError

FRAMES = 5
X264 = {"crf": "10", "sc_threshold": "0", "bf": "3"}
REFRESHED = {**X264, "x264-params": "intra-refresh=1:keyint=6:bframes=0"}
"""Without key frames but the first: part of each frame is coded anew, and all of it after six."""
OPEN_264 = {**X264, "x264-params": "open-gop=1:keyint=6:min-keyint=6:bframes=3:b-adapt=0"}


def x265(is_open):
    return {"x265-params": f"open-gop={int(is_open)}:keyint=6:min-keyint=6:bframes=3:scenecut=0:log-level=none:crf=10"}


VP9 = {"crf": "10", "b": "0", "cpu-used": "8", "lag-in-frames": "0"}
RATE_12, RATE_30 = constant(12, 26), constant(Fraction(30000, 1001), 26)
CENTI = Fraction(1, 100)


def narrow(seen):
    """Every second column: pixels that are twice as wide as high."""
    return seen[:, ::2]


def flat(seen):
    """Every second row."""
    return seen[::2]


def lying(degrees, is_mirrored, is_upside_down):
    """What is stored of a frame that is seen after this display matrix."""

    def stored(seen):
        seen = seen[::-1] if is_upside_down else seen
        seen = seen[:, ::-1] if is_mirrored else seen
        return np.rot90(seen, -degrees // 90)

    return {"stored": stored, "shown": (degrees, is_mirrored, is_upside_down)}


def kinds():
    """Every kind of clip by its name."""

    def h264(ending, times, **more):
        return Kind(ending=ending, codec="libx264", times=times, every=6, **{"options": X264, **more})

    def h265(ending, times, *, is_open, **more):
        return Kind(ending=ending, codec="libx265", times=times, every=6, options=x265(is_open), **more)

    def vp9(ending, times, **more):
        return Kind(ending=ending, codec="libvpx-vp9", times=times, every=6, options=VP9, **more)

    found = {
        "H.264 mp4 12": h264("mp4", RATE_12, base=Fraction(1, 12)),
        "H.264 mp4 29.97": h264("mp4", RATE_30, base=Fraction(1001, 30000)),
        "H.264 mp4 uneven": h264("mp4", uneven(26)),
        "H.264 mp4 paused": h264("mp4", paused(26)),
        "H.264 mp4 fragments": h264("mp4", uneven(26), container={"movflags": "frag_keyframe+empty_moov"}),
        "H.264 mov uneven": h264("mov", uneven(26)),
        "H.264 mkv 12": h264("mkv", RATE_12),
        "H.264 mkv 29.97": h264("mkv", RATE_30),
        "H.264 mkv uneven": h264("mkv", uneven(26)),
        "H.264 mkv live": h264("mkv", paused(26), container={"live": "1"}),
        "H.264 avi 12": h264("avi", RATE_12, base=Fraction(1, 12)),
        "H.264 open mp4": h264("mp4", RATE_12, base=Fraction(1, 12), options=OPEN_264),
        "H.264 open mov uneven": h264("mov", uneven(26), options=OPEN_264),
        "H.264 open mkv paused": h264("mkv", paused(26), options=OPEN_264),
        "H.264 mp4 refreshed": h264("mp4", RATE_12, base=Fraction(1, 12), options=REFRESHED),
        "H.265 mp4 uneven": h265("mp4", uneven(26), is_open=False),
        "H.265 open mp4": h265("mp4", RATE_12, is_open=True),
        "H.265 open mov paused": h265("mov", paused(26), is_open=True),
        "H.265 open mkv uneven": h265("mkv", uneven(26), is_open=True),
        "VP9 webm 12": vp9("webm", RATE_12),
        "VP9 webm uneven": vp9("webm", uneven(26)),
        "VP9 webm paused": vp9("webm", paused(26)),
        "VP9 mp4 uneven": vp9("mp4", uneven(26)),
        "VP9 webm alpha": vp9("webm", uneven(26), form="yuva420p", is_transparent=True),
        "VP8 webm alpha": Kind(
            ending="webm",
            codec="libvpx",
            times=uneven(26),
            every=6,
            form="yuva420p",
            options={"auto-alt-ref": "0", "lag-in-frames": "0", "b": "1000000"},
            is_transparent=True,
        ),
        "PNG mov alpha": Kind(ending="mov", codec="png", times=uneven(26), every=1, form="rgba", is_transparent=True),
        "ProRes mov uneven": Kind(
            ending="mov", codec="prores_ks", times=uneven(26), every=1, form="yuv422p10le", options={"profile": "3"}
        ),
        "ProRes mov alpha": Kind(
            ending="mov",
            codec="prores_ks",
            times=uneven(26),
            every=1,
            form="yuva444p10le",
            options={"profile": "4"},
            is_transparent=True,
        ),
        "qtrle mov": Kind(ending="mov", codec="qtrle", times=paused(26), every=6, form="rgb24"),
        "qtrle mov alpha": Kind(
            ending="mov", codec="qtrle", times=uneven(26), every=6, form="argb", is_transparent=True
        ),
        "ffv1 mkv": Kind(ending="mkv", codec="ffv1", times=paused(26), every=1, form="bgr0"),
        "ffv1 mkv alpha": Kind(ending="mkv", codec="ffv1", times=uneven(26), every=1, form="bgra", is_transparent=True),
        "MPEG-4 avi": Kind(
            ending="avi",
            codec="mpeg4",
            times=RATE_12,
            every=6,
            base=Fraction(1, 12),
            options={"q": "2", "bf": "2", "b_strategy": "0", "sc_threshold": "1000000000"},
        ),
        "GIF 10": Kind(ending="gif", codec="gif", times=constant(10, 26), every=6, form="rgb8", base=CENTI),
        "GIF uneven": Kind(ending="gif", codec="gif", times=uneven(26, CENTI), every=6, form="rgb8", base=CENTI),
        "H.264 mp4 2:1": h264("mp4", uneven(26), stored=narrow, aspect=Fraction(2)),
        "H.264 mkv 1:2": h264("mkv", uneven(26), stored=flat, aspect=Fraction(1, 2)),
        "ProRes mov 2:1": Kind(
            ending="mov",
            codec="prores_ks",
            times=uneven(26),
            every=1,
            form="yuv422p10le",
            stored=narrow,
            aspect=Fraction(2),
        ),
    }
    for degrees in (0, 90, 180, 270):
        for is_mirrored in (False, True):
            if degrees or is_mirrored:
                more = lying(degrees, is_mirrored, False)
                name = f"H.264 mov {degrees}{' mirrored' * is_mirrored}"
                found[name] = h264("mov", uneven(26), **more)
    found["H.264 mp4 upside down"] = h264("mp4", uneven(26), **lying(0, False, True))
    turned = lying(90, True, False)
    stored = turned["stored"]
    found["H.264 mp4 270 mirrored 2:1"] = h264(
        "mp4", uneven(26), stored=lambda seen: narrow(stored(seen)), shown=turned["shown"], aspect=Fraction(2)
    )
    return found


KINDS = kinds()
QUICK = ("H.264 mp4 uneven", "H.265 open mp4", "GIF uneven", "VP9 webm alpha", "H.264 mp4 270 mirrored 2:1")
CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in KINDS]


def taken_at(times, start, rate):
    """The numbers of the frames that are right; None: the clip is too short for this start."""
    if rate is None:
        return list(range(start, start + FRAMES)) if start + FRAMES <= len(times) else None
    wanted = [times[start] + number / Fraction(rate) for number in range(FRAMES)]
    if wanted[-1] > times[-1]:
        return None
    return [max(number for number, time in enumerate(times) if time <= at) for at in wanted]


def starts_of(times, every, rate):
    """The first one, those just before and at a key frame, one in a group, and the last."""
    possible = [start for start in range(len(times)) if taken_at(times, start, rate) is not None]
    wanted = {0, every - 1, every, 2 * every - 1, 2 * every + 2, possible[-1]}
    return len(possible), sorted(wanted.intersection(possible))


def faults(path, kind):
    """Starts at which other frames are taken than those that the times say, with both."""
    found = []
    for rate in (None, 8, 10, 25):
        num_starts, starts = starts_of(kind.times, kind.every, rate)
        assert len(starts) >= 3
        for start in starts:
            levels = load_clip(
                path, size=SIZE, taken=FrameSelection(frames=FRAMES, rate=rate), start=(start + 0.5) / num_starts
            )
            taken, right = numbers_of(levels.permute(1, 2, 3, 0).numpy()), taken_at(kind.times, start, rate)
            if taken != right:
                found.append((rate, start, taken, right))
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder, paths = tmp_path_factory.mktemp("clips"), {}

    def clip(name):
        if name not in paths:
            kind = KINDS[name]
            paths[name] = write(kind, folder / f"{len(paths)}.{kind.ending}")
        return paths[name]

    return clip


def test_a_board_is_read_as_its_number():
    frames = np.stack([np.repeat(board(number)[..., None], 3, axis=2) for number in (0, 1, 137, 255)])
    assert numbers_of(frames) == [0, 1, 137, 255]
    with pytest.raises(AssertionError, match="turned or mirrored"):
        numbers_of(frames[:, :, ::-1])


@pytest.mark.parametrize("name", CASES)
def test_the_frames_of_a_clip_are_those_that_its_times_say(written, name):
    path = written(name)
    assert problem_of_clip(path, FrameSelection(frames=26)) is None
    assert not faults(path, KINDS[name])


def test_open_groups_are_open_and_key_frames_are_where_the_test_expects_them(written):
    with av.open(str(written("H.265 open mp4"))) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
    stamps = sorted(packet.pts for packet in packets)
    keys = [number for number, packet in enumerate(packets) if packet.is_keyframe]
    assert [stamps.index(packets[number].pts) for number in keys] == [0, 6, 12, 18, 24]
    assert any(packet.pts < packets[keys[1]].pts for packet in packets[keys[1] :])


def by_average(patch):
    """A reader that takes frames at the clip's average rate, whatever their times."""

    def numbers(taken, clip, start):
        rate = taken.rate or clip.rate
        return [clip.shown_at((start + number * clip.rate / rate) / clip.rate) for number in range(taken.frames)]

    patch.setattr(clips.FrameSelection, "numbers", numbers)


def with_one_seek(patch):
    """A reader that seeks once, to the time of the first frame, and takes what comes."""

    def decoded(path, clip, first):
        yield from clips._numbered(path, clip, clip_file.Key(stamp=clip.stamps[first], place=clip.stamps[first]))

    patch.setattr(clips, "_decoded", decoded)


def to_the_nearest_key(patch):
    """A reader that never seeks to an earlier key frame than the nearest one."""
    starts = clip_times.FrameTimes.starts_before
    patch.setattr(clip_times.FrameTimes, "starts_before", lambda clip, frame: starts(clip, frame)[:1])


def as_stored(patch):
    """A reader that takes pixels for squares."""
    patch.setattr(clips, "_seen_size", lambda frame, aspect: (frame.width, frame.height))


def turned_only(patch):
    """A reader that takes every display matrix as a turn."""

    def upright(frame):
        return frame.to_image().rotate(frame.rotation % 360, expand=True)

    patch.setattr(clips, "_upright", upright)


def without_alpha(patch):
    """A reader that does not know of what is transparent."""
    patch.setattr(clips, "_upright", lambda frame: frame.to_image())


def by_ffmpegs_decoder(patch):
    """A reader that has FFmpeg choose the decoder."""
    patch.setattr(clip_file, "_WITH_ALPHA", {})


PLANTED = [
    (by_average, "H.264 mp4 uneven"),
    (by_average, "VP9 webm paused"),
    (by_average, "GIF uneven"),
    (with_one_seek, "H.265 open mp4"),
    (with_one_seek, "H.264 open mp4"),
    (with_one_seek, "H.264 avi 12"),
    (to_the_nearest_key, "H.264 mp4 refreshed"),
    (as_stored, "H.264 mp4 270 mirrored 2:1"),
    (as_stored, "H.264 mkv 1:2"),
    (turned_only, "H.264 mov 90 mirrored"),
    (turned_only, "H.264 mov 0 mirrored"),
    (turned_only, "H.264 mp4 upside down"),
    (without_alpha, "qtrle mov alpha"),
    (without_alpha, "ProRes mov alpha"),
    (by_ffmpegs_decoder, "VP9 webm alpha"),
]
QUICKLY = (PLANTED[0], PLANTED[3])


@pytest.mark.parametrize(
    ("plant", "name"), [pytest.param(*one, marks=() if one in QUICKLY else pytest.mark.slow) for one in PLANTED]
)
def test_a_planted_fault_is_found(written, plant, name, monkeypatch):
    path = written(name)
    plant(monkeypatch)
    with pytest.raises((AssertionError, PictureError)):
        assert not faults(path, KINDS[name])
