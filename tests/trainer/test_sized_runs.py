"""Runs over pictures of several sizes: recipes, validation, resuming on another layout."""

import re
from dataclasses import replace

import numpy as np
import pytest
from kit.family_runs import EqualCosts
from kit.sized_pictures import SIZED, save_sized
from kit.tiny_runs import losses_of, opened_here, recipe_of, save_stable_diffusion, train, train_here
from PIL import Image

from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.errors import ConfigError, DataError
from diffusionpipe.profiler import analytic_profile
from diffusionpipe.trainer.course import preparation
from diffusionpipe.trainer.data.batches.batch import BatchSource
from diffusionpipe.trainer.data.batches.sized import agree_on_sizes, sized
from diffusionpipe.trainer.data.sizes.lines import lines_of_sizes
from diffusionpipe.trainer.data.sizes.order import SizeOrder
from diffusionpipe.trainer.data.sizes.sizes import SizeRules, areas_of, assign
from diffusionpipe.trainer.recipe import load_recipe
from diffusionpipe.workflows.planning.recipe_profile import make_profile_of

pytestmark = pytest.mark.usefixtures("one_trace")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_sized(tmp_path_factory.mktemp("pictures") / "sized")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_stable_diffusion(tmp_path_factory.mktemp("model"))


TOKENS = {"same_size": "auto", "batching": "tokens"}


def recipe(model, data, folder, /, **sections):
    sections["data"] = {**SIZED, "validation": str(data), **sections.get("data", {})}
    sections["training"] = {"precision": "float64", **sections.get("training", {})}
    return recipe_of(model, data, folder, validation={"every": 3, "timesteps": [0.3]}, **sections)


def test_three_sizes_train_and_a_run_s_own_recipe_means_the_same(model, data, tmp_path):
    settings = recipe(model, data, tmp_path / "run", training={"steps": 2})
    assert train_here(settings, saves=False) == 2
    assert sorted(losses_of(tmp_path / "run")) == [1, 2]
    assert load_recipe(tmp_path / "run" / "recipe.toml").data == settings.data


def order_of(job, seed):
    """The sizes of a rank whose seed is another one."""
    pictures = [(16, 8), (8, 16), (8, 8)] * 3
    rules = SizeRules(areas=areas_of(["16x8", "8x16", 8], None))
    order = SizeOrder(assignment=assign(pictures, rules, 1), seed=seed + job.membership.rank, run=1)
    try:
        agree_on_sizes(order)
    except ConfigError as error:
        return str(error)
    return "agreed"


@pytest.mark.slow
def test_ranks_whose_sizes_differ_stop_with_both_named(crew):
    first, second = crew.run(order_of, 3)
    assert first == second
    assert re.search(r"from sample \d+ on rank 0 has \d+ x \d+ pixels, rank 1 has \d+ x \d+ pixels; use one", first)


def test_a_picture_that_is_another_one_on_this_machine_stops_with_both_sizes_named(model, data, tmp_path, monkeypatch):
    def scanned(dataset, findings):
        sizes = [(40, 20)] * len(findings.sizes)
        return with_sizes(dataset, replace(findings, sizes=tuple(sizes)))

    with_sizes = preparation._with_sizes
    monkeypatch.setattr(preparation, "_with_sizes", scanned)
    with pytest.raises(DataError, match=r"\.png has \d+ x \d+ pixels here, and 40 x 20 where rank 0 has read it"):
        train_here(recipe(model, data, tmp_path / "run"))


