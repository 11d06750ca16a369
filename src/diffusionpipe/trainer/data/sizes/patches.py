"""Patches of pictures: the size of each step, the place of each patch and its coordinates.

    step                0        1        2        3        4 ...
    side of a patch     R       R / 2     R       R / 4     R           one size a step, keyed by the step

    whole picture R x R      ┌──────────────┐      a patch is cut from the picture as it would be trained on whole;
                             │   ┌──────┐   │      the corners lie on the grid of latents, all with the same probability
                             │   │patch │   │
                             │   └──────┘   │
                             └──────────────┘

Wang et al., "Patch Diffusion", NeurIPS 2023, https://arxiv.org/abs/2304.12526, section 3.2: whole pictures with a
probability p, patches of R / 2 and R / 4 with 3/5 and 2/5 of 1 - p; with an autoencoder R / 2 alone. Differences: the
batch does not grow where patches are small, and with an autoencoder the patch is cut before it is encoded.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from diffusionpipe.ir.size import Clip
from diffusionpipe.models.base.coordinates import coordinates_of
from diffusionpipe.trainer.data.decoding.images import Size

_OF_PATCHES = (0.6, 0.4)
"""The probabilities of patches with half and with a quarter of the side, among patches."""


def patch_sizes(resolution: int, *, is_encoded: bool) -> tuple[Clip, ...]:
    """The sizes of the whole picture and of its patches, the largest first.

    `is_encoded`: the model has an autoencoder; then the smallest patches are left out.

    >>> [size.width for size in patch_sizes(64, is_encoded=False)]
    [64, 32, 16]
    """
    return tuple(Clip.square(resolution // part) for part in ((1, 2) if is_encoded else (1, 2, 4)))


def shares_of(share_whole: float, num_sizes: int) -> tuple[float, ...]:
    """The probability of each of the sizes of `patch_sizes`.

    `share_whole`: the probability of whole pictures.

    >>> shares_of(0.5, 3), shares_of(0.5, 2)
    ((0.5, 0.3, 0.2), (0.5, 0.5))
    """
    patches = _OF_PATCHES if num_sizes == 3 else (1.0,)
    return (share_whole, *((1 - share_whole) * share for share in patches))


def corner(numbers: Sequence[float], whole: Size, patch: Size, unit: int) -> tuple[int, int]:
    """The left and top pixel of a patch in its whole picture, on the grid of latents.

    `numbers`: two uniform numbers in [0, 1) that decide it. `unit`: the number of pixels along a latent's side.

    >>> corner((0.99, 0.0), (8, 8), (4, 4), 2)
    (4, 0)
    """
    left, top = (
        int(number * ((side - own) // unit + 1)) * unit for number, side, own in zip(numbers, whole, patch, strict=True)
    )
    return left, top


def placed(corners: Sequence[tuple[int, int]], whole: Size, patch: Size, unit: int) -> Tensor:
    """The coordinates in whole pictures of the latents of patches, (B, 2, height / unit, width / unit).

    `corners`: left and top of each patch in pixels. `unit`: the number of pixels along a latent's side.
    """
    everywhere = coordinates_of(whole[0] // unit, whole[1] // unit)
    columns, rows = patch[0] // unit, patch[1] // unit
    return torch.stack(
        [
            everywhere[:, top // unit : top // unit + rows, left // unit : left // unit + columns]
            for left, top in corners
        ]
    )
