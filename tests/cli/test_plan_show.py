import json
from dataclasses import replace

import pytest
from kit.screen_files import assert_screen
from planner import synthetic

from diffusionpipe.cli import main
from diffusionpipe.costs.files import write_cluster, write_profile
from diffusionpipe.ir import Sharded
from diffusionpipe.ir.files import read_plan, write_plan
from diffusionpipe.planner import Layout, build_plan
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.search.proposal import predict, pricing_of

PARAMETERS = [10**7] * 6


def profile_of():
    profile = synthetic.chain([0.01, 0.02, 0.01, 0.01, 0.02, 0.01], parameters=PARAMETERS, elements=10**5, frozen=0.01)
    return replace(profile, update=1e-9)


@pytest.fixture
def folder(tmp_path):
    """A plan of two stages on two copies, with the profile and the cluster in another folder."""
    plan_into(tmp_path, stages=2, data_parallel=2, microbatches=4)
    return tmp_path


def plan_into(folder, **sizes):
    (folder / "known").mkdir(exist_ok=True)
    profile, cluster = profile_of(), synthetic.cluster(4)
    write_profile(profile, folder / "known/profile.json")
    write_cluster(cluster, folder / "known/cluster.json")
    setting = Setting(profile=profile, cluster=cluster, workload=synthetic.workload(16))
    plan = build_plan(profile.graph, Layout(batch=16, **sizes), pricing=pricing_of(setting))
    write_plan(plan, folder / "plan.json")


