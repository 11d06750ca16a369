"""`diffusionpipe schedule NAME --versions KIND` shows a window, what it reaches and which weights it reads."""

import json

import pytest
from PIL import Image

from diffusionpipe import cli
from diffusionpipe.ir import Op
from diffusionpipe.ir.files import read_schedule
from diffusionpipe.ir.versions import Versions, staleness_of, versions_read
from diffusionpipe.passes import with_versions
from diffusionpipe.planner.assembly.windows import overlap

SIZES = ("--ranks", "4", "--microbatches")


def shown(capsys, *words, code=0):
    with pytest.raises(SystemExit) as caught:
        cli.main(["schedule", *words])
    assert (caught.value.code or 0) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def test_the_steady_state_stands_beside_the_flushed_makespan(capsys):
    text = shown(capsys, "1f1b", *SIZES, "4", "--versions", "stashed")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "period 12 from the end of a batch to the end of the next one" in lines
    assert "with a flush 21 1.75 times as long" in lines
    assert "0 1 1 1 0 1 1 1 0 2" in lines  # rank, staleness of its forwards and backwards, versions
    assert "3 0 0 0 0 0 0 0 0 1" in lines


@pytest.mark.parametrize(
    ("versions", "microbatches", "held"),
    [("stashed", 1, [4, 3, 2, 1]), ("vertical", 1, [4] * 4), ("delayed", 4, [2] * 4), ("newest", 1, [1] * 4)],
)
def test_the_figures_are_those_of_the_window(capsys, versions, microbatches, held):
    words = *SIZES, str(microbatches), "--versions", versions, "--input-grad", "2"
    found = json.loads(shown(capsys, "1f1b", *words, "--json"))
    assert (found["versions"], found["idle"], found["versions_held"]) == (versions, 0.0, held)
    assert found["period"] == 4 * microbatches
    table = staleness_of(with_versions(overlap(4, microbatches), Versions(versions)))
    assert found["staleness_of_backwards"] == [list(table[stage, Op.B]) for stage in range(4)]


def test_the_picture_and_the_schedule_file_are_written(capsys, tmp_path):
    png, out = tmp_path / "window.png", tmp_path / "window.json"
    shown(capsys, "1f1b", *SIZES, "4", "--versions", "stashed", "--png", str(png), "--out", str(out))
    assert read_schedule(out).orders == with_versions(overlap(4, 4), Versions.STASHED).orders
    with Image.open(png) as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
    backwards = {(33, 113, 181), (217, 95, 14), (35, 139, 69), (106, 81, 163)}
    assert backwards <= colours, "one hue for each of four versions"


def test_a_backward_of_stashed_weights_reads_the_version_of_its_forward():
    read = versions_read(with_versions(overlap(3, 2), Versions.STASHED), 5)
    assert all(version == read[stage, Op.F, microbatch] for (stage, _, microbatch), version in read.items())
    newest = versions_read(with_versions(overlap(3, 2), Versions.NEWEST), 5)
    assert any(version != newest[stage, Op.F, microbatch] for (stage, _, microbatch), version in newest.items())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["1f1b", *SIZES, "4", "--versions", "flushed"], "use stashed, vertical, delayed, newest or predicted"),
        (["1f1b", *SIZES, "4", "--delay", "2"], "--delay is for --versions delayed"),
        (["1f1b", *SIZES, "4", "--versions", "newest", "--delay", "2"], "--delay is for --versions delayed"),
        (["1f1b", *SIZES, "1", "--versions", "delayed"], "a delay of 1 needs at least 3 micro-batches"),
        (["1f1b", "--ranks", "200", "--microbatches", "200", "--versions", "newest"], "simulated forwards, more than"),
        (["zb-h1", *SIZES, "4", "--versions", "stashed"], "does not alternate forwards and backwards"),
        (["1f1b", *SIZES, "4", "--versions", "stashed", "--csv"], "torch's format has no versions"),
    ],
)
def test_what_has_no_window_is_refused(capsys, words, says):
    assert says in shown(capsys, *words, code=2)
