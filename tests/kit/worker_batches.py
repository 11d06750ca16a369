"""Batches that data workers make in tests; the workers import this module, so it imports little."""

import os
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def numbered(step: int) -> dict[str, Tensor]:
    """Of several types, one of them empty, one a scalar per row."""
    return {
        "pixels": torch.full((2, 3, 5), float(step)),
        "nothing": torch.empty(0, 4),
        "ids": torch.tensor([step, step + 1]),
        "narrow": torch.full((3,), step, dtype=torch.bfloat16),
    }


def large(step: int) -> dict[str, Tensor]:
    """1 MB."""
    return {"pixels": torch.full((2**18,), float(step))}


def broken(step: int) -> dict[str, Tensor]:
    """As a worker without memory fails."""
    raise RuntimeError(f"unable to allocate memory for step {step}")


def stuck(step: int) -> dict[str, Tensor]:
    """A worker that lives and never answers."""
    if step > 0:
        time.sleep(600)
    return numbered(step)


def pid(step: int) -> dict[str, Tensor]:
    """The worker's process."""
    return {"pid": torch.tensor([os.getpid()])}


class StuckAt:
    """Makes batches, but never that of one step."""

    def __init__(self, make: Callable[[int], Mapping[str, Tensor]], step: int) -> None:
        self.make, self.step = make, step

    def __call__(self, step: int) -> Mapping[str, Tensor]:
        if step == self.step:
            time.sleep(600)
        return self.make(step)
