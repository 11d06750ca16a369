"""What a VAE needs to decode pictures, counted without weights, is what it holds while it does."""

from unittest import mock

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan
from kit.tiers import quick_and_slow
from kit.tiny_described import PIPELINES, clip_vae, flux2_vae
from kit.tiny_models import tiny_vae

from diffusionpipe.models.opening.configured import configured_parts
from diffusionpipe.models.parts import decoder
from diffusionpipe.models.parts.decoder import decode_in_tiles, decoded_latents, shrinkage
from diffusionpipe.profiler.decoding import decoding_of, run_decoder
from diffusionpipe.profiler.memory import LiveBytes
from diffusionpipe.trainer.inference import decoding

GIB = 2**30
SIDE, TILE = 64, 32
VAES = {
    "kl": tiny_vae,
    "flux.2": flux2_vae,
    "qwen-image": lambda: clip_vae(AutoencoderKLQwenImage),
    "wan": lambda: clip_vae(AutoencoderKLWan),
    "ltx": lambda: PIPELINES["LTXPipeline"]().vae,
    "hunyuan-video": lambda: PIPELINES["HunyuanVideoPipeline"]().vae,
    "dc": lambda: PIPELINES["SanaPipeline"]().vae,
}


def held(vae, latents):
    """The most that decoding real latents of that shape holds."""
    live = LiveBytes()
    rows = torch.zeros(latents, dtype=next(vae.parameters()).dtype)
    with torch.no_grad(), live:
        vae.decode(rows, return_dict=False)
    return live.peak


CASES = [
    ("kl", torch.float32),
    ("kl", torch.bfloat16),
    ("wan", torch.bfloat16),
    *((kind, torch.float32) for kind in VAES if kind != "kl"),
]


@pytest.mark.parametrize(("kind", "dtype"), quick_and_slow(CASES, quick=CASES[:2]))
def test_decoding_holds_within_5_percent_what_is_predicted(kind, dtype, monkeypatch):
    vae = VAES[kind]().to(dtype).eval()
    side = 8 * shrinkage(vae) if kind == "ltx" else SIDE
    monkeypatch.setattr(decoder, "TILE", side // 2)
    latents = decoded_latents(vae, (3, side, side))
    found = decoding_of(vae, latents, dtype)
    assert held(vae, (1, *latents)) == pytest.approx(found.whole, rel=0.05)
    assert held(vae, (4, *latents)) == pytest.approx(run_decoder(vae, (4, *latents), dtype).peak, rel=0.05)
    assert found.picture == side * side * 3 * 4
    assert found.weights == sum(parameter.nbytes for parameter in vae.parameters())
    decode_in_tiles(vae)
    assert held(vae, (1, *latents)) == pytest.approx(found.tiled, rel=0.05)


def test_tiles_of_a_vae_that_takes_both_sides_overlap_alike_in_both():
    vae = VAES["wan"]()
    decode_in_tiles(vae)
    assert vae.tile_sample_min_width == vae.tile_sample_min_height == decoder.TILE
    assert vae.tile_sample_stride_width == vae.tile_sample_stride_height == decoder.TILE * 3 // 4


def test_sdxl_decodes_8_pictures_of_1024_pixels_in_3_gib_and_not_in_24():
    vae = configured_parts("sdxl")["vae"]
    latents = decoded_latents(vae, (3, 1024, 1024))
    found = decoding_of(vae, latents)
    assert run_decoder(vae, (8, *latents)).peak / GIB == pytest.approx(24.0, abs=0.01)
    assert (found.peak(8, is_tiled=False, on_host=True) - found.weights) / GIB == pytest.approx(3.09, abs=0.01)
    assert found.tiled / GIB == pytest.approx(0.76, abs=0.01)


@pytest.mark.parametrize("is_tiled", [True, False])
def test_pictures_are_decoded_one_by_one_and_by_tiles_where_a_whole_one_does_not_fit(monkeypatch, caplog, is_tiled):
    monkeypatch.setattr(decoder, "TILE", TILE)
    vae = tiny_vae().eval()
    rows = torch.randn(3, 4, SIDE // 2, SIDE // 2, generator=torch.Generator().manual_seed(0))
    found = decoding_of(vae, rows.shape[1:])
    live = LiveBytes()
    with torch.no_grad():
        alone = torch.cat([vae.decode(row, return_dict=False)[0] for row in rows.split(1)])
    with (
        mock.patch.object(decoding, "free_on", return_value=found.tiled if is_tiled else 2 * found.whole),
        mock.patch.object(decoding, "decoding_of", return_value=found),
        live,
    ):
        pictures = decoding.decoded(vae, rows)
    expected = found.peak(len(rows), is_tiled=is_tiled, on_host=True) - found.weights - 2 * rows.nbytes
    assert live.peak == pytest.approx(expected, rel=0.05)
    assert ("decoding=tiled" in caplog.text) == is_tiled
    assert torch.equal(pictures, alone) != is_tiled
    assert pictures.shape == alone.shape
