"""The meaning of a picture's numbers: its colour profile, and its transparent parts. All become sRGB on white.

    stored                        pixels here       profile applied     laid over white
    1, L, I;16, LA           ──>  L   and alpha ──>  RGB and alpha  ──>  RGB or L
    RGB, P, RGBA, PA         ──>  RGB and alpha ──>  RGB and alpha  ──>  RGB or L
    CMYK                     ──>  CMYK          ──>  RGB            ──>  RGB or L

LittleCMS converts, with the perceptual intent, as web browsers do. A picture without a profile is sRGB.
"""

from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO

import numpy as np
from PIL import Image, ImageCms, ImageFile

_SPACES = {"L": b"GRAY", "RGB": b"RGB ", "CMYK": b"CMYK"}
"""The name of the colour space in a profile, by Pillow's mode."""
_CLASSES = (b"mntr", b"scnr", b"prtr", b"spac")
"""Classes of profiles that describe colours: of screens, cameras, printers, and spaces such as Lab."""
_HEADER = 132
"""The number of bytes of a profile before its first tag."""
_SAME = 1
"""The most by which a profile for sRGB moves a level; pictures with such a profile keep their levels."""
_SRGB_GAMMA = 0.45455
_SRGB_PRIMARIES = (0.3127, 0.3290, 0.64, 0.33, 0.30, 0.60, 0.15, 0.06)
"""x and y of white, red, green and blue, as PNG writes them."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """The way in which the levels of pictures with one colour profile become levels of sRGB."""

    transform: ImageCms.ImageCmsTransform | None = None
    """The transform of the levels; None: the levels stay as they are."""
    problem: str | None = None
    """Why the profile cannot be applied; None if it can."""


def colours_of(picture: Image.Image) -> str:
    """The mode of a picture's colours without transparency: "L", "RGB" or "CMYK".

    The picture must not be loaded yet.
    """
    if picture.mode in {"1", "L", "LA"} or picture.mode.startswith("I") or stored_mode(picture).startswith("LA"):
        return "L"  # Pillow reads grey of 16 bits with transparency as RGBA
    return "CMYK" if picture.mode == "CMYK" else "RGB"


def stored_mode(picture: Image.Image) -> str:
    """Pillow's name for the way in which the file stores pixels, e.g. "RGB;16B"; "" if it is not known.

    It is not known after the picture is loaded.
    """
    return str(picture.tile[0].args) if isinstance(picture, ImageFile.ImageFile) and picture.tile else ""


def problem_of_colours(picture: Image.Image) -> str | None:
    """Why a picture is taken as sRGB though its file states other colours; None if its colours are read as stated.

    Only the header is needed, and the picture must not be loaded yet.
    """
    info = picture.info
    if "icc_profile" in info:
        if not info["icc_profile"]:  # Pillow found one that it could not put together
            return "its colour profile is cut short or damaged"
        return _reading(info["icc_profile"], colours_of(picture)).problem
    if "srgb" in info:
        return None
    if abs(info.get("gamma", _SRGB_GAMMA) - _SRGB_GAMMA) > 0.005:
        return f"its gAMA chunk says {info['gamma']:g}, and only colour profiles are applied"
    primaries = info.get("chromaticity", _SRGB_PRIMARIES)
    if max(abs(found - own) for found, own in zip(primaries, _SRGB_PRIMARIES, strict=True)) > 0.005:
        return "its cHRM chunk says other primaries than sRGB's, and only colour profiles are applied"
    return None


def srgb_on_white(picture: Image.Image, colours: str, mode: str) -> Image.Image:
    """The picture in sRGB, laid over white, in Pillow's mode `mode`, "RGB" or "L".

    `colours`: the result of `colours_of` for the picture.
    """
    profile = picture.info.get("icc_profile")
    found, alpha = _apart(picture, colours)
    if profile:
        transform = _reading(profile, colours).transform
        if transform is not None:
            found = transform.apply(found)
    if alpha is None:
        return found.convert(mode)
    found = found.convert("RGB")
    found.putalpha(alpha)
    white = Image.new("RGBA", found.size, "white")
    white.alpha_composite(found)
    return white.convert(mode)


def _apart(picture: Image.Image, colours: str) -> tuple[Image.Image, Image.Image | None]:
    """The picture in the mode `colours`, and a picture of each pixel's opacity; None if all pixels are opaque."""
    transparent = picture.info.get("transparency")
    if picture.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        levels = np.asarray(picture)
        grey = Image.fromarray((levels.clip(0, 65535) // 257).astype(np.uint8))  # 65535 / 257 = 255
        return grey, None if transparent is None else Image.fromarray((levels != transparent).astype(np.uint8) * 255)
    has_alpha = "A" in picture.getbands() or transparent is not None
    alpha = picture.convert("RGBA").getchannel("A") if has_alpha else None
    if picture.mode == "P":
        picture = picture.convert("RGBA" if has_alpha else "RGB")
    found = picture.convert(colours)
    found.info.pop("transparency", None)  # else Pillow would put it in again
    return found, alpha


@lru_cache(maxsize=16)  # a folder has few profiles, and to prepare one takes longer than a small picture
def _reading(profile: bytes, colours: str) -> _Reading:
    """The way in which a profile is applied to pictures in the mode `colours`."""
    if problem := _problem(profile, _SPACES[colours]):
        return _Reading(problem=problem)
    try:
        transform = ImageCms.ImageCmsTransform(
            ImageCms.ImageCmsProfile(BytesIO(profile)), _srgb(), colours, "RGB", ImageCms.Intent.PERCEPTUAL
        )
    except (OSError, ImageCms.PyCMSError, ValueError, TypeError):
        return _Reading(problem="its colour profile is damaged: LittleCMS cannot use it")
    return _Reading(transform=None if _is_srgb(transform, colours) else transform)


def _problem(profile: bytes, space: bytes) -> str | None:
    """Why a profile, by its header, does not describe colours of pictures in this colour space; None if it does."""
    size = int.from_bytes(profile[:4])
    if len(profile) < max(size, _HEADER):
        return f"its colour profile is cut short: it has {len(profile):,} of {max(size, _HEADER):,} bytes"
    if profile[36:40] != b"acsp":
        return "its colour profile is not one of ICC's"
    if profile[12:16] not in _CLASSES:
        return f"its colour profile is of the class {_word(profile[12:16])}, which does not describe pictures"
    if profile[16:20] != space:
        return f"its colour profile is for {_word(profile[16:20])}, and its colours are {_word(space)}"
    return None


def _word(code: bytes) -> str:
    """The four characters of a code in a profile as a message may show them; "nothing" for blanks."""
    return ascii(code.decode("latin-1").strip())[1:-1] or "nothing"


def _is_srgb(transform: ImageCms.ImageCmsTransform, colours: str) -> bool:
    """Whether a transform to sRGB changes levels of all kinds by next to nothing."""
    if colours == "CMYK":
        return False
    # Of a colour 17 levels a channel, 255 = 16 x 15.9375.
    steps = np.arange(256 if colours == "L" else 17) * (1 if colours == "L" else 15.9375)
    grids = np.meshgrid(*[steps] * (1 if colours == "L" else 3), indexing="ij")
    levels = np.stack([grid.ravel() for grid in grids], axis=-1).astype(np.uint8)  # (N, 1 or 3)
    probe = Image.fromarray(levels if colours == "L" else levels[:, None])
    moved = np.asarray(transform.apply(probe)).astype(int).reshape(len(levels), 3) - levels
    return bool(np.abs(moved).max() <= _SAME)


@lru_cache(maxsize=1)
def _srgb() -> ImageCms.ImageCmsProfile:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
