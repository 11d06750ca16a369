"""Whether pictures of a size fit in memory, said before a model is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from diffusionpipe.models.base.family import Clip
    from diffusionpipe.units import Bytes

_FLOAT32 = 4


def check_memory(folder: Path, count: int, size: "Clip", device: "torch.device") -> None:
    """Check that decoding `count` pictures or clips fits in the device's free memory, at least tile by tile.

    Raises:
        ConfigError: names the needed and the free memory, and the largest resolution for which both are equal.
        ModelError: the configuration of the folder's VAE makes none.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.runtime.machine.free_memory import free_on

    free = free_on(device)
    if free is None:
        return
    needed = least_memory(folder, count, size, on_host=device.type == "cpu")
    if needed <= free:
        return
    # Memory is taken as growing with the area, and sides are multiples of 8.
    fitting = int(size.width * (free / needed) ** 0.5) // 8 * 8
    noun = "picture" if size.frames == 1 else "clip"
    pictures = f"one {noun}" if count == 1 else f"{count} {noun}s"
    fewer = "" if size.frames == 1 else ", fewer --frames"
    raise ConfigError(
        f"{pictures} of {size} take at least {needed / 2**30:,.1f} GiB, and "
        f"{free / 2**30:,.1f} GiB are free; use a smaller --resolution, below {max(fitting, 8)}{fewer}, or a smaller "
        "--count"
    )


@contextmanager
def named_shortage() -> Iterator[None]:
    """A context in which a lack of memory becomes a ConfigError that says which options to change.

    Raises:
        ConfigError: there was not enough memory.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.runtime.machine.error_file import is_shortage

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        reason = str(error).partition("\n")[0].strip()
        raise ConfigError(
            f"out of memory{f' ({reason})' if reason else ''}; use a smaller --count or a smaller --resolution"
        ) from error


def least_memory(folder: Path, count: int, size: "Clip", *, on_host: bool) -> "Bytes":
    """The peak bytes of decoding `count` samples, tile by tile if that is less; without a VAE, the samples' own bytes.

    `on_host`: whether decoded samples wait in the memory in which they are decoded.

    Raises:
        ModelError: the configuration of the folder's VAE makes none.
    """
    from diffusionpipe.trainer.inference.decoding import folder_decoding

    decoding = folder_decoding(folder, size)
    if decoding is None:
        return count * prod(size.pixels) * _FLOAT32
    return decoding.peak(count, is_tiled=decoding.tiled < decoding.whole, on_host=on_host)
