"""Texts made from captions: what each option does, how often, and that only seed, sample and pass decide it."""

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.batches.batch import Augmentation, BatchSource, Rows, make_batch
from diffusionpipe.trainer.data.batches.loader import StepLoader, fixed_batches
from diffusionpipe.trainer.data.batches.sized import fixed_rows
from diffusionpipe.trainer.data.scan.captions import read_list, read_metadata
from diffusionpipe.trainer.data.scan.dataset import Dataset, Findings, Sample, scan
from diffusionpipe.trainer.data.scan.dataset_form import DATASETS
from diffusionpipe.trainer.data.survey import Folder, SampleUse, survey
from diffusionpipe.trainer.data.text.caption_lengths import EncoderReading
from diffusionpipe.trainer.data.text.caption_rules import (
    CaptionRules,
    SeenSample,
    drawn_text,
    is_dropped_for,
    plain_text,
)
from diffusionpipe.trainer.data.text.treatment import Treatment
from diffusionpipe.trainer.recipe.captions_section import CaptionsSection
from diffusionpipe.trainer.recipe.other_words import SAME

MANY = 1200


def texts(captions, count=MANY, sample=0, **rules):
    return [
        drawn_text(captions, CaptionRules(**rules), SeenSample(seed=5, sample=sample, number=number))
        for number in range(count)
    ]


def is_uniform(counts, choices):
    """Each of these about equally often: five deviations of a binomial number."""
    total, share = sum(counts.values()), 1 / len(choices)
    width = 5 * (total * share * (1 - share)) ** 0.5
    return set(counts) == set(choices) and all(abs(n - total * share) < width for n in counts.values())


def test_by_default_a_caption_is_read_as_it_is():
    odd = " {a|b}, |||x\n[trigger] , y "
    assert set(texts([odd])) == {odd}
    assert texts([], 1) == [""]


def test_each_of_several_captions_and_of_several_lines_is_drawn_equally_often():
    assert is_uniform(Counter(texts(["a", "b", "c"])), "abc")
    assert is_uniform(Counter(texts(["a\n\n b \n", "c"], lines=True)), "abc")
    assert set(texts(["a\nb"])) == {"a\nb"}


def test_each_alternative_is_drawn_equally_often_and_doubled_braces_are_braces():
    found = Counter(texts(["{wild|tame} {big|small|} owl"], alternatives=True))
    assert is_uniform(found, [f"{a} {b} owl" for a in ("wild", "tame") for b in ("big", "small", "")])
    assert set(texts(["{{a|b}} {c}"], alternatives=True)) == {"{a|b} {c}"}


def test_tags_come_in_every_order_equally_often():
    orders = [", ".join(order) for order in permutations(["a", "b c", "d"])]
    assert is_uniform(Counter(texts(["a,b c,  d,"], shuffle=True)), orders)


def test_kept_tags_stay_where_they_are_and_are_never_left_out():
    found = Counter(texts(["head, a, b"], shuffle=True, keep_first=1))
    assert is_uniform(found, ["head, a, b", "head, b, a"])
    marked = Counter(texts(["h, g ||| a, b ||| t, u"], shuffle=True, keep_first=1))
    assert is_uniform(marked, ["h, g, a, b, t, u", "h, g, b, a, t, u"])
    dropped = texts(["h ||| a, b ||| t"], tag_dropout=0.9)
    assert {text.split(", ")[0] for text in dropped} == {"h"}
    assert {text.split(", ")[-1] for text in dropped} == {"t"}


def test_each_tag_is_left_out_with_the_share_and_by_itself():
    found = Counter(texts(["a, b"], count=4000, tag_dropout=0.25))
    for text, share in {"a, b": 0.75**2, "a": 0.75 * 0.25, "b": 0.75 * 0.25, "": 0.25**2}.items():
        assert abs(found[text] / 4000 - share) < 0.04


def test_the_trigger_word_replaces_its_mark_or_stands_in_front_and_is_not_said_twice():
    assert set(texts(["an owl, [trigger], night"], trigger="sks")) == {"an owl, sks, night"}
    assert set(texts(["an owl"], trigger="sks")) == {"sks, an owl"}
    assert set(texts(["sks owl"], trigger="sks")) == {"sks owl"}
    assert set(texts([], trigger="sks")) == {"sks"}


def test_prefix_and_suffix_are_joined_as_they_are_and_never_moved():
    found = set(texts(["a, b"], shuffle=True, prefix="photo of ", suffix=", blurry"))
    assert found == {"photo of a, b, blurry", "photo of b, a, blurry"}


def test_one_option_changes_no_draw_of_another():
    caption = "{x|y}, a, b, c"
    plain = texts([caption, "d"], alternatives=True, shuffle=True)
    ended = texts([caption, "d"], alternatives=True, shuffle=True, prefix="p ")
    assert [f"p {text}" for text in plain] == ended
    chosen = texts([caption, "d"])
    assert [text == "d" for text in chosen] == [text == "d" for text in plain]


