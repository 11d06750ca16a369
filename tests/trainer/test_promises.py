"""Each feature of a recipe keeps what all promise: layouts change nothing, runs resume, diffusers opens the export."""

import random

import pytest
import torch
from kit.promises import (
    FEATURES,
    LAYOUTS,
    STEPS,
    TOGETHER,
    Place,
    differing_losses,
    differing_tensors,
    exported_weights,
    together,
)
from kit.tiny_runs import tensors_of, train, train_here

from diffusionpipe.errors import DiffusionPipeError
from diffusionpipe.trainer.checkpoints.checkpoint import latest

pytestmark = pytest.mark.usefixtures("one_thread")
pytest.importorskip("peft")
CASES = [(names, layout) for layout, recipes in TOGETHER.items() for names in recipes]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("promises")).save()


def test_every_feature_is_tried():
    assert {name for names, _ in CASES for name in names.split(", ")} == FEATURES.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("names", "layout"), CASES)
def test_losses_over_two_ranks_are_those_of_one(place, crew, names, layout):
    feature = together(names)
    found = place.over_two(crew, names, feature, layout)
    assert differing_losses(found, place.alone(names, feature), feature.loose) == []


@pytest.mark.slow
@pytest.mark.parametrize(("names", "layout"), CASES)
def test_a_run_that_was_stopped_resumes_bit_for_bit(place, crew, names, layout):
    feature = together(names)
    run = place.copied(place.stopped(crew, names, feature, layout), f"{names}, same bits")
    assert crew.run(train, place.recipe(run, feature, LAYOUTS[layout]), "latest", exports=False) == [STEPS, STEPS]
    whole = place.over_two(crew, names, feature, layout)
    assert differing_losses(place.folder / run, whole, feature.again) == []
    assert feature.again or differing_tensors(place.folder / run, whole) == []


@pytest.mark.slow
@pytest.mark.parametrize(("names", "layout"), CASES)
def test_a_run_that_was_stopped_on_two_ranks_resumes_on_one(place, crew, names, layout):
    feature = together(names)
    run = place.copied(place.stopped(crew, names, feature, layout), f"{names}, on one rank")
    assert train_here(place.recipe(run, feature), "latest", exports=False) == STEPS
    assert differing_losses(place.folder / run, place.alone(names, feature), feature.loose) == []


@pytest.mark.slow
@pytest.mark.parametrize("names", [names for names, _ in CASES if together(names).is_whole])
def test_diffusers_opens_the_export_with_the_averages(place, names):
    run = place.alone(names, together(names))
    tensors = tensors_of(latest(run))
    averages = {key.removeprefix("ema."): value for key, value in tensors.items() if key.startswith("ema.")}
    assert averages
    components = {key.partition(".")[0] for key in averages}
    found = exported_weights(run / "export", sorted(components))
    assert all(torch.equal(found[key], value.to(found[key].dtype)) for key, value in averages.items())


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_alone_has_the_losses_of_one_rank_in_every_layout(place, crew, name, layout):
    feature = FEATURES[name]
    if layout in feature.not_with:
        with pytest.raises(ValueError, match=r"Set|set|remove"):
            place.recipe("refused", feature, LAYOUTS[layout])
    else:
        found = place.over_two(crew, name, feature, layout)
        assert differing_losses(found, place.alone(name, feature), feature.loose) == []


def pairs(seed, count):
    """Pairs of features, each with a layout, drawn by a seed."""
    draw = random.Random(seed)
    return [(", ".join(draw.sample(list(FEATURES), 2)), draw.choice(list(LAYOUTS))) for _ in range(count)]


@pytest.mark.night
@pytest.mark.slow
@pytest.mark.parametrize(("names", "layout"), pairs(seed=0, count=60))
def test_two_features_keep_their_promises_together_or_are_refused_in_words(place, crew, names, layout):
    first, second = names.split(", ")
    keys = [{(s, k) for s, part in FEATURES[name].sections.items() for k in part} for name in (first, second)]
    if keys[0] & keys[1]:
        pytest.skip("one key has two values")
    feature = together(names)
    try:
        place.recipe("tried", feature, LAYOUTS[layout])
        found = place.over_two(crew, f"pair {names}", feature, layout)
    except (DiffusionPipeError, ValueError):
        has_begun = (place.folder / f"pair {names}, {layout}" / "metrics.jsonl").exists()
        if has_begun:
            raise
        return
    assert differing_losses(found, place.alone(f"pair {names}", feature), feature.loose) == []
