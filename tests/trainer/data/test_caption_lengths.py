"""Captions that a text encoder does not read to their end are counted, for every family's way of reading captions."""

import random
from string import ascii_lowercase

import pytest
from kit.tiny_described import _gemma_tokenizer as gemma_tokenizer
from kit.tiny_described import _llama_tokenizer as llama_tokenizer
from kit.tiny_described import qwen_tokenizer
from kit.tiny_pipelines import PIECES, WORDS
from transformers import CLIPTokenizer, T5Tokenizer

from diffusionpipe.costs import TensorSpec
from diffusionpipe.models.opening.folder import REGISTRY
from diffusionpipe.trainer.data.text import caption_lengths
from diffusionpipe.trainer.data.text.caption_lengths import EncoderReading, counted_captions, cut_captions, readings_of
from diffusionpipe.trainer.data.text.tokens import num_tokens, token_ids
from diffusionpipe.trainer.inference.conditions import _Prompted

LENGTH = 77


def clip_tokenizer():
    merges = [("a", "b"), ("ab", "c</w>"), ("d", "e</w>")]
    more = ["ab", "abc</w>", "de</w>"]
    vocabulary = {word: number for number, word in enumerate([*WORDS[:-2], *more, *WORDS[-2:]])}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=LENGTH)


def captions(seed, count=40, words=60):
    """Of few words and of many, with all that separates words."""
    chance = random.Random(seed)

    def word():
        return "".join(chance.choice(ascii_lowercase[:6]) for _ in range(chance.randint(1, 7)))

    return [
        chance.choice([" ", "  ", "\n", ", "]).join(word() for _ in range(chance.randint(0, words)))
        for _ in range(count)
    ]


def reading(tokenizer, length=LENGTH):
    return EncoderReading(encoder="text_encoder", tokenizer=tokenizer, length=length)


PROMPTS = {f"{name} {key}": prompt for name, family in REGISTRY.items() for key, prompt in family.prompts.items()}


def tokenizer_of(name):
    """The tokenizer of a family and how it reads captions, with single letters or bytes for tokens."""
    prompt = PROMPTS[name]
    if prompt.instruction:
        return _Prompted(gemma_tokenizer(), prompt)
    if name == "HunyuanVideoPipeline input_ids":
        return _Prompted(llama_tokenizer(), prompt)
    if prompt.chat is not None or prompt.template != "{}" or prompt.suffix:
        return _Prompted(qwen_tokenizer(), prompt)
    return _Prompted(T5Tokenizer(vocab=PIECES, extra_ids=0, model_max_length=prompt.length), prompt)


@pytest.mark.parametrize("name", ["CLIP", *PROMPTS])
def test_a_caption_is_cut_if_and_only_if_more_words_behind_it_would_not_be_read(name, monkeypatch):
    monkeypatch.setattr(caption_lengths, "_TRIALS", 4)  # the other 36 are counted by their words
    length = LENGTH if name == "CLIP" else PROMPTS[name].length
    tokenizer = clip_tokenizer() if name == "CLIP" else tokenizer_of(name)
    texts = captions(0, words=length // 3)
    longer = [f"{text} f f" for text in texts]
    is_read = (token_ids(tokenizer, texts, length) != token_ids(tokenizer, longer, length)).any(1).tolist()
    tokens = num_tokens(tokenizer, texts)
    around = num_tokens(tokenizer, [""])[0] if getattr(tokenizer, "has_template", False) else 0
    # Of a caption that just fits, the end of its template may be cut; then more words change what is read.
    clear = [place for place, number in enumerate(tokens) if not length <= number <= length + around]
    assert [tokens[place] > length for place in clear] == [not is_read[place] for place in clear]
    (cut,) = cut_captions(texts, [reading(tokenizer, length)])
    assert 1 < cut.number == sum(number > length for number in tokens) < 39
    assert tokens[cut.longest] == max(tokens)
    assert (cut.limit, cut.looked_at, cut.tokens) == (length - around, 40, max(tokens) - around)
    (found,) = counted_captions(texts, [reading(tokenizer, length)])
    own = sorted(number - around for number, text in zip(tokens, texts, strict=True) if text.strip())
    assert (found.lengths.least, found.lengths.most) == (own[0], own[-1])
    assert found.lengths.median == pytest.approx(own[(len(own) - 1) // 2], rel=0.1)


def test_of_two_encoders_the_one_that_cuts_is_named():
    clip, t5 = (
        TensorSpec(name=f"base/{name}", shape=(length,), dtype="int64")
        for name, length in (("input_ids", LENGTH), ("input_ids_2", 512))
    )
    t5_tokenizer = T5Tokenizer(vocab=PIECES, extra_ids=0, model_max_length=512)
    readings = readings_of((clip, t5), {clip.name: clip_tokenizer(), t5.name: t5_tokenizer})
    (cut,) = cut_captions(["f " * 100], readings)
    assert (cut.encoder, cut.limit) == ("text_encoder of base", LENGTH)


def test_texts_that_are_all_read_are_not_named():
    assert cut_captions(["", "a b c"], [reading(clip_tokenizer())]) == []
    assert cut_captions([], [reading(clip_tokenizer())]) == []
    assert cut_captions(["", " "], [reading(clip_tokenizer())]) == []


def test_of_many_captions_some_are_drawn_the_same_ones_each_time(monkeypatch):
    monkeypatch.setattr(caption_lengths, "MOST", 20)
    texts = [f"{'a ' * 80}{number}" if number % 2 else "a" for number in range(1000)]
    (cut,) = cut_captions(texts, [reading(clip_tokenizer())])
    assert cut.looked_at == 20
    assert 3 < cut.number < 17
    assert cut == cut_captions(texts, [reading(clip_tokenizer())])[0]
