"""`diffusionpipe data`: what a folder or a recipe holds, without a model, beside counts by hand."""

import json

import numpy as np
import pytest
from kit.tiny_runs import recipe_of, save_stable_diffusion, train_here
from PIL import Image

from diffusionpipe import cli
from diffusionpipe.trainer.data.sizes.sizes import sizes_of_area
from diffusionpipe.trainer.inference.conditions import open_tokenizer
from diffusionpipe.workflows.data_report import report_on_recipe

SIZES = {"wide.png": (400, 100), "square.png": (120, 120), "tall.png": (90, 170), "small.png": (10, 10)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "birds"
    (path / "@eaDir").mkdir(parents=True)
    for name, size in SIZES.items():
        Image.new("RGB", size).save(path / name)
    rows = [
        {"file_name": "wide.png", "text": ["one two three", "four"]},
        {"file_name": "square.png", "text": "five six"},
        {"file_name": "gone.png", "text": "seven"},
    ]
    (path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (path / "tall.txt").write_text("eight nine ten eleven")
    (path / "broken.png").write_bytes(b"\x89PNG")
    (path / "@eaDir/wide.png").write_text("x")
    (path / "notes.tsv").write_text("x")
    return path


def shown(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        cli.main(["data", *map(str, words)])
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    return [(line[: line.index("  ")], line.split("  ", 1)[1].strip()) for line in lines if "  " in line], lines


def test_a_folder_is_told_with_everything_that_is_wrong_in_it_and_nothing_is_refused(folder, capsys):
    pairs, _ = shown(capsys, folder, "--resolution", "128")
    said = {name: [text for own, text in pairs if own == name] for name, _ in pairs}
    assert said["pictures"] == [f"4 in {folder}, of 10 x 10 to 400 x 100 (median 90 x 170) pixels"]
    assert any("enlarged up to 12.8 times" in text for text in said["sizes"])
    assert said["captions"] == [
        "of 1 to 4 words (median 2), 4 different; 1 picture has several",
        "1 picture has none, e.g. small.png",
    ]
    overlooked = "\n".join(said["overlooked"])
    for part in ("broken.png: ", "gone.png", "notes.tsv", "1 of @eaDir"):
        assert part in overlooked
    assert "epochs" not in said


def test_sizes_of_an_area_have_each_picture_where_least_of_it_is_cut_away(folder, capsys):
    pairs, _ = shown(capsys, folder, "--resolution", "128", "--aspects", "0.5", "2")
    areas = [(size.width, size.height) for size in sizes_of_area(128, (0.5, 2.0))]
    counts, cuts = {}, []
    for width, height in SIZES.values():
        own = {}
        for across, down in areas:
            scale = max(across / width, down / height)
            own[across, down] = 1 - across * down / (width * height * scale**2)
        best = min(own, key=own.get)
        counts[best] = counts.get(best, 0) + 1
        cuts.append(own[best])
    said = [text for name, text in pairs if name == "sizes"]
    assert said[0] == f"{len(counts)} for 4 pictures; {100 * np.mean(cuts):.0f} % of the pixels are cut away"
    assert {text.partition(" (")[0] for text in said[1:]} == {f"{w} x {h} pixels: {n}" for (w, h), n in counts.items()}
    shares = [1 - min(size) / max(size) for size in SIZES.values()]
    assert (
        dict(pairs)["one square"] == f"of 128 x 128 pixels would cut {100 * np.mean(shares):.0f} % of the pixels away"
    )


def test_a_contact_sheet_fades_what_is_cut_away(tmp_path, capsys):
    (tmp_path / "one").mkdir()
    Image.new("RGB", (400, 100)).save(tmp_path / "one/a.png")
    _, lines = shown(capsys, tmp_path / "one", "--aspects", "1", "1", "--out", tmp_path / "sheet.png")
    assert lines[-1] == f"{tmp_path / 'sheet.png'} shows 1 of them"
    levels = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB"))
    assert (levels == 0).all(-1).sum() == 56 * 56, "of 224 x 56 the square in the middle"
    assert (levels[:70] == 191).all(-1).sum() == 56 * (224 - 56)


def write_recipe(tmp_path, folder, **data):
    recipe = {
        "model": {"path": "nowhere"},
        "data": {"resolution": 64, "sources": {"birds": {"path": str(folder), "repeats": 3}}, **data},
        "training": {"epochs": 2, "batch": 5},
    }
    lines = [
        f"[{section}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in keys.items()) for section, keys in recipe.items()
    ]
    (tmp_path / "recipe.toml").write_text("\n".join(lines))
    return tmp_path / "recipe.toml"


def _toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(own)}" for key, own in value.items()) + " }"
    return json.dumps(value)


def test_a_recipe_is_told_as_its_run_would_begin_though_its_model_is_not_there(tmp_path, folder, capsys):
    recipe = write_recipe(tmp_path, folder, captions={"prefix": "a b "})
    pairs, _ = shown(capsys, recipe, "training.batch=4")
    said = dict(pairs)
    assert said["birds"] == f"4 in {folder}, each 3 times: 100 % of an epoch"
    assert said["epochs"] == "2 (6 steps of 4)"
    assert next(text for name, text in pairs if name == "captions").startswith("of 2 to 6 words")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["data.resolution=3"], "sets a key of a recipe, but"),
        (["--aspects", "2", "1"], "give the least width / height first"),
    ],
)
def test_words_that_a_folder_does_not_take_are_refused(folder, capsys, words, problem):
    with pytest.raises(SystemExit) as caught:
        cli.main(["data", str(folder), *words])
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


