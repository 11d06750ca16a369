"""Whether a cache of encoders' results pays: the break-even beside a sum over steps, and `plan` beside a run."""

import random
import re
from collections import defaultdict
from dataclasses import replace
from itertools import islice
from math import isclose
from statistics import median
from unittest import mock

import pytest
from kit.cached_rows import opened_run
from kit.cuts import traced_once
from kit.descriptions import described
from kit.tiny_runs import recipe_of, save_pictures, save_stable_diffusion, train_here

from diffusionpipe import cli
from diffusionpipe.costs.files import read_profile
from diffusionpipe.errors import RecipeError
from diffusionpipe.trainer.course import run as run_module
from diffusionpipe.trainer.setup import caching
from diffusionpipe.workflows.training import cache_worth
from diffusionpipe.workflows.training.cache_worth import KeptShare, break_even, verdict_of_run, worth_of, writing_rate
from diffusionpipe.workflows.training.expectation import setting_of_plan

pytestmark = pytest.mark.usefixtures("one_trace")

PASSES = 50


def summed(shares, gain, writing, steps_of_pass):
    """The first step after which the sum over single steps, each of one sample, is above zero."""
    seconds, size = sum(one.seconds for one in shares), sum(one.size for one in shares)
    balance = 0.0
    for step in range(1, PASSES * steps_of_pass + 1):
        number = (step - 1) // steps_of_pass
        for one in shares:
            missing = (1 - 1 / one.variants) ** number
            balance += gain * (1 - missing) * one.seconds / seconds - writing * missing * one.size / size
        if balance > 1e-12:
            return step
    return None


def test_break_even_is_the_step_at_which_a_sum_over_steps_turns():
    draw = random.Random(0)
    for _ in range(300):
        shares = [
            KeptShare(seconds=draw.random() + 0.01, size=draw.randint(1, 9), variants=draw.choice([1.0, 2.0, 3.5]))
            for _ in range(draw.randint(1, 3))
        ]
        steps, gain, writing = draw.randint(1, 30), draw.random(), draw.random()
        with mock.patch.object(cache_worth, "MOST_PASSES", PASSES):
            found = break_even(shares, gain=gain, writing=writing, steps_of_pass=steps)
        expected = summed(shares, gain, writing, steps)
        assert (found is None) == (expected is None)
        assert found is None or abs(found - expected) <= 1


def test_without_gain_it_never_pays():
    one = KeptShare(seconds=1.0, size=1, variants=1.0)
    assert break_even([one], gain=0.0, writing=0.0, steps_of_pass=10) is None
    assert break_even([one], gain=1e-6, writing=1.0, steps_of_pass=10) is None


