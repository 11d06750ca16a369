"""Runs of tiny models of the larger pipelines: several text encoders, sizes, guidance, pictures that steer."""

import json
from string import ascii_lowercase

import diffusers
import numpy as np
import pytest
import torch
from crew import crew_of
from PIL import Image
from tiny_models import (
    randomise_parameters,
    tiny_controlnet,
    tiny_flux_transformer,
    tiny_projected_text_encoder,
    tiny_sd3_transformer,
    tiny_sdxl_unet,
    tiny_t5,
    tiny_text_encoder,
    tiny_unet,
    tiny_vae,
)
from tiny_runs import RESOLUTION, losses_of, recipe_of, train, train_here
from transformers import CLIPTokenizer, T5Tokenizer

pytestmark = pytest.mark.xdist_group("crew")

WORDS = [*ascii_lowercase, *(f"{letter}</w>" for letter in ascii_lowercase), "<|startoftext|>", "<|endoftext|>"]
CLIP = {"vocab_size": len(WORDS), "bos_token_id": len(WORDS) - 2, "eos_token_id": len(WORDS) - 1}
PIECES = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0), *((letter, -2.0) for letter in ascii_lowercase)]


def _clip_tokenizer():
    return CLIPTokenizer(vocab={word: i for i, word in enumerate(WORDS)}, merges=[], model_max_length=6)


def _t5_tokenizer():
    return T5Tokenizer(vocab=PIECES, extra_ids=0, model_max_length=512)


def _sdxl():
    return diffusers.StableDiffusionXLPipeline(
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(**CLIP),
        text_encoder_2=tiny_projected_text_encoder(**CLIP),
        tokenizer=_clip_tokenizer(),
        tokenizer_2=_clip_tokenizer(),
        unet=tiny_sdxl_unet(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False),
        add_watermarker=False,
    )


def _controlled():
    return diffusers.StableDiffusionControlNetPipeline(
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(**CLIP),
        tokenizer=_clip_tokenizer(),
        unet=tiny_unet(),
        controlnet=tiny_controlnet(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _sd3():
    return diffusers.StableDiffusion3Pipeline(
        transformer=tiny_sd3_transformer(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=tiny_vae(shift_factor=0.2, use_quant_conv=False),
        text_encoder=tiny_projected_text_encoder(**CLIP),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=tiny_projected_text_encoder(**CLIP),
        tokenizer_2=_clip_tokenizer(),
        text_encoder_3=tiny_t5(vocab_size=len(PIECES)),
        tokenizer_3=_t5_tokenizer(),
    )


def _flux():
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=tiny_vae(shift_factor=0.2, use_quant_conv=False),
        text_encoder=tiny_text_encoder(**CLIP),
        tokenizer=_clip_tokenizer(),
        text_encoder_2=tiny_t5(vocab_size=len(PIECES)),
        tokenizer_2=_t5_tokenizer(),
        transformer=tiny_flux_transformer(),
    )


PIPELINES = {"sdxl": _sdxl, "controlnet": _controlled, "sd3": _sd3, "flux": _flux}


@pytest.fixture(scope="module")
def crew():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with crew_of(2) as ranks:
        yield ranks
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Pictures with captions and pictures that steer."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "edges").mkdir()
    random = np.random.default_rng(0)
    lines = []
    for number in range(8):
        for name in (f"{number}.png", f"edges/{number}.png"):
            values = random.integers(0, 256, (RESOLUTION, RESOLUTION + number, 3), dtype=np.uint8)
            Image.fromarray(values).save(folder / name)
        row = {"file_name": f"{number}.png", "text": f"{ascii_lowercase[number]} b"}
        lines.append(json.dumps({**row, "conditioning_image": f"edges/{number}.png"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", PIPELINES)
def test_two_stages_learn_what_one_process_learns(kind, crew, pictures, tmp_path):
    pipeline = PIPELINES[kind]()
    for seed, part in enumerate(pipeline.components.values()):
        if isinstance(part, torch.nn.Module):
            randomise_parameters(part, seed)
    pipeline.save_pretrained(tmp_path / "model")

    def recipe(name):
        data = {"random_crop": True, "flip": True, "caption_dropout": 0.3}
        return recipe_of(tmp_path / "model", pictures, tmp_path / name, data=data, training={"steps": 2})

    assert crew.run(train, recipe("over-two")) == [2, 2]
    assert train_here(recipe("in-one")) == 2
    over_two, in_one = losses_of(tmp_path / "over-two"), losses_of(tmp_path / "in-one")
    assert over_two.keys() == in_one.keys() == {1, 2}
    assert over_two == pytest.approx(in_one, rel=1e-5)
    assert in_one[1] != in_one[2]


def test_positions_that_are_saved_but_not_trained_are_exported_as_the_source_has_them(pictures, tmp_path):
    pipeline = _sd3()
    pipeline.transformer.pos_embed.pos_embed += 1
    pipeline.save_pretrained(tmp_path / "model")
    recipe = recipe_of(tmp_path / "model", pictures, tmp_path / "run", training={"steps": 1})
    assert train_here(recipe) == 1
    exported = next((tmp_path / "run").rglob("model_index.json")).parent
    transformer = diffusers.SD3Transformer2DModel.from_pretrained(exported / "transformer")
    assert torch.equal(transformer.pos_embed.pos_embed, pipeline.transformer.pos_embed.pos_embed)
