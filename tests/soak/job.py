"""A real job of two ranks that does everything a run can do, for as long as it is let."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
from kit.tiny_runs import recipe_of, save_pictures, save_stable_diffusion

from diffusionpipe.trainer.recipe import Recipe, recipe_to_toml

RANKS = 2
DRAWN = 200
"""A picture every so many steps; everything else is done more often."""
WARM_UP = 2 * DRAWN + 50
"""Steps after which everything was done twice, so that its memory is there."""
END: float = 120.0
"""Seconds in which a stopped job saves and ends."""


def recipe_in(folder: Path, drawn: int) -> Recipe:
    """A run that validates, draws and saves again and again, with data workers and more steps than it will do."""
    save_stable_diffusion(folder / "model")
    held_out = save_pictures(folder / "held-out", count=6, seed=1)
    return recipe_of(
        folder / "model",
        save_pictures(folder / "data"),
        folder / "run",
        data={"workers": 1, "validation": str(held_out)},
        training={"steps": 10_000_000},
        optimizer={"learning_rate": 1e-5},
        validation={"every": 50, "samples": 4},
        sampling={"every": drawn, "steps": 2, "prompts": ("a b", "c")},
        checkpoint={"every": 25, "keep": 2, "asynchronous": True},
        run={"patience": 60.0},  # other programs may keep the machine busy
    )


class Job:
    """The job, which draws a picture every `drawn` steps; its processes by name."""

    def __init__(self, folder: Path, *, drawn: int = DRAWN) -> None:
        self.recipe = recipe_in(folder, drawn)
        file = folder / "recipe.toml"
        file.write_text(recipe_to_toml(self.recipe), encoding="utf-8")
        self.log = folder / "log"
        words = ["-m", "diffusionpipe", "train", str(file), "--device", "cpu", "--ranks", str(RANKS)]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *words], stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def processes(self) -> dict[str, psutil.Process]:
        """The launcher, the ranks and their data workers."""
        launcher = psutil.Process(self._process.pid)
        found = {"launcher": launcher}
        for child in launcher.children(recursive=True):
            with suppress(psutil.Error):
                rank = child.environ().get("RANK", "?")
                is_rank = "diffusionpipe" in child.cmdline() and child.ppid() == launcher.pid
                found[f"rank {rank}" if is_rank else f"worker of rank {rank}"] = child
        return found

    def end(self) -> int:
        """Ask it to save and stop; its exit status."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=END)
        finally:
            self._process.kill()
