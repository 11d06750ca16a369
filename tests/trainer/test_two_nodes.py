"""docs/gpu.md's commands for two nodes, on two network namespaces with names of their own."""

import os
import signal
import subprocess
import time

import pytest
from kit.nodes import may_have_nodes, two_nodes
from kit.tiny_runs import losses_of, recipe_of, save_dit, save_pictures

from diffusionpipe.trainer.recipe import recipe_to_toml

pytestmark = pytest.mark.slow

TORCHRUN = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d")
"""torchrun as docs/gpu.md starts it."""
LIMIT = 200.0


@pytest.fixture
def nodes(tmp_path):
    if not may_have_nodes():
        pytest.skip("this machine allows no network namespaces")
    with two_nodes(tmp_path) as both:
        yield both


def start(nodes, *arguments):
    words = [*TORCHRUN, "--rdzv-endpoint", "node-0:29500", "-m", "diffusionpipe", *arguments]
    return [node.start(words, os.environ | {"NO_COLOR": "1"}) for node in nodes]


def ended(process):
    """Exit status and output."""
    try:
        output = process.communicate(timeout=LIMIT)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(process.communicate()[0])
    return process.returncode, output


def let_go(process):
    """End torchrun on the node that does not hold its store: it may wait for minutes after the other node has left."""
    process.terminate()
    return process.communicate()[0]


def test_two_nodes_train_stop_and_go_on(nodes, tmp_path):
    recipe = recipe_of(
        save_dit(tmp_path / "dit"), save_pictures(tmp_path / "data"), tmp_path / "run", training={"steps": 100_000}
    )
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(recipe))
    both = start(nodes, "train", str(tmp_path / "recipe.toml"))
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + LIMIT
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert [process.poll() for process in both] == [None, None], [process.communicate()[0] for process in both]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    both[1].send_signal(signal.SIGTERM)
    status, output = ended(both[0])
    let_go(both[1])
    steps = len(losses_of(tmp_path / "run"))
    assert status == 1, "torchrun's own, for any status but 0"
    assert f"stopped step={steps} reason=requested exit_status=75 resume=latest" in output
    both = start(nodes, "train", str(tmp_path / "recipe.toml"), "--resume", "auto", f"training.steps={steps + 2}")
    status, output = ended(both[0])
    let_go(both[1])
    assert status == 0, output
    assert "ranks=2 nodes=2" in output
    assert f"steps={steps + 2} from_step={steps}" in output
    assert len(losses_of(tmp_path / "run")) == steps + 2


def test_doctor_names_a_folder_that_is_not_shared(nodes, tmp_path):
    (tmp_path / "runs").mkdir()
    nodes[1].hide(tmp_path / "runs")
    both = start(nodes, "doctor", "--folder", str(tmp_path / "runs"))
    status, output = ended(both[0])
    let_go(both[1])
    assert status == 1
    failed = [line for line in output.splitlines() if line.startswith("fail")]
    assert len(failed) == 1, output
    assert "is not the same folder for all ranks: node-1 (ranks 1) does not share it with rank 0 on node-0" in failed[0]
