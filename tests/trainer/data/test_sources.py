"""Several folders as one data set: who is seen how often, whose loss counts how much, and that no layout changes it."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from kit.descriptions import described as describe
from kit.layouts import assert_same_step, reference_step, step_in_threads
from kit.tiny_models import raw_inputs
from kit.tiny_runs import losses_of, recipe_of, save_pictures, save_stable_diffusion, train_here
from PIL import Image
from pydantic import ValidationError

from diffusionpipe.costs import TensorSpec
from diffusionpipe.errors import CheckpointError, DataError, ModelError
from diffusionpipe.models.objectives.objective import ObjectiveSettings
from diffusionpipe.models.objectives.sample_weights import SAMPLE_WEIGHT, with_sample_weights
from diffusionpipe.models.opening.folder import build_graph, weight_sources
from diffusionpipe.models.parameters.weights import materialize
from diffusionpipe.planner import Layout
from diffusionpipe.trainer.data.batches.batch import Augmentation, BatchSource, Rows, make_batch
from diffusionpipe.trainer.data.batches.loader import StepLoader, fixed_batches
from diffusionpipe.trainer.data.batches.sized import fixed_rows
from diffusionpipe.trainer.data.masks.loss import load_loss_mask, problem_of_loss_mask
from diffusionpipe.trainer.data.scan.dataset import examine
from diffusionpipe.trainer.data.scan.dataset_form import DATASETS
from diffusionpipe.trainer.data.scan.sources import FoundSource, joined
from diffusionpipe.trainer.data.survey import Folder, SampleUse, survey
from diffusionpipe.trainer.data.text.treatment import Treatment
from diffusionpipe.trainer.recipe import DataSection

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("sources")
    save_pictures(path / "owls", 3)
    save_pictures(path / "birds", 7, seed=1)
    return path


def found(place, name, repeats=1, regularisation=False):
    dataset, findings = examine(place / name, "text")
    return FoundSource(name=name, dataset=dataset, findings=findings, repeats=repeats, regularisation=regularisation)


def names_of(dataset, batch, steps, positions=None, seed=3):
    source = BatchSource(dataset=dataset, inputs=(TensorSpec(name="time", shape=()),), seed=seed)
    own = positions or tuple(range(batch))
    loader = StepLoader(source=source, batch=batch, positions=own, first_step=0, num_steps=steps, workers=0)
    return [[sample.name for sample in loader.samples(step)] for step in range(steps)]


def test_an_epoch_has_each_picture_as_often_as_its_source_is_repeated(place):
    dataset, findings = joined([found(place, "owls", 4), found(place, "birds")])
    assert len(dataset.samples) == len(findings.sizes) == 3 * 4 + 7
    seen = [name for step in names_of(dataset, 5, 19) for name in step]  # five epochs of 19
    for epoch in range(5):
        counts = Counter(seen[19 * epoch : 19 * (epoch + 1)])
        assert counts == {f"owls/{n:03d}.png": 4 for n in range(3)} | {f"birds/{n:03d}.png": 1 for n in range(7)}


def test_a_rank_sees_the_samples_of_its_positions(place):
    dataset, _ = joined([found(place, "owls", 2), found(place, "birds")])
    whole = names_of(dataset, 6, 7)
    assert names_of(dataset, 6, 7, (4, 1)) == [[step[4], step[1]] for step in whole]


@pytest.mark.parametrize(("new", "expected"), [(1, 1), (2, 1), (5, 2), (12, 5)])
def test_a_regularisation_set_has_about_the_samples_of_all_others(place, new, expected):
    dataset, _ = joined([found(place, "owls", new), found(place, "birds", None, regularisation=True)])
    assert [part.repeats for part in dataset.parts] == [new, expected]
    assert abs(7 * expected - 3 * new) <= 4 or expected == 1


def test_samples_have_the_files_of_their_own_folders_on_every_rank(place):
    dataset, findings = joined([found(place, "owls", 2), found(place, "birds")])
    again, _ = DATASETS.read(json.loads(json.dumps(DATASETS.write((dataset, None)))))
    assert again == dataset
    assert again.path(1) == place / "owls/000.png"
    assert again.path(6) == place / "birds/000.png"
    assert set(findings.files) == {sample.name for sample in dataset.samples}


def words(texts, *, padding, max_length, truncation):
    return {"input_ids": [([ord(c) for c in text] + [0] * max_length)[:max_length] for text in texts]}


PIXELS = TensorSpec(name="pixels", shape=(3, 8, 8))


def source(dataset, treatments, *inputs, **augmentation):
    return BatchSource(
        dataset=dataset,
        inputs=inputs,
        seed=3,
        tokenizers={"input_ids": words},
        treatments=treatments,
        augmentation=Augmentation(**augmentation),
    )


def test_each_source_has_its_captions_and_its_weight(place):
    data = DataSection.model_validate(
        {
            "resolution": 8,
            "captions": {"prefix": "x ", "trigger": "sks"},
            "sources": {
                "owls": {"path": str(place / "owls"), "loss_weight": 2.5},
                "birds": {"path": str(place / "birds"), "regularisation": True, "loss_weight": 0.25},
                "plain": {"path": str(place / "birds"), "captions": {"suffix": "!"}},
            },
        }
    )
    parts = [found(place, "owls"), found(place, "birds"), found(place, "birds")]
    dataset, _ = joined(parts)
    made = source(
        dataset,
        data.treatments,
        TensorSpec(name="input_ids", shape=(8,), dtype="int64"),
        TensorSpec(name=SAMPLE_WEIGHT, shape=()),
        PIXELS,
    )
    rows = Rows(samples=(0, 3, 10), passes=(0, 0, 0), positions=(0, 1, 2), step=0)
    batch = make_batch(made, rows)
    texts = ["".join(map(chr, filter(None, row))) for row in batch["input_ids"].tolist()]
    assert texts == ["x sks, a", "x a", "a!"]
    assert batch[SAMPLE_WEIGHT].tolist() == [2.5, 0.25, 1.0]
    held = next(fixed_batches(made, fixed_rows(3, times=1, batch=3), batch=3, positions=(0, 1, 2), times=(0.5,)))
    assert held[SAMPLE_WEIGHT].tolist() == [1.0, 1.0, 1.0], "validation weighs nothing"


def save_mask(path, levels):
    path.parent.mkdir(exist_ok=True, parents=True)
    Image.fromarray(np.asarray(levels, dtype=np.uint8)).save(path)


def test_a_mask_of_the_loss_is_the_mean_of_its_pixels_cut_and_mirrored_as_its_picture(tmp_path):
    levels = np.random.default_rng(0).integers(0, 256, (8, 12))
    save_mask(tmp_path / "m.png", levels)
    for left, crop in ((0, 0.0), (2, 0.5), (4, 0.99)):
        for flip in (False, True):
            seen = levels[:, left : left + 8][:, :: -1 if flip else 1] / 255
            expected = seen.reshape(4, 2, 4, 2).mean((1, 3))
            mask = load_loss_mask(tmp_path / "m.png", size=(8, 8), latents=(4, 4), crop=(crop, 0.5), flip=flip)
            assert np.allclose(mask[0].numpy(), expected, atol=1e-6)


def test_masks_and_weights_reach_the_rows_of_their_pictures(place, tmp_path):
    dataset, _ = joined([found(place, "owls"), found(place, "birds")])
    for number in range(3):
        save_mask(tmp_path / f"{number:03d}.png", np.full((8, 8), 85 * number))
    treatments = (Treatment(loss_mask=f"{tmp_path}/{{name}}.png", loss_weight=3.0), Treatment(loss_weight=0.5))
    made = source(dataset, treatments, TensorSpec(name=SAMPLE_WEIGHT, shape=(1, 2, 2)), PIXELS)
    rows = Rows(samples=(0, 1, 2, 3), passes=(0,) * 4, positions=tuple(range(4)), step=0)
    found_weights = make_batch(made, rows)[SAMPLE_WEIGHT]
    for row, weight in zip(found_weights, (0.0, 1.0, 2.0, 0.5), strict=True):
        assert torch.allclose(row, torch.full((1, 2, 2), weight))


@pytest.fixture(scope="module")
def stable_diffusion(tmp_path_factory):
    return save_stable_diffusion(tmp_path_factory.mktemp("sd") / "sd")


@pytest.mark.parametrize("is_masked", [False, True])
def test_weights_multiply_the_error_and_two_stages_have_the_gradients_of_one_process(stable_diffusion, is_masked):
    plain = build_graph(stable_diffusion, objective=ObjectiveSettings(), resolution=8, dtype="float64")
    graph = with_sample_weights(plain, is_masked=is_masked)
    names = [layer.name for layer in graph.layers]
    sources = weight_sources(stable_diffusion, graph)
    materialize(graph, names, sources, device="cpu", dtype=torch.float64, seed=0)
    inputs = raw_inputs(graph, 4)
    inputs["input_ids"] %= 50
    inputs[SAMPLE_WEIGHT] = torch.rand(inputs[SAMPLE_WEIGHT].shape, generator=torch.Generator().manual_seed(1))
    layout = Layout(batch=4, stages=2, microbatches=2)
    assert_same_step(step_in_threads(graph, describe(graph), layout, inputs), reference_step(graph, inputs))
    prediction, target, weight = (torch.rand(4, 3, 2, 2, dtype=torch.float64) for _ in range(3))
    own = torch.rand(4, *((1, 2, 2) if is_masked else ()), dtype=torch.float64)
    last = graph.layers[-1]
    (loss, *_) = last.run(graph.components["objective"], prediction, target, weight[:, 0, 0, 0], own)
    error = ((prediction - target) ** 2).numpy() * weight[:, 0, 0, 0].numpy().reshape(4, 1, 1, 1)
    expected = (error * own.numpy().reshape(4, 1, *own.shape[2:] or (1, 1))).mean((1, 2, 3))
    assert np.allclose(loss.numpy(), expected, atol=1e-14)


def test_a_loss_that_is_not_of_latents_alone_takes_no_masks(stable_diffusion):
    settings = ObjectiveSettings(self_conditioning=0.5)
    graph = build_graph(stable_diffusion, objective=settings, resolution=8)
    with pytest.raises(ModelError, match=r"data\.loss_mask: .* remove loss_mask"):
        with_sample_weights(graph, is_masked=True)


def test_the_block_before_the_first_step_names_each_source_with_its_share(place):
    scanned = Folder(*joined([found(place, "owls", 4), found(place, "birds")]))
    use = SampleUse(steps=1, batch=2, epochs=1.0, size=(8, 8), readings=(), treatments=(Treatment(), Treatment()))
    said = {line.name: line.text for line in survey(scanned, None, use)}
    assert said["pictures"].startswith(f"10 in {place / 'owls'}, {place / 'birds'}, of 8 x 8")
    assert said["owls"] == f"3 in {place / 'owls'}, each 4 times: 63 % of an epoch"
    assert said["birds"] == f"7 in {place / 'birds'}: 37 % of an epoch"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, r"train: a folder of pictures is required"),
        ({"train": "a", "sources": {"b": {"path": "b"}}}, r"train: \[data.sources.NAME\] names the folders"),
        ({"sources": {"a/b": {"path": "b"}}}, r"sources.'a/b': a name of a source has no slash"),
        ({"sources": {"a": {"path": "b", "regularisation": True}}}, r"sources: all are regularisation sets"),
        ({"sources": {"a": {"path": "b", "loss_mask": "m.png"}}}, r"the path of each picture's mask holds \{name\}"),
        ({"sources": {"a": {"path": "b", "repeats": 0}}}, r"repeats"),
        ({"train": "a", "loss_mask": "m/{name}.png", "frames": 5}, r"loss_mask: masks of clips"),
        (
            {"sources": {"a": {"path": "b", "regularisation": True, "captions": {"trigger": "s"}}}},
            r"captions.trigger: a regularisation set has no trigger word",
        ),
    ],
)
def test_sources_that_make_no_sense_are_refused(data, problem):
    with pytest.raises(ValidationError, match=problem):
        DataSection.model_validate({"resolution": 8, **data})


def test_masks_that_are_missing_or_of_another_size_are_named(tmp_path):
    picture = tmp_path / "a.png"
    assert "is missing" in problem_of_loss_mask(tmp_path / "no.png", picture, (8, 8))
    save_mask(tmp_path / "m.png", np.zeros((4, 8)))
    said = problem_of_loss_mask(tmp_path / "m.png", picture, (8, 8))
    assert said.endswith("the mask has 8 x 4 pixels and its picture 8 x 8; make it as large")
    assert problem_of_loss_mask(tmp_path / "m.png", picture, (8, 4)) is None


def recipe(place, model, name, steps=6, owls=(), **sections):
    sources = {
        "owls": {"path": str(place / "owls"), "repeats": 2, **dict(owls)},
        "birds": {"path": str(place / "birds"), "regularisation": True, "loss_weight": 0.5},
    }
    training = {"steps": steps, "batch": 4, "precision": "float64"}
    made = recipe_of(model, place / "owls", place / name, training=training, **sections)
    data = DataSection.model_validate({"sources": sources, "resolution": 8, "workers": 0})
    return type(made).model_validate({**made.model_dump(), "data": data.model_dump(), "models": {}})


def test_missing_masks_are_named_before_the_run(place, stable_diffusion):
    bad = recipe(place, stable_diffusion, "masked", owls={"loss_mask": f"{place}/masks/{{name}}.png"})
    with pytest.raises(DataError, match=r"000\.png: its mask of the loss, .*000\.png, is missing"):
        train_here(bad)


def test_a_run_is_not_resumed_with_other_repeats(place, stable_diffusion):
    for number in range(3):
        save_mask(place / f"grey/{number:03d}.png", np.full((8, 8), 255 - 60 * number))
    owls = {"loss_mask": f"{place}/grey/{{name}}.png"}
    train_here(recipe(place, stable_diffusion, "whole", 2, owls=owls))
    with pytest.raises(CheckpointError, match=r"sources was .*owls.*2 times, loss_mask .* and is .*3 times"):
        train_here(recipe(place, stable_diffusion, "whole", 8, owls={**owls, "repeats": 3}), "latest")


@pytest.mark.slow
def test_the_loss_of_a_run_is_that_of_its_weights(place, stable_diffusion):
    train_here(recipe(place, stable_diffusion, "once", 1, owls={"loss_weight": 0.5}))
    train_here(recipe(place, stable_diffusion, "twice", 1, owls={"loss_weight": 1.0}))
    once, twice = losses_of(place / "once")[1], losses_of(place / "twice")[1]
    assert once < twice < 2 * once, "birds keep their weight"
