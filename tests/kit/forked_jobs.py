"""`diffusionpipe train` as tests/kit/nursery.py starts programs; a rank can be made to wait at a moment of its work."""

import json
import multiprocessing
import os
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import psutil
from kit.crew import start_fork_server
from kit.jobs import Job
from kit.moments import Moment
from kit.nursery import found_nursery, run_program

from diffusionpipe.trainer.recipe import Recipe


class ForkedCommand(Job):
    """`diffusionpipe train` with a recipe; a rank can be made to wait at a moment of its work."""

    def __init__(
        self, recipe: Recipe, *words: str, ranks: int = 2, moment: Moment | None = None, patches: str = ""
    ) -> None:
        """`patches`: a script that each rank runs before it starts; it sees its number as `rank`."""
        super().__init__(recipe, words, ranks)
        start_fork_server()
        wishes = {"moment": moment.to_json() if moment is not None else None, "patches": patches}
        (self.place / "wishes.json").write_text(json.dumps(wishes))
        (self.place / "err").touch()
        context = multiprocessing.get_context("forkserver")
        self._process: BaseProcess = context.Process(target=_launch, args=(str(self.place), self.arguments))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def rank_now(self, number: int) -> psutil.Process | None:
        with suppress(OSError, ValueError, psutil.NoSuchProcess):
            process = psutil.Process(int((self.place / f"rank-{number}.pid").read_text()))
            if os.readlink(f"/proc/{process.pid}/cwd") == str(self.place):
                return process
        return None


def _launch(place: str, arguments: list[str]) -> NoReturn:
    """The launcher's whole life."""
    os.chdir(place)
    for stream, target in (("out", 1), ("err", 2)):
        file = os.open(stream, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, target)
        os.close(file)
    found_nursery(_fulfil_wishes)
    run_program(["-m", "diffusionpipe", *arguments])


def _fulfil_wishes() -> None:
    """In a rank: leave its process's number, and be ready for its moment."""
    rank = int(os.environ["RANK"])
    draft = Path(f".rank-{rank}.pid")
    draft.write_text(str(os.getpid()))
    draft.replace(f"rank-{rank}.pid")
    wishes = json.loads(Path("wishes.json").read_text())
    if wishes["patches"]:
        exec(compile(wishes["patches"], "<patches>", "exec"), {"rank": rank})
    if wishes["moment"] is not None:
        Moment.from_json(wishes["moment"]).arm(rank, Path.cwd())
