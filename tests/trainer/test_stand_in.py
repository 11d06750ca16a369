"""Pictures of families that diffusers' own pipelines draw, with our layers in place of the transformer."""

import json
import shutil
from unittest import mock

import pytest
import torch
from diffusers import AutoencoderKL
from drawn_families import SIZE, drawn_by_diffusers, drawn_here, settings_of
from tiers import quick_and_slow
from tiny_described import PIPELINES, RESOLUTIONS, save_described

from diffusionpipe.models.folder import REGISTRY
from diffusionpipe.models.latents import encoding_of
from diffusionpipe.models.pipeline_defaults import Guidance, default_guidance
from diffusionpipe.trainer.stand_in import Order, draw_by_pipeline

pytestmark = pytest.mark.usefixtures("one_trace")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of tiny models, each made once."""
    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = save_described(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return folder


CASES = [
    (kind, guidance)
    for kind in PIPELINES
    for guidance in (1.5, REGISTRY[kind].call.unguided)
    if REGISTRY[kind].call.scale or guidance != 1.5  # a pipeline without classifier-free guidance draws without it
]


@pytest.mark.parametrize(
    ("kind", "guidance"),
    quick_and_slow(CASES, quick=[("QwenImagePipeline", 1.5), ("ZImagePipeline", 1.5)]),
)
def test_sample_draws_what_diffusers_draws(monkeypatch, folders, kind, guidance):
    size = RESOLUTIONS.get(kind, SIZE)
    ours = drawn_here(monkeypatch, folders(kind), guidance, size)
    theirs = drawn_by_diffusers(folders(kind), guidance, size)
    assert ours.shape == theirs.shape == (2, size, size, 3)
    assert (ours - theirs).abs().max() < 1e-5
    assert theirs.std() > 0.02


def test_a_distilled_klein_is_drawn_without_guidance_unless_told_otherwise(folders, tmp_path):
    base = folders("Flux2KleinPipeline")
    assert default_guidance(base) == Guidance(scale=4.0)
    shutil.copytree(base, tmp_path, dirs_exist_ok=True)
    index = json.loads((base / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"is_distilled": True}))
    assert default_guidance(tmp_path) == Guidance(scale=1.0)


@pytest.mark.parametrize("needs_pictures", [False, True], ids=["training", "sample"])
def test_pictures_for_which_there_is_no_memory_end_a_drawing_and_only_sample_fails(folders, caplog, needs_pictures):
    folder = folders("ZImagePipeline")
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
