"""The call of MiniMax H3's transformer: text, sound and clip are one sequence of rows.

    rows    | text ...... | sound, two channels | tokens of the clip ........................ |
    tags      1             2                     0

The class has the rows' places and times in arguments without a batch: all samples of a batch have the same times.
"""

from collections.abc import Mapping
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from diffusionpipe.errors import ModelError
from diffusionpipe.models.opening.class_call import Config, Grid, Made, Tensors

_RATE, _SOUND, _CHANNELS = 24, 40, 2
"""The numbers of a clip's frames in a second, of its sound's latents in a second, and of the sound's channels."""
_FIRST, _CHUNK = 5, 17
"""The numbers of frames that the VAE encodes first, and then at a time."""


def latent_frames(frames: int) -> int:
    """The number of latent frames of a clip: two for the first 5 frames, five for each 17 frames after them.

    Raises ModelError for a number of frames that cannot be divided so.
    """
    chunks, rest = divmod(frames - _FIRST, _CHUNK)
    if frames < _FIRST or rest:
        near = max(chunks, 0) * _CHUNK + _FIRST
        raise ModelError(
            f"the VAE of MiniMax H3 encodes {_FIRST} frames, then {_CHUNK} at a time; {frames} frames do not divide "
            f"so: use {near} or {near + _CHUNK}"
        )
    return chunks * 5 + 2


def rows(config: Config, grid: Grid) -> tuple[int, ...]:
    """The shape of a clip's latents as rows, (N, C): N patches with C numbers in each."""
    return grid.cells, config["in_channels"] * prod(config["patch_size"])


def rows_of_sound(config: Config, grid: Grid) -> tuple[int, ...]:
    """The shape of a clip's sound latents as rows, (N, C), the first sound channel's before the second's."""
    return _num_rows(grid)[1], config["audio_in_channels"]


def _num_rows(grid: Grid) -> tuple[int, int, int]:
    """(number of rows of the text, of the sound, of the clip)."""
    return grid.text, _CHANNELS * round(grid.clip.frames / _RATE * _SOUND), grid.cells


def _range(part: int) -> Made:
    """The function that makes the indices of the rows of part 0 (text), 1 (sound) or 2 (clip)."""

    def found(config: Config, grid: Grid, tensors: Tensors) -> Tensor:
        ends = list(accumulate(_num_rows(grid), initial=0))
        return torch.arange(ends[part], ends[part + 1])

    return found


def _tags(config: Config, grid: Grid, tensors: Tensors) -> Tensor:
    parts = zip(_num_rows(grid), (1, 2, 0), strict=True)
    return torch.cat([torch.full((number,), tag) for number, tag in parts])


def _zeros(*shape: int) -> Made:
    return lambda config, grid, tensors: torch.zeros((sum(_num_rows(grid)), *shape), dtype=torch.int64)


MADE: Mapping[str, Made] = {
    "timestep_indices": _zeros(),
    "token_tags": _tags,
    "position_ids": _zeros(3),
    "text_indices": _range(0),
    "audio_indices": _range(1),
    "video_indices": _range(2),
}
"""Argument that is the same for all samples -> the function that makes it. Every row reads the first of the times, and
has the first position."""
