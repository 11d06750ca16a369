"""Pictures as levels of 0 to 255, one byte each, until they are on the device.

    data worker          rank, page-locked      device
    levels (uint8)  ──>  levels (uint8)    ──>  levels ──> values in the model's dtype

So a batch travels to a GPU in a quarter of the bytes of float32. A value is looked up in a table of 256 that was
computed once on the CPU: a GPU may divide by multiplying with the reciprocal, which gives other last bits.
"""

import torch
from torch import Tensor

NUM_LEVELS = 256
_LOWEST = {"pixels": -1, "condition": 0}
"""The value of the lowest level, for each kind of raw input that is a picture; the highest level is 1."""


def keeps_levels(device: torch.device) -> bool:
    """Whether pictures reach this device as uint8 levels: True for a GPU; on a CPU nothing is gained."""
    return device.type == "cuda"


def is_picture(kind: str) -> bool:
    """Whether a raw input of this kind is a picture: "pixels" or "condition"."""
    return kind in _LOWEST


def values_of_pictures(kind: str, levels: Tensor) -> Tensor:
    """The values of uint8 levels in float32: in [-1, 1] for pixels, in [0, 1] for conditioning pictures."""
    pixels = levels.to(torch.float32).div_(127.5).sub_(1)
    return pixels if _LOWEST[kind] < 0 else pixels.add_(1).div_(2)


def table_of(kind: str) -> Tensor:
    """The value of each of the 256 levels of a raw input of this kind, float32, (256,)."""
    return values_of_pictures(kind, torch.arange(NUM_LEVELS, dtype=torch.uint8))
