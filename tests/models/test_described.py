"""Families described as data read captions and predict as diffusers' pipelines do, and give the same gradients."""

import inspect
import pickle
from pathlib import Path

import diffusers
import pytest
import torch
from kit.opened_family import CAPTIONS, Opened
from kit.tiers import quick_and_slow
from kit.tiny_described import CLIPS, PIPELINES, flux2_vae

from diffusionpipe.errors import ModelError
from diffusionpipe.models.base.family import Clip
from diffusionpipe.models.families import described
from diffusionpipe.models.families.sana_instruction import INSTRUCTION
from diffusionpipe.models.objectives.objective import ObjectiveSettings, Prediction
from diffusionpipe.models.opening.folder import REGISTRY, build_graph, open_components
from diffusionpipe.models.parts.autoencoder import vae_problems

pytestmark = pytest.mark.usefixtures("one_trace")

every_family = pytest.mark.parametrize("kind", quick_and_slow(PIPELINES, quick=["ZImagePipeline"]))


def _states(pipeline, kind):
    """What diffusers' pipeline reads of the captions: a tensor of the length of each caption."""
    if kind == "QwenImagePipeline":
        states, mask = pipeline._get_qwen_prompt_embeds(list(CAPTIONS))
        return [s[m.bool()] for s, m in zip(states, mask, strict=True)]
    if kind == "ChromaPipeline":
        return list(pipeline._get_t5_prompt_embeds(list(CAPTIONS))[0])
    if kind == "AuraFlowPipeline":
        return list(pipeline.encode_prompt(list(CAPTIONS), do_classifier_free_guidance=False)[0])
    if kind in ("PixArtSigmaPipeline", "LTXPipeline"):
        states, mask, _, _ = pipeline.encode_prompt(list(CAPTIONS), do_classifier_free_guidance=False)
        return [s[m.bool()] for s, m in zip(states, mask, strict=True)]
    if kind == "SanaPipeline":
        states, mask, _, _ = pipeline.encode_prompt(list(CAPTIONS), False, complex_human_instruction=[INSTRUCTION])
        return [s[m.bool()] for s, m in zip(states, mask, strict=True)]
    if kind == "HunyuanVideoPipeline":
        states, _, mask = pipeline.encode_prompt(list(CAPTIONS))
        return [s[m.bool()] for s, m in zip(states, mask, strict=True)]
    if kind in ("Flux2KleinPipeline", "Flux2Pipeline"):
        return list(pipeline.encode_prompt(list(CAPTIONS))[0])
    if kind == "Krea2Pipeline":
        return list(pipeline.encode_prompt(list(CAPTIONS))[0].flatten(-2))
    if kind == "WanPipeline":
        return list(pipeline._get_t5_prompt_embeds(list(CAPTIONS), max_sequence_length=512))
    return pipeline._encode_prompt(list(CAPTIONS))


@every_family
@torch.no_grad()
def test_captions_are_read_as_diffusers_pipeline_reads_them(kind, tmp_path):
    opened = Opened(kind, tmp_path)
    ours = opened.run("text_states")
    for found, expected in zip(ours, _states(opened.pipeline, kind), strict=True):
        tolerance = 1e-5 if kind == "SanaPipeline" else 1e-10  # Gemma's softmax is in float32
        torch.testing.assert_close(found[: len(expected)], expected, rtol=tolerance, atol=tolerance)
        if kind not in (
            "ChromaPipeline",
            "PixArtSigmaPipeline",
            "LTXPipeline",
            "SanaPipeline",
            "Krea2Pipeline",
        ):  # those mask the rest in the transformer
            assert not found[len(expected) :].any()


