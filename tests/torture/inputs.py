"""Models, pictures and recipes of the tortured runs, and the uninterrupted runs that they are compared with."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from kit.forked_jobs import ForkedCommand
from kit.tiny_runs import losses_of, recipe_of, save_dit, save_pictures, save_stable_diffusion, tensors_of
from torture.findings import LostError, UnequalError

from diffusionpipe.trainer.checkpoints.checkpoint import verify
from diffusionpipe.trainer.checkpoints.checkpoint_folder import latest, saved_checkpoints
from diffusionpipe.trainer.recipe import Recipe

STEPS = 12
SAVED = (4, 8, 12)
"""Steps with a checkpoint; validation comes just before each."""
DRAWN = (6, 12)
METRICS = ("loss", "gradient_norm", "learning_rate", "validation_loss")


@dataclass(frozen=True)
class Flavour:
    """A kind of run."""

    model: str
    ranks: int
    sections: Mapping[str, Mapping[str, object]]
    tolerance: float = 0.0
    """Relative, of metrics; 0: every bit is compared, also of weights, pictures and export."""


EXACT = {"training": {"precision": "float64"}}
SHORT = {
    "training": {"steps": 6},
    "checkpoint": {"every": 2},
    "validation": {"every": 6},
    "sampling": {"every": "none"},
}
LONG = {"training": {"steps": 40}, "validation": {"every": 20}, "sampling": {"every": 20}}
WINDOWS = {"training": {"clip": "block"}}
FLAVOURS = {
    "stages": Flavour("sd", 2, {"pipeline": {"stages": 2}}),
    "three": Flavour("dit", 3, {"pipeline": {"stages": 3}}),
    "sharded": Flavour("dit", 2, {"pipeline": {"data_parallel": 2, "sharded": True}}),
    "workers": Flavour("dit", 2, {"pipeline": {"stages": 2}, "data": {"workers": 1}}),
    "asynchronous": Flavour("dit", 2, {"pipeline": {"stages": 2}, "checkpoint": {"asynchronous": True}}),
    "stashed": Flavour("dit", 2, WINDOWS | {"pipeline": {"stages": 2, "versions": "stashed"}}),
    "delayed": Flavour("dit", 2, WINDOWS | {"pipeline": {"stages": 2, "versions": "delayed"}}),
    "newest": Flavour("dit", 2, WINDOWS | {"pipeline": {"stages": 2, "versions": "newest"}}),
    "short": Flavour("dit", 2, SHORT | {"pipeline": {"stages": 2}}),
    "long": Flavour("dit", 2, LONG | {"pipeline": {"stages": 2}}),
    "long sharded": Flavour("dit", 2, LONG | {"pipeline": {"data_parallel": 2, "sharded": True}}),
    "float64": Flavour("dit", 2, EXACT | {"pipeline": {"stages": 2}}, 1e-10),
    "searched": Flavour(
        "dit", 2, EXACT | {"pipeline": {"plan": "auto", "microbatches": "none", "encode_chunk": "none"}}, 1e-10
    ),
}  # fmt: skip
CONDITIONS = {"sd": {"prompts": ["a", "b"]}, "dit": {"labels": [1, 2]}}


class Inputs:
    """What the cases share. Mutable: references are made when they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._references: dict[str, Path] = {}
        save_stable_diffusion(self.folder / "sd")
        save_dit(self.folder / "dit")
        save_pictures(self.folder / "data")
        save_pictures(self.folder / "held-out", count=4, seed=1)

    def recipe(self, name: str, flavour: str, **sections: Mapping[str, object]) -> Recipe:
        """The recipe of a run that validates, draws, saves and exports."""
        chosen = FLAVOURS[flavour]
        base: dict[str, dict[str, object]] = {
            "data": {"validation": str(self.folder / "held-out")},
            "training": {"steps": STEPS},
            "checkpoint": {"every": SAVED[0], "asynchronous": False},
            "validation": {"every": SAVED[0]},
            "sampling": {"every": DRAWN[0], "steps": 2, **CONDITIONS[chosen.model]},
            "run": {"trackers": "none"},
        }
        for more in (chosen.sections, sections):
            for section, values in more.items():
                base[section] = base.get(section, {}) | dict(values)
        return recipe_of(self.folder / chosen.model, self.folder / "data", self.folder / name, **base)

    def reference(self, flavour: str) -> Path:
        """The folder of an uninterrupted run."""
        if flavour not in self._references:
            recipe = self.recipe(f"reference-{flavour}", flavour)
            status, error = ForkedCommand(recipe, ranks=FLAVOURS[flavour].ranks).end()
            assert status == 0, error
            self._references[flavour] = recipe.run.folder
        return self._references[flavour]

    def check_equal(self, folder: Path, flavour: str) -> None:
        """Compare a run with the uninterrupted one.

        Raises:
            UnequalError: something differs.
        """
        expected, tolerance = self.reference(flavour), FLAVOURS[flavour].tolerance
        for key in METRICS:
            a, b = losses_of(folder, key), losses_of(expected, key)
            if a.keys() != b.keys():
                raise UnequalError(f"{key} at steps {sorted(a)}, not {sorted(b)}")
            if wrong := [step for step in b if abs(a[step] - b[step]) > tolerance * abs(b[step])]:
                raise UnequalError(f"{key} of step {wrong[0]} is {a[wrong[0]]!r}, not {b[wrong[0]]!r}")
        if tolerance == 0:
            self._check_files(folder, expected)

    def _check_files(self, folder: Path, expected: Path) -> None:
        found, right = tensors_of(_newest(folder)), tensors_of(_newest(expected))
        if found.keys() != right.keys() or not all(torch.equal(found[name], right[name]) for name in right):
            raise UnequalError("the last checkpoints differ")
        files = [*expected.glob("samples/*.png"), *expected.glob("export/**/*.safetensors")]
        for file in files:
            other = folder / file.relative_to(expected)
            if not other.is_file() or other.read_bytes() != file.read_bytes():
                raise UnequalError(f"{file.relative_to(expected)} differs")


def saved_steps(folder: Path) -> list[int]:
    """The steps of a run's checkpoints, each of which is whole.

    Raises:
        LostError: one is not.
    """
    found = []
    for path in saved_checkpoints(folder):
        try:
            verify(path)
        except Exception as error:
            raise LostError(str(error)) from error
        found.append(int(path.name.removeprefix("step-")))
    return sorted(found)


def _newest(folder: Path) -> Path:
    path = latest(folder)
    if path is None:
        raise LostError(f"{folder} has no checkpoint")
    return path
