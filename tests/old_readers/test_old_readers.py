"""The harness of `make old-readers`: what it calls a failure, and what a folder as the hub has it holds."""

import json
import subprocess
import sys

import numpy as np
import pytest
import sentencepiece
from old_readers.__main__ import READER, cell
from old_readers.exports import SOURCES, write_source
from safetensors.torch import load_file, save_file

from diffusionpipe.trainer.inference.conditions import open_tokenizer


@pytest.fixture
def result(tmp_path):
    def result(value, error=None, reports=()):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.npy"
        np.save(path, np.full((1, 2, 2, 3), value))
        return {"picture": str(path), "error": error, "reports": list(reports)}

    return result


def test_equal_pictures_pass_and_the_largest_difference_is_shown(result):
    pair = [result(0.5), result(0.6)]
    assert cell(["source", "whole"], pair, [result(0.5), result(0.60005)]) == "5e-05"


@pytest.mark.parametrize(
    ("value", "problem", "said"),
    [
        (0.61, {}, "whole: pictures differ by 1.0e-02"),
        (0.6, {"reports": ["unet: 1 missing_keys: a"]}, "whole: unet: 1 missing_keys: a"),
        (0.6, {"error": "KeyError: b"}, "whole: KeyError: b"),
    ],
)
def test_other_pictures_missing_tensors_and_errors_fail(result, value, problem, said):
    there = [result(0.5), result(value, **problem)]
    assert cell(["source", "whole"], [result(0.5), result(0.6)], there) == f"FAILED: {said}"


def test_a_training_that_changed_nothing_fails(result):
    here, there = [result(0.5), result(0.5)], [result(0.5), result(0.5)]
    assert cell(["source", "whole"], here, there) == "FAILED: whole: pictures are those of the source"


def test_a_class_that_an_environment_does_not_have_is_named(result):
    there = [result(0.5, "AttributeError: module transformers has no attribute Qwen3Model")] * 2
    said = cell(["source", "whole"], [result(0.5)] * 2, there)
    assert said == "none: module transformers has no attribute Qwen3Model"


def test_a_folder_that_has_the_file_of_sentencepiece_alone_gives_the_tokens_of_sentencepiece(tmp_path):
    folder = write_source(SOURCES["PixArtSigmaPipeline"], tmp_path / "model")
    assert not list(folder.glob("tokenizer/tokenizer.json"))
    own = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer" / "spiece.model"))
    text = "a cat by two ü dogs"
    tokens = open_tokenizer(folder)([text], padding="max_length", max_length=40, truncation=True)["input_ids"][0]
    expected = [*own.encode(text), own.eos_id()]
    assert tokens == expected + [0] * (40 - len(expected))


@pytest.mark.slow
def test_the_reader_names_a_tensor_that_is_missing_and_draws_without_a_report_where_none_is(tmp_path):
    source = SOURCES["Stable Diffusion 1"]
    folder = write_source(source, tmp_path / "model")
    damaged = write_source(source, tmp_path / "damaged")
    path = damaged / "text_encoder" / "model.safetensors"
    tensors = load_file(path)
    del tensors["text_model.final_layer_norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    jobs = [
        {
            "folder": str(one),
            "adapters": None,
            "call": dict(source.call) | {"num_inference_steps": 1},
            "arrays": {},
            "eager": [],
            "seed": 0,
            "picture": str(tmp_path / f"{one.name}.npy"),
        }
        for one in (folder, damaged)
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    subprocess.run([sys.executable, READER, tmp_path / "jobs.json", tmp_path / "results.json"], check=True)
    whole, lacking = json.loads((tmp_path / "results.json").read_text())
    assert whole == {"reports": [], "error": None}
    assert np.load(tmp_path / "model.npy").shape == (2, 8, 8, 3)
    assert any("final_layer_norm.weight" in report for report in lacking["reports"])
