"""How families that diffusers' own pipelines draw are guided; test_described_families compares their pictures."""

import json
import shutil
from unittest import mock

import pytest
import torch
from diffusers import AutoencoderKL
from kit.drawn_families import settings_of
from kit.tiny_described import save_described

from diffusionpipe.models.opening.folder import REGISTRY
from diffusionpipe.models.opening.pipeline_defaults import Guidance, default_guidance
from diffusionpipe.models.parts.latents import encoding_of
from diffusionpipe.trainer.inference.diffusers_pipeline import Order, draw_by_pipeline

SIZE = 16
"""Pixels."""


def test_a_distilled_klein_is_drawn_without_guidance_unless_told_otherwise(tmp_path):
    base = save_described("Flux2KleinPipeline", tmp_path / "base")
    assert default_guidance(base) == Guidance(scale=4.0)
    shutil.copytree(base, tmp_path / "distilled")
    index = json.loads((base / "model_index.json").read_text())
    (tmp_path / "distilled" / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}))
    assert default_guidance(tmp_path / "distilled") == Guidance(scale=1.0)


@pytest.mark.parametrize("needs_pictures", [False, True], ids=["training", "sample"])
def test_pictures_for_which_there_is_no_memory_end_a_drawing_and_only_sample_fails(tmp_path, caplog, needs_pictures):
    folder = save_described("ZImagePipeline", tmp_path)
    order = Order(
        folder=folder,
        settings=settings_of(folder, REGISTRY["ZImagePipeline"].call.unguided),
        num_samples=1,
        latents=encoding_of(AutoencoderKL.from_pretrained(folder / "vae"), SIZE, "float32").latents,
        resolution=SIZE,
        device=torch.device("cpu"),
        needs_pictures=needs_pictures,
    )
    steps = []

    def draw():
        return draw_by_pipeline(
            order, lambda noisy, _: noisy, decodes=True, on_step=lambda done, total: steps.append((done, total))
        )

    with mock.patch.object(AutoencoderKL, "decode", side_effect=torch.OutOfMemoryError("CUDA out of memory.")):
        if needs_pictures:
            with pytest.raises(torch.OutOfMemoryError):
                draw()
        else:
            assert draw() is None
            assert 'samples=none reason="no memory to decode them: CUDA out of memory."' in caplog.text
    assert steps[-1] == (4, 4)
