"""Pictures that diffusers draws from words in another process, which imports nothing of ours, beside those of `sample`.

The other process opens the folder by `from_pretrained` and calls the pipeline with the words and the start noise.
"""

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from shutil import copytree
from typing import Any

import diffusers
import numpy as np
from kit.drawn_families import GUIDED, STEPS, Asked, asked_of, difference, drawn_here, guidances_of, size_of, told_of
from kit.family_runs import SAVED as SAVED_FAMILIES
from kit.family_runs import saved
from kit.tiny_pipelines import sdxl
from kit.tiny_runs import save_stable_diffusion
from numpy.typing import NDArray

from diffusionpipe.models.opening.folder import REGISTRY, model_index

READER = Path(__file__).with_name("plain_reader.py")
WITHIN = 1e-5
MOVES = 1e-3
"""A flag that moves a picture by less does not count."""
SAVED = {"StableDiffusionPipeline": save_stable_diffusion, "StableDiffusionXLPipeline": saved(sdxl), **SAVED_FAMILIES}
WITHOUT = {
    **dict.fromkeys(
        ("StableDiffusionInpaintPipeline", "StableDiffusionXLInpaintPipeline", "FluxFillPipeline"),
        "it draws from pictures and masks too; tests/trainer/test_filled_holes.py compares it",
    ),
    "StableDiffusionControlNetPipeline": "it draws from pictures too",
    "WanImageToVideoPipeline": "it draws from a first frame too; tests/trainer/test_filled_clips.py compares it",
    "IFPipeline": "its pictures are enlarged by another pipeline, and both are drawn together",
    "IFSuperResolutionPipeline": "it enlarges pictures of another pipeline",
    "DDPMPipeline": "it has no words",
}
"""Pipelines that are not called with words alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One call of a pipeline."""

    name: str
    asked: Asked
    flag: str | None = None
    """The entry of model_index.json that is set to the other value."""


def calls_of(kind: str, folder: Path) -> list[Told]:
    """With and without guidance, with and without a negative prompt where the pipeline takes one, each flag flipped."""
    takes_negative = "negative_prompt" in signature(getattr(diffusers, kind).__call__).parameters
    found = []
    for guidance in guidances_of(kind):
        for has_negative in (True, False) if takes_negative else (False,):
            words = ["guided" if guidance == GUIDED else "not guided"]
            words += [f"{'with' if has_negative else 'without'} a negative prompt"] if takes_negative else []
            asked = asked_of(folder, size_of(kind), guidance, has_negative=has_negative)
            found.append(Told(name=", ".join(words), asked=asked))
            flag = REGISTRY[kind].zeroed
            if flag and guidance == GUIDED and not has_negative:
                found.append(Told(name=f"{flag} flipped", asked=_flipped(asked, flag), flag=flag))
    return found


def lacks_of(kind: str) -> list[str]:
    """What cannot be asked of diffusers' pipeline."""
    if len(guidances_of(kind)) == 1:
        return ["guidance"]
    return [] if "negative_prompt" in signature(getattr(diffusers, kind).__call__).parameters else ["a negative prompt"]


def _flipped(asked: Asked, flag: str) -> Asked:
    """The same from a copy of the folder in which the flag has its other value."""
    (source,) = asked.sources
    index = model_index(source.folder)
    folder = copytree(source.folder, source.folder.with_name(f"{source.folder.name}-{flag}"), dirs_exist_ok=True)
    default = signature(getattr(diffusers, asked.kind).__init__).parameters[flag].default
    (folder / "model_index.json").write_text(json.dumps({**index, flag: not index.get(flag, default)}))
    return replace(asked, sources=(replace(source, folder=folder),))


def drawn_apart(told: Sequence[Told], place: Path) -> list[NDArray[np.float32]]:
    """What diffusers draws of each call, in one other process.

    Raises:
        AssertionError: a call failed.
    """
    place.mkdir(parents=True, exist_ok=True)
    jobs = [_job(one.asked, place, number) for number, one in enumerate(told)]
    asked, results = place / "jobs.json", place / "results.json"
    asked.write_text(json.dumps(jobs))
    subprocess.run([sys.executable, READER, asked, results], check=True, capture_output=True)
    for one, result in zip(told, json.loads(results.read_text()), strict=True):
        assert result["error"] is None, f"{one.name}: {result['error']}"
    drawn = [np.load(job["picture"]) for job in jobs]
    is_still = [one.asked.sources[0].clip is None for one in told]
    return [one[:, 0] if one.ndim == 5 and still else one for one, still in zip(drawn, is_still, strict=True)]


def _job(asked: Asked, place: Path, number: int) -> Mapping[str, Any]:
    noise, told = told_of(asked)
    arrays = {name: value for name, value in told.items() if hasattr(value, "numpy")}
    files = {name: place / f"{number}-{name}.npy" for name in (*arrays, "noise")}
    for name, file in files.items():
        np.save(file, (noise if name == "noise" else arrays[name]).numpy())
    call = {name: value for name, value in told.items() if name not in arrays}
    return {
        "folder": str(asked.sources[0].folder),
        "adapters": None,
        "call": {**call, "num_inference_steps": STEPS},
        "arrays": {name: str(files[name]) for name in arrays},
        "noise": str(files["noise"]),
        "eager": [],
        "seed": 0,
        "picture": str(place / f"{number}.npy"),
    }


def compared(told: Sequence[Told], drawn: Sequence[NDArray[np.float32]]) -> dict[str, float]:
    """Name of each call -> the largest difference of ours from what diffusers has `drawn`, which it is checked by.

    Raises:
        AssertionError: a picture differs, or a flag moves nothing.
    """
    theirs = dict(zip((one.name for one in told), drawn, strict=True))
    found = {}
    for one in told:
        (ours,) = drawn_here(one.asked)
        found[one.name] = difference((ours,), (theirs[one.name],))
        assert ours.std() > 0.02, f"{one.name}: an empty picture"
        assert found[one.name] < WITHIN, f"{one.name}: differs by {found[one.name]:.1e}"
        if one.flag:
            moved = difference((theirs[one.name],), (theirs["guided, without a negative prompt"],))
            assert moved > MOVES, f"{one.name}: moves the picture by {moved:.1e} alone"
    return found


def drawn_tenth(seed: int) -> list[tuple[str, int]]:
    """(pipeline, number of the call) of a tenth of all calls; every pipeline is equally likely."""
    pairs = [(kind, number) for kind in SAVED for number in range(_most_calls(kind))]
    return random.Random(seed).sample(pairs, round(len(pairs) / 10))


def _most_calls(kind: str) -> int:
    takes_negative = "negative_prompt" in signature(getattr(diffusers, kind).__call__).parameters
    return len(guidances_of(kind)) * (1 + takes_negative) + (REGISTRY[kind].zeroed is not None)