@pytest.mark.slow
def test_pictures_are_drawn_at_their_own_sizes_on_two_stages_as_on_one_rank(model, data, tmp_path, crew):
    drawn = {"every": 2, "steps": 2, "prompts": ["a", "b", "c"], "sizes": ["8x16", "8x8", "16x8"]}
    sections = {"training": {"steps": 2}, "sampling": drawn}
    train_here(recipe(model, data, tmp_path / "one", **sections))
    crew.run(train, recipe(model, data, tmp_path / "two", **sections))
    one, two = (
        [Image.open(path) for path in sorted((tmp_path / run).glob("samples/*/*.png"))] for run in ("one", "two")
    )
    assert [picture.size for picture in one] == [(8, 16), (8, 8), (16, 8)]
    assert [np.asarray(picture).tolist() for picture in one] == [np.asarray(picture).tolist() for picture in two]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"resolution": ["7x16", 8]}}, r"7 is not a multiple of 2; the nearest .* is 8 x 16 pixels$"),
        ({"data": {"same_size": 4}, "training": {"batch": 6}}, "data.same_size: 4 does not divide training.batch = 6"),
        ({"pipeline": {"microbatches": 1}}, "data.same_size: 2 samples in a row .* multiple of 4"),
        ({"data": {"allow_growth": True}}, "allow_growth: new pictures would change the sizes"),
        (
            {"data": {"resolution": ["8x8x5", 16]}},
            "no clips; .*; leave out the frames .x5 in data.resolution",
        ),
        ({"data": {"resolution": ["8x8", "16x8"], "aspects": [0.5, 2.0]}}, "aspects: every size states its width and"),
        (
            {"data": {"resolution": 40, "aspects": [0.5, 2.0], "multiple": 5}},
            r"data.multiple: 5 gives sizes such as .* 55 is not a multiple of 2; set it to 4 or 6$",
        ),
        ({"data": {"min_side": 5000}}, "every picture is left out; set data.min_side to 20 or less$"),
        ({"sampling": {"every": 1, "prompts": ["a"], "sizes": ["9x9"]}}, "the nearest is 8x8"),
        ({"data": {"batching": "tokens"}}, "same_size: with batching .* remove same_size"),
        ({"data": {"resolution": 8, "same_size": "auto", "weigh": "tokens"}}, "weigh: all samples have one size"),
        ({"data": TOKENS, "pipeline": {"fill": True}}, "pipeline.fill: bubbles are filled with the next step"),
        ({"data": TOKENS, "pipeline": {"plan": "auto", "stages": 2}}, 'set schedule = "1f1b", fill = false, sharded'),
        ({"data": TOKENS, "pipeline": {"microbatches": 1}}, "pipeline.microbatches: a step of several sizes has more"),
        ({"data": TOKENS, "pipeline": {"encoders": "cache"}}, "pipeline.encoders: the fills that write a cache"),
        ({"data": TOKENS, "pipeline": {"schedule": "gpipe"}}, "pipeline.schedule: .* gpipe would never be run; remove"),
        ({"data": TOKENS, "pipeline": {"orders": "a.json"}}, "pipeline.orders: .* a.json would never be run; remove"),
        ({"data": TOKENS, "pipeline": {"schedule": "zb-h1"}}, "pipeline.schedule: each step .* so zb-h1 would never"),
    ],
)
def test_recipes_of_sizes_that_cannot_be_had_are_refused_by_name(model, data, tmp_path, sections, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        train_here(recipe(model, data, tmp_path / "run", **sections))


def losses(folder, steps=6):
    found = losses_of(folder)
    return [found[step] for step in range(1, steps + 1)]


def test_steps_cut_by_tokens_have_the_losses_of_the_same_samples_one_by_one(model, data, tmp_path):
    cut = recipe(model, data, tmp_path / "cut", data=TOKENS, pipeline={"microbatches": 2}, training={"steps": 2})
    one_by_one = recipe(
        model, data, tmp_path / "one", data={"same_size": 1}, pipeline={"microbatches": 4}, training={"steps": 2}
    )
    train_here(cut, saves=False)
    train_here(one_by_one, saves=False)
    assert losses(tmp_path / "cut", 2) == pytest.approx(losses(tmp_path / "one", 2), rel=1e-12)


@pytest.mark.slow
def test_steps_cut_by_tokens_train_and_resume_on_two_stages_and_two_copies_as_on_one_rank(model, data, tmp_path, crew):
    def made(folder, steps=6, **pipeline):
        own = {"batch": 8, "steps": steps}
        return recipe(
            model, data, tmp_path / folder, data={**TOKENS, "weigh": "tokens"}, pipeline=pipeline, training=own
        )

    train_here(made("one", microbatches=4))
    train_here(made("two", 2, microbatches=2))
    crew.run(train, made("two", 4, microbatches=4), "latest")
    crew.run(train, made("two", microbatches=2, data_parallel=2), "latest")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-12)