def shown(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as exit_info:
        main(["plan", "show", *map(str, arguments)])
    assert (exit_info.value.code or 0) == code
    output = capsys.readouterr()
    return output.err if code else output.out


def known(folder):
    return "--profile", folder / "known/profile.json", "--cluster", folder / "known/cluster.json"


@pytest.mark.parametrize("width", [80, 160])
def test_the_screen_without_a_profile(folder, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert_screen(f"plan_show_without_profile_{width}", shown(capsys, folder / "plan.json"))


@pytest.mark.parametrize("width", [80, 160])
def test_the_screen_with_the_files_of_a_run_folder(folder, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    (folder / "plan.json").rename(folder / "known/plan.json")
    screen = shown(capsys, folder / "known/plan.json")
    assert all(len(line) <= width for line in screen.splitlines())
    assert_screen(f"plan_show_{width}", screen)


def test_the_screen_of_sharded_copies_calls_them_so(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    plan_into(folder, stages=1, data_parallel=4, microbatches=2, sharded=Sharded.ALL, buckets=3)
    (folder / "plan.json").rename(folder / "known/plan.json")
    screen = shown(capsys, folder / "known/plan.json")
    assert screen.startswith("sharded data parallel, 4 copies, 2 micro-batches, 3 buckets; batch 16, 4 ranks")
    assert "1f1b" not in screen
    assert_screen("plan_show_sharded_80", screen)


def test_times_and_memory_are_those_of_the_simulator(folder, capsys):
    plan, profile = read_plan(folder / "plan.json"), profile_of()
    screen = shown(capsys, folder / "plan.json", *known(folder))
    workload = synthetic.workload(16)
    setting = Setting(profile=profile, cluster=synthetic.cluster(4), workload=workload)
    proposal = predict(setting, plan.train, plan.blocks, plan.mesh)
    assert proposal.update > 0
    times = f"step {proposal.step * 1e3:.1f} ms: iteration {proposal.iteration * 1e3:.1f} ms, then update"
    assert f"{times} {proposal.update * 1e3:.1f} ms" in screen
    for use in proposal.memory:
        assert f"{use.total / 2**20:.2f}" in screen


def test_without_a_profile_no_time_is_invented(folder, capsys):
    screen = shown(capsys, folder / "plan.json")
    assert "no profile: times are equal units" in screen
    assert " ms" not in screen
    assert "GiB" not in screen
    assert "MiB" not in screen


def test_every_stage_is_shown_with_its_layers(folder, capsys):
    plan = read_plan(folder / "plan.json")
    rows = [line.split() for line in shown(capsys, folder / "plan.json").splitlines()]
    for block in plan.blocks[:-1]:
        assert any(row[-3:] == [str(len(block)), block[0], block[-1]] for row in rows)


def test_a_profile_of_another_model_beside_the_plan_is_named_and_not_used(folder, capsys):
    write_profile(synthetic.chain([0.1], parameters=[10], elements=10), folder / "profile.json")
    with pytest.raises(SystemExit):
        main(["plan", "show", str(folder / "plan.json")])
    output = capsys.readouterr()
    assert "profile.json was made for another model and is not used" in output.err
    assert "no profile" in output.out


def test_the_prediction_beside_the_plan_is_used_where_there_is_no_profile(folder, capsys):
    from diffusionpipe.workflows.planning.prediction_file import write_prediction

    plan = read_plan(folder / "plan.json")
    setting = Setting(profile=profile_of(), cluster=synthetic.cluster(4), workload=synthetic.workload(16))
    proposal = predict(setting, plan.train, plan.blocks, plan.mesh)
    write_prediction(proposal.timeline, folder / "plan.json")
    screen = shown(capsys, folder / "plan.json")
    assert "times: the prediction beside the plan" in screen
    assert f"iteration {proposal.iteration * 1e3:.1f} ms" in screen


def test_pictures_come_with_the_summary(folder, capsys):
    names = {option: folder / f"picture.{option}" for option in ("png", "svg")}
    options = [word for option, path in names.items() for word in (f"--{option}", path)]
    screen = shown(capsys, folder / "plan.json", *known(folder), *options, "--perfetto", folder / "trace.json")
    assert screen.startswith("1f1b, 2 stages x 2 groups, 4 micro-batches; batch 16, 4 ranks")
    assert names["png"].read_bytes().startswith(b"\x89PNG")
    assert "<svg" in names["svg"].read_text()
    assert (folder / "trace.json").stat().st_size > 100


def test_a_plan_edited_into_something_illegal_is_refused(folder, capsys):
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace("0F0 ", "", 1))
    assert "worker 0: 0F0" in shown(capsys, folder / "plan.json", code=2)


def test_a_plan_whose_stage_holds_a_block_that_is_not_there_is_refused_by_name(folder, capsys):
    data = json.loads((folder / "plan.json").read_text())
    data["blocks"] = data["blocks"][:-1]
    (folder / "plan.json").write_text(json.dumps(data))
    block = shown(capsys, folder / "plan.json", *known(folder), code=2)
    assert f"{folder}/plan.json: the schedule is illegal" in block
    assert "the plan has 2 blocks" in block


def test_a_named_profile_of_another_model_is_refused(folder, capsys):
    write_profile(synthetic.unet(), folder / "known/profile.json")
    assert "was made for another model" in shown(capsys, folder / "plan.json", *known(folder), code=2)


def test_a_profile_with_the_same_layers_in_another_order_is_refused(folder, capsys):
    plan = read_plan(folder / "plan.json")
    longest = max(plan.blocks[:-1], key=len)
    blocks = tuple(block[::-1] if block == longest else block for block in plan.blocks)
    write_plan(replace(plan, blocks=blocks), folder / "plan.json")
    message = " ".join(shown(capsys, folder / "plan.json", *known(folder), code=2).split())
    assert f"its layers from {longest[-1]} on come in another order than the plan's" in message


def test_a_cluster_with_fewer_devices_than_the_plan_is_refused(folder, capsys):
    write_cluster(synthetic.cluster(1), folder / "known/cluster.json")
    message = " ".join(shown(capsys, folder / "plan.json", *known(folder), code=2).split())
    assert f"{folder / 'plan.json'} is for 4 ranks, but cluster" in message


def test_a_profile_without_a_cluster_is_refused(folder, capsys):
    assert "--profile and --cluster need each other" in shown(capsys, folder / "plan.json", *known(folder)[:2], code=2)


def test_a_plan_that_does_not_fit_is_shown_and_refused_with_what_it_needs(folder, capsys):
    cluster = synthetic.cluster(4)
    small = replace(cluster, devices=tuple(replace(device, memory=10**8) for device in cluster.devices))
    write_cluster(small, folder / "known/cluster.json")
    error = shown(capsys, folder / "plan.json", *known(folder), code=2)
    assert "rank 0 needs" in error
    assert "its device has 95.4 MiB" in error
    assert "diffusionpipe plan --cluster" in error


def test_a_profile_of_before_shows_plans_with_whole_backwards_alone(folder, capsys):
    path = folder / "known/profile.json"
    old = json.loads(path.read_text())
    old["version"] = 2
    for layer in old["layers"]:
        layer.pop("kept", None)
        layer.pop("kept_reads", None)
    path.write_text(json.dumps(old))
    assert "memory of each rank" in shown(capsys, folder / "plan.json", *known(folder))
    plan_into(folder, stages=2, data_parallel=2, microbatches=4, schedule="zb-h1")
    path.write_text(json.dumps(old))
    error = shown(capsys, folder / "plan.json", *known(folder), code=2)
    assert f"diffusionpipe profile RECIPE --out {path}" in error
