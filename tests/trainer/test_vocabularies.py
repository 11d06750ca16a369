"""Tokenizers beside the embeddings of their text encoders, and labels beside the classes of a denoiser."""

import pytest
import torch
from kit.family_runs import SAVED as FAMILIES
from kit.tiny_runs import recipe_of, save_dit, save_pictures, save_stable_diffusion, train_here
from torch import nn
from transformers import AddedToken, CLIPTextModel, CLIPTokenizer

from diffusionpipe.errors import ModelError, RecipeError
from diffusionpipe.models.objectives.objective import ObjectiveSettings
from diffusionpipe.models.opening.folder import build_graph
from diffusionpipe.trainer.data.text.tokens import TOKENS, token_ids
from diffusionpipe.trainer.inference.conditions import tokenizers_of

SAVED = {"StableDiffusionPipeline": save_stable_diffusion, **FAMILIES}
KINDS = [kind for kind in SAVED if kind != "DiTPipeline"]
WIDE = {"LTXPipeline": 64, "SanaPipeline": 32}
LARGE = 10**6


def opened(kind, folder):
    SAVED[kind](folder)
    return build_graph(folder, objective=ObjectiveSettings(), resolution=WIDE.get(kind, 16))


def embed(graph, name, rows):
    """Give the encoder of a raw input an embedding of that many tokens."""
    encoder = graph.components[name.replace("input_ids", "text_encoder")]
    encoder.set_input_embeddings(nn.Embedding(rows, 1, device="meta"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_without_an_embedding_is_refused_for_each_encoder(kind, tmp_path):
    graph = opened(kind, tmp_path)
    names = [spec.name for spec in graph.inputs if spec.name in TOKENS]
    shapes = {spec.name: spec.shape for spec in graph.inputs}
    found = tokenizers_of(graph, tmp_path)
    texts = ["", "a", "a b c", "the quick brown fox 0123456789 jumps over a lazy dog"]
    assert names
    for name in names:
        most = int(token_ids(found[name], texts, *shapes[name]).max())
        embed(graph, name, most)
        with pytest.raises(ModelError, match=f"embeds tokens up to {most - 1}; put the tokenizer there"):
            tokenizers_of(graph, tmp_path)
        embed(graph, name, LARGE)
    assert tokenizers_of(graph, tmp_path).keys() == set(names)


@pytest.mark.parametrize("special", [True, False])
def test_an_added_word_needs_an_embedding_and_a_special_token_that_no_text_has_does_not(special, tmp_path):
    graph = opened("StableDiffusionPipeline", tmp_path)
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path / "tokenizer")
    rows = len(tokenizer)
    tokenizer.add_tokens([AddedToken("<bird>", special=special)], special_tokens=special)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    if special:
        tokenizers_of(graph, tmp_path)
    else:
        with pytest.raises(ModelError, match=f"tokens up to {rows}, and text_encoder embeds tokens up to {rows - 1}"):
            tokenizers_of(graph, tmp_path)


def test_a_run_with_the_tokenizer_of_another_encoder_ends_before_its_first_step(tmp_path):
    model = save_stable_diffusion(tmp_path / "sd")
    encoder = CLIPTextModel.from_pretrained(model / "text_encoder")
    encoder.resize_token_embeddings(10)
    encoder.save_pretrained(model / "text_encoder")
    recipe = recipe_of(model, save_pictures(tmp_path / "data"), tmp_path / "run")
    with pytest.raises(ModelError, match=r"tokenizer has tokens up to 53, and text_encoder embeds tokens up to 9;"):
        train_here(recipe)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_ids_below_the_number_of_rows_are_all_embedded(tmp_path):
    """The check by the ids themselves: with as many rows as are accepted, torch finds each token of the vocabulary."""
    graph = opened("StableDiffusionPipeline", tmp_path)
    (tokenizer,) = tokenizers_of(graph, tmp_path).values()
    rows = graph.components["text_encoder"].get_input_embeddings().num_embeddings
    ids = token_ids(tokenizer, [word.removesuffix("</w>") for word in tokenizer.get_vocab()], 6)
    assert nn.Embedding(rows, 1)(ids).shape[:2] == ids.shape
    embed(graph, "input_ids", rows - 1)
    with pytest.raises(ModelError):
        tokenizers_of(graph, tmp_path)
    with pytest.raises(IndexError):
        nn.Embedding(rows - 1, 1)(torch.as_tensor(ids))


def test_a_label_that_the_run_would_draw_without_a_class_ends_before_its_first_step(tmp_path):
    drawn = {"every": 1, "steps": 2, "labels": (99,)}
    recipe = recipe_of(save_dit(tmp_path / "dit"), save_pictures(tmp_path / "data"), tmp_path / "run", sampling=drawn)
    with pytest.raises(RecipeError, match="there is no class 99; the model has classes 0 to 4"):
        train_here(recipe)
    assert not (tmp_path / "run/metrics.jsonl").exists()