def test_words_that_a_recipe_does_not_take_are_refused(tmp_path, folder, capsys):
    with pytest.raises(SystemExit):
        cli.main(["data", str(write_recipe(tmp_path, folder)), "--resolution", "64"])
    assert "a recipe has its sizes: data.resolution=768" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_run_says_the_same_of_its_data_before_its_first_step(tmp_path):
    save_stable_diffusion(tmp_path / "sd")
    (tmp_path / "data").mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (30, 20)).save(tmp_path / "data" / name)
        (tmp_path / f"data/{name[0]}.txt").write_text("a")
    recipe = recipe_of(tmp_path / "sd", tmp_path / "data", tmp_path / "run", training={"steps": 1})
    told = []
    train_here(recipe, tell_data=told.extend)
    assert list(report_on_recipe(recipe).lines) == told
    assert {"pictures", "epochs", "cut away", "captions"} <= {line.name for line in told}


def test_a_recipe_whose_model_is_there_counts_tokens_and_names_what_the_run_would_refuse(tmp_path, folder, capsys):
    save_stable_diffusion(tmp_path / "sd")
    recipe = write_recipe(tmp_path, folder, captions={"prefix": "a b "})
    pairs, _ = shown(capsys, recipe, f"model.path={tmp_path / 'sd'}")
    said = [text for name, text in pairs if name == "captions"]
    tokenizer = open_tokenizer(tmp_path / "sd")
    texts = [f"a b {text}" for text in ("one two three", "four", "five six", "eight nine ten eleven", "")] * 3
    tokens = sorted(len(row) for row in tokenizer(texts)["input_ids"])
    assert said[0] == f"of {tokens[0]} to {tokens[-1]} tokens (median {tokens[7]}); text_encoder reads up to 6"
    assert said[1].startswith("12 are longer than the 6 tokens that text_encoder reads, the longest of birds/tall.png")
    assert said[2] == "1 picture has none, e.g. birds/small.png"
    pairs, _ = shown(capsys, recipe, f"model.path={tmp_path / 'sd'}", 'data.resolution=["7x16", 8]')
    assert "the nearest size that it takes is 8 x 16 pixels" in dict(pairs)["model"]
