"""The memory that a VAE needs while it makes pictures of latents, one after the other."""

from dataclasses import dataclass

from diffusionpipe.units import Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The bytes that a VAE takes to decode pictures: its weights, and the memory for each picture."""

    weights: Bytes
    """Weights of the whole VAE, as it is loaded."""
    whole: Bytes
    """Memory beside the weights while one picture is decoded as a whole, the picture included."""
    tiled: Bytes
    """Memory beside the weights while one picture is decoded tile by tile; equals `whole` for pictures up to one tile.
    """
    picture: Bytes
    """Bytes of one decoded picture, which waits in host memory."""

    latents: Bytes
    """Bytes of one picture's latents, which are held twice: as they were drawn, and as the decoder reads them."""

    def __post_init__(self) -> None:
        sizes = (self.weights, self.whole, self.tiled, self.picture, self.latents)
        if wrong := [size for size in sizes if size < 0]:
            raise ValueError(f"sizes must not be negative; got {wrong[0]}")

    def peak(self, pictures: int, *, is_tiled: bool, on_host: bool) -> Bytes:
        """The largest memory in bytes while `pictures` pictures are decoded, tile by tile or each as a whole.

        `on_host`: whether decoded pictures wait in the same memory, as on a CPU.

        >>> Decoding(weights=5, whole=100, tiled=30, picture=2, latents=1).peak(8, is_tiled=True, on_host=True)
        67
        """
        waiting = 2 * self.latents + (self.picture if on_host else 0)
        return self.weights + (self.tiled if is_tiled else self.whole) + pictures * waiting

    def needs_tiles(self, room: Bytes, pictures: int, *, on_host: bool) -> bool:
        """Whether pictures must be decoded in tiles: as wholes they need more than `room` bytes, and tiles take less.

        `on_host`: whether decoded pictures wait in the same memory, as on a CPU.
        """
        return self.peak(pictures, is_tiled=False, on_host=on_host) > room and self.tiled < self.whole
