"""Runs that leave ranks out: they learn, bit for bit, what a job of the used ranks alone learns."""

import os
from dataclasses import replace

import pytest
from kit.forked import completed
from kit.forked_jobs import ForkedCommand
from kit.nodes import may_have_nodes, two_nodes
from kit.tiny_runs import losses_of, recipe_of, save_dit, save_pictures, train

from diffusionpipe.errors import ConfigError, RecipeError
from diffusionpipe.ir.files import read_plan
from diffusionpipe.runtime.job.membership import Membership
from diffusionpipe.trainer.recipe import PipelineSection, ranks_that_train, recipe_to_toml
from diffusionpipe.workflows.training.used_ranks import place_among

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    place = tmp_path_factory.mktemp("used")
    model, data = save_dit(place / "dit"), save_pictures(place / "data")

    def make(name, **pipeline):
        return recipe_of(model, data, place / name, training={"steps": 3}, pipeline=pipeline)

    return make


def ended(job):
    status, error = job.end()
    assert status == 0, error
    return error


@pytest.fixture(scope="module")
def two(crew, recipe):
    """The losses of a job of two ranks."""
    assert crew.run(train, recipe("two")) == [3, 3]
    return losses_of(recipe("two").run.folder)


@pytest.mark.parametrize("use", [pytest.param((0, 2), marks=pytest.mark.slow), (1, 2)])
def test_the_launcher_starts_the_used_ranks_alone(recipe, two, use):
    asked = recipe(f"launched-{use[0]}", use=use)
    said = ended(ForkedCommand(asked, ranks=3))
    left_out = 3 - sum(use)
    assert f"left out, as pipeline.use asks: {left_out}\n" in said
    assert losses_of(asked.run.folder) == two
    assert read_plan(asked.run.folder / "plan.json").mesh.num_ranks == 2


@pytest.mark.slow
@pytest.mark.parametrize("use", [(0, 2), (1, 2), (2,)])
def test_ranks_of_torchrun_that_are_left_out_end_with_one_line(recipe, two, use, tmp_path):
    asked = recipe(f"torchrun-{len(use)}-{use[0]}", use=use)
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(asked))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "--max-restarts", "1", "-m", "diffusionpipe"]
    words += ["train", str(tmp_path / "recipe.toml"), "--device", "cpu", "--no-cache"]
    done = completed(words, environment=os.environ | {"NO_COLOR": "1"})
    told = [line for line in done.stderr.splitlines() if "left out, as pipeline.use asks" in line]
    assert len(told) == 3 - len(use)
    assert sorted(int(line.split("rank=")[1].split()[0]) for line in told if "rank=" in line) == sorted(
        {0, 1, 2} - set(use)
    )
    assert "restarted=" not in done.stderr
    if len(use) == 2:
        assert losses_of(asked.run.folder) == two
    assert len(losses_of(asked.run.folder)) == 3


@pytest.mark.slow
def test_the_rank_of_a_node_that_is_left_out_ends_and_the_other_node_trains(recipe, tmp_path):
    if not may_have_nodes():
        pytest.skip("this machine allows no network namespaces")
    asked = recipe("nodes", use=(0,))
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(asked))
    words = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", "node-0:29500", "-m", "diffusionpipe", "train", str(tmp_path / "recipe.toml")]
    with two_nodes(tmp_path) as nodes:
        environ = os.environ | {"NO_COLOR": "1"}
        both = [node.start([*words, "--no-cache"], environ) for node in nodes]
        told = [process.communicate(timeout=200)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert "left out, as pipeline.use asks: ranks 0 train" in "".join(told)
    assert len(losses_of(asked.run.folder)) == 3


@pytest.mark.slow
def test_a_crash_restarts_the_used_ranks_alone(recipe, two):
    asked = recipe("restarted", use=(1, 2))
    job = ForkedCommand(asked, "--max-restarts", "1", "training.steps=30", ranks=3)
    job.await_step(2)
    job.rank(1).kill()
    said = ended(job)
    assert "left out, as pipeline.use asks: 0" in said
    assert "restart" in said
    assert len(losses_of(asked.run.folder)) == 30
    assert list(losses_of(asked.run.folder).items())[:3] == list(two.items())


MEMBER = Membership(rank=2, world_size=4, local_rank=2, address="here", port=1, store_rank=None)


def test_used_ranks_keep_their_devices_and_are_counted_anew():
    own = place_among(MEMBER, (0, 2, 3), {"LOCAL_WORLD_SIZE": "2"})
    assert (own.rank, own.world_size, own.local_rank, own.store_rank) == (1, 3, 2, None)
    assert place_among(MEMBER, (0, 1), {"LOCAL_WORLD_SIZE": "2"}) is None
    launched = replace(MEMBER, launcher=1)
    assert place_among(launched, (0, 1), {}) is launched


@pytest.mark.parametrize(
    ("member", "environ"),
    [(MEMBER, {"LOCAL_WORLD_SIZE": "2"}), (replace(MEMBER, store_rank=0), {"LOCAL_WORLD_SIZE": "4"}), (MEMBER, {})],
    ids=["no rank of the agent's node", "not the rank that keeps the store", "an agent that tells no number"],
)
def test_ranks_that_keep_the_jobs_store_cannot_all_be_left_out(member, environ):
    with pytest.raises(ConfigError, match=r"pipeline\.use: the job's store is kept with .* use one of them, or start"):
        place_among(member, (2, 3), environ)


def test_a_recipe_that_names_ranks_which_are_not_there_is_refused():
    assert ranks_that_train(PipelineSection(use=(2, 0)), 3) == (0, 2)
    assert ranks_that_train(PipelineSection(), 3) == (0, 1, 2)
    with pytest.raises(RecipeError, match=r"pipeline\.use: there is no rank 3, 5, because 3 are started; start 6"):
        ranks_that_train(PipelineSection(use=(0, 3, 5)), 3)
    with pytest.raises(ValueError, match="use: 1, 1 names a rank twice"):
        PipelineSection(use=(1, 1))
