"""docs/library.md runs, and its models train as in one process under each kind of schedule."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import diffusionpipe as dp
from diffusionpipe.costs.cluster import of_ranks
from diffusionpipe.costs.clusters import load_cluster

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
DEFINITIONS = [block for block in BLOCKS if re.match(r"(import torch|class |NODES)", block)]
BATCH = 8


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page's models as a module that other processes can import, in float64."""
    folder = tmp_path_factory.mktemp("page")
    text = "\n\n".join(["import diffusionpipe as dp", *DEFINITIONS])
    text = text.replace(
        "    torch.manual_seed(0)\n", "    torch.set_default_dtype(torch.float64)\n    torch.manual_seed(0)\n"
    )
    (folder / "page_models.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
    before = torch.get_default_dtype()
    yield importlib.import_module("page_models")
    sys.path.remove(str(folder))
    del sys.modules["page_models"]
    torch.set_default_dtype(before)


@pytest.mark.slow
def test_the_page_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(BLOCKS), str(PAGE), "exec"), {"__name__": "page"})
    assert {"timeline.png", "trace.json", "profile.json", "measured.png", "saved"} <= {
        p.name for p in tmp_path.iterdir()
    }
    assert "torch.Size([16, 8, 23])" in capsys.readouterr().out


def own_orders(ranks, microbatches):
    """All forwards, then the backwards in the order of the last micro-batch first."""
    backwards = range(microbatches - 1, -1, -1)
    return [[f"{r}F{i}" for i in range(microbatches)] + [f"{r}B{i}" for i in backwards] for r in range(ranks)]


def batch_of(model):
    torch.manual_seed(1)
    return [
        torch.randint(3, (BATCH, *s.shape)) if s.dtype == "int64" else torch.rand(BATCH, *s.shape)
        for s in model.graph.inputs
    ]


def plan_of(model, schedule, stages):
    """A plan of these stages; those of translation have replicas (1, 1, 2)."""
    profile = dp.profile(model, analytic="cpu-1-thread", batch_sizes=(1, 2, 4))
    if stages == 3:
        order = dp.schedule(schedule, ranks=3, microbatches=4)
        return dp.plan(profile, cluster="cpux2:2", batch=BATCH, schedule=order, replicas=(1, 1, 2))
    order = dp.schedule(schedule, ranks=2, microbatches=4)
    return dp.plan(profile, cluster="cpux2", batch=BATCH, schedule=order)


def assert_trains_as_one_process(model, batch, loss, gradients):
    expected = model.loss(*batch)
    expected.backward()
    assert abs(loss - expected.item()) <= 1e-12 * abs(expected.item())
    assert gradients.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert (gradients[name] - parameter.grad).norm() <= 1e-12 * parameter.grad.norm(), name


SCHEDULES = ("1f1b", "zb-h1", "zb-v", own_orders)
"""The graph network is cheap, so it stands for all in the quick tests."""


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["1f1b", "zb-h1", "zb-v", "own"])
@pytest.mark.parametrize(
    "name", ["graphs", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt", "translation"))]
)
def test_a_model_of_the_page_trains_as_in_one_process(page, name, schedule, tmp_path):
    model = getattr(page, name)()
    choice = plan_of(model, schedule, 3 if name == "translation" and schedule != "zb-v" else 2)
    batch = batch_of(model)
    with dp.run(model, choice.plan, ranks="threads") as run:
        loss, gradients = run.step(*batch), run.gradients()
        measured = run.timeline()
    assert_trains_as_one_process(model, batch, loss, gradients)
    assert measured.compare(choice).ratio > 0


IN_PROCESSES = [("graphs", "1f1b"), ("gpt", "zb-v"), ("translation", "zb-h1"), ("translation", own_orders)]
"""Each model and each schedule: processes run the program that threads run with all pairs above."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), IN_PROCESSES)
def test_a_model_of_the_page_trains_in_processes_as_in_one(page, name, schedule):
    model = getattr(page, name)()
    choice = plan_of(model, schedule, 3 if name == "translation" and schedule != "zb-v" else 2)
    batch = batch_of(model)
    with dp.run(getattr(page, name), choice.plan, ranks="processes") as run:
        loss, gradients = run.step(*batch), run.gradients()
        assert run.timeline().source == "measured"
    assert_trains_as_one_process(model, batch, loss, gradients)


def plan_of_towers(model):
    """Its plan on three ranks: each tower is a stage, and so is the rest."""
    profile = dp.profile(model, analytic="cpu-1-thread", batch_sizes=(1, 2, 4))
    cluster = of_ranks(load_cluster("cpux2:2"), (0, 1, 2))
    choice = dp.plan(profile, cluster=cluster, batch=BATCH, schedule="graphpipe", stages=3, microbatches=4)
    assert choice.plan.blocks[:2] == (("0.Tower", "2.Tower"), ("1.Tower", "3.Tower"))
    edges = {(edge.producer, edge.consumer) for edge in choice.plan.train.placement.pipelines[0].edges}
    assert edges & {(0, 1), (0, 2), (1, 2)} == {(0, 2), (1, 2)}
    assert "3 stages (2 in a row)" in choice.why
    return choice.plan


def test_towers_beside_each_other_train_as_in_one_process(page):
    model = page.towers()
    batch = batch_of(model)
    with dp.run(model, plan_of_towers(model), ranks="threads") as run:
        loss, gradients = run.step(*batch), run.gradients()
    assert_trains_as_one_process(model, batch, loss, gradients)


@pytest.mark.slow
def test_towers_beside_each_other_train_in_processes_as_in_one(page):
    model = page.towers()
    batch = batch_of(model)
    with dp.run(page.towers, plan_of_towers(model), ranks="processes") as run:
        loss, gradients = run.step(*batch), run.gradients()
    assert_trains_as_one_process(model, batch, loss, gradients)


@pytest.mark.slow
def test_a_script_that_starts_processes_without_a_guard_is_told_so(page, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(page.__file__).parent)!r})\n"
        "import diffusionpipe as dp, page_models\n"
        "profile = dp.profile(page_models.graphs(), analytic='cpu-1-thread', batch_sizes=(1, 2))\n"
        "plan = dp.plan(profile, cluster='cpux2', batch=4, data_parallel=2).plan\n"
        "dp.run(page_models.graphs, plan, ranks='processes')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith('it must call dp.run under if __name__ == "__main__": alone.')


def test_tied_weights_are_trained_where_both_layers_are_on_one_rank(page):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    embed, head = page.Embed(), torch.nn.Linear(page.WIDTH, page.WORDS, bias=False)
    head.weight = embed.words.weight
    tokens, following = torch.randint(page.WORDS, (2, BATCH, page.LENGTH))
    layers = [embed, *(page.Block() for _ in range(4)), head]
    model = dp.pipeline(layers, loss=page.per_sample, example=(tokens, following))
    with pytest.raises(dp.ConfigError, match=r"0.Embed and 5.Linear train the same parameter model.0.words.weight"):
        plan_of(model, "1f1b", 2)
    with dp.run(model, plan_of(model, "zb-v", 2).plan, ranks="threads") as run:
        loss, gradients = run.step(tokens, following), run.gradients()
        assert torch.equal(run.state_dict()["5.weight"], embed.words.weight)
    assert_trains_as_one_process(model, (tokens, following), loss, gradients)
