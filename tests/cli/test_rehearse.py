"""Rehearsals from the command line: two stages of a made-up model with a frozen layer."""

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from kit.screen_files import assert_screen
from rich.console import Console

from diffusionpipe import cli
from diffusionpipe.cli.text import screen
from diffusionpipe.cli.text.rehearsal_report import Outcome, figures_of, print_report
from diffusionpipe.cli.verbs.rehearse import disturbance, rehearsal_progress, used_by_others
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
from diffusionpipe.costs.clusters import load_cluster
from diffusionpipe.costs.files import read_profile, write_profile
from diffusionpipe.errors import ConfigError
from diffusionpipe.ir import Action, Mesh, Op, Span, Timeline
from diffusionpipe.ir.files import read_plan, write_plan
from diffusionpipe.ir.flows import flows
from diffusionpipe.planner.assembly.layout import Layout
from diffusionpipe.planner.from_profile import plan_from_profile, setting_of
from diffusionpipe.planner.pricing.stage_costs import costs_of
from diffusionpipe.runtime.machine.free_memory import free_memory
from diffusionpipe.runtime.machine.machine_use import Counters, own_cores
from diffusionpipe.schedules import REGISTRY
from diffusionpipe.simulator import simulate
from diffusionpipe.workflows.rehearsing.rehearsal import (
    FINEST,
    LONGEST,
    Rehearsed,
    fitting_bytes_scale,
    fitting_scale,
    group_of,
    held_bytes,
    rehearsal_mesh,
    scaled_costs,
    scaled_tensors,
    seconds_by_kind,
)
from diffusionpipe.workflows.rehearsing.size import COMMAND_BYTES, RANK_BYTES, Size, size_of

SHARDED = Path(__file__).parents[1] / "files" / "sharded_flux"
GIB = 2**30
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
        (("--ranks", 3), "do not form whole pipelines of 2"),
        (("--ranks", 6), "the plan has 4 ranks"),
        (("--scale", 0), "is not a positive number"),
        (("--bytes-scale", -1), "is not a positive number"),
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


def test_the_chosen_scale_makes_the_shortest_pass_ten_milliseconds(files):
    schedule = REGISTRY["1f1b"](2, 4)
    costs = Costs(stages=(StageCosts(forward=2, backward=4), StageCosts(forward=0, backward=0)))
    assert fitting_scale(schedule, costs, 10) * 2 == pytest.approx(0.01)


