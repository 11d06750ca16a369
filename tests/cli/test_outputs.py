"""Outputs are checked before the work: each command is refused for its output, although its input does not exist."""

import pytest

from diffusionpipe import cli

COMMANDS = {
    "profile": ("profile", "none.toml", "--out"),
    "plan": ("plan", "none.toml", "--cluster", "l40sx8", "--out"),
    "plan show": ("plan", "show", "none.json", "--png"),
    "cluster": ("cluster", "--ranks", "2", "--out"),
    "schedule": ("schedule", "gpipe", "--ranks", "100", "--microbatches", "400", "--perfetto"),
    "rehearse": ("rehearse", "none.json", "--profile", "none.json", "--png"),
    "sample": ("sample", "none", "--prompt", "a bird", "--out"),
}


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_an_output_in_a_missing_folder_is_refused_before_the_work(capsys, tmp_path, words):
    with pytest.raises(SystemExit) as caught:
        cli.main([*words, str(tmp_path / "missing" / "file.png")])
    assert caught.value.code == 2
    assert f"cannot write {tmp_path}/missing/file.png: No such file or directory" in capsys.readouterr().err


def test_a_picture_of_an_unknown_format_is_refused_before_the_work(capsys, tmp_path):
    with pytest.raises(SystemExit):
        cli.main(["plan", "show", "none.json", "--png", str(tmp_path / "plan.doc")])
    assert "no picture format '.doc'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
