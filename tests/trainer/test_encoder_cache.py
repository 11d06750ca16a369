"""Runs with a cache of encoders' results: losses, layouts, resuming, disks and other runs."""

import json
import logging
import multiprocessing
import re
import shutil
from unittest import mock

import pytest
import torch
from kit import tiny_runs
from kit.cached_rows import opened_run
from kit.cached_runs import (
    LAYOUT,
    assert_close,
    entries_of,
    is_whole,
    small_shards,
    train_in_small_shards,
    train_without_settings,
)
from kit.crew import nest
from kit.full_disk import full_disk
from kit.sized_pictures import SIZED, save_sized
from kit.tiny_models import FILLING_UNET, randomise_parameters, tiny_unet, tiny_vae
from kit.tiny_runs import save_pictures, save_stable_diffusion, train_here
from safetensors import safe_open

from diffusionpipe.errors import ConfigError, RecipeError
from diffusionpipe.ir.words import bytes_in_words
from diffusionpipe.trainer.data.cache.files import shards_of
from diffusionpipe.trainer.recipe import Recipe
from diffusionpipe.trainer.setup import caching as setup

PICTURES, BATCH = 8, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_stable_diffusion(tmp_path_factory.mktemp("cached") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = save_pictures(tmp_path_factory.mktemp("cached") / "pictures", PICTURES)
    lines = [
        re.sub(r'"text": "."', f'"text": "{letter}"', line)
        for letter, line in zip("ijklmnop", (folder / "metadata.jsonl").read_text().splitlines(), strict=True)
    ]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def recipe_of(*folders, data=None, **sections):
    """A recipe whose captions are all read."""
    return tiny_runs.recipe_of(*folders, data={"caption_dropout": 0.0, **(data or {})}, **sections)


@pytest.fixture(scope="module")
def make(model, data):
    def made(folder, encoders=None, *, steps=8, **sections):
        pipeline = {**LAYOUT, **sections.pop("pipeline", {})}
        if encoders is not None:
            pipeline |= {"encoders": encoders, "fill": pipeline.get("fill", False)}
        training = {"steps": steps, "batch": BATCH, **sections.pop("training", {})}
        return recipe_of(model, data, folder, training=training, pipeline=pipeline, **sections)

    return made


def counts_in(caplog):
    """Counts of results that the last run of rank 0 has said."""
    text = next(one.getMessage() for one in reversed(caplog.records) if "cache_of_this_rank" in one.getMessage())
    return {name: int(count) for name, _, count in (word.partition("=") for word in text.split()[1:])}


@pytest.fixture(scope="module")
def plain(make, tmp_path_factory):
    """The run without a cache."""
    recipe = make(tmp_path_factory.mktemp("cached") / "plain")
    train_here(recipe)
    return recipe


@pytest.fixture(scope="module")
def exact(make, tmp_path_factory):
    """The run without a cache in float64, in which layouts do not differ."""
    recipe = make(tmp_path_factory.mktemp("cached") / "exact", training={"precision": "float64"})
    train_here(recipe)
    return recipe


def test_epochs_from_the_cache_have_the_losses_of_encoded_ones(make, plain, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    recipe = make(tmp_path / "run", "cache")
    with small_shards():
        train_here(recipe, exports=False)
    assert_close(recipe, plain)
    entries = entries_of(tmp_path / "run" / "cache")
    kinds = {name.partition("-")[0] for name, _ in entries}
    assert kinds == {"latents", "texts"}
    assert len(entries) == 2 * PICTURES
    counts = counts_in(caplog)
    assert counts["written"] == 2 * PICTURES
    assert counts["read"] + counts["encoded"] == 2 * 8 * BATCH
    assert counts["read"] >= counts["encoded"]
    again = make(tmp_path / "again", "cache", pipeline={"cache": str(tmp_path / "run" / "cache")})
    train_here(again, exports=False)  # a second run computes nothing
    assert_close(again, plain)
    assert counts_in(caplog) == {"encoded": 0, "read": 2 * 8 * BATCH, "written": 0}


@pytest.mark.parametrize(
    "pipeline",
    [
        {"stages": 2, "fill": True},
        {"stages": 1, "replicas": [2]},
        {"stages": 1, "data_parallel": 2, "offload_frozen": True, "fill": True},
    ],
    ids=["filled", "replicas", "copies, offloaded"],
)
def test_layouts_read_one_cache_and_a_run_resumes_on_another(make, exact, tmp_path, crew, pipeline):
    sections = {"checkpoint": {"every": 5}, "training": {"precision": "float64"}}
    half = make(tmp_path / "run", "cache", pipeline=pipeline, steps=5, **sections)
    crew.run(train_in_small_shards, half)
    written = entries_of(tmp_path / "run" / "cache")
    assert len(written) == 2 * PICTURES
    whole = make(tmp_path / "run", "cache", **sections)
    with small_shards():
        train_here(whole, resume="latest")
    assert_close(whole, exact, most=1e-12)
    assert entries_of(tmp_path / "run" / "cache").keys() == written.keys()


def test_settings_that_one_rank_cannot_write_end_all_ranks_with_one_sentence(make, tmp_path, crew):
    recipe = make(tmp_path / "run", "cache", pipeline={"stages": 2})
    first, second = crew.run(train_without_settings, recipe)
    assert isinstance(second, ConfigError)
    assert str(first) == str(second) == "rank 0: the disk is full"


def test_several_sizes_and_data_workers_read_it_too(model, tmp_path):
    pictures = save_sized(tmp_path / "sized")
    keys = {**SIZED, "flip": True, "workers": 1}
    training = {"steps": 15, "batch": 4}

    def made(name, **pipeline):
        return recipe_of(
            model, pictures, tmp_path / name, data=keys, training=training, pipeline={**LAYOUT, **pipeline}
        )

    plain, cached = made("plain"), made("cached", encoders="cache", fill=False)
    train_here(plain)
    with small_shards():
        train_here(cached)
    assert_close(cached, plain)


def test_the_last_rows_of_a_cache_of_one_run_do_not_hide_another_picture(make, data, model, tmp_path):
    """A picture that is replaced has another key."""
    pictures = shutil.copytree(data, tmp_path / "pictures")
    cache = {"encoders": "cache", "fill": False, "cache": str(tmp_path / "cache")}
    training = {"steps": 2, "batch": BATCH}
    train_here(
        recipe_of(model, pictures, tmp_path / "one", training=training, pipeline={**LAYOUT, **cache}), exports=False
    )
    other = save_pictures(tmp_path / "other", 1, seed=5)
    shutil.copy(other / "000.png", pictures / "003.png")
    cached = recipe_of(model, pictures, tmp_path / "two", training=training, pipeline={**LAYOUT, **cache})
    plain = recipe_of(model, pictures, tmp_path / "three", training=training, pipeline=LAYOUT)
    train_here(cached, exports=False)
    train_here(plain, exports=False)
    assert_close(cached, plain)
    assert len(entries_of(tmp_path / "cache")) == 2 * PICTURES + 1


def test_another_vae_is_named_and_its_results_are_its_own(make, data, model, tmp_path, caplog):
    folder = tmp_path / "run"
    cache = {"encoders": "cache", "fill": False, "cache": str(tmp_path / "cache")}
    train_here(make(folder, steps=2, pipeline=cache, encoders="cache"))
    changed = shutil.copytree(model, tmp_path / "changed")
    vae = tiny_vae()
    randomise_parameters(vae, 7)
    vae.save_pretrained(changed / "vae")
    training = {"steps": 2, "batch": BATCH}
    cached = recipe_of(changed, data, tmp_path / "two", training=training, pipeline={**LAYOUT, **cache})
    plain = recipe_of(changed, data, tmp_path / "three", training=training, pipeline=LAYOUT)
    caplog.clear()
    train_here(cached)
    (said,) = [one.getMessage() for one in caplog.records if "other settings" in one.getMessage()]
    assert "latents-moments" in said
    assert "weights of vae" in said
    assert "weights of text_encoder" not in said
    train_here(plain)
    assert_close(cached, plain)
    assert len({name for name, _ in entries_of(tmp_path / "cache")}) == 3  # texts are as before


def test_a_full_disk_ends_the_writing_and_not_the_run(make, plain, tmp_path, caplog):
    folder = tmp_path / "small"
    folder.mkdir()
    with full_disk(folder, free=16384), small_shards(), mock.patch.object(setup, "problem_of_cache", return_value=None):
        recipe = make(tmp_path / "run", "cache", pipeline={"cache": str(folder)}, checkpoint={"every": 1000})
        train_here(recipe, exports=False)
        assert not list(folder.glob("*/.*.tmp"))
    assert_close(recipe, plain)
    said = [one.getMessage() for one in caplog.records if "training continues without" in one.getMessage()]
    assert len(said) == 1


def test_a_disk_that_is_too_small_is_refused_with_both_sizes(make, tmp_path):
    recipe = make(tmp_path / "run", "cache")
    with (
        mock.patch.object(setup.shutil, "disk_usage", return_value=mock.Mock(free=100)),
        pytest.raises(ConfigError, match=r"needs [\d.]+ KiB more, and 0\.0977 KiB of its disk are free; make room"),
    ):
        train_here(recipe)
    assert not (tmp_path / "run" / "cache").exists()


def test_files_leave_less_to_write_only_where_the_run_can_read_them(make, tmp_path):
    recipe = make(tmp_path / "run", "cache")
    with opened_run(recipe) as run:
        found = run.found
    folders = sorted((tmp_path / "run" / "cache").iterdir())
    assert len(folders) == len(found.kept) == 2

    def missing():
        with mock.patch.object(setup.shutil, "disk_usage", return_value=mock.Mock(free=0)):
            return setup.problem_of_cache(found, recipe)

    of_nothing = missing()
    for folder, size in zip(folders, (100, 10 * found.size), strict=True):  # more than a run of these samples writes
        (folder / f"{folder.name}.safetensors").write_bytes(bytes(size))
    assert bytes_in_words(found.totals[_place(found, folders[0])] - 100) in missing()
    (folders[0] / "1.safetensors").write_bytes(bytes(found.size))
    assert missing() is None
    for folder in folders:
        settings = json.loads((folder / "settings.json").read_text())
        (folder / "settings.json").write_text(json.dumps(settings | {"precision": "another"}))
    assert missing() == of_nothing


def _place(found, folder):
    """The place of the kept tensor whose results a folder has."""
    return next(place for place, one in enumerate(found.settings) if one["tensor"] in folder.name)


def test_damaged_shards_are_computed_again(make, plain, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    recipe = make(tmp_path / "run", "cache")
    with small_shards():
        train_here(recipe, exports=False)
    shards = sorted((tmp_path / "run" / "cache").glob("*/*.safetensors"))
    shards[0].write_bytes(shards[0].read_bytes()[:-4])
    shards[1].write_bytes(b"")
    turned = bytearray(shards[3].read_bytes())
    turned[-2] ^= 0x40
    shards[3].write_bytes(turned)
    (shards[2].parent / ".draft.safetensors.1.tmp").write_bytes(b"x")
    shards_of.cache_clear()  # the run is another process
    again = make(tmp_path / "again", "cache", pipeline={"cache": str(tmp_path / "run" / "cache")})
    train_here(again, exports=False)
    assert_close(again, plain)
    assert counts_in(caplog)["written"] > 0
    for shard in (shards[1], shards[3]):
        assert [one.getMessage() for one in caplog.records if str(shard) in one.getMessage()]
    assert all(is_whole(shard) for shard in (tmp_path / "run" / "cache").glob("*/*.safetensors"))


def test_two_runs_write_one_cache_at_the_same_time(make, plain, tmp_path):
    shared = {"cache": str(tmp_path / "cache")}
    runs = [make(tmp_path / f"run {number}", "cache", pipeline=shared) for number in range(2)]
    nest(_train_both, runs)
    for recipe in runs:
        assert_close(recipe, plain)
    entries = {key for _, key in _keys(tmp_path / "cache")}
    assert len(entries) == 2 * PICTURES


def _keys(folder):
    for shard in sorted(folder.glob("*/*.safetensors")):
        with safe_open(shard, "pt") as opened:
            yield from ((shard.parent.name, key) for key in list(opened.keys()))


def _train_both(runs):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_train_one, args=(recipe,)) for recipe in runs]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def _train_one(recipe: Recipe):
    torch.set_num_threads(1)
    with small_shards():
        train_here(recipe)


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [
        ({"encoders": "fill", "fill": False}, r'"fill" is contradicted by fill = false'),
        ({"encoders": "cache", "versions": "stashed"}, "without a flush"),
        ({"cache": "x"}, "nothing is kept"),
        ({"encoders": "fill", "cache": "x"}, "nothing is kept"),
        ({"encoders": "fill", "plan": "plan.json"}, "the plan file"),
    ],
)
def test_contradictions_are_refused(make, tmp_path, pipeline, said):
    with pytest.raises((RecipeError, ValueError), match=said):
        make(tmp_path / "run", pipeline=pipeline)


def test_encoders_that_run_in_bubbles_are_what_fill_means(make, tmp_path):
    assert make(tmp_path / "run", pipeline={"encoders": "fill"}).pipeline.fill
    assert make(tmp_path / "run", pipeline={"encoders": "cache"}).pipeline.fill
    assert make(tmp_path / "run", pipeline={"encoders": "cache", "plan": "auto"}).pipeline.fill is None
    assert make(tmp_path / "run").pipeline.fill is None


def test_pictures_with_holes_keep_the_whole_picture_alone(model, data, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    tiny_unet(**FILLING_UNET).save_pretrained(folder / "unet")
    keys, training = {"masks": "edges"}, {"steps": 6, "batch": BATCH}
    plain = recipe_of(folder, data, tmp_path / "plain", data=keys, training=training, pipeline=LAYOUT)
    pipeline = {**LAYOUT, "encoders": "cache", "fill": False}
    cached = recipe_of(folder, data, tmp_path / "cached", data=keys, training=training, pipeline=pipeline)
    train_here(plain)
    with small_shards():
        train_here(cached)
    assert_close(cached, plain)
    assert len(entries_of(tmp_path / "cached" / "cache")) == 2 * PICTURES
