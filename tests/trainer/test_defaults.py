"""Recipes of five keys: machine and search decide the rest, once, and the run folder keeps what they decided."""

import logging

import pytest
from kit.crew import crew_of
from kit.tiers import quick_and_slow
from kit.tiny_runs import losses_of, save_dit, save_pictures, train, train_here

from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import read_profile
from diffusionpipe.ir.files import read_plan
from diffusionpipe.planner.choosing.choice import choose
from diffusionpipe.trainer.recipe import load_recipe, recorded_recipe
from diffusionpipe.workflows.planning.recipe_setting import setting_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("defaults")
    save_dit(folder / "dit")
    save_pictures(folder / "data")
    return folder


@pytest.fixture
def file(place, tmp_path):
    path = tmp_path / "five.toml"
    path.write_text(
        f'[model]\npath = "{place / "dit"}"\n[data]\ntrain = "{place / "data"}"\nresolution = 8\n'
        "[training]\nsteps = 3\nbatch = 4\n"
    )
    return path


def own(file, *overrides):
    return load_recipe(file, [f"run.folder={file.parent / 'run'}", "data.workers=0", *overrides])


@pytest.mark.parametrize("ranks", quick_and_slow([1, 2, 4], [1]))
def test_the_plan_of_five_keys_is_the_searchs(file, ranks):
    recipe, folder = own(file), file.parent / "run"
    if ranks == 1:
        assert train_here(recipe) == 3
    else:
        with crew_of(ranks) as crew:
            assert crew.run(train, recipe) == [3] * ranks
    plan, kept = read_plan(folder / "plan.json"), recorded_recipe(folder / "recipe.toml")
    asked = setting_of(kept, read_profile(folder / "profile.json"), load_cluster(str(folder / "cluster.json")))
    assert plan == choose(asked, may_recompute=True).plan()
    assert plan.mesh.num_ranks == ranks
    text = (folder / "recipe.toml").read_text()
    for line in ('precision = "float32"', 'frozen_dtype = "none"', "activation_checkpointing = []", 'plan = "auto"'):
        assert line in text


def test_a_run_that_continues_keeps_what_was_decided(file, caplog):
    folder = file.parent / "run"
    with caplog.at_level(logging.INFO):
        assert train_here(own(file, "training.steps=2", "pipeline.microbatches=1"), exports=False) == 2
    assert 'precision=float32 frozen_dtype=none reason="devices not all with bfloat16"' in caplog.text
    path = folder / "recipe.toml"
    lines = path.read_text().replace('precision = "float32"', 'precision = "bfloat16"').splitlines(keepends=True)
    # As an older version has written it: without the keys that it did not know.
    path.write_text("".join(line for line in lines if not line.startswith("frozen_dtype")))
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert train_here(own(file, "pipeline.microbatches=1"), resume="latest", exports=False) == 3
    assert 'precision=bfloat16 frozen_dtype=none reason="as before"' in caplog.text
    assert len(losses_of(folder)) == 3
    assert recorded_recipe(path).training.precision == "bfloat16"
