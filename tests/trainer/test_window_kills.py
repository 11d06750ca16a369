"""Trainings without a flush that are killed at any moment and resumed end with the bits of an uninterrupted run."""

import shutil
import signal
from random import Random

import pytest
from kit.crew import nest
from kit.forked_jobs import ForkedCommand
from kit.moments import Moment
from kit.mortal_runs import RANKS, assert_same_bits, step_of, train_whole, train_with_kills
from kit.tiny_runs import recipe_of, save_dit, save_pictures

from diffusionpipe.ir.files import read_plan
from diffusionpipe.trainer.setup.job_profile import PROFILE

pytestmark = pytest.mark.slow

FILLED = "stashed"
"""In this run each rank encodes a part of a later batch behind its backwards."""
MICROBATCHES = 2
EVERY = 3
"""Steps between checkpoints, each behind a validation and a flush."""
KILLS = 10
OFTEN = {
    "a backward": MICROBATCHES * EVERY,
    "encoding a batch": EVERY,
    "an update": EVERY,
    "the sum of a window": EVERY,
    "the average": EVERY,
    "a validation batch": 1,
    "writing tensors": 1,
}
"""Places to which each rank comes so often from one checkpoint to the next."""
ONCE = {"publishing": 1, "the manifest": 1, "the rename": 1}
"""Those to which only rank 0 comes."""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    place = tmp_path_factory.mktemp("kills")
    save_dit(place / "dit")
    save_pictures(place / "data")
    save_pictures(place / "held-out", count=6, seed=1)

    def make(name, versions):
        return recipe_of(
            place / "dit",
            place / "data",
            place / f"{name}-{versions}",
            data={"validation": str(place / "held-out")},
            training={"steps": EVERY * (KILLS + 1), "clip_norm": 0.5, "clip": "block", "ema_decay": 0.9},
            pipeline={"versions": versions, "microbatches": MICROBATCHES, "fill": versions == FILLED},
            validation={"every": EVERY, "samples": 2, "timesteps": (0.5,)},
            checkpoint={"every": EVERY, "keep": 1},
        )

    return make


@pytest.fixture(scope="module", params=["stashed", "delayed", "newest"])
def versions(request):
    return request.param


@pytest.fixture(scope="module")
def whole(recipe, versions):
    """The uninterrupted run."""
    made = recipe("whole", versions)
    nest(train_whole, made)
    assert read_plan(made.run.folder / "plan.json").is_filled == (versions == FILLED)
    return made


def moment_of(draw):
    rank = draw.randrange(RANKS)
    counts = OFTEN if rank else {**OFTEN, **ONCE}
    place = draw.choice(list(counts))
    return Moment(place, rank, draw.randint(1, counts[place]))


def test_ten_kills_at_random_moments_change_no_bit(recipe, versions, whole):
    draw, killed = Random(f"kills {versions}"), recipe("killed", versions)
    nest(train_with_kills, killed, [moment_of(draw) for _ in range(KILLS)])
    assert_same_bits(killed, whole)


def test_a_job_whose_rank_is_killed_goes_on_bit_for_bit(recipe, versions, whole):
    """The command, with its launcher and its ranks."""
    killed = recipe("job", versions)
    if versions == FILLED:
        killed.run.folder.mkdir()
        shutil.copy(whole.run.folder / PROFILE, killed.run.folder)
    moment = Moment("an update", 1, 2 * EVERY + 2)
    job = ForkedCommand(killed, ranks=RANKS, moment=moment)
    try:
        job.await_event((job.place / "reached").exists, moment.place)
        job.rank(moment.rank).send_signal(signal.SIGKILL)
        status, error = job.end()
    finally:
        job.kill_all()
    assert status == 1
    assert f"error: rank {moment.rank}" in error
    assert "Traceback" not in error
    assert step_of(killed) == 2 * EVERY
    nest(train_whole, killed, "latest")
    assert_same_bits(killed, whole)
