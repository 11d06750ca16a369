"""How diffusers' pipeline of a folder draws by default: guidance and size."""

from dataclasses import dataclass
from pathlib import Path

from diffusionpipe.errors import ModelError
from diffusionpipe.models.opening.folder import component_config, family_of, model_index


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """The scale of classifier-free guidance, and the guidance that a distilled denoiser reads."""

    scale: float
    """Scale of classifier-free guidance; the value `unguided` turns it off."""
    embedded: float | None = None
    """The guidance that a distilled denoiser reads, one with guidance embeddings; None for other denoisers."""
    unguided: float = 1.0
    """The scale that turns guidance off: 1, or 0 in some pipelines."""

    @property
    def is_guided(self) -> bool:
        """Whether every sample is computed twice, with and without its condition."""
        return self.scale != self.unguided


def default_guidance(folder: Path) -> Guidance:
    """The guidance with which the pipeline in the folder draws by default.

    Raises ModelError for a pipeline that is not supported.
    """
    family = family_of(folder)
    if family.embedded_guidance is None:
        unguided = family.call.unguided if family.call else 1.0
        is_ignored = model_index(folder).get("is_distilled") is True  # FLUX.2 [klein] of few steps
        return Guidance(scale=unguided if is_ignored else family.guidance, unguided=unguided)
    is_distilled = component_config(folder, family.trainable[0]).get("guidance_embeds", False)
    return Guidance(scale=family.guidance, embedded=family.embedded_guidance if is_distilled else None)


def default_resolution(folder: Path) -> int:
    """The side, in pixels, of the pictures that the pipeline in the folder draws by default.

    Raises:
        ModelError: the folder's pipeline is not supported, or its configuration has no size.
    """
    family = family_of(folder)
    denoiser = next(name for name in ("unet", "transformer") if name in family.components)
    size: object = family.sample_size
    if size is None:
        size = component_config(folder, denoiser).get("sample_size")
    if not isinstance(size, int):
        raise ModelError(
            f"{folder / denoiser / 'config.json'} does not say the size of a picture (sample_size is {size!r}); "
            "give it with --resolution"
        )
    if "vae" not in family.components:
        return size
    vae = component_config(folder, "vae")
    sizes = (vae.get(name) for name in ("block_out_channels", "encoder_block_out_channels", "dim_mult"))
    halvings = len(next(filter(None, sizes), [0])) - 1
    # Every level of the VAE but the last one halves the sides.
    return size << halvings
