"""Two ranks that are killed at random instants while they save: no checkpoint that was complete is lost."""

import os
import random
import signal
import socket
import time

import pytest
from kit.crew import crew_of
from kit.forked import Forked
from kit.tiny_runs import losses_of, recipe_of, save_dit, save_pictures, tensors_of, train

from diffusionpipe.trainer.checkpoints.checkpoint import verify
from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest

STEPS = 400
KILLS = 5
PATIENCE = 120.0
SCRIPT = """
import os, random, time
from pathlib import Path
from unittest import mock
from kit.tiny_runs import recipe_of, train
from diffusionpipe.runtime.job.process_group import joined, leave
from diffusionpipe.runtime.job.membership import membership
from diffusionpipe.trainer.checkpoints.checkpoint import Saving

member = membership(os.environ)
write, publish = Saving.write, Saving.publish

def slowly(inner):
    def slow(*arguments):
        time.sleep(random.random() / 5)
        result = inner(*arguments)
        time.sleep(random.random() / 5)
        return result
    return slow

try:
    with joined(member, device="cpu") as job:
        recipe = recipe_of(Path({model!r}), Path({data!r}), Path({folder!r}), **{sections!r})
        with mock.patch.object(Saving, "write", slowly(write)), mock.patch.object(Saving, "publish", slowly(publish)):
            train(job, recipe, "auto")
except BaseException as error:
    leave(error, member)
"""


def started(script):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    environment = os.environ | {name: str(value) for name, value in job.items()} | {"TORCH_CPP_LOG_LEVEL": "FATAL"}
    return [Forked(script, environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]


def is_saving(folder):
    return any((folder / "checkpoints").glob(".step-*.writing"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_while_saving_lose_nothing(tmp_path):
    model, data, chance = save_dit(tmp_path / "model"), save_pictures(tmp_path / "data"), random.Random(0)
    sections = {"training": {"steps": STEPS}, "checkpoint": {"every": 3, "keep": 2, "asynchronous": True}}
    folder = tmp_path / "run"
    script = SCRIPT.format(model=str(model), data=str(data), folder=str(folder), sections=sections)
    complete, leftovers = 0, 0
    for _ in range(KILLS):
        ranks, begun = started(script), max(losses_of(folder), default=0) if folder.exists() else 0
        try:
            deadline = time.monotonic() + PATIENCE
            while not (folder.exists() and max(losses_of(folder), default=0) > begun and is_saving(folder)):
                assert time.monotonic() < deadline
                assert all(rank.returncode is None for rank in ranks), [rank.communicate() for rank in ranks]
                time.sleep(0.01)
            time.sleep(chance.random() / 3)
            os.kill(chance.choice(ranks).pid, signal.SIGKILL)
            for rank in ranks:
                rank.wait(timeout=30)
        finally:
            for rank in ranks:
                rank.kill()
        leftovers += is_saving(folder)
        found = latest(folder)
        if found is not None:
            verify(found)
        step = int(found.name.removeprefix("step-")) if found is not None else 0
        assert step >= complete
        complete = step
    assert leftovers >= 1, "no kill has met a save"
    steps = complete + 4
    finished = recipe_of(model, data, folder, **sections | {"training": {"steps": steps}})
    expected = recipe_of(model, data, tmp_path / "expected", training={"steps": steps})
    with crew_of(2) as crew:
        assert crew.run(train, finished, "auto") == [steps, steps]
        assert crew.run(train, expected) == [steps, steps]
    assert losses_of(folder) == losses_of(tmp_path / "expected")
    found, wanted = tensors_of(latest(folder)), tensors_of(latest(tmp_path / "expected"))
    assert all(found[name].equal(tensor) for name, tensor in wanted.items())
