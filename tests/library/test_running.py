"""What `dp.run` does beside steps: saves, errors, other sizes, and what it refuses."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import diffusionpipe as dp
from diffusionpipe.errors import CheckpointError, ConfigError, ModelError, PeerError
from diffusionpipe.ir.versions import Versions
from diffusionpipe.planner import Layout, build_plan

X, Y = torch.randn(8, 16), torch.randn(8, 4)


def mse(output, target):
    return (output - target).square().mean(1)


def make(width=16, *, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16), nn.Linear(16, 4)]
    return dp.pipeline(layers, loss=mse, example=(X, Y))


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module")
def plans(model):
    profile = dp.profile(model, analytic="cpu-1-thread", batch_sizes=(1, 2, 4))
    sizes = {
        "pipeline": {"stages": 2, "microbatches": 2},
        "copies": {"data_parallel": 2},
        "sharded": {"sharded": True},
        "owners": {"sharded": "optimizer"},
    }
    return {name: dp.plan(profile, cluster="cpux2", batch=8, **own).plan for name, own in sizes.items()}


def losses(model, plan, steps, folder=None, optimizer=torch.optim.AdamW):
    found = []
    with dp.run(model, plan, ranks="threads") as run:
        run.optimizer(optimizer, lr=0.05, clip_norm=0.5)
        for step in range(run.resume(folder) if folder else 0, steps):
            found.append(run.step(X, Y))
            if folder:
                run.save(folder, step + 1)
        return found, run.state_dict()


@pytest.mark.parametrize("name", ["pipeline", "copies", "sharded", "owners"])
def test_steps_are_those_of_torch_in_one_process(model, plans, name):
    found, state = losses(model, plans[name], 4)
    alone = make()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.05)
    expected = []
    for _ in range(4):
        optimizer.zero_grad()
        expected.append((loss := alone.loss(X, Y)).item())
        loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] < found[0]
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5)


def test_the_model_keeps_its_weights_until_it_takes_the_runs(model, plans):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    _, state = losses(model, plans["pipeline"], 2)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    other = make(seed=3)
    other.load_state_dict(state)
    assert torch.equal(other.state_dict()["3.weight"], state["3.weight"])


@pytest.mark.parametrize(
    ("first", "then"), [("pipeline", "copies"), ("copies", "sharded"), ("sharded", "owners"), ("owners", "pipeline")]
)
def test_a_save_is_resumed_by_another_layout(model, plans, tmp_path, first, then):
    whole, _ = losses(model, plans[first], 6)
    begun, _ = losses(model, plans[first], 3, tmp_path)
    rest, _ = losses(model, plans[then], 6, tmp_path)
    assert begun == whole[:3]
    assert rest == pytest.approx(whole[3:], rel=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000006"]


def test_a_save_that_was_cut_off_is_not_read(model, plans, tmp_path):
    begun, _ = losses(model, plans["pipeline"], 3, tmp_path)
    shutil.copytree(tmp_path / "step-00000003", tmp_path / ".step-00000004")
    (tmp_path / "step-00000009").mkdir()  # without save.json
    with dp.run(model, plans["pipeline"], ranks="threads") as run:
        run.optimizer(torch.optim.AdamW, lr=0.05)
        assert run.resume(tmp_path) == 3
        assert run.timeline().source == "measured"  # that of the save
        run.save(tmp_path, 4)
    assert not (tmp_path / ".step-00000004").exists()
    assert len(begun) == 3


def damage_tensors(place):
    path = next(place.glob("rank-*.safetensors"))
    path.write_bytes(path.read_bytes()[:40])


def other_version(place):
    path = place / "save.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 9}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (damage_tensors, "cannot be read"),
        (other_version, "reads diffusionpipe-save version 1"),
        (lambda place: (place / "save.json").write_text("{"), "save.json: cannot be read"),
        (lambda place: (place / "rank-1.safetensors").unlink(), "rank-1.safetensors: cannot be read"),
    ],
)
def test_a_damaged_save_is_refused_by_name(model, plans, tmp_path, change, says):
    losses(model, plans["pipeline"], 1, tmp_path)
    change(tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match=says):
        losses(model, plans["pipeline"], 2, tmp_path)


def test_a_save_of_another_model_or_optimizer_is_refused(model, plans, tmp_path):
    losses(model, plans["pipeline"], 1, tmp_path)
    with pytest.raises(CheckpointError, match="was saved with AdamW, and the run has SGD"):
        losses(model, plans["pipeline"], 2, tmp_path, torch.optim.SGD)
    wide = make(width=8)
    plan = dp.plan(dp.profile(wide, analytic="cpu-1-thread", batch_sizes=(1, 2)), cluster="cpux2", batch=8).plan
    with pytest.raises(CheckpointError, match=r"different model: 0.weight, \(8, 16\), has the shape \(16, 16\)"):
        losses(wide, plan, 2, tmp_path)


def test_any_number_of_samples_is_evaluated_and_predicted(model, plans):
    output = model.module
    for plan in plans.values():
        with dp.run(model, plan, ranks="threads") as run:
            for count in (1, 8, 13):
                x, y = torch.randn(count, 16), torch.randn(count, 4)
                assert run.evaluate(x, y) == pytest.approx(float(model.loss(x, y).detach()), rel=1e-5)
                hidden = x
                for child in output.children():
                    hidden = child(hidden)
                torch.testing.assert_close(run.predict(x), hidden.detach())
            assert run.rows == range(8)


class Late(nn.Module):
    is_broken = False

    def forward(self, hidden):
        if Late.is_broken:
            raise ValueError("too much for me")
        return hidden


def test_an_error_of_one_rank_ends_all_and_is_raised_here(monkeypatch):
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Linear(16, 16), Late(), nn.Linear(16, 4)]
    model = dp.pipeline(layers, loss=mse, example=(X, Y))
    profile = dp.profile(model, analytic="cpu-1-thread", batch_sizes=(1, 2))
    plan = dp.plan(profile, cluster="cpux2", batch=8, stages=2, microbatches=4).plan
    with dp.run(model, plan, ranks="threads") as run:
        run.step(X, Y)
        monkeypatch.setattr(Late, "is_broken", True)
        with pytest.raises(ValueError, match="too much for me"):
            run.step(X, Y)
        with pytest.raises(PeerError, match=r"the run has ended \(too much for me\); start another one"):
            run.step(X, Y)


def test_a_closed_run_is_over(model, plans):
    with dp.run(model, plans["copies"], ranks="threads") as run:
        run.step(X, Y)
    with pytest.raises(PeerError, match="it was closed"):
        run.step(X, Y)


def test_what_is_printed_is_printed_once(model, plans, capsys):
    with dp.run(model, plans["pipeline"], ranks="threads") as run:
        run.print("step", 3, sep="=")
    assert capsys.readouterr().out == "step=3\n"


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda run: run.step(X[:4], Y[:4]), "a batch of 4 samples, but the plan is for 8; give as many, or plan for"),
        (lambda run: run.step(X), "a batch of 1 tensors, but the model takes 2: input, target"),
        (lambda run: run.predict(X, Y), "a batch of 2 tensors, but the model takes 1: input"),
        (lambda run: run.timeline(), "no step has been measured yet"),
        (lambda run: run.set(lr=1), "there is no optimizer"),
        (lambda run: run.save("x", -1), "step=-1: give the number of steps"),
        (lambda run: run.optimizer("AdamW"), "'AdamW' is not an optimizer; give a class of torch.optim"),
        (lambda run: run.optimizer(torch.optim.AdamW, speed=1), "AdamW: .*speed"),
        (lambda run: run.optimizer(torch.optim.SGD, lr=-1), "SGD: Invalid learning rate"),
        (lambda run: run.optimizer(torch.optim.LBFGS), "LBFGS calls the model again"),
        (lambda run: run.optimizer(torch.optim.SGD, lr=1, clip_norm=0), "clip_norm=0: give a number above 0"),
    ],
)
def test_what_a_run_cannot_do_is_refused_and_the_run_goes_on(model, plans, act, says):
    with dp.run(model, plans["pipeline"], ranks="threads") as run:
        with pytest.raises(ConfigError, match=says):
            act(run)
        run.step(X, Y)


def test_options_of_the_optimizer_can_change(model, plans):
    with dp.run(model, plans["pipeline"], ranks="threads") as run:
        run.optimizer(torch.optim.SGD, lr=0.1)
        run.set(lr=0.0)
        assert run.step(X, Y) == run.step(X, Y)


def test_a_plan_of_other_layers_or_without_a_flush_is_refused(model, plans):
    torch.manual_seed(0)
    longer = dp.pipeline([*model.module.children(), nn.Linear(4, 4)], loss=mse, example=(X, Y))
    with pytest.raises(ConfigError, match=r"the plan is for 5 layers and the model has 6: only the model has 4.Linear"):
        dp.run(longer, plans["pipeline"])
    layout = Layout(batch=8, stages=2, microbatches=2, versions=Versions.STASHED)
    with pytest.raises(ConfigError, match="trains without a flush"):
        dp.run(model, build_plan(model.description, layout))


@pytest.mark.parametrize(
    ("ranks", "given", "says"),
    [
        ("gpus", None, 'ranks=\'gpus\': use "threads" or "processes"'),
        (None, "plan", "dp.run takes a plan, not a str; give the .plan of what dp.plan returns"),
        ("processes", None, "takes a function that returns the model"),
    ],
)
def test_other_arguments_are_refused(model, plans, ranks, given, says):
    with pytest.raises(ConfigError, match=says):
        dp.run(model, given or plans["pipeline"], ranks=ranks)


def test_a_function_that_processes_cannot_import_is_refused(plans):
    with pytest.raises(ConfigError, match=r"<lambda> of .* cannot be imported by other processes"):
        dp.run(lambda: make(), plans["pipeline"], ranks="processes")
    with pytest.raises(ConfigError, match=r"dp.run takes a model, not a function; make one with dp.pipeline"):
        dp.run(make, plans["pipeline"], ranks="threads")


def test_other_numbers_of_ranks_are_refused_under_torchrun(model, plans, monkeypatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="the plan is for 2 ranks, but 3 were started; start 2 with torchrun"):
        dp.run(model, plans["pipeline"])
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ConfigError, match="MASTER_PORT is not set"):
        dp.run(model, plans["pipeline"])


def test_a_batch_of_other_tensors_names_them(model, plans):
    with dp.run(model, plans["copies"]) as run, pytest.raises(ModelError, match="input has the shape"):
        run.step(X[:, :3], Y)


def test_without_torch_the_names_that_need_it_say_so():
    program = """
import sys
sys.modules["torch"] = None
import diffusionpipe as dp
dp.simulate(dp.schedule("1f1b", ranks=2, microbatches=2))
for name in ("run", "pipeline", "layer", "profile"):
    try:
        getattr(dp, name)
    except dp.ConfigError as error:
        print(error)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [
        f"dp.{name} needs torch, which cannot be imported; install it (pip install torch)"
        for name in ("run", "pipeline", "layer", "profile")
    ]


def test_a_run_under_autocast_is_near_one_in_float32(model):
    profile = dp.profile(model, analytic="cpu-1-thread", precision="bfloat16", batch_sizes=(1, 2))
    plan = dp.plan(profile, cluster="cpux2", batch=8, stages=2, microbatches=2).plan
    with dp.run(model, plan, ranks="threads", precision="bfloat16") as run:
        narrow = run.step(X, Y)
        assert all(gradient.dtype == torch.float32 for gradient in run.gradients().values())
    expected = float(model.loss(X, Y).detach())
    assert narrow != expected
    assert narrow == pytest.approx(expected, rel=0.02)
