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

    latents: Bytes
    """Of the latents of one picture, which are there as they were drawn and as the decoder reads them."""

    def __post_init__(self) -> None:
        sizes = (self.weights, self.whole, self.tiled, self.picture, self.latents)
        if wrong := [size for size in sizes if size < 0]:
            raise ValueError(f"sizes must not be negative; got {wrong[0]}")

    def peak(self, pictures: int, *, is_tiled: bool, on_host: bool) -> Bytes:
        """The most that is there for so many pictures; `on_host`: they wait in the same memory, which is that of a CPU.

        >>> Decoding(weights=5, whole=100, tiled=30, picture=2, latents=1).peak(8, is_tiled=True, on_host=True)
        67
        """
        waiting = 2 * self.latents + (self.picture if on_host else 0)
        return self.weights + (self.tiled if is_tiled else self.whole) + pictures * waiting

    def needs_tiles(self, room: Bytes, pictures: int, *, on_host: bool) -> bool:
        """Whether so many pictures do not fit if each is decoded as a whole, and tiles take less."""
        return self.peak(pictures, is_tiled=False, on_host=on_host) > room and self.tiled < self.whole
