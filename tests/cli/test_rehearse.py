"""Rehearsals from the command line: two stages of a made-up model with a frozen layer."""

import json
from dataclasses import replace

import pytest

from diffusionpipe import cli
from diffusionpipe.cli.rehearsal import (
    fitting_bytes_scale,
    fitting_scale,
    group_of,
    rehearsal_mesh,
    scaled_costs,
    scaled_tensors,
    seconds_by_kind,
)
from diffusionpipe.costs import (
    Costs,
    LayerProfile,
    LayerSpec,
    Link,
    ModelGraph,
    ParameterSpec,
    Profile,
    StageCosts,
    TensorSpec,
)
from diffusionpipe.costs.files import write_profile
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Action, Mesh, Op, Span, Timeline
from diffusionpipe.ir.files import read_plan, write_plan
from diffusionpipe.ir.flows import flows
from diffusionpipe.planner.build import Layout
from diffusionpipe.planner.from_profile import plan_from_profile
from diffusionpipe.schedules import REGISTRY

LAYERS = ("encoder", "first", "second")
UPDATE = 0.001
"""Seconds for each parameter."""


def profile_of(names=LAYERS):
    """A frozen layer and two trained ones, 1 ms a sample each way."""
    tensors = ["pixels", "latent", "hidden", "loss"]
    graph = ModelGraph(
        layers=tuple(
            LayerSpec(name=name, component=name, reads=(read,), writes=(write,), parameters=(f"{name}.weight",))
            for name, read, write in zip(names, tensors, tensors[1:], strict=False)
        ),
        tensors=tuple(
            TensorSpec(name=name, shape=() if name == "loss" else (8, 8), needs_gradient=name in ("hidden", "loss"))
            for name in tensors
        ),
        parameters=tuple(
            ParameterSpec(name=f"{name}.weight", shape=(4,), is_trainable=name != names[0]) for name in names
        ),
        inputs=("pixels",),
    )
    layers = []
    for name in names:
        is_trained = name != names[0]
        time = (0.001, 0.002)
        layers.append(
            LayerProfile(
                name=name,
                forward=time,
                input_grad=time if name == names[2] else (0.0, 0.0),
                weight_grad=time if is_trained else (0.0, 0.0),
                activation=(64, 128),
                workspace=(0, 0),
            )
        )
    return Profile(
        graph=graph, batch_sizes=(1, 2), layers=tuple(layers), device="made up", device_type="cuda",
        precision="float32", source="measured", update=UPDATE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(plan, profile)."""
    folder = tmp_path_factory.mktemp("rehearse")
    profile = profile_of()
    plan, path = folder / "plan.json", folder / "profile.json"
    write_plan(plan_from_profile(profile, Layout(batch=8, stages=2, microbatches=4, data_parallel=2)), plan)
    write_profile(profile, path)
    return plan, path


def exit_of(*arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(list(map(str, arguments)))
    return caught.value.code


def test_a_rehearsal_reports_every_rank_measured_and_predicted(files, tmp_path, capsys):
    plan, profile = files
    picture = tmp_path / "picture.png"
    options = ("--scale", 2, "--iterations", 2, "--json", "--png", picture)
    assert exit_of("rehearse", plan, "--profile", profile, *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    assert len(found["iteration"]["measured_s"]) == 2
    planned, scaled = found["planned"], found["iteration"]["predicted_s"]
    assert planned["update_s"] == pytest.approx(4 * UPDATE)  # each rank holds one layer
    assert planned["step_s"] == planned["iteration_s"] + planned["update_s"]
    assert scaled == pytest.approx(2 * planned["iteration_s"], rel=0.2)
    assert min(found["iteration"]["measured_s"]) >= max(rank["predicted_s"]["backward"] for rank in found["ranks"])
    assert found["scale"] == 2
    # 4 micro-batches of one sample: F 1 ms, B of the first stage W alone, of the second I and W, times the scale
    assert found["ranks"][0]["predicted_s"]["forward"] == pytest.approx(0.008)
    assert found["ranks"][0]["predicted_s"]["backward"] == pytest.approx(0.008)
    assert found["ranks"][1]["predicted_s"]["backward"] == pytest.approx(0.016)
    assert found["ranks"][2]["predicted_s"] == found["ranks"][0]["predicted_s"]
    assert picture.stat().st_size > 10_000


def test_one_pipeline_of_a_data_parallel_plan_is_rehearsed_as_a_table(files, capsys):
    plan, profile = files
    assert exit_of("rehearse", plan, "--profile", profile, "--iterations", 1, "--ranks", 2) == 0
    printed = capsys.readouterr().out
    for text in ("iteration:", "bubble:", "encode", "measured / predicted"):
        assert text in printed


def test_a_plan_of_another_model_is_refused(files, tmp_path, capsys):
    other = tmp_path / "other.json"
    write_profile(profile_of(("encoder", "first", "another")), other)
    assert exit_of("rehearse", files[0], "--profile", other) == 2
    assert "another model" in capsys.readouterr().err


def test_an_illegal_plan_is_refused_by_rank_and_action(files, tmp_path, capsys):
    plan = read_plan(files[0])
    first, *rest = plan.train.orders
    order = list(first)
    forward = next(i for i, a in enumerate(order) if a.op is Op.F and a.microbatch == 0)
    backward = next(i for i, a in enumerate(order) if a.op is Op.B and a.microbatch == 0)
    order[forward], order[backward] = order[backward], order[forward]
    path = tmp_path / "illegal.json"
    write_plan(replace(plan, train=replace(plan.train, orders=(tuple(order), *rest))), path)
    assert exit_of("rehearse", path, "--profile", files[1]) == 2
    printed = capsys.readouterr().err
    assert "worker 0" in printed
    assert "0B0" in printed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ranks", 3), "no whole pipelines of 2"),
        (("--ranks", 6), "the plan has 4 ranks"),
        (("--scale", 0), "is no factor"),
        (("--bytes-scale", -1), "is no factor"),
        (("--cluster", "rtx4090x2"), "the plan is for 4 ranks"),
    ],
)
def test_wrong_sizes_are_refused(files, capsys, options, words):
    plan, profile = files
    assert exit_of("rehearse", plan, "--profile", profile, *options) == 2
    assert words in capsys.readouterr().err


def test_a_mesh_without_its_schedules_workers_is_refused(files, tmp_path, capsys):
    path = tmp_path / "mesh.json"
    write_plan(replace(read_plan(files[0]), mesh=Mesh(pipeline=3)), path)
    assert exit_of("rehearse", path, "--profile", files[1]) == 2
    assert "the mesh has 3 workers" in capsys.readouterr().err


def test_more_processes_than_a_machine_should_run_are_refused_with_what_fits():
    with pytest.raises(ConfigError, match="use --ranks 64 or less, in steps of 8"):
        rehearsal_mesh(Mesh(data_parallel=64, pipeline=8), None)
    assert rehearsal_mesh(Mesh(data_parallel=64, pipeline=8), 16) == Mesh(data_parallel=2, pipeline=8)
    assert rehearsal_mesh(Mesh(data_parallel=8, shard=8), 2) == Mesh(data_parallel=2, shard=2)


def test_scaling_multiplies_every_time_and_leaves_memory():
    costs = Costs(stages=(StageCosts(forward=1, backward=2, activation=7),), fills=(3,), reduces=(4,), unshards=(6,))
    scaled = scaled_costs(costs, 0.5)
    assert (scaled.stages[0].forward, scaled.stages[0].backward, scaled.stages[0].activation) == (0.5, 1, 7)
    assert (scaled.fills, scaled.reduces, scaled.unshards) == ((1.5,), (2,), (3,))


def test_the_chosen_scale_makes_the_shortest_pass_ten_milliseconds():
    costs = Costs(stages=(StageCosts(forward=2, backward=4), StageCosts(forward=0, backward=0)))
    assert fitting_scale(costs) * 2 == pytest.approx(0.01)


def test_scaled_tensors_keep_at_least_one_number_and_scalars_as_they_are():
    specs = (TensorSpec(name="a", shape=(10, 10)), TensorSpec(name="loss", shape=()))
    assert scaled_tensors(specs, 0.5)["a"].shape == (50,)
    assert scaled_tensors(specs, 1e-9)["a"].shape == (1,)
    assert scaled_tensors(specs, 1e-9)["loss"].shape == ()


def test_the_chosen_bytes_can_be_copied_in_a_twentieth_of_a_core(files):
    schedule = read_plan(files[0]).train
    costs = Costs(stages=(), tensor_bytes={"hidden": 1000, "latent": 1000})
    link = Link(0.0, 1e5)
    scale = fitting_bytes_scale(schedule, costs, link, 1.0)
    sent = sum(len(m.samples) * sum(costs.tensor_bytes.get(t, 0) for t in m.tensors) for m in schedule.messages)
    affordable = 0.05 * 1e5 / 4
    passed = sum(len(f.samples) * sum(costs.tensor_bytes.get(t, 0) for t in f.tensors) for f in flows(schedule))
    assert scale * passed == pytest.approx(affordable)
    assert 0.5 * affordable < scale * sent <= affordable
    assert fitting_bytes_scale(schedule, costs, link, 1.0, data_parallel=4) == pytest.approx(scale / 4)
    assert fitting_bytes_scale(schedule, costs, link, 1e6) == 1.0


def test_what_stays_on_a_rank_is_scaled_too():
    """Two stages of one worker send nothing, but write and read gradients and activations as large as messages."""
    schedule = REGISTRY["interleaved"](1, 2, 2)
    assert (schedule.num_workers, len(schedule.placement.stages), schedule.messages) == (1, 2, ())
    passed = sum(len(flow.samples) for flow in flows(schedule))
    assert passed == 2 * 2 * 2  # forward and backward of two micro-batches of two samples
    costs = Costs(stages=(), tensor_bytes={"hidden": 1000})
    scale = fitting_bytes_scale(schedule, costs, Link(0.0, 1e5), 1.0)
    assert scale * passed * 1000 == pytest.approx(0.05 * 1e5 / 4)


def test_a_group_of_a_measured_timeline_has_workers_in_place_of_ranks():
    def span(worker):
        return Span(worker=worker, action=Action(stage=0, op=Op.F, microbatch=0), start=0, end=1 + worker)

    timeline = Timeline(num_workers=4, spans=tuple(map(span, range(4))))
    group = group_of(timeline, Mesh(data_parallel=2, pipeline=2), 1)
    assert [(s.worker, s.end) for s in group.spans] == [(0, 3), (1, 4)]
    assert seconds_by_kind(group, 0) == {"forward": 3, "backward": 0, "encode": 0, "idle": 1}
