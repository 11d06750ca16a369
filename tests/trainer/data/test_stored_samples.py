"""Samples in shards and in tables: the same batches as from a folder, whichever rank or worker reads them."""

import io
import json
import tarfile

import numpy as np
import pytest
import torch
from kit.crew import crew_of
from kit.tiny_runs import losses_of, recipe_of, save_pictures, save_stable_diffusion, train, train_here
from PIL import Image

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import ConfigError, DataError
from diffusionpipe.trainer.data.batches.batch import Augmentation, BatchSource
from diffusionpipe.trainer.data.batches.loader import StepLoader
from diffusionpipe.trainer.data.places import PlaceKind, files_of, kind_of_place, problem_of_place
from diffusionpipe.trainer.data.scan.columns import Columns
from diffusionpipe.trainer.data.scan.dataset import Condition, ScanRules
from diffusionpipe.trainer.data.scan.dataset_form import DATASETS
from diffusionpipe.trainer.data.scan.scanning import examine_place

PIXELS = TensorSpec(name="pixels", shape=(3, 8, 8))
IDS = TensorSpec(name="input_ids", shape=(4,), dtype="int64")


def words(texts, *, padding, max_length, truncation):
    return {"input_ids": [([ord(c) for c in text] + [0] * max_length)[:max_length] for text in texts]}


