"""How a program runs its kernels on a GPU, as far as a computed profile depends on it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """The ways in which kernels run that a computed profile depends on; the default is eager torch."""

    has_flash_attention: bool = True
    """Whether attention is one kernel; else its scores are written to memory and read again."""
    is_channels_last: bool = False
    """Whether tensors are stored in the layout in which convolutions compute, with the channels last."""
    is_compiled: bool = False
    """Whether pointwise operations are fused with each other and with norms."""
    has_fused_norms: bool = False
    """Whether norms read and write the narrow type of the matrix products under autocast."""

    def __str__(self) -> str:
        words = {
            "channels last": self.is_channels_last,
            "fused norms": self.has_fused_norms,
            "plain attention": not self.has_flash_attention,
        }
        return ", ".join(
            ["compiled" if self.is_compiled else "eager", *(word for word, applies in words.items() if applies)]
        )


EAGER = Mode()
"""The default mode of torch, in which DiffusionPipe runs."""
