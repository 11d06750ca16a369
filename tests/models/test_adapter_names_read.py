"""Files in other programs' names as diffusers' own readers take them: the same pictures, the same products."""

import re
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from accelerate import init_empty_weights
from kit.tiny_described import aura_flow, flux2, ltx, qwen_image, wan, z_image
from kit.tiny_models import randomise_pipeline, tiny_t5, tiny_text_encoder, tiny_unet, tiny_vae
from kit.tiny_pipelines import CLIP, sdxl
from safetensors.torch import save_file

from diffusionpipe.models.parameters.adapter_names import Adapter, layer_sizes, to_foreign

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("peft")


def stable_diffusion(**unet):
    return diffusers.StableDiffusionPipeline(
        vae=tiny_vae(),
        text_encoder=tiny_text_encoder(**CLIP),
        tokenizer=sdxl().tokenizer,
        unet=tiny_unet(**unet),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def stable_diffusion_2():
    """Its blocks have linear layers before and after attention, and heads by their width."""
    return stable_diffusion(use_linear_projection=True, attention_head_dim=(1, 2))


DRAWN = {
    "Stable Diffusion 1": (stable_diffusion, {"height": 16, "width": 16}),
    "Stable Diffusion 2": (stable_diffusion_2, {"height": 16, "width": 16}),
    "StableDiffusionXLPipeline": (sdxl, {"height": 16, "width": 16}),
    "QwenImagePipeline": (qwen_image, {"height": 16, "width": 16, "negative_prompt": "b", "true_cfg_scale": 2.0}),
    "WanPipeline": (wan, {"height": 16, "width": 32, "num_frames": 5}),
    "LTXPipeline": (ltx, {"height": 64, "width": 64, "num_frames": 9}),
}


READ = {"WanPipeline": r"^(blocks|condition_embedder|proj_out)", "LTXPipeline": r"^transformer_blocks"}
"""Layers of which diffusers reads adapters; of the other pipelines it reads all."""


def _adapters(module, names, *, rank=2, scale=0.75, size=0.3):
    made, generator = {}, torch.Generator().manual_seed(0)
    for name in names:
        weight = module.get_submodule(name).weight
        down = torch.randn(rank, *weight.shape[1:], generator=generator)
        up = torch.randn(weight.shape[0], rank, *(1 for _ in weight.shape[2:]), generator=generator)
        made[name] = Adapter(down=down * size, up=up * size, scale=scale)
    return made


def _delta(adapter):
    return (adapter.scale * adapter.up.flatten(1) @ adapter.down.flatten(1)).reshape(-1, *adapter.down.shape[1:])


def _picture(pipeline, arguments):
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    drawn = pipeline("a cat", num_inference_steps=2, generator=generator, output_type="np", **arguments)
    return np.asarray(getattr(drawn, "images", None) if hasattr(drawn, "images") else drawn.frames)


@pytest.mark.parametrize("layers", ["attention", "all"])
@pytest.mark.parametrize("kind", DRAWN)
def test_diffusers_draws_from_the_file_what_the_weights_with_the_adapters_added_draw(kind, layers, tmp_path):
    make, arguments = DRAWN[kind]
    pipeline = make()
    randomise_pipeline(pipeline)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()  # a T5 has dropout
    with torch.no_grad():
        for parameter in pipeline.vae.decoder.parameters() if kind == "WanPipeline" else ():
            parameter.mul_(0.6 if parameter.ndim > 1 else 1.0)  # calm as a trained one: rounding errors stay small
    component = "unet" if hasattr(pipeline, "unet") else "transformer"
    module = getattr(pipeline, component)
    names = [n for n in layer_sizes(module) if ".attn" in n or (layers == "all" and re.search(READ.get(kind, ""), n))]
    modules = {component: module}
    adapters = {component: _adapters(module, names, size=0.15 if layers == "attention" else 0.1)}
    for name in ("text_encoder", "text_encoder_2") if component == "unet" else ():
        encoder = getattr(pipeline, name, None)
        if encoder is not None:
            # Without out_proj, by which diffusers finds the kind of a file: it is added, with zeros.
            targets = [n for n in layer_sizes(encoder) if re.search(r"(q_proj|v_proj|fc1)$", n)]
            modules[name], adapters[name] = encoder, _adapters(encoder, targets, size=0.15)
    path = tmp_path / "adapters.safetensors"
    save_file(to_foreign(adapters, modules, pipeline=type(pipeline).__name__), path)
    plain = _picture(pipeline, arguments)
    pipeline.load_lora_weights(str(path))
    loaded = _picture(pipeline, arguments)
    pipeline.unload_lora_weights()
    with torch.no_grad():
        for part, own in adapters.items():
            for name, adapter in own.items():
                modules[part].get_submodule(name).weight += _delta(adapter)
    ours = _picture(pipeline, arguments)
    assert np.abs(ours - plain).max() > 1e-2
    assert np.abs(loaded - ours).max() <= 1e-5


def _wide(kind, **config):
    with init_empty_weights():
        return getattr(diffusers, kind)(**config)


ONE = {"num_layers": 1, "num_single_layers": 1}
MATRICES = {
    "FluxPipeline": lambda: _wide("FluxTransformer2DModel", guidance_embeds=True, **ONE),
    "ChromaPipeline": lambda: _wide("ChromaTransformer2DModel", **ONE),
    "HunyuanVideoPipeline": lambda: _wide("HunyuanVideoTransformer3DModel", num_refiner_layers=1, **ONE),
    "Flux2Pipeline": lambda: flux2().transformer,
    "ZImagePipeline": lambda: z_image().transformer,
    "WanPipeline": lambda: wan().transformer,
    "QwenImagePipeline": lambda: qwen_image().transformer,
    "LTXPipeline": lambda: ltx().transformer,
    "AuraFlowPipeline": lambda: aura_flow().transformer,
}


BLOCKS = {
    "FluxPipeline": r".*transformer_blocks",
    "ChromaPipeline": r".*transformer_blocks",
    "HunyuanVideoPipeline": r"(single_)?transformer_blocks",  # its reader mixes up ranks of the token refiner
    "Flux2Pipeline": r".*transformer_blocks",
    "ZImagePipeline": r"layers|.*_refiner",
    "WanPipeline": r"blocks",
    "LTXPipeline": r"transformer_blocks",
}
"""Layers of which diffusers reads adapters."""


def test_the_clip_of_flux_is_read_under_its_name_and_its_t5_is_not(tmp_path):
    modules = {"text_encoder": tiny_text_encoder(), "text_encoder_2": tiny_t5()}
    targets = {name: [n for n in layer_sizes(part) if re.search(r"\.q(_proj)?$", n)] for name, part in modules.items()}
    adapters = {name: _adapters(part, targets[name]) for name, part in modules.items()}
    path = tmp_path / "adapters.safetensors"
    save_file(to_foreign(adapters, modules, pipeline="FluxPipeline"), path)
    state = diffusers.FluxPipeline.lora_state_dict(str(path))
    read = [name for name in state if state[name].any()]
    assert len(read) == 2 * len(targets["text_encoder"])
    for name, adapter in adapters["text_encoder"].items():
        stem = f"text_encoder.text_model.{name.removeprefix('text_model.').replace('q_proj', 'to_q_lora')}"
        up, down = (state[f"{stem}.{side}.weight"].double() for side in ("up", "down"))
        ours = _delta(replace(adapter, down=adapter.down.double(), up=adapter.up.double()))
        assert (up @ down - ours).abs().max() <= 1e-6 * ours.abs().max()


@pytest.mark.parametrize("layers", ["attention", "blocks"])
@pytest.mark.parametrize("kind", MATRICES)
def test_what_diffusers_makes_of_the_file_has_the_same_products(kind, layers, tmp_path):
    """At the widths that are written into a reader, one block of each kind."""
    module = MATRICES[kind]()
    names = [n for n in layer_sizes(module) if re.match(BLOCKS.get(kind, ""), n)]
    adapters = _adapters(module, [n for n in names if layers == "blocks" or re.search(r"\.attn|\.attention\.", n)])
    path = tmp_path / "adapters.safetensors"
    save_file(to_foreign({"transformer": adapters}, {"transformer": module}, pipeline=kind), path)
    found = getattr(diffusers, kind).lora_state_dict(str(path), return_alphas=True)
    state, alphas = found if isinstance(found, tuple) else (found, None)
    assert not alphas  # else they would be applied once more
    read = {name.removeprefix("transformer.").partition(".lora_")[0] for name in state}
    live = {name for name in read if state[f"transformer.{name}.lora_B.weight"].any()}
    assert live == adapters.keys()
    for name in live:
        up, down = (state[f"transformer.{name}.lora_{side}.weight"].double() for side in "BA")
        columns = slice(None, None, 1 + down.shape[1] // 100)  # of wide layers about 100
        adapter = adapters[name]
        ours = _delta(replace(adapter, down=adapter.down[:, columns].double(), up=adapter.up.double()))
        assert (up @ down[:, columns] - ours).abs().max() <= 1e-6 * ours.abs().max(), name
