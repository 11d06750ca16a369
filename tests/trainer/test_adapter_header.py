"""The kinds of base models in the words of other programs, from the configurations of the published models."""

import pytest

from diffusionpipe.models.objectives.objective import Prediction
from diffusionpipe.trainer.exports.adapter_header import base_kind

EPSILON, V, FLOW = Prediction.EPSILON, Prediction.V_PREDICTION, Prediction.FLOW_MATCHING
MEDIUM = {"num_layers": 24, "dual_attention_layers": tuple(range(13))}


@pytest.mark.parametrize(
    ("pipeline", "config", "prediction", "architecture", "version"),
    [
        ("StableDiffusionPipeline", {"cross_attention_dim": 768}, EPSILON, "stable-diffusion-v1", "sd_v1"),
        ("StableDiffusionPipeline", {"cross_attention_dim": 1024}, EPSILON, "stable-diffusion-v2-512", "sd_v2"),
        ("StableDiffusionPipeline", {"cross_attention_dim": 1024}, V, "stable-diffusion-v2-768-v", "sd_v2_v"),
        ("StableDiffusionXLPipeline", {}, EPSILON, "stable-diffusion-xl-v1-base", "sdxl_base_v1-0"),
        ("StableDiffusion3Pipeline", {"num_layers": 24}, FLOW, "stable-diffusion-3-medium", None),
        ("StableDiffusion3Pipeline", MEDIUM, FLOW, "stable-diffusion-3-5-medium", None),
        ("StableDiffusion3Pipeline", {"num_layers": 38}, FLOW, "stable-diffusion-3-5-large", None),
        ("FluxPipeline", {"guidance_embeds": True}, FLOW, "flux-1-dev", "flux1"),
        ("FluxPipeline", {"guidance_embeds": False}, FLOW, "flux-1-schnell", "flux1"),
        ("Flux2KleinPipeline", {"num_attention_heads": 32}, FLOW, "Flux.2-klein-9b", None),
        ("WanPipeline", {}, FLOW, "wan2.1", None),
        ("SanaPipeline", {}, FLOW, "Sana", None),
    ],
)
def test_each_base_model_has_the_words_that_other_programs_know(pipeline, config, prediction, architecture, version):
    kind = base_kind(pipeline, config, prediction)
    assert (kind.architecture, kind.version) == (architecture, version)
