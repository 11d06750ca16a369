"""The settings by which the samples of a source are used: captions, sizes, and weight in the loss."""

from dataclasses import dataclass

from diffusionpipe.trainer.data.text.caption_rules import AS_THEY_ARE, CaptionRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """The settings by which samples of one source are used: rules of captions, weight and mask of the loss, sizes."""

    captions: CaptionRules = AS_THEY_ARE
    loss_weight: float = 1.0
    """The factor of the loss of its samples."""
    loss_mask: str | None = None
    """The path of a picture's mask of the loss, with `masks.kinds.NAME` in place of its name; None for no masks."""
    resolution: tuple[int | str, ...] = ()
    """Sides and sizes for this source, in the form that `areas_of` reads; () if it has no sizes of its own."""


PLAIN = Treatment()
