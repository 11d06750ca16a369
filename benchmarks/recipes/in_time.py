"""Digits whose denoising steps are computed at the same time (SRDS), beside the same digits drawn by steps in turn."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from PIL import Image
from sklearn.svm import SVC

from benchmarks.recipes.digits import EXAMPLE, trained
from diffusionpipe.models.opening.folder import scheduler_config
from diffusionpipe.timing.in_time import blocks_of, evaluations, latency
from diffusionpipe.trainer.inference import drawing_in_time
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.folder_drawing import draw_from_folder

STEPS, SIDE, GUIDANCE, TOLERANCE, PICTURES = 36, 32, 1.5, 1e-3, 200


def in_time(folder: Path, steps: int) -> list[str]:
    """The lines about a new run's digits."""
    return in_time_lines(trained(folder, steps) / "export")


def in_time_lines(export: Path, pictures: int = PICTURES) -> list[str]:
    """The lines about digits that a folder draws."""
    with counted() as refinements:
        (in_turn, plain_s), (at_once, refined_s) = (_drawn(export, pictures, one) for one in (None, TOLERANCE))
    most, count = max(refinements), len(blocks_of(STEPS))
    size = STEPS // count
    ranks = ", ".join(f"{latency(count, size, most, ranks=one)} on {one}" for one in (count, 2, 1))
    total = sum(map(len, evaluations(count, size, most)))
    same = float(np.mean(_read(in_turn) == _read(at_once)))
    counts = f"{most} refinements, {total} evaluations, one after the other: {ranks} ranks"
    return [
        f"{STEPS} steps in turn: {plain_s:.0f} CPU s in one process",
        f"tolerance {TOLERANCE:g}: {counts}; {refined_s:.0f} CPU s in one process",
        f"the same digit: {same:.1%} of {pictures}",
    ]


@contextmanager
def counted() -> Iterator[list[int]]:
    """The refinements of each drawing in the block, as its log says."""
    found: list[int] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg.startswith("refinements="):
                found.append(int(record.args[0]))  # type: ignore[index,arg-type]  # of our own message

    logger, handler = logging.getLogger(drawing_in_time.__name__), Kept()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _judge(module: str) -> Any:
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return import_module(module)


def _drawn(export: Path, pictures: int, tolerance: float | None) -> tuple[list[Image.Image], float]:
    """Digits, and the CPU seconds that they took."""
    words = _judge("dataset").WORDS
    captions = tuple(f"a handwritten {words[number % len(words)]}" for number in range(pictures))
    settings = SamplingSettings(
        steps=STEPS, guidance=GUIDANCE, seed=0, scheduler=scheduler_config(export), tolerance=tolerance
    )
    begun = process_time()
    wish = SampleRequest(prompts=captions)
    drawn = draw_from_folder(export, wish, settings, resolution=SIDE, device=torch.device("cpu"))
    return [Image.fromarray(picture) for picture in drawn], process_time() - begun


def _read(pictures: list[Image.Image]) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """The digit that the example's classifier reads in each picture."""
    judge = _judge("score")
    (training, digits), _ = judge.real_digits()
    found: np.ndarray[tuple[int], np.dtype[np.int64]] = (
        SVC(C=10.0, gamma="scale").fit(training, digits).predict(judge.ink_of(pictures))
    )
    return found
