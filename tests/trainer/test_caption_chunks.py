import json
from dataclasses import replace

import diffusers
import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from kit.descriptions import described as describe
from kit.drawn_families import STEPS, Asked, difference, drawn_here, settings_of
from kit.layouts import assert_same_step, reference_step, step_in_threads
from kit.tiny_models import randomise_pipeline, raw_inputs, tiny_projected_text_encoder, tiny_text_encoder
from kit.tiny_pipelines import CLIP, WORDS, sd3
from kit.tiny_pipelines import sdxl as tiny_sdxl
from kit.tiny_runs import losses_of, recipe_of, save_pictures, save_stable_diffusion, train, train_here
from PIL import Image
from safetensors import safe_open
from transformers import CLIPTokenizer

from diffusionpipe import cli
from diffusionpipe.errors import ConfigError, ModelError
from diffusionpipe.models.base.family import Absent, CaptionReading
from diffusionpipe.models.graphs.run import needed_layers, run_layers
from diffusionpipe.models.objectives.objective import ObjectiveSettings, Prediction
from diffusionpipe.models.opening.folder import build_graph, weight_sources
from diffusionpipe.models.parameters.lora import LoraSettings
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.planner import Layout
from diffusionpipe.profiler.counted import count_layers
from diffusionpipe.trainer.data.randomness import normal
from diffusionpipe.trainer.data.text.caption_lengths import EncoderReading, chunks_in_use
from diffusionpipe.trainer.data.text.tokens import token_ids
from diffusionpipe.trainer.inference.conditions import SampleRequest, tokenizers_of
from diffusionpipe.trainer.inference.folder_drawing import Source

pytestmark = pytest.mark.usefixtures("one_thread", "one_trace")

BEGIN, END = CLIP["bos_token_id"], CLIP["eos_token_id"]
PADDING = WORDS.index("z</w>")
"""The token that fills up in some of the folders, as "!" does in those of Stable Diffusion 2."""
LENGTHS = (0, 75, 76, 150, 200)
LETTERS = "abcdefghijklmnopqrstuvwxy"


def caption(num_tokens):
    """A caption of so many tokens, each a word of one letter."""
    return " ".join(LETTERS[i * i % 25] for i in range(num_tokens))


def tokenizer(padding="<|endoftext|>"):
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77, pad_token=padding)


def encoder(make=tiny_text_encoder):
    return make(**CLIP, max_position_embeddings=77, num_hidden_layers=3)


@pytest.fixture(scope="module")
def stable_diffusion(tmp_path_factory):
    """A folder whose captions have 77 tokens, padded with a token of their own."""
    folder = save_stable_diffusion(tmp_path_factory.mktemp("sd"))
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    pipeline.register_modules(text_encoder=encoder(), tokenizer=tokenizer("z</w>"))
    randomise_pipeline(pipeline)
    pipeline.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sdxl(tmp_path_factory):
    folder, pipeline = tmp_path_factory.mktemp("sdxl"), tiny_sdxl()
    pipeline.register_modules(
        text_encoder=encoder(),
        text_encoder_2=encoder(tiny_projected_text_encoder),
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer("z</w>"),
    )
    randomise_pipeline(pipeline)
    pipeline.save_pretrained(folder)
    return folder


def rows_of(num_tokens, chunks, padding):
    """The tokens of a caption's chunks, by hand, (N, 77)."""
    tokens = [WORDS.index(f"{letter}</w>") for letter in caption(num_tokens).split()]
    parts = [[BEGIN, *tokens[75 * i :][:75], END] for i in range(chunks)]
    return torch.tensor([part + [padding] * (77 - len(part)) for part in parts])


def found_in(folder, texts, captions, targets):
    """What the layers make of texts."""
    graph = build_graph(folder, objective=ObjectiveSettings(), resolution=16, captions=captions)
    names = [layer.name for layer in graph.layers if layer.component.startswith("text_encoder")]
    materialize(graph, names, weight_sources(folder, graph), device="cpu", dtype=torch.float32, seed=0)
    shapes = {spec.name: spec.shape for spec in graph.inputs}
    raw = {name: token_ids(own, texts, *shapes[name]) for name, own in tokenizers_of(graph, folder).items()}
    with torch.no_grad():
        return run_layers(needed_layers(graph.layers, targets, raw), graph.components, raw, targets=targets)


