"""The block before step 1: it names what is probably not meant, in one screen, and says nothing where all is well."""

import io
import json
import logging
import shutil
from dataclasses import replace

import numpy as np
import pytest
from kit.screen_files import assert_screen
from kit.tiny_runs import recipe_of, save_pictures, save_stable_diffusion, train_here
from PIL import Image
from rich.console import Console

from diffusionpipe.cli.text.run_text import ConsoleWords
from diffusionpipe.models.opening.folder import scheduler_config
from diffusionpipe.trainer.data.decoding.images import placing
from diffusionpipe.trainer.data.scan.dataset import Dataset, Findings, Sample
from diffusionpipe.trainer.data.sizes.sizes import SizeRules, assign, sizes_of_area
from diffusionpipe.trainer.data.survey import Folder, SampleUse, kept_survey, survey
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.folder_drawing import Source, open_source

ROWS = 24
"""Of a small terminal."""


def folder(sizes, texts=None, overlooked=()):
    names = [f"{number}.png" for number in range(len(sizes))]
    samples = tuple(Sample(name=name, text=text) for name, text in zip(names, texts or ["a"] * len(sizes), strict=True))
    findings = Findings(noun="pictures", sizes=tuple(sizes), files={}, overlooked=tuple(overlooked))
    return Folder(Dataset(folder="data", samples=samples), findings)


def lines_of(train, held_out=None, **use):
    given = {"steps": 10, "batch": 2, "epochs": 1.0, "size": (512, 512), "readings": (), **use}
    return {line.name: line.text for line in survey(train, held_out, SampleUse(**given))}


def test_pictures_that_are_enlarged_by_more_than_two_are_counted_and_the_worst_is_named():
    said = lines_of(folder([(256, 300), (255, 300), (120, 100), (512, 512)]))
    assert said["enlarged"] == "2 by more than 2 to 512 x 512, the most 2.png, 120 x 100 pixels, by 5.12"
    assert "enlarged" not in lines_of(folder([(256, 300), (4000, 300)]))
    assert (
        lines_of(folder([(1, 1)]))["enlarged"] == "1 by more than 2 to 512 x 512, the most 0.png, 1 x 1 pixels, by 512"
    )


@pytest.mark.parametrize("wanted", [(512, 512), (512, 256), (64, 96)])
def test_the_share_that_is_cut_away_is_that_of_the_pictures_as_they_are_placed(wanted):
    sizes = [(640, 480), (300, 900), (512, 512), (1000, 999)]
    shares = []
    for size in sizes:
        width, height = placing(size, wanted, (0.5, 0.5)).resized
        shares.append(1 - wanted[0] * wanted[1] / (width * height))
    said, worst = lines_of(folder(sizes), size=wanted)["cut away"], shares.index(max(shares))
    assert said.startswith(f"{100 * sum(shares) / 4:.0f} % of the pixels, the most of {worst}.png, ")
    assert said.endswith(f"{100 * max(shares):.0f} %")
    assert lines_of(folder([(512, 512)]))["cut away"] == "0 % of the pixels"


def test_epochs_are_a_number_and_a_batch_that_is_larger_than_the_data_is_named():
    assert lines_of(folder([(512, 512)] * 3), epochs=20 / 3)["epochs"] == "6.67 (10 steps of 2)"
    assert "batch" not in lines_of(folder([(512, 512)] * 2))
    said = lines_of(folder([(512, 512)] * 3), batch=8)["batch"]
    assert said.startswith("training.batch is 8, larger than the data set of 3 pictures: each is up to 3 times in one")


def test_sizes_that_are_not_known_are_not_said():
    said = lines_of(folder([None, None]))
    assert said.keys() == {"pictures", "epochs"}
    assert said["pictures"] == "2 in data"


@pytest.mark.parametrize("seed", range(3))
def test_the_kept_sizes_have_the_shares_and_cuts_of_the_pictures_as_they_are_placed(seed):
    """Beside each picture placed on its own, at the size that its number has."""
    random = np.random.default_rng(seed)
    pictures = [tuple(map(int, random.integers(40, 900, 2))) for _ in range(60)]
    rules = SizeRules(areas=(sizes_of_area(256, (0.5, 2.0)),))
    assigned = assign(pictures, rules, 1)
    use = SampleUse(steps=10, batch=2, epochs=1.0, size=(256, 256), readings=(), sizes=assigned)
    kept = kept_survey(folder(pictures), None, use)
    assert sum(one.samples for one in kept.sizes) == 60 - len(assigned.left_out)
    for one, share in zip(kept.sizes, assigned.shares, strict=True):
        wanted = (share.size.width, share.size.height)
        cuts = []
        for number in share.members[0]:
            width, height = placing(pictures[number], wanted, (0.5, 0.5)).resized
            cuts.append(1 - wanted[0] * wanted[1] / (width * height))
        assert one.size == f"{wanted[0]:,} x {wanted[1]:,}"
        assert (one.samples, one.cut) == (len(cuts), pytest.approx(np.mean(cuts), abs=0.01))  # whole pixels there