def test_a_disk_is_measured_and_nothing_is_left(tmp_path):
    assert writing_rate(tmp_path / "later" / "cache") > 0
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_stable_diffusion(tmp_path_factory.mktemp("worth") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return save_pictures(tmp_path_factory.mktemp("worth") / "pictures", 12)


def test_auto_caches_where_it_pays_and_fills_elsewhere_with_the_reason(model, data, tmp_path, caplog):
    caplog.set_level("INFO")
    for name, steps, expected in (("long", 400, True), ("short", 3, False)):
        caplog.clear()
        recipe = recipe_of(
            model,
            data,
            tmp_path / name,
            training={"steps": steps, "batch": 4},
            pipeline={"microbatches": 2, "encode_chunk": 2, "encoders": "auto", "fill": True},
        )
        with mock.patch("diffusionpipe.workflows.training.cache_worth.writing_rate", return_value=1e9):
            judged = train_until_judged(recipe)
        assert judged is expected
        said = [one.getMessage() for one in caplog.records]
        assert any(re.search(r"cache: .* GiB, filled while the first epoch trains, saves", text) for text in said)
        assert any("would not pay before the last step, 3" in text for text in said) is not expected


class _JudgedError(Exception):
    pass


def train_until_judged(recipe):
    """Whether the run has a cache: it ends before its first step."""
    found = []

    def seen(state):
        found.append(state.cache is not None)
        raise _JudgedError

    with mock.patch.object(run_module, "_train", seen), pytest.raises(_JudgedError):
        train_here(recipe, judge_cache=verdict_of_run)
    return found[0]


def test_auto_needs_measured_layers(model, data, tmp_path):
    with pytest.raises((RecipeError, ValueError), match='"auto" needs measured layers'):
        recipe_of(model, data, tmp_path / "run", pipeline={"encoders": "auto", "fill": False})


def test_a_disk_that_is_too_small_leaves_auto_to_the_bubbles(model, data, tmp_path, caplog):
    caplog.set_level("INFO")
    recipe = recipe_of(model, data, tmp_path / "run", pipeline={"encoders": "auto", "fill": True})
    with mock.patch.object(caching.shutil, "disk_usage", return_value=mock.Mock(free=1)):
        assert train_until_judged(recipe) is False
    assert any("encoders=fill" in one.getMessage() and "make room" in one.getMessage() for one in caplog.records)


STEPS, BATCH = 36, 4


def test_plan_says_the_break_even_of_the_times_that_the_run_measures(model, data, tmp_path):
    """Medians over the steps of a first epoch, beside the profile that is measured before them."""
    recipe = recipe_of(
        model,
        data,
        tmp_path / "run",
        data={"resolution": 64},
        training={"steps": STEPS, "batch": BATCH},
        pipeline={"microbatches": 2, "encode_chunk": 4, "encoders": "cache", "fill": True},
    )
    with opened_run(recipe, briefly=False) as run:
        assert run.found is not None
        setting = setting_of_plan(recipe, run.session.plan, read_profile(tmp_path / "run" / "profile.json"))
        times = defaultdict(list)
        worker = run.session.worker
        for batch in islice(run.loader, STEPS):
            worker.watch.start()
            worker.feed(worker.train, batch)
            worker.train.run()
            for one in worker.watch.stop():
                times[one.name, one.samples].append(one.seconds)
    rate = writing_rate(tmp_path / "run" / "cache")
    found = replace(run.found, num_samples=4000)
    planned = worth_of(found, run.session.plan, setting, rate)
    profile = setting.profile
    factors = {
        name: median(seconds) / profile.forward(name, samples)
        for (name, samples), seconds in times.items()
        if name in run.found.spared
    }
    assert factors.keys() == run.found.spared
    layers = tuple(
        replace(one, forward=tuple(factors.get(one.name, 1.0) * seconds for seconds in one.forward))
        for one in profile.layers
    )
    measured = worth_of(found, run.session.plan, replace(setting, profile=replace(profile, layers=layers)), rate)
    assert planned.pays is not None
    assert measured.pays is not None
    assert isclose(planned.pays, measured.pays, rel_tol=0.1), (planned, measured)


def test_plan_prints_size_gain_and_step(model, data, tmp_path, capsys):
    path = tmp_path / "small.toml"
    path.write_text(
        f'[model]\npath = "{model}"\n[data]\ntrain = "{data}"\nresolution = 8\ncaptions = {{ shuffle = true }}\n'
        "[training]\nsteps = 500\nbatch = 4\n[optimizer]\nlearning_rate = 0.01\n"
        f'[pipeline]\nencoders = "auto"\n[run]\nfolder = "{tmp_path / "run"}"\n'
    )
    with (
        traced_once(),
        mock.patch("diffusionpipe.trainer.model.members.describe", described),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main(["plan", str(path), "--cluster", "rtx3090x2", "--no-cache"])
    out = capsys.readouterr().out
    assert ended.value.code == 0, out
    assert re.search(r"cache: 0\.00 GiB, filled while the first epoch trains, saves [\d.]+ % of a step", out)
    assert "cache: encoded for each step: text_states (data.captions.shuffle)" in out