def test_a_stage_that_takes_next_to_no_time_does_not_make_a_rehearsal_long():
    schedule = REGISTRY["1f1b"](2, 4)
    costs = Costs(stages=(StageCosts(forward=2, backward=4), StageCosts(forward=1e-6, backward=1e-6)))
    iteration = simulate(schedule, costs).makespan
    assert fitting_scale(schedule, costs, 3) * iteration * (3 + 1) == pytest.approx(LONGEST)
    many = fitting_scale(schedule, costs, 10**6)
    assert many * (2 + 4 + 2e-6) / 4 == pytest.approx(FINEST)  # the mean of all passes stays long enough to be timed


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


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A plan that shards FLUX.1-dev with adapters over 8 devices in 59 blocks, profile, cluster: files of all three."""
    folder = tmp_path_factory.mktemp("sharded")
    for name in ("plan.json", "profile.json"):
        (folder / name).write_bytes(gzip.decompress((SHARDED / f"{name}.gz").read_bytes()))
    return folder / "plan.json", folder / "profile.json", SHARDED / "cluster.json"


def sharded_size(sharded, *, ranks=4, iterations=3, free=None, bytes_scale=None, scale=None):
    plan, profile = read_plan(sharded[0]), read_profile(sharded[1])
    setting = setting_of(profile, plan.mesh, plan.batch)
    setting = replace(
        setting, cluster=load_cluster(str(sharded[2])), workload=replace(setting.workload, checkpointed=("*",))
    )
    costs = costs_of(plan.train, plan.blocks, plan.mesh, setting)
    return size_of(
        plan.train,
        costs,
        profile.graph,
        rehearsal_mesh(plan.mesh, ranks),
        iterations=iterations,
        scale=scale or fitting_scale(plan.train, costs, iterations),
        bytes_scale=bytes_scale,
        free=free,
    )


def test_a_sharded_plan_of_many_blocks_is_rehearsed_in_little_time_and_memory(sharded):
    size = sharded_size(sharded)
    assert size.seconds == pytest.approx(LONGEST)
    assert size.tensors < 0.5 * GIB
    assert size.memory < 2 * GIB
    assert "on 4 ranks: about 20 s and " in str(size)
    assert sharded_size(sharded, iterations=1).seconds == pytest.approx(LONGEST)


def test_whole_tensors_are_refused_where_memory_is_short_with_a_scale_that_fits(sharded):
    whole = sharded_size(sharded, bytes_scale=1.0)
    assert whole.tensors > 4 * 59 * 4 * 4000 * 3072 * 2  # every block's output, on every rank
    with pytest.raises(
        ConfigError, match=r"--bytes-scale 1 makes tensors of .* GiB on 4 ranks.*leave it out"
    ) as caught:
        sharded_size(sharded, bytes_scale=1.0, free=8 * GIB)
    advised = float(str(caught.value).split("use --bytes-scale ")[1].split()[0])
    assert sharded_size(sharded, bytes_scale=advised, free=8 * GIB).memory < 8 * GIB


def test_tensors_are_scaled_down_to_the_free_memory_and_too_many_ranks_are_refused(sharded):
    processes = COMMAND_BYTES + 4 * RANK_BYTES
    free = processes + 40 * 2**20
    size = sharded_size(sharded, free=free)
    assert size.tensors <= 20.5 * 2**20 < sharded_size(sharded).tensors
    assert size.seconds == pytest.approx(LONGEST)
    with pytest.raises(ConfigError, match=r"4 ranks need .* GiB of memory.*use --ranks 3"):
        sharded_size(sharded, free=processes - 1)
    with pytest.raises(ConfigError, match="end other programs"):
        sharded_size(sharded, free=COMMAND_BYTES)


def test_a_virtual_stage_holds_what_it_writes_and_what_other_ranks_send_it():
    tensors = {"hidden": TensorSpec(name="hidden", shape=(10,), dtype="float32")}
    assert held_bytes(REGISTRY["1f1b"](2, 4, 2), tensors) == [2 * 40, 2 * 40]
    assert held_bytes(REGISTRY["interleaved"](1, 2, 2), tensors) == [2 * 40, 0]


COMMAND = """
import sys, torch
torch.set_num_threads(1)
from diffusionpipe.cli import main
main(sys.argv[1:])
"""


def rehearsal(sharded, *options):
    plan, profile, cluster = map(str, sharded)
    words = ["rehearse", plan, "--profile", profile, "--cluster", cluster, "--ranks", "4", *options]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def memory_of(pids):
    """Each page once, in bytes."""
    found = 0
    for pid in pids:
        try:
            found += psutil.Process(pid).memory_full_info().pss
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
def test_a_sharded_plan_is_rehearsed_in_four_gigabytes_and_predicted_within_five_percent(sharded):
    process = rehearsal(sharded, "--iterations", "3", "--json")
    most = 0
    while process.poll() is None:
        children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        most = max(most, memory_of([process.pid, *children]))
        time.sleep(1.0)
    shown, said = process.communicate()
    figures = json.loads(shown)
    assert "about 20 s and " in said
    assert "rehearsed 3 of 3 iterations" in said
    assert 0.3 * GIB < most < min(4 * GIB, figures["memory_bytes"])
    if disturbance(figures["processor"]) is None:  # beside other programs the measured times say nothing
        assert abs(figures["iteration"]["error"]) < 0.05
    assert 4 * figures["iteration"]["predicted_s"] == pytest.approx(20, rel=0.1)


@pytest.mark.slow
def test_no_rank_outlives_a_command_that_is_killed_in_the_middle_of_an_iteration(sharded):
    process = rehearsal(sharded, "--iterations", "1", "--scale", "10")
    started = []
    deadline = time.monotonic() + 120
    while len(started) < 6 and time.monotonic() < deadline:  # ranks, the process that forks them, the resource tracker
        time.sleep(0.5)
        started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 6
    time.sleep(5)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(started, timeout=20)
    running = [one for one in alive if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    for one in running:
        one.kill()
    assert running == []


def test_processor_time_of_others_is_what_neither_the_command_nor_its_ranks_used():
    cores = len(own_cores())
    start = Counters(clock=10.0, unused=100.0, own=1.0, helpers=5.0)
    end = Counters(clock=20.0, unused=100.0 + 10 * cores - 9.0, own=2.0, helpers=8.0)
    assert used_by_others(start, end) == pytest.approx(0.5)
    assert used_by_others(start, replace(end, helpers=80.0)) == 0.0
    assert used_by_others(None, end) is None
    assert used_by_others(start, start) is None


def test_free_memory_is_read_from_the_system_and_the_control_group(tmp_path):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    assert free_memory(proc, cgroup) is None
    proc.mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert free_memory(proc, cgroup) == 4000 * 1024
    (cgroup / "memory.max").write_text("3000000\n")
    (cgroup / "memory.current").write_text("2000000\n")
    (cgroup / "memory.stat").write_text("anon 1500000\ninactive_file 500000\n")
    assert free_memory(proc, cgroup) == 1_500_000
    (cgroup / "memory.max").write_text("max\n")
    assert free_memory(proc, cgroup) == 4000 * 1024


@pytest.mark.parametrize("group", ["job_7/step_0", "job_7", "."])
@pytest.mark.parametrize(
    ("line", "root", "limit", "used", "files"),
    [
        ("0::/{}", ".", "memory.max", "memory.current", "inactive_file"),
        ("4:memory:/{}", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ("4:cpu,memory:/{}", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_the_limit_of_a_group_around_the_process_counts_in_both_versions(
    tmp_path, line, root, limit, used, files, group
):
    """Slurm and containers on older systems limit a job by a group that is not the root."""
    proc, folder = tmp_path / "proc", tmp_path / "cgroup" / root / group
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("9:name=systemd:/other\n" + line.format("job_7/step_0") + "\n")
    (proc / "meminfo").write_text("MemAvailable: 4000 kB\n")
    folder.mkdir(parents=True)
    (folder / limit).write_text("3000000\n")
    (folder / used).write_text("2000000\n")
    (folder / "memory.stat").write_text(f"{files} 500000\n")
    assert free_memory(proc, tmp_path / "cgroup") == 1_500_000
    (folder / limit).write_text("9223372036854771712\n")  # how the first version says that there is none
    assert free_memory(proc, tmp_path / "cgroup") == 4000 * 1024


def test_a_disturbed_rehearsal_says_by_what():
    calm = {"cores": 2, "rank_cores": 0.1, "other_cores": 0.2}
    assert disturbance(calm) is None
    assert disturbance(calm | {"other_cores": None}) is None
    assert "other programs used 1.4 of this machine's 2 cores" in disturbance(calm | {"other_cores": 1.4})
    assert "the ranks used 1.2 of this machine's 2 cores" in disturbance(calm | {"rank_cores": 1.2})


SIZE = Size(num_ranks=4, iterations=3, iteration=5.0, bytes_scale=0.01, tensors=2**28)


def test_progress_is_lines_in_a_pipe_and_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr(screen, "REFRESH", 0.0)
    written = io.StringIO()
    clock = iter([0.0, 0.1, 6.0, 7.0, 12.0])
    with rehearsal_progress(Console(file=written, width=80), SIZE, clock=lambda: next(clock)) as report:
        for done in range(4):
            report(done)
    assert written.getvalue().splitlines() == [
        "rehearsed 1 of 3 iterations, about 10 s left",
        "rehearsed 3 of 3 iterations, done",
    ]
    drawn = io.StringIO()
    with rehearsal_progress(Console(file=drawn, width=80, force_terminal=True), SIZE) as report:
        for done in range(4):
            report(done)
    assert "4/4" in drawn.getvalue()


def shown_outcome(files):
    """A rehearsal of two iterations in which everything took 2 % longer than predicted."""
    plan, profile = read_plan(files[0]), read_profile(files[1])
    costs = costs_of(plan.train, plan.blocks, plan.mesh, setting_of(profile, plan.mesh, plan.batch))
    predicted = simulate(plan.train, scaled_costs(costs, 2))
    measured = []
    for factor in (1.02, 1.03):
        spans = tuple(
            replace(span, worker=plan.mesh.rank(group, span.worker), start=factor * span.start, end=factor * span.end)
            for group in range(2)
            for span in predicted.spans
        )
        measured.append(Timeline(num_workers=4, spans=spans, source="measured"))
    result = Rehearsed(predicted=predicted, measured=tuple(measured), cpu=(0.01, 0.01), mesh=plan.mesh)
    outcome = Outcome(result=result, size=SIZE, link=Link(1e-4, 2e9), scale=2.0, bytes_scale=0.25, others=0.125)
    return figures_of(outcome, plan, profile, costs)


@pytest.mark.parametrize("columns", [80, 160])
def test_the_screen_of_a_rehearsal(files, columns, monkeypatch):
    monkeypatch.setattr("diffusionpipe.cli.text.rehearsal_report.num_cores", lambda: 2)
    screen = io.StringIO()
    console = Console(file=screen, width=columns, highlight=False, force_terminal=True)
    console.print(str(SIZE))
    print_report(console, shown_outcome(files))
    console.print(f"warning: {disturbance({'cores': 2, 'rank_cores': 0.1, 'other_cores': 1.4})}")
    assert_screen(f"rehearse_{columns}", screen.getvalue())
