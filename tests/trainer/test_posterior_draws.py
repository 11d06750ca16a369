"""Cached posteriors: each pass of a picture draws its own latents from one kept mean and deviation."""

import numpy as np
import pytest
from kit.cached_runs import LAYOUT, entries_of
from kit.posterior_draws import posterior_draws
from kit.tiny_runs import recipe_of, save_pictures, save_stable_diffusion

from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.runtime.job.process_group import joined
from diffusionpipe.trainer.data.randomness import generator

PICTURES, BATCH, STEPS = 4, 4, 4
EPOCHS = BATCH * STEPS // PICTURES


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, pictures, and a cache of all pictures, which one run of two epochs has written."""
    folder = tmp_path_factory.mktemp("posterior")
    save_stable_diffusion(folder / "model")
    save_pictures(folder / "pictures", PICTURES)
    drawn_here(made(folder, "first", steps=2))
    return folder


@pytest.fixture(scope="module")
def draws(place):
    """The draws of an uninterrupted run in one process."""
    return drawn_here(made(place, "whole"))


def made(place, name, *, steps=STEPS, encoders="cache", **pipeline):
    kept = {"encoders": encoders, "fill": False, "cache": str(place / "cache")} if encoders == "cache" else {}
    return recipe_of(
        place / "model",
        place / "pictures",
        place / name,
        training={"steps": steps, "batch": BATCH, "seed": 7},
        pipeline={**LAYOUT, **kept, **pipeline},
        checkpoint={"every": 3},
    )


def drawn_here(recipe, resume=None):
    with joined(membership({}), device="cpu") as job:
        return posterior_draws(job, recipe, resume)


def picture_of(draw):
    return draw.moments.numpy().tobytes()


def by_turn(draws, seed=7):
    """(step, position) -> picture of each draw; the noise of every turn is made again with numpy.

    Draws of layers that are measured have no turn. Fills encode the batch after the last one too. Both are left out.
    """
    shape = draws[0].noise.shape
    turns = {
        generator(seed=seed, purpose="posterior_noise", step=step, position=position)
        .standard_normal(shape, dtype=np.float32)
        .tobytes(): (step, position)
        for step in range(STEPS)
        for position in range(BATCH)
    }
    noises = ((draw.noise.numpy().tobytes(), picture_of(draw)) for draw in draws)
    found = [(turns[noise], picture) for noise, picture in noises if noise in turns]
    assert len(dict(found)) == len(found), "no turn has two draws"
    return dict(found)


def test_each_epoch_draws_other_latents_from_the_kept_mean_and_deviation(place, draws):
    kept = {row.numpy().tobytes() for (name, _), row in entries_of(place / "cache").items() if "moments" in name}
    assert len(kept) == PICTURES
    assert len(draws) == len(by_turn(draws)) == STEPS * BATCH
    assert {picture_of(draw) for draw in draws} == kept
    for draw in draws:
        mean, logarithm = np.split(draw.moments.double().numpy(), 2)
        deviation = np.exp(np.clip(logarithm, -30, 20) / 2)
        assert deviation.min() > 0.01
        expected = mean + deviation * draw.noise.double().numpy()
        np.testing.assert_allclose(draw.latents.double().numpy(), expected, rtol=0, atol=1e-6)
    for picture in kept:
        own = [draw.latents.numpy() for draw in draws if picture_of(draw) == picture]
        assert len(own) == EPOCHS
        assert all(np.abs(one - other).max() > 0.1 for k, one in enumerate(own) for other in own[:k])


def test_a_resumed_run_draws_what_an_uninterrupted_one_draws(place, draws):
    before = by_turn(drawn_here(made(place, "parts", steps=3)))
    after = by_turn(drawn_here(made(place, "parts"), "latest"))
    assert {step for step, _ in after} == set(range(3, STEPS))
    assert before | after == by_turn(draws)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        ("filled", {"stages": 2, "fill": True}),
        ("replicas", {"stages": 1, "replicas": [2]}),
        ("copies", {"stages": 1, "data_parallel": 2}),
    ],
)
def test_every_layout_draws_the_same_latents_of_each_turn(place, draws, crew, name, pipeline):
    ranks = crew.run(posterior_draws, made(place, name, **pipeline))
    assert by_turn([draw for rank in ranks for draw in rank]) == by_turn(draws)
