"""The size of a sample in pixels."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """The width and height of a sample in pixels, and its number of frames; 1: a picture."""

    width: int
    height: int
    frames: int = 1

    @classmethod
    def square(cls, side: int) -> "Clip":
        """The size of a square picture whose sides have `side` pixels."""
        return cls(width=side, height=side)

    @property
    def pixels(self) -> tuple[int, ...]:
        """The shape of a sample: (3, H, W), or with more than one frame (3, F, H, W)."""
        return (3, *(() if self.frames == 1 else (self.frames,)), self.height, self.width)

    @property
    def num_pixels(self) -> int:
        """The number of pixels of all its frames."""
        return prod(self.pixels[1:])

    @property
    def volume(self) -> float:
        """Pixels that a model reads of a clip: width x height x (1 + (frames - 1) / 4), about in proportion to tokens.

        VAEs for clips make one frame of four.
        """
        return self.width * self.height * (1 + (self.frames - 1) / 4)

    @property
    def stated(self) -> tuple[int, int | None, int | None]:
        """(resolution, height, frames) as recipes and commands state them; None: as high as wide, and one frame.

        >>> Clip(width=832, height=480).stated
        (832, 480, None)
        """
        height = None if self.height == self.width else self.height
        return self.width, height, None if self.frames == 1 else self.frames

    def __str__(self) -> str:
        """The frames and the pixels of the clip in words."""
        size = f"{self.width} x {self.height} pixels"
        return size if self.frames == 1 else f"{self.frames} frames of {size}"
