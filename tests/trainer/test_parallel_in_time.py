"""Denoising steps that are computed at the same time: the published algorithm, its counts, and pictures drawn by it."""

import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from kit.drawn_families import _drawn_in_job, _first, drawn_here
from kit.drawn_families import asked_of as asked_of_family
from kit.tiny_models import randomise_pipeline
from kit.tiny_pipelines import PIPELINES
from kit.tiny_runs import save_stable_diffusion

from diffusionpipe.errors import RecipeError
from diffusionpipe.timing.in_time import blocks_of, evaluations, latency
from diffusionpipe.trainer.inference.drawing import Arithmetic
from diffusionpipe.trainer.inference.drawing_in_time import check_in_time, check_ranks
from diffusionpipe.trainer.inference.parallel_in_time import DdimWalk, draw_in_time
from diffusionpipe.trainer.recipe import RecipePrecision

pytestmark = pytest.mark.usefixtures("one_thread")
GOLDEN = {
    36: [9.29e-2, 1.46e-2, 2.30e-3, 1.93e-4, 7.20e-6, 7.27e-8],
    64: [7.85e-2, 1.00e-2, 1.03e-3, 8.50e-5, 5.24e-6, 1.63e-7],
}
"""Relative errors after 0, 1, 2, ... refinements."""


