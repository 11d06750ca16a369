"""Transformer classes of diffusers without a folder: what they are called with follows from their configuration."""

import inspect
from dataclasses import replace

import diffusers
import pytest
import torch
from kit.cut_cases import CASES, REFUSED, TEXT
from kit.tiers import quick_and_slow

from diffusionpipe.errors import ModelError
from diffusionpipe.models.base.family import Clip
from diffusionpipe.models.graphs.describe import describe
from diffusionpipe.models.opening import class_graph as module
from diffusionpipe.models.opening.class_graph import called_graph, class_call, class_graph, grid_of
from diffusionpipe.models.opening.class_table import CLASSES
from diffusionpipe.models.opening.meta import module_on_meta
from diffusionpipe.models.parameters.lora import LoraSettings, is_adapter

NOT_PLANNED = {
    "HeliosTransformer3DModel",  # reads frames of older clips
    "HunyuanDiT2DModel",  # these have no default size
    "Transformer2DModel",
    "EasyAnimateTransformer3DModel",
    "LatteTransformer3DModel",
    "LuminaNextDiT2DModel",
    "MiniMaxMusic3Transformer1DModel",  # reads what another model makes of its text
}


def defaults(kind):
    parameters = inspect.signature(inspect.unwrap(getattr(diffusers, kind).__init__)).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


def small_grid(kind):
    """As few cells as the cases of `cut_cases` have."""
    call = replace(CLASSES[kind], text=TEXT)
    if not call.pixels:
        return call, grid_of(kind, replace(call, size=Clip(width=1, height=1, frames=12)), None)
    side = (4 if call.patch == 1 else 8) * call.pixels
    frames = 1
    if call.frames is not None:
        frames = next(number for number in (2, 5, 9) if _is_divided(call.frames, number))
    return call, grid_of(kind, call, Clip(width=side, height=side, frames=frames))


def _is_divided(divide, frames):
    try:
        return divide(frames) == 2
    except ModelError:
        return False


@pytest.mark.parametrize("kind", [name for name in CASES if name in CLASSES])
def test_shapes_follow_from_a_configuration_and_the_prediction_is_like_the_latents(kind):
    call, grid = small_grid(kind)
    transformer = getattr(diffusers, kind)(**CASES[kind].config)
    latents, shapes = call.latents(transformer.config, grid), call.shapes(transformer.config, grid)
    tensors = {name: torch.zeros((2, *shape), dtype=dtype) for name, (shape, dtype) in shapes.items()}
    tensors |= {call.noisy: torch.zeros(2, *latents), call.times: torch.zeros(2)}
    with torch.no_grad():
        prediction = call.forward(transformer.config, grid, transformer, **tensors)
    assert prediction[:, : latents[0]].shape == (2, *latents)  # some state variances in further channels


def test_all_of_the_class_is_trained_but_for_what_gives_another_output():
    kind = "MiniMaxH3Transformer3DModel"
    call, grid = small_grid(kind)
    transformer = module_on_meta(kind, CASES[kind].config, source=kind)
    model = describe(called_graph(call, grid, transformer))
    assert model.tensor("prediction").shape == model.tensor("latents").shape
    frozen = {name for name, parameter in transformer.named_parameters() if not parameter.requires_grad}
    assert frozen == {"audio_proj_out.weight", "audio_proj_out.bias"}


def test_adapters_alone_are_trained_where_they_are_asked_for():
    kind = "MiniMaxH3Transformer3DModel"
    call, grid = small_grid(kind)
    transformer = module_on_meta(kind, CASES[kind].config, source=kind)
    model = describe(called_graph(call, grid, transformer, LoraSettings(rank=2)))
    trained = [parameter.name for parameter in model.parameters if parameter.is_trainable]
    assert trained
    assert all(map(is_adapter, trained))


@pytest.mark.parametrize("kind", quick_and_slow(sorted(set(REFUSED) & set(CLASSES)), ["Lumina2Transformer2DModel"]))
def test_a_class_that_cannot_be_cut_is_refused_with_the_reason_in_a_sentence(kind):
    with pytest.raises(ModelError, match=f"^{kind} cannot be cut: its [^\n]*$"):
        class_graph(kind)


