"""A run that is killed again and again while it writes its cache: nothing is lost, and nothing is mixed."""

import json
from pathlib import Path

import pytest
import torch
from kit.cached_runs import LAYOUT, assert_close, entries_of, is_whole, small_shards, train_in_small_shards
from kit.crew import crew_of, nest
from kit.killed_writes import RENAMED, Kill
from kit.mortal_runs import RANKS, step_of, train_whole, warm
from kit.tiny_runs import recipe_of, save_pictures, save_stable_diffusion

from diffusionpipe.runtime.job.process_group import Job
from diffusionpipe.trainer.recipe import Recipe

BATCH, PICTURES, STEPS = 4, 80, 40
"""Two epochs; each start ends within the first steps with new results."""
KILLS = (
    Kill(rank=0, kind="", share=0.0),  # the settings of a folder, which come first
    Kill(rank=0, kind="", share=0.5),
    Kill(rank=0, kind="", share=1.0, number=2),  # the settings of the other folder
    Kill(rank=1, kind="latents-", share=0.0),
    Kill(rank=1, kind="texts-", share=0.02),  # in the header of a shard
    Kill(rank=0, kind="latents-", share=0.5),
    Kill(rank=0, kind="texts-", share=0.999),
    Kill(rank=1, kind="latents-", share=1.0),
    Kill(rank=1, kind="texts-", share=RENAMED),
    Kill(rank=0, kind="latents-", share=RENAMED, number=2),
)


def train_until_killed(job: Job, recipe: Recipe, resume: str | None, kill: Kill, mark: Path) -> int:
    kill.arm(job.membership.rank, recipe.run.folder / "cache", mark)
    return train_in_small_shards(job, recipe, resume)


def killed_and_resumed(recipe: Recipe) -> list[int]:
    """The numbers of shards after each kill. In a nest."""
    warm(recipe)
    found: list[int] = []
    before: set[Path] = set()
    for number, kill in enumerate(KILLS):
        mark, resume = recipe.run.folder.parent / f"killed {number}", "latest" if step_of(recipe) else None
        with crew_of(RANKS, is_forked=True) as crew, pytest.raises((EOFError, ConnectionResetError)):
            crew.run(train_until_killed, recipe, resume, kill, mark)
        assert mark.exists(), f"{kill} was not reached"
        shards = set((recipe.run.folder / "cache").glob("*/*.safetensors"))
        assert shards >= before, kill
        assert all(map(is_whole, shards)), kill
        before = shards
        found.append(len(shards))
    with crew_of(RANKS, is_forked=True) as crew:
        assert crew.run(train_in_small_shards, recipe, "latest") == [STEPS] * RANKS
    return found


def whole_in_small_shards(recipe: Recipe) -> None:
    with small_shards():
        train_whole(recipe)


def test_ten_kills_in_its_writing_leave_the_losses_and_the_cache_of_an_uninterrupted_run(tmp_path):
    model, data = save_stable_diffusion(tmp_path / "model"), save_pictures(tmp_path / "pictures", PICTURES)
    rows = [json.loads(line) for line in (data / "metadata.jsonl").read_text().splitlines()]
    letters = "abcdefghijklmnopqrst"
    texts = [f"{one} {other}" for one in letters for other in letters][: len(rows)]
    lines = [json.dumps({**row, "text": text}) for row, text in zip(rows, texts, strict=True)]
    (data / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    common = {"training": {"steps": STEPS, "batch": BATCH, "precision": "float64"}}
    pipeline = {**LAYOUT, "stages": 2, "fill": True}
    plain = recipe_of(model, data, tmp_path / "plain", pipeline=pipeline, **common)
    cached = recipe_of(model, data, tmp_path / "cached", pipeline={**pipeline, "encoders": "cache"}, **common)
    killed = recipe_of(
        model,
        data,
        tmp_path / "killed",
        pipeline={**pipeline, "encoders": "cache"},
        checkpoint={"every": 2, "keep": 1},
        **common,
    )
    nest(train_whole, plain)
    nest(whole_in_small_shards, cached)
    counts = nest(killed_and_resumed, killed)
    assert counts[:3] == [0, 0, 0], "settings come before shards"
    assert counts[-1] > 3
    assert_close(killed, plain, most=1e-12)
    found, expected = (entries_of(recipe.run.folder / "cache") for recipe in (killed, cached))
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