def _predicted(pipeline, kind, noisy, timesteps, states):
    """The velocity, as diffusers' pipeline computes it of its transformer."""
    transformer = pipeline.transformer
    lengths = torch.tensor([len(each) for each in states])
    if kind == "AuraFlowPipeline":
        return transformer(noisy, torch.stack(states), timesteps / 1000, return_dict=False)[0]
    if kind == "SanaPipeline":
        text = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
        mask = (torch.arange(text.shape[1]) < lengths[:, None]).long()
        return transformer(noisy, text, timesteps, encoder_attention_mask=mask, return_dict=False)[0]
    if kind == "PixArtSigmaPipeline":
        text = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
        mask = (torch.arange(text.shape[1]) < lengths[:, None]).long()
        output = transformer(
            noisy,
            text,
            timesteps,
            {"resolution": None, "aspect_ratio": None},
            encoder_attention_mask=mask,
            return_dict=False,
        )[0]
        return output.chunk(2, dim=1)[0]
    if kind == "ChromaPipeline":
        B, C, H, W = noisy.shape
        mask = pipeline._get_t5_prompt_embeds(list(CAPTIONS))[1].detach()
        tokens = transformer(
            pipeline._pack_latents(noisy, B, C, H, W),
            torch.stack(states),
            timesteps / 1000,
            pipeline._prepare_latent_image_ids(B, H // 2, W // 2, "cpu", noisy.dtype),
            torch.zeros(512, 3, dtype=noisy.dtype),
            pipeline._prepare_attention_mask(B, H * W // 4, noisy.dtype, mask),
            return_dict=False,
        )[0]
        return pipeline._unpack_latents(tokens, 2 * H, 2 * W, 2)
    if kind == "LTXPipeline":
        text = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
        _, _, F, H, W = noisy.shape
        tokens = transformer(
            pipeline._pack_latents(noisy),
            text,
            timesteps,
            torch.arange(text.shape[1]) < lengths[:, None],
            F,
            H,
            W,
            (8 / 25, 32, 32),
            return_dict=False,
        )[0]
        return pipeline._unpack_latents(tokens, F, H, W)
    if kind == "HunyuanVideoPipeline":
        text, pooled, mask = pipeline.encode_prompt(list(CAPTIONS))
        guidance = torch.full((len(noisy),), 6000.0, dtype=noisy.dtype)
        return transformer(noisy, timesteps, text.detach(), mask, pooled.detach(), guidance, return_dict=False)[0]
    if kind in ("Flux2KleinPipeline", "Flux2Pipeline"):
        guidance = torch.full((len(noisy),), 6.0, dtype=noisy.dtype) if kind == "Flux2Pipeline" else None
        places = pipeline._prepare_latent_ids(noisy)
        tokens = transformer(
            pipeline._pack_latents(noisy),
            torch.stack(states),
            timesteps / 1000,
            places,
            pipeline._prepare_text_ids(torch.stack(states)),
            guidance,
            return_dict=False,
        )[0]
        return torch.stack(list(pipeline._unpack_latents_with_ids(tokens, places)))
    if kind == "Krea2Pipeline":
        B, C, _, H, W = noisy.shape
        mask = pipeline.encode_prompt(list(CAPTIONS))[1]
        tokens = transformer(
            pipeline._pack_latents(noisy, B, C, H, W),
            torch.stack(states).unflatten(-1, (12, -1)),
            timesteps / 1000,
            pipeline.prepare_position_ids(len(states[0]), H // 2, W // 2, "cpu"),
            mask,
            return_dict=False,
        )[0]
        return pipeline._unpack_latents(tokens, H * 4, W * 4)
    if kind == "WanPipeline":
        return transformer(noisy, timesteps, torch.stack(states), return_dict=False)[0]
    if kind == "ZImagePipeline":
        pictures = transformer(list(noisy.unsqueeze(2)), (1000 - timesteps) / 1000, states, return_dict=False)[0]
        return -torch.stack(pictures).squeeze(2)
    B, C, _, H, W = noisy.shape
    text = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
    tokens = transformer(
        pipeline._pack_latents(noisy, B, C, H, W),
        text,
        torch.arange(text.shape[1]) < lengths[:, None],
        timesteps / 1000,
        [[(1, H // 2, W // 2)]] * B,
        return_dict=False,
    )[0]
    return pipeline._unpack_latents(tokens, H * pipeline.vae_scale_factor, W * pipeline.vae_scale_factor, 4)


@pytest.mark.parametrize(
    ("kind", "clip"),
    quick_and_slow(
        [(kind, None) for kind in PIPELINES] + list(CLIPS.items()),
        quick=[("ZImagePipeline", None), ("WanPipeline", CLIPS["WanPipeline"])],
    ),
)
def test_prediction_and_gradients_are_those_of_diffusers(kind, clip, tmp_path):
    opened = Opened(kind, tmp_path, clip)
    transformer = opened.pipeline.transformer
    with torch.no_grad():
        states, text = _states(opened.pipeline, kind), opened.run("text_states")
    if kind == "QwenImagePipeline":
        opened.pipeline.vae_scale_factor = 4
    expected = _predicted(opened.pipeline, kind, opened.inputs["noisy"], opened.inputs["timesteps"], states)
    expected.pow(2).mean().backward()
    gradients = {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}
    transformer.zero_grad()

    with torch.no_grad():
        pooled = {"pooled_text": opened.run("pooled_text")} if "input_ids_2" in opened.inputs else {}
    found = opened.run("prediction", text_states=text, **pooled)
    found.pow(2).mean().backward()

    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(transformer.get_parameter(name).grad, gradient, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("kind", "is_clip"),
    quick_and_slow([(kind, is_clip) for kind in CLIPS for is_clip in (False, True)], quick=[("WanPipeline", True)]),
)
@torch.no_grad()
def test_latents_are_normalised_as_diffusers_pipeline_undoes_it(kind, is_clip, tmp_path):
    opened = Opened(kind, tmp_path, CLIPS[kind] if is_clip else None)
    vae = opened.pipeline.vae
    shape = next(spec.shape for spec in opened.graph.inputs if spec.name == "pixels")
    pixels = torch.rand(2, *shape, dtype=torch.float64) * 2 - 1
    noise = torch.zeros_like(opened.inputs["noisy"][:2])
    ours = opened.run("latents", pixels=pixels, posterior_noise=noise)
    numbers = ([0.1, 0.2, -0.1, 0.0], [1.5, 2.0, 0.5, 1.0])  # of the tiny VAEs: means and deviations
    if kind == "HunyuanVideoPipeline":
        numbers = ([0.0] * 4, [1 / vae.config.scaling_factor] * 4)
    shift, scale = (torch.tensor(each).double().view(1, 4, 1, 1, 1) for each in numbers)
    clips = pixels if is_clip else pixels.unsqueeze(2)
    torch.testing.assert_close(ours * scale + shift, vae.encode(clips).latent_dist.mode())


@pytest.mark.slow
@torch.no_grad()
def test_patches_of_latents_are_normalised_as_diffusers_pipeline_undoes_it(tmp_path):
    opened = Opened("Flux2KleinPipeline", tmp_path)
    vae = opened.pipeline.vae
    pixels = torch.rand(2, 3, 16, 16, dtype=torch.float64) * 2 - 1
    mean = vae.encode(pixels).latent_dist.mode()
    ours = opened.run("latents", pixels=pixels, posterior_noise=torch.zeros_like(mean))
    std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps).view(1, -1, 1, 1)
    found = opened.pipeline._unpatchify_latents(ours * std + vae.bn.running_mean.view(1, -1, 1, 1))
    torch.testing.assert_close(found, mean)
    with pytest.raises(ModelError, match="latents of size 9 cannot be cut into patches of 2"):
        build_graph(tmp_path, objective=ObjectiveSettings(prediction=Prediction.FLOW_MATCHING), resolution=18)


def test_latents_in_other_patches_are_refused():
    vae = flux2_vae()
    assert vae_problems(vae) == []
    vae.register_to_config(patch_size=(1, 1))
    assert vae_problems(vae) == ["vae: patch_size = (1, 1) is not supported; supported: [2, 2], (2, 2)"]


@pytest.mark.parametrize(
    ("resolution", "named"), [(18, "is not a multiple of 4"), (12, "latents of size 3 cannot be cut into patches")]
)
def test_a_resolution_that_does_not_fit_is_refused(resolution, named, tmp_path):
    PIPELINES["WanPipeline"]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=named):
        build_graph(tmp_path, objective=ObjectiveSettings(prediction=Prediction.FLOW_MATCHING), resolution=resolution)


@torch.no_grad()
def test_each_clip_of_a_batch_has_its_own_frames_of_a_second(tmp_path):
    opened = Opened("LTXPipeline", tmp_path, CLIPS["LTXPipeline"])
    rates = torch.tensor([25.0, 24000 / 1001, 8.0])
    text = opened.run("text_states")
    found = opened.run("prediction", text_states=text, frame_rate=rates)
    for number, rate in enumerate(rates.tolist()):
        row = slice(number, number + 1)
        noisy = opened.inputs["noisy"][row]
        tokens = opened.pipeline.transformer(
            hidden_states=opened.pipeline._pack_latents(noisy),
            encoder_hidden_states=text[row],
            timestep=opened.inputs["timesteps"][row],
            encoder_attention_mask=opened.inputs["input_mask"][row],
            num_frames=noisy.shape[2],
            height=noisy.shape[3],
            width=noisy.shape[4],
            rope_interpolation_scale=(8 / rate, 32, 32),  # as in diffusers' pipeline
        )[0]
        expected = opened.pipeline._unpack_latents(tokens, *noisy.shape[2:])
        torch.testing.assert_close(found[row], expected, rtol=1e-5, atol=1e-5)
    other = opened.run("prediction", text_states=text, frame_rate=torch.full((3,), 25.0))
    assert [float((found - other)[number].abs().max()) > 1e-3 for number in range(3)] == [False, True, True]


def test_families_are_told_of_a_clip_what_diffusers_pipelines_tell():
    """A pipeline of clips that takes frames of a second tells them to its model; others know nothing of them."""
    words = ("frame_rate", "fps")
    told = {
        kind: [name for name in inspect.signature(getattr(diffusers, kind).__call__).parameters if name in words]
        for kind, family in REGISTRY.items()
        if family.has_clips
    }
    assert {kind: names for kind, names in told.items() if names} == {"LTXPipeline": ["frame_rate"]}
    assert CLIPS.keys() <= told.keys()
    for kind, names in told.items():
        parameters = inspect.signature(getattr(diffusers, kind).__call__).parameters
        assert [parameters[name].default for name in names] == [REGISTRY[kind].frame_rate for _ in names]
        assert names or REGISTRY[kind].frame_rate is None


@pytest.mark.parametrize(
    ("clip", "named"),
    [
        (Clip(width=24, height=18, frames=5), "resolution 18 is not a multiple of 4"),
        (Clip(width=12, height=16, frames=5), "latents of size 3 cannot be cut into patches"),
        (Clip(width=24, height=16, frames=6), "6 frames do not divide so: use 5 or 7"),
    ],
)
def test_a_clip_that_does_not_fit_is_refused(clip, named, tmp_path):
    PIPELINES["WanPipeline"]().save_pretrained(tmp_path)
    objective = ObjectiveSettings(prediction=Prediction.FLOW_MATCHING)
    with pytest.raises(ModelError, match=named):
        build_graph(tmp_path, objective=objective, resolution=16, clip=clip)


def test_a_model_of_pictures_takes_no_clips(tmp_path):
    PIPELINES["ZImagePipeline"]().save_pretrained(tmp_path)
    objective = ObjectiveSettings(prediction=Prediction.FLOW_MATCHING)
    named = ", ".join(kind for kind, family in REGISTRY.items() if family.has_clips)
    with pytest.raises(ModelError, match=f"no clips; models of clips are {named}; leave out the frames .x5 in data"):
        build_graph(tmp_path, objective=objective, resolution=16, clip=CLIPS["WanPipeline"])


def test_a_wan_2_2_with_two_transformers_is_refused(tmp_path):
    pipeline = PIPELINES["WanPipeline"]()
    pipeline.register_modules(transformer_2=pipeline.transformer)
    pipeline.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="transformer_2 is WanTransformer3DModel; models with it are not supported"):
        open_components(tmp_path)


def test_a_krea_2_that_reads_other_layers_is_refused(tmp_path):
    pipeline = PIPELINES["Krea2Pipeline"]()
    pipeline.register_to_config(text_encoder_select_layers=(1, 2), patch_size=4)
    pipeline.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"text_encoder_select_layers is \[1, 2\]; supported: \[2, 5") as caught:
        open_components(tmp_path)
    assert "model_index.json: patch_size is 4; supported: 2" in str(caught.value)


@pytest.mark.parametrize("kind", REGISTRY)
def test_data_workers_can_be_given_what_is_done_to_captions(kind):
    there = pickle.loads(pickle.dumps(REGISTRY[kind].prompts))
    for name, prompt in REGISTRY[kind].prompts.items():
        assert there[name].clean(" A b ") == prompt.clean(" A b ")
        assert prompt.chat is None or there[name].chat("a") == prompt.chat("a")


def test_a_family_is_a_page_of_data():
    files = Path(described.__file__).parent.glob("*.py")
    lengths = {path.stem: len(text.splitlines()) for path in files if "FAMILY = family(" in (text := path.read_text())}
    assert len(lengths) >= len(PIPELINES)
    assert {name: length for name, length in lengths.items() if length > 90} == {}
