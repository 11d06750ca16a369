"""What a VAE takes that makes pictures of latents, one after the other."""

from dataclasses import dataclass

from diffusionpipe.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Bytes of a VAE and of what its decoder makes."""

    weights: Bytes
    """Of the whole VAE, as it is loaded."""
    whole: Bytes
    """Beside them while one picture is decoded, what comes out included."""
    tiled: Bytes
    """The same of a picture that is decoded tile by tile; as `whole` where it is no larger than a tile."""
    picture: Bytes
    """Of one decoded picture, which waits in host memory."""

    def __post_init__(self) -> None:
        if wrong := [size for size in (self.weights, self.whole, self.tiled, self.picture) if size < 0]:
            raise ValueError(f"sizes must not be negative; got {wrong[0]}")

    def peak(self, *, is_tiled: bool, waiting: int = 0) -> Bytes:
        """The most that is there; `waiting`: pictures that are kept in the same memory, on a CPU all of them.

        >>> Decoding(weights=5, whole=100, tiled=30, picture=2).peak(is_tiled=True, waiting=8)
        51
        """
        return self.weights + (self.tiled if is_tiled else self.whole) + waiting * self.picture

    def needs_tiles(self, room: Bytes) -> bool:
        """Whether a whole picture does not fit beside the weights, and tiles take less."""
        return self.peak(is_tiled=False) > room and self.tiled < self.whole