def test_the_kept_facts_are_those_that_are_printed_and_how_long_captions_are():
    train, use = folder([(512, 256), None], ["a b", "a b c d"]), {"steps": 10, "batch": 2, "epochs": 1.0}
    read = SampleUse(size=(512, 512), readings=(), **use)
    kept = kept_survey(train, None, read)
    assert (kept.lines, kept.further) == (survey(train, None, read), ())
    assert [(one.size, one.samples, one.cut) for one in kept.sizes] == [("512 x 512", 2, 0.5)]
    counted = kept_survey(train, None, replace(read, readings=None))
    assert (counted.lines, counted.further) == (survey(train, None, replace(read, readings=None)), ())
    assert "of 2 to 4 words (median 2), 2 different" in [line.text for line in counted.lines]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model whose captions have at most six tokens, and data with every fault that is named."""
    path = tmp_path_factory.mktemp("survey")
    save_stable_diffusion(path / "sd")
    save_pictures(path / "sound", 4)
    (path / "data" / "@eaDir").mkdir(parents=True)
    Image.new("RGB", (120, 100)).save(path / "data" / "small.png")
    (path / "data" / "small.txt").write_text("word " * 200)
    Image.new("RGB", (900, 300)).save(path / "data" / "wide.png")
    (path / "data" / "wide.txt").write_text("")
    for name in ("@eaDir/x.jpg", "rows.parquet", "x.psd"):
        (path / "data" / name).write_text("x")
    (path / "data" / "lone.caption").write_text("a")
    (path / "data" / "gone").symlink_to("nowhere")
    return path


def told(place, tmp_path, pictures="data", **sections):
    """What a run says of its data, until it would plan."""

    class EndError(Exception):
        pass

    found = []

    def tell(lines):
        found.extend(lines)
        raise EndError

    recipe = recipe_of(place / "sd", place / pictures, tmp_path / "run", **sections)
    with pytest.raises(EndError):
        train_here(recipe, tell_data=tell)
    return found


def on_terminal(lines, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    ConsoleWords(console).data(lines)
    return console.file.getvalue()


def test_every_fault_is_named_before_anything_is_planned_in_one_screen(place, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    sampling = {"every": 2, "prompts": ["a b", "a prompt of more letters"], "steps": 1}
    data = {"resolution": 256}
    lines = told(place, tmp_path, training={"batch": 8}, data=data, sampling=sampling)
    lines = [replace(line, text=line.text.replace(f"{place}/", "")) for line in lines]
    shown = on_terminal(lines, 80)
    assert len(shown.splitlines()) <= ROWS
    assert_screen("train_data_80", shown)
    named = {line.name for line in lines if line.is_warning}
    assert named == {"batch", "enlarged", "captions", "prompts"}
    ConsoleWords(Console(file=io.StringIO())).data(lines)
    assert "captions: 1 is longer than the 6 tokens that text_encoder reads, the longest of small.png" in caplog.text


def test_sound_data_are_told_without_a_warning(place, tmp_path):
    sampling = {"every": 2, "prompts": ["a b"], "steps": 1}
    lines = told(place, tmp_path, pictures="sound", sampling=sampling)
    assert [line.name for line in lines] == ["pictures", "epochs", "cut away", "captions"]
    assert not any(line.is_warning for line in lines)
    assert lines[0].text.endswith("of 8 x 8 pixels")
    assert lines[1].text == "6 (6 steps of 4)"
    assert lines[3].text == "of 3 tokens; text_encoder reads up to 6"


def test_validation_has_lines_of_its_own(place, tmp_path):
    shutil.copytree(place / "data", tmp_path / "held-out", symlinks=True)
    data = {"validation": str(tmp_path / "held-out")}
    texts = [line.text for line in told(place, tmp_path, data=data | {"resolution": 8}, validation={"every": 1})]
    assert f"2 in {tmp_path / 'held-out'}" in texts
    assert "captions 1 is empty, e.g. wide.png" in texts
    assert f"{tmp_path / 'held-out'}: 1 of @eaDir: names that machines make" in texts


def test_a_prompt_that_sample_draws_the_beginning_of_alone_is_named_once(place, caplog):
    wish = SampleRequest(prompts=("a b", "a prompt of more letters") * 2, negatives=("a",) * 4)
    settings = SamplingSettings(steps=1, guidance=2.0, seed=0, scheduler=scheduler_config(place / "sd"))
    source = Source(folder=place / "sd", resolution=8)
    open_source(source, wish, settings, tells=False)
    assert not caplog.messages
    open_source(source, wish, settings)
    (message,) = caplog.messages
    assert message.startswith("1 prompt is longer than the 6 tokens that text_encoder reads, so the rest has no effect")
    assert message.endswith('the longest, "a prompt of more letters", has 22; more --caption-chunks read more of it')


def test_braces_without_a_partner_and_inside_others_are_counted(place, tmp_path):
    folder = save_pictures(tmp_path / "pictures")
    texts = ["a {b|c}", "a {b|{c|d}}", "{a|b", "a} b", "{{a|b}}", "{a}"]
    captions = [texts[number % len(texts)] for number in range(20)]
    entries = [{"file_name": f"{number:03d}.png", "text": text} for number, text in enumerate(captions)]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, entries)) + "\n", encoding="utf-8")
    data = {"captions": {"alternatives": True}}
    lines = told(place, tmp_path, pictures=folder, data=data)
    (line,) = (line for line in lines if "outside of alternatives" in line.text)
    strays = sum(text in ("a {b|{c|d}}", "{a|b", "a} b", "{a}") for text in captions)
    assert line.is_warning
    assert line.text.startswith(f"{strays} pictures have braces outside of alternatives, e.g. 001")
    assert not any("outside of alternatives" in line.text for line in told(place, tmp_path, pictures=folder))