@pytest.mark.parametrize("clip_skip", [None, 2])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_states_are_those_of_the_chunks_encoded_one_by_one(stable_diffusion, chunks, clip_skip):
    lengths = [n for n in LENGTHS if n <= 75 * chunks]
    captions = CaptionReading(chunks=chunks, clip_skip=clip_skip)
    found = found_in(stable_diffusion, [caption(n) for n in lengths], captions, ["text_states"])["text_states"]
    assert found.shape == (len(lengths), 77 * chunks, 8)
    model = diffusers.StableDiffusionPipeline.from_pretrained(stable_diffusion).text_encoder
    for row, number in zip(found, lengths, strict=True):
        with torch.no_grad():
            outputs = [
                model(ids[None], output_hidden_states=True).hidden_states[-(clip_skip or 1)]
                for ids in rows_of(number, chunks, PADDING)
            ]
            expected = model.final_layer_norm(torch.cat(outputs, 1))[0]
        assert torch.allclose(row, expected, atol=1e-6)


def test_sdxl_joins_the_states_of_both_encoders_and_pools_the_first_chunk(sdxl):
    targets = ["text_states", "pooled_text"]
    found = found_in(sdxl, [caption(n) for n in LENGTHS], CaptionReading(chunks=3), targets)
    pipeline = diffusers.StableDiffusionXLPipeline.from_pretrained(sdxl)
    for row, pooled, number in zip(found["text_states"], found["pooled_text"], LENGTHS, strict=True):
        with torch.no_grad():
            first = [pipeline.text_encoder(ids[None], output_hidden_states=True) for ids in rows_of(number, 3, END)]
            second = [
                pipeline.text_encoder_2(ids[None], output_hidden_states=True) for ids in rows_of(number, 3, PADDING)
            ]
        states = [torch.cat([one.hidden_states[-2] for one in found], 1)[0] for found in (first, second)]
        assert torch.allclose(row, torch.cat(states, -1), atol=1e-6)
        assert torch.allclose(pooled, second[0].text_embeds[0], atol=1e-6)


def test_no_text_is_zeros_in_sdxl_in_each_chunk(sdxl):
    found = found_in(sdxl, [Absent(), ""], CaptionReading(chunks=2), ["text_states", "pooled_text"])
    assert not found["text_states"][0].any()
    assert not found["pooled_text"][0].any()
    assert found["text_states"][1].abs().sum(-1).min() > 0


def test_a_short_word_is_not_cut_by_the_end_of_a_chunk_and_a_long_one_is():
    own = tokenizer()
    short, long = (" ".join(["a"] * 70 + ["b" * n, "c"]) for n in (7, 8))
    moved, cut = token_ids(own, [short, long], 2, 77).tolist()
    a, b, b_end, c = (WORDS.index(word) for word in ("a</w>", "b", "b</w>", "c</w>"))
    assert moved[0] == [BEGIN, *[a] * 70, END, *[END] * 5]
    assert moved[1][:10] == [BEGIN, *[b] * 6, b_end, c, END]
    assert cut[0] == [BEGIN, *[a] * 70, *[b] * 5, END]
    assert cut[1][:6] == [BEGIN, b, b, b_end, c, END]


def asked_of_chunks(folder):
    """A picture of 150 tokens, away from 90."""
    return Asked(
        sources=(Source(folder=folder, resolution=16, captions=CaptionReading(chunks=2)),),
        wish=SampleRequest(prompts=(caption(150),), negatives=(caption(90),)),
        settings=(settings_of(folder, 3.0),),
        guidance=3.0,
    )