def write_shard(path, *members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Seven pictures with captions and labels: in a folder, in two shards, and in tables."""
    path = tmp_path_factory.mktemp("stored")
    folder = save_pictures(path / "data", 7)
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    members = []
    for number, row in enumerate(rows):
        stem = row["file_name"].removesuffix(".png")
        about = {"caption": row["text"], "label": row["label"]}
        said = (
            [(f"{stem}.json", json.dumps(about).encode())]
            if number % 2
            else [(f"{stem}.txt", row["text"].encode()), (f"{stem}.cls", str(row["label"]).encode())]
        )
        members.append([(f"{stem}.png", (folder / row["file_name"]).read_bytes()), *said])
    for number, part in enumerate((members[:4], members[4:])):
        write_shard(path / f"birds-{number:03d}.tar", *[member for sample in part for member in sample])
    return path


def rows_of(path):
    folder = path / "data"
    found = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    return [{**row, "bytes": (folder / row["file_name"]).read_bytes()} for row in found]


def batches(dataset, steps=5, positions=(0, 1, 2), first=0, workers=0):
    source = BatchSource(
        dataset=dataset,
        inputs=(PIXELS, IDS),
        seed=4,
        tokenizers={"input_ids": words},
        augmentation=Augmentation(flip=True),
    )
    loader = StepLoader(source=source, batch=3, positions=positions, first_step=first, num_steps=steps, workers=workers)
    found = list(loader)
    return [{name: value.clone() for name, value in batch.items()} for batch in found]


def assert_same(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def expected(place):
    return batches(examine_place(place / "data", Condition.TEXT)[0])


def test_shards_give_the_batches_of_the_folder_that_they_hold(place, expected):
    dataset, findings = examine_place(place / "birds-{000..001}.tar", Condition.TEXT)
    assert [sample.name for sample in dataset.samples[:2]] == ["birds-000.tar/000.png", "birds-000.tar/001.png"]
    assert [sample.label for sample in dataset.samples] == [row["label"] for row in rows_of(place)]
    assert findings.sizes == ((8, 8),) * 7
    sent = DATASETS.read(json.loads(json.dumps(DATASETS.write((dataset, None)))))[0]
    assert sent == dataset
    assert_same(batches(sent), expected)
    assert_same(batches(sent, 3, (2, 0), 2), [{k: v[[2, 0]] for k, v in batch.items()} for batch in expected[2:]])


@pytest.mark.slow
def test_worker_processes_read_shards_and_tables(place, expected):
    for name in ("birds-*.tar", "rows.parquet"):
        save_parquet(place)
        dataset, _ = examine_place(place / name, Condition.TEXT)
        assert_same(batches(dataset, workers=2), expected)


def save_parquet(place):
    datasets = pytest.importorskip("datasets")
    rows = rows_of(place)
    columns = {"image": [{"bytes": row["bytes"], "path": None} for row in rows]}
    columns |= {"text": [row["text"] for row in rows], "label": [row["label"] for row in rows]}
    features = datasets.Features(
        {"image": datasets.Image(), "text": datasets.Value("string"), "label": datasets.Value("int64")}
    )
    made = datasets.Dataset.from_dict(columns, features=features)
    made.to_parquet(str(place / "rows.parquet"))
    return made


def test_tables_and_saved_data_sets_give_the_batches_of_the_folder(place, expected, monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = save_parquet(place)
    datasets.DatasetDict({"train": made}).save_to_disk(str(place / "saved"))
    (place / "rows.csv").write_text(
        "file,said\n" + "\n".join(f"data/{r['file_name']},{r['text']}" for r in rows_of(place))
    )
    lines = [json.dumps({"file": f"data/{r['file_name']}", "said": [r["text"]]}) for r in rows_of(place)]
    (place / "rows.jsonl").write_text("\n".join(lines))
    named = Columns(image="file", text="said")
    for name, columns in (
        ("rows.parquet", Columns()),
        ("saved", Columns()),
        ("rows.csv", named),
        ("rows.jsonl", named),
    ):
        dataset, _ = examine_place(place / name, Condition.TEXT, columns=columns)
        sent = DATASETS.read(json.loads(json.dumps(DATASETS.write((dataset, None)))))[0]
        assert_same(batches(sent), expected)
    with pytest.raises(DataError, match=r"no column 'image'; name one of file, said as columns\.image"):
        examine_place(place / "rows.csv", Condition.TEXT)
    with pytest.raises(ConfigError, match="it has no split 'test'; its splits are train"):
        examine_place(place / "saved", Condition.TEXT, columns=Columns(split="test"))


def picture():
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    return file.getvalue()


BAD = {
    "outside": ([("../a.png", b"")], r"its member \.\./a\.png lies outside of the shard's folder"),
    "absolute": ([("/a.png", b"")], "lies outside of the shard's folder"),
    "apart": ([("a.png", b"x"), ("b.png", b"x"), ("a.txt", b"x")], "the members of a are not one after the other"),
    "two": ([("a.png", b"x"), ("a.jpg", b"x")], r"a has two pictures, \.png and \.jpg"),
    "label": ([("a.png", b"x"), ("a.cls", b"one")], "invalid literal"),
    "text": ([("a.png", b"x"), ("a.json", b'{"caption": 3}')], "its caption is 3; expected a text"),
    "none": ([("a.png", picture())], r"1 picture without a text:\n    s\.tar/a\.png"),
    "damaged": ([("a.png", b"x"), ("a.txt", b"x")], r"s\.tar/a\.png: UnidentifiedImageError"),
    "empty": ([("a.txt", b"x")], "it holds no pictures that can be read"),
}


@pytest.mark.parametrize(("members", "problem"), BAD.values(), ids=BAD)
def test_a_shard_that_cannot_be_used_is_refused_with_the_member(tmp_path, members, problem):
    write_shard(tmp_path / "s.tar", *members)
    with pytest.raises(DataError, match=problem):
        examine_place(tmp_path / "s.tar", Condition.TEXT)


def test_shards_that_are_cut_short_or_compressed_are_named(tmp_path):
    whole = write_shard(tmp_path / "a.tar", ("a.png", picture() * 40), ("a.txt", b"x")).read_bytes()
    (tmp_path / "short.tar").write_bytes(whole[:700])
    with pytest.raises(DataError, match=r"short\.tar: unexpected end of data"):
        examine_place(tmp_path / "short.tar", Condition.TEXT)
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz"):
        pass
    with pytest.raises(DataError, match=r"b\.tar\.gz: it is compressed; unpack it with gunzip"):
        examine_place(tmp_path / "b.tar.gz", Condition.TEXT)


def test_a_report_names_what_a_run_refuses(tmp_path):
    write_shard(tmp_path / "s.tar", ("a.png", picture()), ("b.png", b"x"), ("c.txt", b"x"))
    dataset, findings = examine_place(tmp_path / "s.tar", Condition.NOTHING, rules=ScanRules(reports=True))
    assert [sample.name for sample in dataset.samples] == ["s.tar/a.png"]
    assert "s.tar/b.png: UnidentifiedImageError" in findings.overlooked[0]
    assert findings.overlooked[1] == "1 sample has no picture, e.g. s.tar/c"


def test_places_are_told_apart_and_missing_ones_named(tmp_path):
    assert kind_of_place(tmp_path) is PlaceKind.FOLDER
    assert kind_of_place(tmp_path / "a-{0..3}.tar") is PlaceKind.SHARDS
    assert kind_of_place(tmp_path / "*.parquet") is PlaceKind.TABLE
    assert [file.name for file in files_of(tmp_path / "a-{08..10}.tar")] == ["a-08.tar", "a-09.tar", "a-10.tar"]
    assert problem_of_place(tmp_path / "*.tar") == f"no file is named {tmp_path}/*.tar"
    assert problem_of_place(tmp_path / "a.tar") == f"there is no file {tmp_path}/a.tar"
    assert problem_of_place(tmp_path / "no") == f"there is no folder {tmp_path}/no"


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", ["birds-*.tar", "rows.parquet"])
def test_a_run_resumed_in_an_epoch_on_two_ranks_has_the_losses_of_the_folder(place, name):
    save_parquet(place)
    if not (place / "sd").exists():
        save_stable_diffusion(place / "sd")

    def recipe(data, run, steps=4, **sections):
        training = {"steps": steps, "batch": 4, "precision": "float64"}
        return recipe_of(place / "sd", place / data, place / run, training=training, **sections)

    run = f"of-{name[:5]}"
    train_here(recipe("data", f"whole-{run}"))
    train_here(recipe(name, run, 2))
    with crew_of(2) as crew:
        assert crew.run(train, recipe(name, run, pipeline={"stages": 2}), "latest") == [4, 4]
    whole, parts = losses_of(place / f"whole-{run}"), losses_of(place / run)
    assert whole.keys() == parts.keys() == {1, 2, 3, 4}
    assert all(abs(whole[step] - parts[step]) < 1e-12 for step in whole)
    assert np.isfinite(list(parts.values())).all()