class Mixture:
    """The exact noise of a mixture of two normal distributions on Stable Diffusion's schedule, which counts calls."""

    def __init__(self, steps):
        betas = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
        alphas = np.cumprod(1 - betas)
        times = np.array([step * 1000 // steps for step in range(steps)])[::-1].copy()
        self.before = torch.tensor(alphas[times])
        self.walk = DdimWalk(torch.tensor(times), self.before, torch.tensor(np.append(alphas[times[1:]], 1.0)))
        self.first = torch.tensor(np.random.default_rng(0).standard_normal((256, 2)))
        self.calls = []

    def predict(self, sample, step):
        self.calls.append(step)
        alpha = self.before[step]
        variance = 0.25 * alpha + 1 - alpha
        apart = sample[:, None] - alpha.sqrt() * torch.tensor([[2.0, 0.0], [-1.0, 1.5]], dtype=torch.float64)
        shares = torch.softmax(-(apart**2).sum(-1) / (2 * variance), 1)
        return (shares[..., None] * apart).sum(1) / variance * (1 - alpha).sqrt()

    def sequential(self):
        sample = self.first
        for step in range(len(self.before)):
            sample = self.walk.step(self.predict(sample, step), sample, step, step + 1)
        return sample

    def ddim(self, sample, start, stop):
        """One step of DDIM by its formula, for the independent refinements."""
        now, then = self.before[start], self.walk.after[stop - 1]
        noise = self.predict(sample, start)
        return then.sqrt() * (sample - (1 - now).sqrt() * noise) / now.sqrt() + (1 - then).sqrt() * noise


def plainly(mixture, count, refinements):
    """The results by the formula, refinement after refinement, and the evaluations one after the other."""
    size = len(mixture.before) // count
    starts = [number * size for number in range(count + 1)]
    samples, in_turn = [mixture.first], 0
    coarse = []
    for start, stop in pairwise(starts):
        coarse.append(mixture.ddim(samples[-1], start, stop))
        samples.append(coarse[-1])
        in_turn += 1
    results = [samples[-1]]
    for _ in range(refinements):
        fine = []
        for number, start in enumerate(starts[:-1]):
            sample = samples[number]
            for step in range(start, start + size):
                sample = mixture.ddim(sample, step, step + 1)
            fine.append(sample)
        in_turn += size  # of all blocks at the same time
        refined = [mixture.first]
        for number, (start, stop) in enumerate(pairwise(starts)):
            new = mixture.ddim(refined[-1], start, stop)
            refined.append(new + fine[number] - coarse[number])
            coarse[number] = new
            in_turn += 1
        samples = refined
        results.append(samples[-1])
    return results, in_turn


@pytest.mark.parametrize("steps", GOLDEN)
def test_errors_of_refinements_are_the_published_ones_and_the_last_result_is_the_sequential_one(steps):
    mixture, found = Mixture(steps), []
    expected = mixture.sequential()
    refined = draw_in_time(
        mixture.walk, mixture.predict, mixture.first, tolerance=0.0, on_refined=lambda k, x: found.append(x)
    )
    errors = [float((sample - expected).norm() / expected.norm()) for sample in found]
    assert errors[: len(GOLDEN[steps])] == pytest.approx(GOLDEN[steps], rel=0.02)
    assert refined.refinements == len(blocks_of(steps)) == len(errors) - 1
    assert torch.equal(refined.sample, expected)
    assert (refined.sample - plainly(mixture, len(blocks_of(steps)), refined.refinements)[0][-1]).abs().max() < 1e-12


@pytest.mark.parametrize("steps", GOLDEN)
def test_evaluations_in_turn_are_those_of_the_formulas(steps, capsys):
    count = len(blocks_of(steps))
    size = steps // count
    plain, _ = plainly(Mixture(steps), count, 4)
    changes = [float((new - old).abs().mean()) for old, new in pairwise(plain)]
    for k, change in enumerate(changes, start=1):
        mixture, ticks = Mixture(steps), [[]]

        def predict(sample, step, mixture=mixture, ticks=ticks):
            ticks[-1].append(step // size)
            return mixture.predict(sample, step)

        refined = draw_in_time(
            mixture.walk,
            predict,
            mixture.first,
            tolerance=change * 1.001,
            on_tick=lambda done, total, ticks=ticks: ticks.append([]),
        )
        assert refined.refinements == k
        assert (refined.sample - plain[k]).abs().max() < 1e-12
        # A tick evaluates a block once at most: with a rank for each block, ticks are evaluations one after the other.
        assert ticks == evaluations(count, size, k)
        assert all(len(set(tick)) == len(tick) > 0 for tick in ticks)
        assert refined.in_turn == len(ticks) == count + k * size == latency(count, size, k, ranks=count)
        assert plainly(Mixture(steps), count, k)[1] == count + k * (size + count)
        assert refined.total == refined.on_this_rank == sum(map(len, ticks)) == len(mixture.calls)
        with capsys.disabled():
            sys.stdout.write(f"\n{steps} steps, {k} refinements: {len(ticks)} in turn, {refined.total} in all")


def test_blocks_of_unequal_sizes_end_where_the_steps_in_turn_end():
    mixture = Mixture(11)
    refined = draw_in_time(mixture.walk, mixture.predict, mixture.first, tolerance=0.0)
    assert torch.equal(refined.sample, mixture.sequential())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_stable_diffusion(tmp_path_factory.mktemp("model") / "sd", set_alpha_to_one=False)


def asked_of(folder, size, *, steps=7, **more):
    asked = asked_of_family(folder, size)
    settings = tuple(replace(one, steps=steps, **more) for one in asked.settings)
    return replace(asked, settings=settings)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("clip", [False, True])
def test_a_folders_pictures_are_those_of_steps_in_turn(prediction, clip, folder, caplog):
    scheduler = {**asked_of(folder, 8).settings[0].scheduler, "prediction_type": prediction, "clip_sample": clip}
    in_turn = drawn_here(asked_of(folder, 8, scheduler=scheduler))[0]
    at_once = drawn_here(asked_of(folder, 8, scheduler=scheduler, tolerance=0.0))[0]
    assert np.abs(in_turn - at_once).max() < 1e-4
    if prediction == "v_prediction":
        assert "refinements took as long as 7 steps in turn; raise the tolerance" in caplog.text
        coarse = drawn_here(asked_of(folder, 8, scheduler=scheduler, tolerance=1.0))[0]
        assert np.abs(in_turn - coarse).max() > 1e-3, "with one refinement they are not yet"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_flows_are_drawn_parallel_in_time_too(kind, tmp_path):
    pipeline = PIPELINES[kind]()
    randomise_pipeline(pipeline)
    pipeline.save_pretrained(tmp_path)
    in_turn = drawn_here(asked_of(tmp_path, 16))[0]
    at_once = drawn_here(asked_of(tmp_path, 16, tolerance=0.0))[0]
    assert np.abs(in_turn - at_once).max() < 1e-4


@pytest.mark.slow
def test_two_ranks_draw_the_bits_of_one(crew, folder):
    for tolerance in (1e-3, 0.0):
        asked = asked_of(folder, 8, tolerance=tolerance)
        over_two = _first(crew.run(_drawn_in_job, asked, RecipePrecision.FLOAT32))
        assert np.array_equal(over_two[0], drawn_here(asked, Arithmetic())[0])


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("DPMSolverMultistepScheduler", {}, "a step of DPMSolverMultistepScheduler is not one step .*DDIMScheduler"),
        ("EulerAncestralDiscreteScheduler", {}, "EulerAncestralDiscreteScheduler is not one step without noise"),
        ("DDPMScheduler", {"variance_type": "learned_range"}, "a step of DDPMScheduler is not one step without noise"),
        ("DDIMScheduler", {"thresholding": True}, "the scheduler's thresholding makes its steps depend on more"),
    ],
)
def test_schedulers_of_several_steps_or_with_noise_are_refused(name, more, message, folder):
    settings = asked_of(folder, 8, tolerance=1e-3).settings[0]
    scheduler = {**settings.scheduler, **more, "_class_name": name}
    with pytest.raises(RecipeError, match=f"parallel in time: .*{message}"):
        check_in_time(folder, replace(settings, scheduler=scheduler))
    check_in_time(folder, replace(settings, scheduler=scheduler, tolerance=None))


def test_more_ranks_than_blocks_are_refused(folder):
    settings = asked_of(folder, 8, tolerance=1e-3).settings[0]
    with pytest.raises(RecipeError, match="4 ranks cannot share the 3 blocks of 7 denoising steps; use --ranks 3"):
        check_ranks(settings, 4)
    check_ranks(settings, 3)
