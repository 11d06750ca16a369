"""Whether pictures of a size fit in memory, said before a model is loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from diffusionpipe.units import Bytes

_DECODED_TOGETHER = 8
"""Pictures that go through the VAE at a time."""
_FLOAT32 = 4


def check_memory(folder: Path, count: int, resolution: int, device: "torch.device") -> None:
    """Refuse pictures whose decoding alone needs more memory than the device has left.

    Raises:
        ConfigError: names what is needed, what is left, and the largest resolution for which both are equal.
    """
    from diffusionpipe.errors import ConfigError

    free, needed = _free(device), least_memory(folder, count, resolution)
    if free is None or needed <= free:
        return
    fitting = int(resolution * (free / needed) ** 0.5) // 8 * 8
    pictures = "one picture" if count == 1 else f"{count} pictures"
    raise ConfigError(
        f"{pictures} of {resolution} x {resolution} pixels take at least {needed / 2**30:,.1f} GiB, and "
        f"{free / 2**30:,.1f} GiB are free; use a smaller --resolution, below {max(fitting, 8)}, or a smaller --count"
    )


@contextmanager
def named_shortage() -> Iterator[None]:
    """Within the block, a lack of memory becomes an error that says what to change.

    Raises:
        ConfigError: there was not enough memory.
    """
    from diffusionpipe.errors import ConfigError
    from diffusionpipe.runtime.error_file import is_shortage

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        reason = str(error).partition("\n")[0].strip()
        raise ConfigError(
            f"out of memory{f' ({reason})' if reason else ''}; use a smaller --count or a smaller --resolution"
        ) from error


def least_memory(folder: Path, count: int, resolution: int) -> "Bytes":
    """What the input and the output of the VAE's last convolution take at full size; all else comes on top.

    Without a VAE the pictures alone.
    """
    from diffusionpipe.models.folder import component_config, family_of

    if "vae" not in family_of(folder).components:
        return count * resolution**2 * 3 * _FLOAT32
    config = component_config(folder, "vae")
    channels, patch = config.get("block_out_channels"), config.get("patch_size")
    side = patch if isinstance(patch, int) and patch > 0 else 1
    width = channels[0] if isinstance(channels, list) and channels and isinstance(channels[0], int) else 1
    return min(count, _DECODED_TOGETHER) * (resolution // side) ** 2 * (width + 3 * side**2) * _FLOAT32


def _free(device: "torch.device") -> "Bytes | None":
    import torch

    from diffusionpipe.runtime.free_memory import free_memory

    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
