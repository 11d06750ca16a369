"""Runs whose sizes are searched or come from a plan file: they learn what one process learns, and keep their plan."""

import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from kit.tiny_runs import losses_of, opened_here, recipe_of, save_pictures, save_stable_diffusion, train, train_here

from diffusionpipe import profiler
from diffusionpipe.cli import main
from diffusionpipe.costs import Device
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import read_profile, write_cluster, write_profile
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Op
from diffusionpipe.ir.files import read_plan, write_plan
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.trainer.recipe import recipe_to_toml
from diffusionpipe.trainer.setup import planning, session
from diffusionpipe.workflows.planning.job_profiles import CachedProfiles
from diffusionpipe.workflows.planning.prediction_file import read_prediction
from diffusionpipe.workflows.training.plan_memory import check_plan_memory

pytestmark = pytest.mark.usefixtures("one_thread")

FREE = {"microbatches": "none", "encode_chunk": "none"}
"""The sizes of `recipe_of` left out."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planned")
    save_stable_diffusion(folder / "sd")
    save_pictures(folder / "data")
    return folder


@pytest.fixture(scope="module")
def recipe(place):
    def make(folder, steps=4, **pipeline):
        sections = {"training": {"steps": steps}, "pipeline": FREE | pipeline}
        return recipe_of(place / "sd", place / "data", folder, **sections)

    return make


@pytest.fixture(scope="module")
def in_one(recipe, place):
    """The losses of one process."""
    assert train_here(recipe(place / "one"), saves=False) == 4
    return losses_of(place / "one")


@pytest.fixture(scope="module")
def searched(crew, recipe, place):
    """A finished run over two ranks whose sizes were searched; it has measured layers and links."""
    assert crew.run(train, recipe(place / "searched", plan="auto")) == [4, 4]
    return place / "searched"


@pytest.fixture
def measured(searched, tmp_path):
    """The folder of a run that has not begun, with the measurements of another."""
    (tmp_path / "run").mkdir()
    for name in ("profile.json", "cluster.json"):
        shutil.copy(searched / name, tmp_path / "run")
    return tmp_path / "run"


def assert_learns_the_same(folder, in_one):
    losses = losses_of(folder)
    assert losses.keys() == in_one.keys()
    assert list(losses.values()) == pytest.approx(list(in_one.values()), rel=1e-5)


def problem_of(results):
    """The error that every rank raises."""
    assert all(isinstance(result, ConfigError) for result in results), results
    assert len({str(result) for result in results}) == 1
    return str(results[0])


def test_a_searched_run_in_one_process_measures_and_learns_the_same(recipe, in_one, tmp_path):
    assert train_here(recipe(tmp_path / "run", plan="auto"), exports=False) == 4
    assert read_profile(tmp_path / "run" / "profile.json").source == "measured"
    assert read_plan(tmp_path / "run" / "plan.json").mesh.num_ranks == 1
    assert_learns_the_same(tmp_path / "run", in_one)


def test_a_searched_plan_learns_what_one_process_learns(searched, in_one):
    assert read_plan(searched / "plan.json").mesh.num_ranks == 2
    assert load_cluster(str(searched / "cluster.json")).num_ranks == 2
    assert_learns_the_same(searched, in_one)


@pytest.mark.parametrize(
    "given",
    [
        {"data_parallel": 1, "fill": True},
        {"data_parallel": 2, "fill": True},
        {"stages": 2, "microbatches": 4, "schedule": "gpipe", "fill": False, "encode_chunk": 1},
    ],
    ids=["filled pipeline", "filled copies", "all but the cuts"],
)
def test_given_sizes_are_kept_and_change_no_loss(crew, recipe, measured, in_one, given):
    assert crew.run(train, recipe(measured, plan="auto", **given), exports=False) == [4, 4]
    plan = read_plan(measured / "plan.json")
    assert plan.mesh.data_parallel == given.get("data_parallel", 1)
    assert (plan.prologue is not None) == given["fill"]
    if "schedule" in given:
        assert plan.train.name.startswith("gpipe")
        assert max(len(p.microbatches) for p in plan.train.placement.pipelines) == 4
        assert max(len(fill.samples) for fill in plan.train.fills) == 1
    assert_learns_the_same(measured, in_one)


def test_a_resumed_run_keeps_its_plan_and_on_other_ranks_makes_another(crew, recipe, measured):
    assert crew.run(train, recipe(measured, plan="auto", steps=2)) == [2, 2]
    plan, cluster = ((measured / name).read_bytes() for name in ("plan.json", "cluster.json"))
    assert crew.run(train, recipe(measured, plan="auto", steps=3), "latest") == [3, 3]
    assert (measured / "plan.json").read_bytes() == plan
    assert (measured / "cluster.json").read_bytes() == cluster
    assert train_here(recipe(measured, plan="auto"), "latest") == 4
    assert read_plan(measured / "plan.json").mesh.num_ranks == 1
    assert load_cluster(str(measured / "cluster.json")).num_ranks == 1


def test_a_resumed_run_trains_by_the_plan_in_its_folder_though_planning_anew_finds_another(
    crew, recipe, measured, plan_of_copies
):
    assert crew.run(train, recipe(measured, plan="auto", steps=2)) == [2, 2]
    other = Path(plan_of_copies).read_bytes()
    assert (measured / "plan.json").read_bytes() != other
    (measured / "plan.json").write_bytes(other)
    assert crew.run(train, recipe(measured, plan="auto", steps=3), "latest") == [3, 3]
    assert (measured / "plan.json").read_bytes() == other
    assert crew.run(train, recipe(measured, plan="auto", steps=4, data_parallel=1), "latest", exports=False) == [4, 4]
    assert read_plan(measured / "plan.json").mesh.data_parallel == 1


def test_a_resumed_run_with_a_profile_of_an_older_format_keeps_its_plan_and_gets_what_the_profile_lacks(
    crew, recipe, measured
):
    assert crew.run(train, recipe(measured, plan="auto", steps=2)) == [2, 2]
    plan, path = (measured / "plan.json").read_bytes(), measured / "profile.json"
    measured_now = read_profile(path)
    assert measured_now.counts_kept
    path.write_text(of_version_2(path.read_text()))
    assert not read_profile(path).counts_kept
    assert crew.run(train, recipe(measured, plan="auto", steps=3), "latest") == [3, 3]
    assert (measured / "plan.json").read_bytes() == plan
    completed = read_profile(path)
    assert completed.counts_kept
    for layer, now in zip(completed.layers, measured_now.layers, strict=True):
        assert replace(layer, kept=now.kept, kept_reads=now.kept_reads) == now


def of_version_2(text):
    """A profile file as it was before profiles said what split backwards keep."""
    old = {**json.loads(text), "version": 2}
    for layer in old["layers"]:
        layer.pop("kept", None)
        layer.pop("kept_reads", None)
    return json.dumps(old)


def test_a_resumed_run_says_why_it_plans_anew(recipe, tmp_path, caplog):
    caplog.set_level(logging.INFO, "diffusionpipe")
    folder = tmp_path / "run"

    def lines_of(steps, **pipeline):
        caplog.clear()
        assert train_here(recipe(folder, steps=steps, **pipeline), None if steps == 1 else "latest") == steps
        return [text for text in caplog.messages if "planned_again" in text or "kept=True" in text]

    assert lines_of(1) == []
    assert lines_of(2) == [f"plan={folder / 'plan.json'} kept=True"]
    assert lines_of(3, microbatches=2) == ['planned_again=True reason="pipeline.microbatches was None, and is 2"']
    plan = read_plan(folder / "plan.json")
    write_plan(replace(plan, mesh=replace(plan.mesh, data_parallel=2)), folder / "plan.json")
    assert lines_of(4, microbatches=2) == ['planned_again=True reason="the run had 2 ranks, and has 1"']


def test_ranks_take_what_as_many_ranks_have_measured_in_another_run(crew, recipe, tmp_path):
    shelf, kept = CachedProfiles(tmp_path / "kept"), tmp_path / "kept"

    def run(folder, resume=None):
        told = recipe(tmp_path / folder, plan="auto", steps=1)
        assert crew.run(train, told, resume, None, 1, shelf) == [1, 1]
        return read_profile(tmp_path / folder / "profile.json")

    first = run("first")
    (path,) = kept.iterdir()
    assert read_profile(path) == first
    marked = replace(first, update=first.update + 0.5)
    write_profile(marked, path)
    assert run("second") == marked
    assert run("first", "latest") == first  # a run keeps to its own
    assert train_here(recipe(tmp_path / "alone", plan="auto", steps=1), profiles=shelf) == 1
    assert read_profile(tmp_path / "alone" / "profile.json").update < 0.5
    assert len(list(kept.iterdir())) == 2
    path.write_text("{}")
    assert path.name in problem_of(crew.run(train, recipe(tmp_path / "third", plan="auto"), None, None, 1, shelf))


def test_a_plan_file_that_plan_has_written_is_trained_by(crew, recipe, searched, in_one, tmp_path):
    path, cluster = tmp_path / "plan.json", searched / "cluster.json"
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(recipe(tmp_path / "run", plan="auto", data_parallel=1)))
    arguments = [tmp_path / "recipe.toml", "--cluster", cluster, "--profile", searched / "profile.json", "--out", path]
    with pytest.raises(SystemExit) as caught:
        main(["plan", *map(str, arguments)])
    assert caught.value.code == 0
    assert crew.run(train, recipe(tmp_path / "run", plan=str(path))) == [4, 4]
    assert (tmp_path / "run" / "plan.json").read_bytes() == path.read_bytes()
    assert not (tmp_path / "run" / "profile.json").exists()
    assert_learns_the_same(tmp_path / "run", in_one)
    timeline = read_prediction(path, read_plan(path))
    assert timeline is not None
    assert timeline.source == "simulated"


@pytest.fixture(scope="module")
def plan_of_copies(recipe, place):
    """A plan file of two ranks: copies, with three buckets of gradients and groups side by side."""
    model = opened_here(recipe(place / "described")).model
    layout = Layout(batch=4, stages=1, microbatches=2, data_parallel=2, adjacent=2, buckets=3)
    plan = build_plan(model, layout)
    assert sum(action.op is Op.REDUCE_GRAD for action in plan.train.orders[0]) == 3
    write_plan(plan, place / "copies.json")
    return str(place / "copies.json")


def test_a_plan_with_buckets_and_copies_side_by_side_is_trained_by(crew, recipe, plan_of_copies, in_one, tmp_path):
    assert crew.run(train, recipe(tmp_path / "run", plan=plan_of_copies)) == [4, 4]
    assert_learns_the_same(tmp_path / "run", in_one)


def test_a_plan_that_does_not_fit_is_refused_with_what_it_needs_before_weights_are_loaded(
    recipe, place, measured, tmp_path, monkeypatch
):
    opened = opened_here(recipe(place / "described"))
    path = tmp_path / "given.json"
    plan = build_plan(opened.model, Layout(batch=4, stages=1, microbatches=2))
    write_plan(plan, path)
    shutil.copy(measured / "profile.json", tmp_path)
    monkeypatch.setattr(session, "load_weights", lambda *_: pytest.fail("weights are loaded"))
    monkeypatch.setattr(planning, "usable_memory", lambda _: 2**20)
    told = recipe(tmp_path / "run", plan=str(path))
    message = r"given.json: the plan does not fit: rank 0 needs \d\.\d MiB at its peak, and its device has 1.0 MiB"
    with pytest.raises(ConfigError, match=message) as measured_before:
        train_here(told)
    (tmp_path / "profile.json").unlink()
    with pytest.raises(ConfigError, match=message) as by_parameters:
        train_here(told)
    needs = [float(re.search(r"needs ([0-9.]+)", str(one.value))[1]) for one in (measured_before, by_parameters)]
    assert needs[0] >= needs[1]
    on_gpu = replace(opened, recipe=told, device="cuda")
    devices, kept = [Device(name="NVIDIA L40S", memory=2**20)], tmp_path / "profiles"
    with pytest.raises(ConfigError, match=message):
        check_plan_memory(plan, on_gpu, devices, cache=kept)
    monkeypatch.setattr(profiler, "analytic_profile", lambda *_, **__: pytest.fail("layers are counted again"))
    check_plan_memory(plan, on_gpu, [replace(devices[0], memory=2**30)], cache=kept)


def test_a_plan_for_other_ranks_stops_every_rank(crew, recipe, plan_of_copies, tmp_path):
    with pytest.raises(ConfigError, match=r"it is for 2 ranks, but there are 1: start with --ranks 2"):
        train_here(recipe(tmp_path / "run", plan=plan_of_copies))
    assert "cannot read" in problem_of(crew.run(train, recipe(tmp_path / "run", plan=str(tmp_path / "gone.json"))))


def test_a_model_that_fits_nowhere_stops_every_rank_and_says_by_how_much(crew, recipe, measured):
    cluster = load_cluster(str(measured / "cluster.json"))
    small = replace(cluster, devices=tuple(replace(device, memory=10**4) for device in cluster.devices))
    write_cluster(small, measured / "cluster.json")
    message = problem_of(crew.run(train, recipe(measured, plan="auto")))
    assert "No layout fits" in message
    assert "These changes would fit" in message


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ("a100-80x8", r"a100-80x8 has NVIDIA A100-SXM4-80GB, but this run is on .* thread"),
        ("nowhere", "there is no cluster 'nowhere'"),
        ("{small}", r"has 1 devices, but this run has 2 ranks; start 1 or fewer"),
    ],
)
def test_a_cluster_that_cannot_be_this_one_stops_every_rank(crew, recipe, tmp_path, cluster, message):
    two = load_cluster("cpux2")
    write_cluster(replace(two, devices=two.devices[:1], nodes=(0,)), tmp_path / "small.json")
    named = cluster.format(small=tmp_path / "small.json")
    found = problem_of(crew.run(train, recipe(tmp_path / "run", plan="auto", cluster=named)))
    assert re.search(message, found), found


def test_the_first_devices_of_a_larger_cluster_are_this_job(crew, recipe, measured):
    assert crew.run(train, recipe(measured, steps=1, plan="auto", cluster="cpux2:2")) == [1, 1]
    assert load_cluster(str(measured / "cluster.json")).name == "cpux2:2"
    assert load_cluster(str(measured / "cluster.json")).num_ranks == 2


def test_a_searched_run_that_must_shard_learns_what_one_process_learns(crew, recipe, measured, in_one):
    assert crew.run(train, recipe(measured, plan="auto", sharded=True)) == [4, 4]
    plan = read_plan(measured / "plan.json")
    assert plan.mesh.shard == 2
    assert any(action.op is Op.UNSHARD for action in plan.train.orders[0])
    assert list(losses_of(measured).values()) == pytest.approx(list(in_one.values()), rel=1e-5)


@pytest.mark.slow
def test_a_searched_run_whose_states_must_be_in_parts_learns_what_one_process_learns(crew, recipe, measured, in_one):
    assert crew.run(train, recipe(measured, plan="auto", sharded="optimizer")) == [4, 4]
    plan = read_plan(measured / "plan.json")
    assert (plan.mesh.owners, plan.mesh.shard) == (2, 1)
    assert list(losses_of(measured).values()) == pytest.approx(list(in_one.values()), rel=1e-5)
