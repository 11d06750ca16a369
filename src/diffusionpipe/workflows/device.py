"""The device that --device names."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def chosen_device(name: str) -> "torch.device":
    """The torch device of this name; "auto" is a GPU where there is one, else the CPU.

    Raises:
        ConfigError: there is no such device here.
    """
    import torch

    from diffusionpipe.errors import ConfigError

    has_cuda = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"there is no device {name!r}; choose auto, cpu or cuda")
    if name == "cuda" and not has_cuda:
        raise ConfigError("torch finds no CUDA device here; choose --device cpu")
    return torch.device(("cuda" if has_cuda else "cpu") if name == "auto" else name)