@given(st.text("ab,|{} []", max_size=30), st.integers(0, 3), st.integers(0, 50))
def test_a_shuffled_caption_has_the_tags_of_the_plain_one(caption, kept, number):
    rules = CaptionRules(shuffle=True, keep_first=kept)
    drawn = drawn_text([caption], rules, SeenSample(seed=1, sample=2, number=number))
    assert sorted(drawn.split(", ")) == sorted(plain_text(caption, rules).split(", "))


def words(texts, *, padding, max_length, truncation):
    """Each letter is a token."""
    return {"input_ids": [([ord(c) for c in text] + [0] * max_length)[:max_length] for text in texts]}


IDS = TensorSpec(name="input_ids", shape=(24,), dtype="int64")
RULES = CaptionRules(alternatives=True, shuffle=True, tag_dropout=0.2, keep_first=1, trigger="zz")


def source(folder, rules=RULES, inputs=(IDS,), **augmentation):
    samples = tuple(Sample(name=f"{n}.png", text=f"k{n}, a, {{b|c}}, d", others=(f"o{n}",)) for n in range(5))
    return BatchSource(
        dataset=Dataset(folder=folder, samples=samples),
        inputs=inputs,
        seed=7,
        tokenizers={spec.name: words for spec in inputs},
        augmentation=Augmentation(**augmentation),
        treatments=(Treatment(captions=rules),),
    )


def ids(made, steps, positions=tuple(range(8)), workers=0, first=0):
    loader = StepLoader(source=made, batch=8, positions=positions, first_step=first, num_steps=steps, workers=workers)
    return torch.stack([batch["input_ids"] for batch in loader])


def test_texts_are_the_same_whichever_rank_makes_them_and_from_whichever_step(tmp_path):
    made = source(tmp_path, condition_dropout=0.1)
    whole = ids(made, 6)
    assert len({tuple(row) for row in whole.flatten(0, 1).tolist()}) > 20, "they vary"
    for positions in ((0, 1, 2), (3, 4, 5, 6, 7), (6, 1)):
        assert torch.equal(ids(made, 6, positions), whole[:, list(positions)])
    assert torch.equal(ids(made, 3, first=3), whole[3:]), "a run that resumes in the middle of an epoch"