@pytest.mark.slow
def test_steps_cut_by_tokens_train_by_a_searched_plan_as_on_one_rank(model, data, tmp_path, crew):
    own = {"batch": 8, "steps": 26}
    stated = {"stages": 2, "schedule": "1f1b", "fill": False, "sharded": False}
    searched = {"plan": "auto", "microbatches": "none", "encode_chunk": "none", **stated}
    one = recipe(model, data, tmp_path / "one", data=TOKENS, pipeline={"microbatches": 4}, training=own)
    two = recipe(model, data, tmp_path / "two", data=TOKENS, pipeline=searched, training=own)
    train_here(one)
    crew.run(train, two, profiles=EqualCosts())
    assert losses(tmp_path / "two", 26) == pytest.approx(losses(tmp_path / "one", 26), rel=1e-9)


def test_samples_weigh_as_much_as_their_pixels_and_one_in_the_mean():
    pictures = [(16, 8), (8, 16), (8, 8), (8, 8), (8, 8)]
    order = SizeOrder(
        assignment=assign(pictures, SizeRules(areas=areas_of(["16x8", "8x16", 8], None)), 1), seed=0, run=1
    )
    source, inputs = BatchSource(dataset=None, inputs=(), seed=0), dict.fromkeys(order.sizes, ())
    weights = [one.size_weight for one in sized(source, order, inputs, order.assignment.mean_pixels).sources]
    visits = [share.visits for share in order.assignment.shares]
    assert sum(weight * count for weight, count in zip(weights, visits, strict=True)) == pytest.approx(sum(visits))
    pixels = [size.num_pixels for size in order.sizes]
    assert [weight / weights[0] for weight in weights] == [size / pixels[0] for size in pixels]


def test_one_size_leaves_small_pictures_out_and_trains_on_the_others(model, data, tmp_path):
    only = {"resolution": 8, "same_size": "auto", "min_side": 10}
    train_here(recipe(model, data, tmp_path / "run", data=only, training={"steps": 1}))
    assert losses(tmp_path / "run", 1)[0] > 0


def test_sizes_without_a_picture_are_named():
    assignment = assign([(16, 8)] * 4, SizeRules(areas=areas_of(["16x8", "8x16", 8], None)), 1)
    lines = {name: text for name, text, _ in lines_of_sizes(assignment, ["a"] * 4, 1)}
    assert lines["no picture"] == "8 x 16 pixels"


def test_pictures_that_lose_more_than_the_limit_are_counted_and_the_worst_is_named():
    pictures = [(16, 8)] * 3 + [(30, 10), (100, 10)]
    names = [f"{number}.png" for number in range(5)]
    assignment = assign(pictures, SizeRules(areas=areas_of(["16x8", "8x16"], None), most_cut=0.3), 1)
    alone = {number: min(1 - 2 / (width / height), 1) for number, (width, height) in enumerate(pictures)}
    assert assignment.cut_much == pytest.approx({number: cut for number, cut in alone.items() if cut > 0.3})
    lines = {name: (text, is_warning) for name, text, is_warning in lines_of_sizes(assignment, names, 1)}
    assert lines["cut away"] == ("2 pictures by more than 30 %, the most 4.png: 80 %", True)


def test_a_plan_of_a_recipe_has_the_mean_time_of_its_sizes_and_the_memory_of_the_largest(model, data, tmp_path):
    sizes = {"resolution": ["16x32", "32x16", "24x16", 16]}
    settings = recipe(model, data, tmp_path / "run", data=sizes, training={"precision": "float32"})
    profile = make_profile_of(settings, load_cluster("rtx3090x2"), uses_cache=False)
    opened = opened_here(settings)
    graphs, models = opened.graph.of_sizes, (opened.model, *opened.others)
    assert len(profile.sizes) == len(graphs) == 4
    alone = [
        analytic_profile(graph, own, device="rtx3090", precision="float32", batch_sizes=profile.batch_sizes)
        for graph, own in zip(graphs, models, strict=True)
    ]
    names = profile.graph.backbone_layers
    times = [sum(own.forward(name, 2) + own.weight_grad(name, 2) for name in names) for own in (profile, *alone)]
    mean = sum(size.share * own for size, own in zip(profile.sizes, times[1:], strict=True))
    assert times[0] == pytest.approx(mean, rel=0.05)
    for name in names:
        assert profile.activation(name, 2) == max(own.activation(name, 2) for own in alone)
