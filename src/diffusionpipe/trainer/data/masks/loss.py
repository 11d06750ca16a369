"""Masks of the loss: grey pictures, white where a picture counts and black where it does not.

A mask has the size of its picture. It is resized, cropped and mirrored as its picture is, and then reduced to the size
of the latents: each latent has the mean of its pixels. Masks of holes (`holes`) are another thing: inputs of the model.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import interpolate

from diffusionpipe.trainer.data.content import Content
from diffusionpipe.trainer.data.decoding.images import CENTRE, PictureError, Size, placing, read_header, reason_of
from diffusionpipe.trainer.data.decoding.picture_file import opened_picture
from diffusionpipe.trainer.data.masks.kinds import NAME
from diffusionpipe.trainer.data.scan.dataset import Dataset
from diffusionpipe.trainer.data.text.treatment import Treatment


def loss_mask_of(dataset: Dataset, treatments: Sequence[Treatment], sample: int) -> Path | None:
    """The path of the file that weights a sample in the loss; None where its source of samples has no such masks.

    `treatments`: for each source, with the pattern of the paths.
    """
    pattern = treatments[dataset.samples[sample].source].loss_mask
    if pattern is None:
        return None
    return Path(pattern.replace(NAME, str(PurePosixPath(dataset.own_name(sample)).with_suffix(""))))


def load_loss_mask(
    path: Path, *, size: Size, latents: tuple[int, int], crop: tuple[float, float] = CENTRE, flip: bool = False
) -> Tensor:
    """The weights in the loss of a picture's latents, in [0, 1], (1, h, w), from its mask file.

    `size`: width and height to which the picture is cut, at `crop`; `flip` mirrors it. `latents`: (h, w).

    Raises:
        PictureError: the file cannot be read; the message names it.
    """
    try:
        with opened_picture(path) as opened:
            picture = ImageOps.exif_transpose(opened).convert("L")
    except Exception as error:  # the formats' readers raise whatever their parsers stumble over
        raise PictureError(path, reason_of(error)) from error
    place = placing(picture.size, size, crop)
    if place.resized != picture.size:
        picture = picture.resize(place.resized, Image.Resampling.BOX)  # a mean of pixels; bicubic would leave [0, 1]
    picture = picture.crop((place.left, place.top, place.left + size[0], place.top + size[1]))
    levels = np.array(ImageOps.mirror(picture) if flip else picture, dtype=np.float32) / 255
    return interpolate(torch.from_numpy(levels)[None, None], size=latents, mode="area")[0]  # (1, h, w)


def problem_of_loss_mask(path: Path, picture: Content, found: Size | None) -> str | None:
    """A sentence on why the file `path` cannot be a mask of the loss for a picture; None if it can.

    `found`: width and height of the picture.

    Only the mask's header is checked; with `found` None sizes are not compared.
    """
    if not path.is_file():
        return f"{picture}: its mask of the loss, {path}, is missing"
    header = read_header(path)
    if header.problem is not None:
        return f"{path}: {header.problem}"
    if found is not None and header.size != found:
        width, height = header.size or (0, 0)
        return (
            f"{path}: the mask has {width} x {height} pixels and its picture {found[0]} x {found[1]}; make it as large"
        )
    return None