def test_every_class_that_the_tests_cut_is_planned_but_for_those_that_have_a_reason():
    assert (set(CASES) | set(REFUSED)) - set(CLASSES) == NOT_PLANNED


@pytest.mark.parametrize(
    ("kind", "size", "latents", "text"),
    [
        ("FluxTransformer2DModel", None, (4096, 64), (512, 4096)),
        ("Flux2Transformer2DModel", Clip(width=512, height=1024), (2048, 128), (512, 15360)),
        ("WanTransformer3DModel", None, (16, 21, 60, 104), (512, 4096)),
        ("CogVideoXTransformer3DModel", None, (13, 16, 60, 90), (226, 4096)),
        ("LTXVideoTransformer3DModel", None, (21 * 16 * 22, 128), (128, 4096)),
        ("MiniMaxH3Transformer3DModel", None, (37 * 24 * 42, 96), (512, 5120)),
        ("MiniMaxH3Transformer3DModel", Clip(width=832, height=480, frames=124), (37 * 15 * 26, 96), (512, 5120)),
    ],
)
def test_a_sample_has_the_size_that_is_stated_or_published(kind, size, latents, text):
    call, config = class_call(kind), defaults(kind)
    grid = grid_of(kind, call, size)
    assert call.latents(config, grid) == latents
    assert call.shapes(config, grid)["encoder_hidden_states"][0] == text


def test_the_sound_of_a_clip_of_minimax_h3_is_as_long_as_the_clip():
    call = class_call("MiniMaxH3Transformer3DModel")
    shape, _ = call.shapes(defaults("MiniMaxH3Transformer3DModel"), grid_of("", call, None))["audio_hidden_states"]
    assert shape == (2 * round(124 / 24 * 40), 32)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("MiniMaxH3Transformer", "has no class MiniMaxH3Transformer. Names that are near: MiniMaxH3Transformer3DModel"),
        ("os.system", "has no class os.system"),
        ("FluxPipeline", "FluxPipeline is a pipeline of diffusers, not a transformer. Its transformer is FluxTransf"),
        ("AutoencoderKLWan", "is an autoencoder of diffusers, not a transformer"),
        ("UNet2DConditionModel", "is a U-Net of diffusers, not a transformer"),
        ("DDIMScheduler", "is a scheduler of diffusers, not a transformer"),
        ("models", "has no class models"),
        ("HeliosTransformer3DModel", "is not known here; docs/models.md lists"),
    ],
)
def test_what_is_no_transformer_class_is_refused_before_anything_is_built(kind, words, monkeypatch):
    monkeypatch.setattr(module, "module_on_meta", None)  # calling it would fail
    with pytest.raises(ModelError) as caught:
        class_graph(kind)
    assert words in str(caught.value)


def test_a_class_that_another_version_of_diffusers_has_is_named_so(monkeypatch):
    monkeypatch.setitem(CLASSES, "Wan9Transformer3DModel", CLASSES["WanTransformer3DModel"])
    with pytest.raises(ModelError, match=r"has no class Wan9Transformer3DModel\. Other versions"):
        class_call("Wan9Transformer3DModel")


@pytest.mark.parametrize(
    ("kind", "size", "words"),
    [
        ("FluxTransformer2DModel", Clip(width=1000, height=1024), "squares of 16 pixels; 1000 x 1024 .* 992 x 1024"),
        ("FluxTransformer2DModel", Clip(width=64, height=64, frames=5), "draws pictures, not clips"),
        ("WanTransformer3DModel", Clip(width=832, height=480, frames=80), "80 frames do not divide so: use 77 or 81"),
        ("MiniMaxH3Transformer3DModel", Clip(width=832, height=480, frames=120), "divide so: use 107 or 124"),
        ("MiniMaxH3Transformer3DModel", Clip(width=832, height=480), "1 frames do not divide so: use 5 or 22"),
        ("PriorTransformer", Clip(width=64, height=64), "denoises no pictures; leave out --resolution"),
    ],
)
def test_a_size_that_the_class_cannot_have_is_refused_with_one_that_it_can(kind, size, words):
    with pytest.raises(ModelError, match=words):
        grid_of(kind, class_call(kind), size)