def test_a_sample_is_keyed_by_its_own_passes_and_not_by_the_step(tmp_path):
    """Samples that a batch of another size has at other steps have the same texts in the same epoch."""
    made, seen = source(tmp_path, CaptionRules(shuffle=True)), {}
    for batch in (3, 5):
        loader = StepLoader(
            source=made, batch=batch, positions=tuple(range(batch)), first_step=0, num_steps=30 // batch, workers=0
        )
        rows = [row for step in loader for row in step["input_ids"].tolist()]
        names = [sample.name for step in range(30 // batch) for sample in loader.samples(step)]
        for place, (name, row) in enumerate(zip(names, rows, strict=True)):
            assert seen.setdefault((place // 5, name), row) == row
    assert len(seen) == 30


@pytest.mark.slow
def test_worker_processes_make_the_same_texts(tmp_path):
    made = replace(source(tmp_path), tokenizers={"input_ids": words})
    assert torch.equal(ids(made, 4, workers=2), ids(made, 4))


def test_one_encoder_is_dropped_by_itself_and_its_mask_with_it(tmp_path):
    second = TensorSpec(name="input_ids_2", shape=(24,), dtype="int64")
    rules = CaptionRules(encoder_dropout=(("text_encoder_2", 0.3),))
    made = source(tmp_path, rules, (IDS, second))
    rows = Rows(samples=(1,) * MANY, passes=tuple(range(MANY)), positions=tuple(range(MANY)), step=0)
    batch = make_batch(made, rows)
    assert (batch["input_ids"] > 0).any(1).all()
    empty = (batch["input_ids_2"] == 0).all(1)
    assert abs(empty.float().mean().item() - 0.3) < 0.07
    seen = [SeenSample(seed=7, sample=1, number=number) for number in range(MANY)]
    assert empty.tolist() == [is_dropped_for("text_encoder_2", rules, one) for one in seen]


def test_validation_reads_the_first_caption_with_all_of_its_tags(tmp_path):
    made = source(tmp_path, CaptionRules(alternatives=True, shuffle=True, tag_dropout=0.5, prefix="p "))
    found = next(fixed_batches(made, fixed_rows(5, times=1, batch=5), batch=5, positions=tuple(range(5)), times=(0.5,)))
    expected = [f"p k{n}, a, b, d" for n in range(5)]
    assert found["input_ids"].tolist() == words(expected, padding="", max_length=24, truncation=True)["input_ids"]


def test_what_a_model_does_not_read_is_refused(tmp_path):
    with pytest.raises(DataError, match="no text encoder 'unet'; use text_encoder or text_encoder_2"):
        source(
            tmp_path,
            CaptionRules(encoder_dropout=(("unet", 0.1),)),
            (IDS, TensorSpec(name="input_ids_2", shape=(4,), dtype="int64")),
        )
    time = TensorSpec(name="time", shape=())
    with pytest.raises(DataError, match=r"data\.captions: the model reads no captions; remove the section"):
        BatchSource(
            dataset=Dataset(folder=tmp_path, samples=()),
            inputs=(time,),
            seed=0,
            treatments=(Treatment(captions=RULES),),
        )


def save(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        Image.new("RGB", (8, 8)).save(folder / name)


def test_a_list_in_metadata_is_several_captions_and_reaches_every_rank(tmp_path):
    save(tmp_path / "data", "a.png", "b.png")
    rows = [{"file_name": "a.png", "text": ["one", "two"]}, {"file_name": "b.png", "text": "three"}]
    (tmp_path / "data/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = scan(tmp_path / "data", "text")
    assert [sample.captions for sample in dataset.samples] == [("one", "two"), ("three",)]
    assert DATASETS.read(json.loads(json.dumps(DATASETS.write((dataset, None)))))[0] == dataset
    (tmp_path / "metadata.json").write_text(json.dumps({"a.png": ["one", "two"]}))
    assert read_list(tmp_path, "metadata.json").descriptions["a.png"].others == ("two",)


@pytest.mark.parametrize("text", [[], ["a", 3], {"a": 1}])
def test_a_list_that_holds_no_captions_is_named_with_its_line(tmp_path, text):
    (tmp_path / "metadata.jsonl").write_text(json.dumps({"file_name": "a.png", "text": text}))
    (problem,) = read_metadata(tmp_path, ["metadata.jsonl"]).problems
    assert problem.endswith(f"text is {json.dumps(text)}; expected a string, or a list of strings")


def test_the_block_before_the_first_step_counts_the_longest_text_of_each_caption():
    def counted(texts, **_):
        return {"input_ids": [text.split() for text in texts]}

    dataset = Dataset(
        folder="data", samples=(Sample(name="a", text="x"), Sample(name="b", text="y", others=("{z|z z z}",)))
    )
    findings = Findings(noun="pictures", sizes=(None, None), files={}, overlooked=())
    use = SampleUse(
        steps=1,
        batch=1,
        epochs=1.0,
        size=(8, 8),
        treatments=[Treatment(captions=CaptionRules(alternatives=True, prefix="p "))],
        readings=[EncoderReading(encoder="text_encoder", tokenizer=counted, length=3)],
    )
    said = {line.name: line.text for line in survey(Folder(dataset, findings), None, use)}
    assert said["captions"].startswith(
        "1 is longer than the 3 tokens that text_encoder reads, the longest of b, 4 tokens"
    )


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"keep_first": 2}, "keep_first: no tags are moved or left out; set shuffle = true"),
        ({"keep_mark": "##"}, "keep_mark: no tags are moved"),
        ({"separator": ";"}, "separator: no tags are moved"),
        ({"separator": " ", "shuffle": True}, "separator: it is blank"),
        ({"trigger": "a [trigger]"}, r"trigger: it holds \[trigger\]"),
        ({"prefix": "a\0"}, "prefix: it holds a NUL"),
        ({"tag_dropout": 1.0}, "tag_dropout"),
        ({"dropout": {"text_encoder": 1.5}}, "text_encoder"),
    ],
)
def test_keys_without_effect_or_sense_are_refused(keys, problem):
    with pytest.raises(ValidationError, match=problem):
        CaptionsSection.model_validate(keys)


def test_every_option_has_a_row_with_its_words_elsewhere_and_one_in_the_reference():
    named = {key.removeprefix("data.captions.") for key in SAME if key.startswith("data.captions.")}
    assert named == set(CaptionsSection.model_fields)
    reference = (Path(__file__).parents[3] / "docs/recipe.md").read_text(encoding="utf-8")
    _, _, rest = reference.partition("### [data.captions]")
    assert set(re.findall(r"^\| `(\w+)` \|", rest.partition("\n####")[0], re.MULTILINE)) == named


def test_a_separator_alone_parts_the_trigger_word():
    rules = CaptionsSection.model_validate({"separator": ";", "trigger": "sks"}).rules
    assert drawn_text(["owl"], rules, SeenSample(seed=0, sample=0, number=0)) == "sks; owl"


@pytest.mark.parametrize(
    ("text", "is_there"), [("masks", False), ("sksy cat", False), ("a sks cat", True), ("cat,sks", True)]
)
def test_a_trigger_inside_another_word_is_not_the_trigger(text, is_there):
    assert plain_text(text, CaptionRules(trigger="sks")) == (text if is_there else f"sks, {text}")
