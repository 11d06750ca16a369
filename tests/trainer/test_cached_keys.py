"""Each key of [data] with a cache of encoders' results: the rows that stages read are those without one."""

import json

import pytest
import torch
from kit.cached_rows import rows_seen
from kit.tiny_clips import save_clips
from kit.tiny_described import save_described
from kit.tiny_runs import recipe_of, save_pictures, save_stable_diffusion

from diffusionpipe.errors import ConfigError
from diffusionpipe.trainer.recipe.cached_keys import ON_CACHE, OnCache, counts_of
from diffusionpipe.trainer.recipe.captions_section import CaptionsSection
from diffusionpipe.trainer.recipe.schema import DataSection
from diffusionpipe.trainer.recipe.sources_section import SourceSection

PICTURES, EPOCHS, BATCH = 6, 4, 3
PIPELINE = {"microbatches": 1, "encode_chunk": 2, "encoders": "cache", "fill": False}


@pytest.fixture(scope="module")
def stable_diffusion(tmp_path_factory):
    return save_stable_diffusion(tmp_path_factory.mktemp("cached") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Six pictures with several captions each."""
    folder = save_pictures(tmp_path_factory.mktemp("cached") / "pictures", PICTURES)
    lines = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):
        line["text"] = f"{'efghij'[number]} {{a|b}}, d\n{'mnopqr'[number]} k"
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    rows = [f"{line['file_name']},{'stuvwx'[number]}" for number, line in enumerate(lines)]
    (folder / "table.csv").write_text("\n".join(["file,words", *rows]) + "\n")
    return folder


def recipes(model, data, folder, data_keys):
    """The recipe with a cache, and without."""
    section = {"caption_dropout": 0.0, **data_keys}
    steps = {"steps": EPOCHS * PICTURES // BATCH, "batch": BATCH}
    common = {"data": section, "training": steps}
    return (
        recipe_of(model, data, folder / "cached", **common, pipeline=PIPELINE),
        recipe_of(model, data, folder / "plain", **common, pipeline={"microbatches": 1, "encode_chunk": 2}),
    )


def assert_same_rows(found, expected):
    assert len(found.rows) == len(expected.rows)
    for own, other in zip(found.rows, expected.rows, strict=True):
        assert own.keys() == other.keys() >= {"noisy", "text_states", "target"}
        for name, value in own.items():
            torch.testing.assert_close(value, other[name], rtol=1e-6, atol=1e-6)


def test_every_key_of_data_says_what_it_does_to_a_cache():
    fields = {f"data.{key}" for key in DataSection.model_fields}
    fields |= {f"data.captions.{key}" for key in CaptionsSection.model_fields}
    fields |= {f"data.sources.NAME.{key}" for key in SourceSection.model_fields}
    assert ON_CACHE.keys() == fields


CASES = {
    "plain": ({}, PICTURES, PICTURES),
    "flip": ({"flip": True}, 2 * PICTURES, PICTURES),
    "dropout": ({"caption_dropout": 0.4}, PICTURES, PICTURES + 1),
    "lines": ({"captions": {"lines": True}}, PICTURES, 2 * PICTURES),
    "alternatives": ({"captions": {"alternatives": True}}, PICTURES, 2 * PICTURES),
    "encoder dropout": ({"captions": {"dropout": {"text_encoder": 0.4}}}, PICTURES, PICTURES + 1),
    "prefix and suffix": ({"captions": {"prefix": "x ", "suffix": " y", "trigger": "z"}}, PICTURES, PICTURES),
    "shuffle": ({"captions": {"shuffle": True}}, PICTURES, 0),
    "dropped tags": ({"captions": {"shuffle": True, "tag_dropout": 0.3, "keep_first": 1}}, PICTURES, 0),
    "random crop": ({"random_crop": True}, 0, PICTURES),
    "sizes": ({"resolution": [8, "16x8"]}, 2 * PICTURES, PICTURES),
    "areas": ({"resolution": [8, 16], "min_side": 4, "flip": True}, 4 * PICTURES, PICTURES),
    "aspects": (
        {"resolution": [8], "aspects": [0.5, 2.0], "multiple": 4, "max_cut": 0.6, "enlarge": False},
        PICTURES,
        PICTURES,
    ),
    "marked tags": (
        {"captions": {"shuffle": True, "keep_mark": "k", "separator": "{", "tag_dropout": 0.2}},
        PICTURES,
        0,
    ),
    "states of another layer": ({"clip_skip": 2}, PICTURES, PICTURES),
    "chunks": ({"caption_chunks": 2}, PICTURES, PICTURES),
    "patches": ({"resolution": 16, "patches": {"share_whole": 0.5}}, 0, PICTURES),
    "table": ({"train": "{data}/table.csv", "columns": {"image": "file", "text": "words"}}, PICTURES, PICTURES),
    "sources": (
        {
            "train": "none",
            "sources": {
                "a": {"path": "{data}", "captions": {"prefix": "x "}, "resolution": 16},
                "b": {
                    "path": "{data}/table.csv",
                    "columns": {"image": "file", "text": "words"},
                    "regularisation": True,
                },
            },
        },
        2 * PICTURES,
        2 * PICTURES,
    ),
}
ELSEWHERE = {
    "data.frames": "test_clips_are_new_each_time_and_their_texts_are_kept",
    "data.height": "test_clips_are_new_each_time_and_their_texts_are_kept",
    "data.frame_rate": "test_clips_are_new_each_time_and_their_texts_are_kept",
}
"""Keys of models of clips, and the test that walks them."""


def placed(keys, data):
    """The keys with the place of the pictures."""
    return json.loads(json.dumps(keys).replace("{data}", str(data)))


def walked(section, name="data"):
    """The dotted keys of a section and of all sections below it."""
    for key, value in section.items():
        yield f"{name}.{key}"
        if key == "sources":
            for own in value.values():
                yield from walked(own, "data.sources.NAME")
        elif key == "captions":
            yield from walked(value, "data.captions")


def test_each_key_that_changes_what_is_kept_is_walked():
    found = {key for keys, _, _ in CASES.values() for key in walked(keys)}
    found |= {"data.sizes"} if "data.resolution" in found else set()  # a list of sizes is written as `resolution`
    found |= {key for key, test in ELSEWHERE.items() if test in globals()}
    asked = {key for key, effect in ON_CACHE.items() if effect is not OnCache.NOTHING}
    assert asked - found == set()


@pytest.mark.parametrize("case", CASES)
def test_rows_of_every_epoch_are_those_without_a_cache(case, stable_diffusion, data, tmp_path):
    keys, most_pictures, most_texts = CASES[case]
    cached, plain = recipes(stable_diffusion, data, tmp_path, placed(keys, data))
    found = rows_seen(cached)
    assert_same_rows(found, rows_seen(plain))
    entries = {path.name.partition("-")[0]: 0 for path in (tmp_path / "cached" / "cache").iterdir()}
    assert entries.keys() == {kind for kind, most in (("latents", most_pictures), ("texts", most_texts)) if most}
    assert 0 < found.num_written <= most_pictures + most_texts
    if case in ("plain", "prefix and suffix", "random crop", "shuffle"):  # nothing is computed twice
        kept = bool(most_pictures) + bool(most_texts)
        assert found.num_written == most_pictures + most_texts
        assert found.num_encoded == PICTURES * kept
        assert found.num_read == PICTURES * (EPOCHS - 1) * kept


@pytest.mark.slow
def test_clips_are_new_each_time_and_their_texts_are_kept(tmp_path):
    model = save_described("WanPipeline", tmp_path / "model")
    clips = save_clips(tmp_path / "clips", PICTURES, frames=8, width=32, height=16)
    keys = {"resolution": 32, "height": 16, "frames": 5, "frame_rate": 8.0}
    cached, plain = recipes(model, clips, tmp_path, keys)
    found = rows_seen(cached)
    for own, other in zip(found.rows, rows_seen(plain).rows, strict=True):
        assert own.keys() == other.keys()
        for name, value in own.items():
            torch.testing.assert_close(value, other[name], rtol=1e-6, atol=1e-6)
    assert {path.name.partition("-")[0] for path in (tmp_path / "cached" / "cache").iterdir()} == {"texts"}
    assert found.num_written == PICTURES


def test_what_is_new_each_time_everywhere_is_refused_by_its_keys(stable_diffusion, data, tmp_path):
    cached, _ = recipes(stable_diffusion, data, tmp_path, {"random_crop": True, "captions": {"shuffle": True}})
    with pytest.raises(ConfigError, match=r"pipeline\.encoders: nothing can be kept.*data\.captions\.shuffle"):
        rows_seen(cached)


def test_texts_are_counted_with_their_alternatives():
    section = DataSection(train="x", resolution=8, captions={"alternatives": True, "lines": True})
    counts = counts_of(section, [(0, ("{a|b|c} {d|e}\nf",)), (0, ("g",))])
    assert (counts.pictures, counts.views, counts.texts, counts.variants) == (2, 1, 6 + 1 + 1 + 1, 4.0)


def test_keys_have_one_effect_each():
    assert set(ON_CACHE.values()) == set(OnCache)