def by_diffusers_from_states(folder):
    """The same picture by diffusers' pipeline, given the states of each chunk."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    given = {}
    for role, number in (("", 150), ("negative_", 90)):
        with torch.no_grad():
            if hasattr(pipeline, "text_encoder_2"):
                one = pipeline.text_encoder(rows_of(number, 2, END), output_hidden_states=True)
                two = pipeline.text_encoder_2(rows_of(number, 2, PADDING), output_hidden_states=True)
                states = torch.cat([one.hidden_states[-2], two.hidden_states[-2]], -1)
                given[f"{role}pooled_prompt_embeds"] = two.text_embeds[:1]
            else:
                states = pipeline.text_encoder(rows_of(number, 2, PADDING)).last_hidden_state
        given[f"{role}prompt_embeds"] = states.reshape(1, 154, -1)
    noise = normal(seed=0, purpose="sampling", step=0, positions=range(1), shape=(4, 8, 8))
    size = {"height": 16, "width": 16, "num_inference_steps": STEPS, "guidance_scale": 3.0}
    return pipeline(**given, **size, latents=noise, output_type="np").images


@pytest.mark.parametrize("name", ["stable_diffusion", "sdxl"])
def test_a_long_prompt_draws_what_diffusers_draws_from_the_chunks_states(request, name):
    folder = request.getfixturevalue(name)
    asked = asked_of_chunks(folder)
    ours = drawn_here(asked)
    assert difference(ours, (by_diffusers_from_states(folder),)) < 1e-5
    source = replace(asked.sources[0], captions=CaptionReading())
    assert difference(drawn_here(replace(asked, sources=(source,))), ours) > 1e-3


def test_other_families_refuse_chunks_and_a_skipped_layer(tmp_path, sdxl):
    sd3().save_pretrained(tmp_path)
    for folder, captions, named in (
        (tmp_path, CaptionReading(chunks=2), "caption_chunks: captions are read in chunks by StableDiffusionPipeline"),
        (sdxl, CaptionReading(clip_skip=2), "clip_skip has no effect"),
    ):
        flow = ObjectiveSettings(prediction=Prediction.FLOW_MATCHING if folder == tmp_path else Prediction.EPSILON)
        with pytest.raises(ModelError, match=named):
            build_graph(folder, objective=flow, resolution=16, captions=captions)


def test_a_skip_beyond_the_first_layer_is_refused(stable_diffusion):
    with pytest.raises(ModelError, match="clip_skip: 4 is more than the 3 layers of text_encoder"):
        build_graph(
            stable_diffusion, objective=ObjectiveSettings(), resolution=16, captions=CaptionReading(clip_skip=4)
        )


@pytest.mark.slow
def test_the_longer_states_are_priced(stable_diffusion):
    def counted(chunks):
        reading = CaptionReading(chunks=chunks)
        graph = build_graph(stable_diffusion, objective=ObjectiveSettings(), resolution=8, captions=reading)
        model = describe(graph)
        counts = count_layers(graph, model, 3, precision="float32", device_type="cpu", step=lambda: None)
        work = {name: sum(op.flops for op in count.forward) for name, count in counts.items()}
        return model.tensor("text_states").num_bytes, work

    (short, less), (long, more) = counted(1), counted(2)
    assert long == 2 * short
    denoiser = [name for name in less if name.startswith("unet.") and more[name] != less[name]]
    unet = UNet2DConditionModel.from_pretrained(stable_diffusion, subfolder="unet")
    rows = {"down_blocks.0": 16, "up_blocks.1": 16, "mid_block": 4}  # places of the latents, 4 x 4 and 2 x 2
    expected = 0
    for name, module in unet.named_modules():
        if name.endswith(".attn2"):
            width = module.to_k.out_features
            places = next(number for block, number in rows.items() if name.startswith(block))
            expected += 2 * 3 * 77 * 2 * width * (module.to_k.in_features + places)  # keys, values; scores, sums
    assert sum(more[name] - less[name] for name in denoiser) == expected > 0


# Runs.


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = save_pictures(tmp_path_factory.mktemp("data") / "pictures", count=8)
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["text"] = caption(30 * number)
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def long_recipe(model, data, folder, /, **sections):
    given = {
        "data": {"caption_chunks": 2, "clip_skip": 2, "validation": str(data), "caption_dropout": 0.3},
        "training": {"steps": 2, "precision": "float64"},
        "validation": {"every": 2, "samples": 3, "timesteps": (0.5,)},
        "sampling": {"every": 2, "steps": 2, "guidance": 2.0, "prompts": (caption(120),), "negative_prompt": "a b"},
        "checkpoint": {"every": 1},
    }
    return recipe_of(
        model, data, folder, **{key: given.get(key, {}) | sections.get(key, {}) for key in {**given, **sections}}
    )


@pytest.fixture(scope="module")
def in_one(stable_diffusion, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "one"
    said = []
    assert train_here(long_recipe(stable_diffusion, data, folder), tell_data=said.extend) == 2
    return folder, [line.text for line in said]


def test_three_stages_give_the_gradients_of_one_process_where_the_encoder_is_trained(stable_diffusion):
    graph = build_graph(
        stable_diffusion,
        objective=ObjectiveSettings(),
        resolution=8,
        train=("unet", "text_encoder"),
        dtype="float64",
        captions=CaptionReading(chunks=2, clip_skip=2),
    )
    names, sources = [layer.name for layer in graph.layers], weight_sources(stable_diffusion, graph)
    materialize(graph, names, sources, device="cpu", dtype=torch.float64, seed=0)
    inputs = raw_inputs(graph, 4)
    layout = Layout(batch=4, stages=3, microbatches=2)
    assert_same_step(step_in_threads(graph, describe(graph), layout, inputs), reference_step(graph, inputs))


def test_a_layer_that_is_skipped_has_no_adapters(stable_diffusion):
    graph = build_graph(
        stable_diffusion,
        objective=ObjectiveSettings(),
        resolution=8,
        train=("unet", "text_encoder"),
        lora=LoraSettings(rank=2),
        captions=CaptionReading(chunks=2, clip_skip=2),
    )
    adapted = {name for name, p in graph.components["text_encoder"].named_parameters() if p.requires_grad}
    assert {name.split(".")[2] for name in adapted} == {"0", "1"}
    assert describe(graph).layers


@pytest.mark.slow
def test_a_layer_that_is_skipped_is_exported_as_it_was(stable_diffusion, data, tmp_path):
    trained = {"train": ("unet", "text_encoder")}
    recipe = long_recipe(stable_diffusion, data, tmp_path, model=trained, sampling={"every": None})
    assert train_here(recipe) == 2
    kinds = diffusers.StableDiffusionPipeline
    before, after = (
        kinds.from_pretrained(folder).text_encoder.state_dict() for folder in (stable_diffusion, tmp_path / "export")
    )
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if ".layers.2." in name} <= same
    assert not {name for name in before if ".layers.1." in name} & same


@pytest.mark.slow
def test_a_file_of_adapters_says_how_captions_were_read(stable_diffusion, data, tmp_path):
    recipe = long_recipe(stable_diffusion, data, tmp_path, lora={"rank": 2}, sampling={"every": None})
    assert train_here(recipe) == 2
    with safe_open(tmp_path / "export/pytorch_lora_weights.safetensors", framework="pt") as file:
        header = file.metadata()
    assert (header["ss_clip_skip"], header["ss_max_token_length"]) == ("2", "150")


@pytest.mark.slow
def test_a_run_over_two_stages_reads_chunks_as_one_process_does(crew, stable_diffusion, data, in_one, tmp_path):
    assert crew.run(train, long_recipe(stable_diffusion, data, tmp_path / "two")) == [2, 2]
    for key in ("loss", "validation_loss", "gradient_norm"):
        found, expected = losses_of(tmp_path / "two", key), losses_of(in_one[0], key)
        assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-10)
        assert expected


def test_captions_beyond_the_chunks_are_counted(in_one):
    (line,) = [text for text in in_one[1] if "longer" in text and not text.startswith(("captions", "prompts"))]
    assert line.startswith("2 are longer than the 154 tokens that text_encoder reads, the longest of 007.png, 216")
    assert line.endswith("; a larger data.caption_chunks reads more")


@pytest.mark.parametrize(("num_tokens", "needed"), [(0, 1), (75, 1), (76, 2), (150, 2), (151, 3), (400, 4)])
def test_chunks_are_in_use_up_to_the_longest_text(num_tokens, needed):
    reading = EncoderReading(encoder="text_encoder", tokenizer=tokenizer(), length=77, chunks=4)
    assert chunks_in_use(["a b", caption(num_tokens)], [reading]) == needed


@pytest.mark.slow
def test_chunks_that_no_caption_fills_are_named(stable_diffusion, data, tmp_path):
    said = []
    recipe = long_recipe(
        stable_diffusion, data, tmp_path, data={"caption_chunks": 4}, sampling={"every": 1, "steps": 1}
    )
    train_here(recipe, tell_data=said.extend)
    texts = [line.text for line in said]
    assert "fit into 3 chunks; data.caption_chunks = 3 is faster than 4" in texts


def test_a_run_does_not_go_on_with_other_chunks(stable_diffusion, data, in_one):
    other = long_recipe(stable_diffusion, data, in_one[0], data={"caption_chunks": 3})
    with pytest.raises(ConfigError, match=r"data\.caption_chunks"):
        train_here(other, "latest")


def command(*words):
    with pytest.raises(SystemExit) as caught:
        cli.main([str(word) for word in words])
    return caught.value.code


def test_the_card_draws_by_our_command_because_diffusers_reads_prompts_otherwise(in_one):
    card = (in_one[0] / "export/README.md").read_text(encoding="utf-8")
    assert "captions read in 2 chunks and without the last layer of CLIP" in " ".join(card.split())
    assert "--caption-chunks 2 --clip-skip 2" in card


def test_sample_reads_a_prompt_as_the_run_was_trained(in_one, tmp_path):
    words = ["sample", in_one[0], "--steps", "2", "--guidance", "2", "--keep"]
    drawn = {}
    for name, more in (
        ("run", []),
        ("given", ["--caption-chunks", "2", "--clip-skip", "2"]),
        ("short", ["--caption-chunks", "1"]),
    ):
        given = ["--prompt", caption(120), "--out", str(tmp_path / "grid.png"), *more]
        assert command(*words, tmp_path / name, *given) == 0
        (drawn[name],) = (tmp_path / name).iterdir()
    pictures = {name: np.asarray(Image.open(path)) for name, path in drawn.items()}
    assert np.array_equal(pictures["run"], pictures["given"])
    assert not np.array_equal(pictures["run"], pictures["short"])
    again = tmp_path / "again.png"
    assert command("sample", in_one[0], "--like", drawn["run"], "--out", again) == 0
    assert np.array_equal(np.asarray(Image.open(again)), pictures["run"])
