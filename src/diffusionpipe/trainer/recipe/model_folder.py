"""The components of a diffusers folder by its files alone: recipes are checked against it before torch is imported."""

from pathlib import Path

from diffusionpipe.files.input_file import read_json
from diffusionpipe.ir.home import expanded_path
from diffusionpipe.models.parts.hole_channels import fills_holes


def components_of_folder(path: str) -> tuple[str, ...]:
    """The names of the components in a local diffusers folder that have a config.json, as all with weights have.

    () if the folder cannot be read, and for a hub id or a model in one file, whose components are known when they are
    opened.
    """
    try:
        folder = expanded_path(Path(path))
        index = read_json(folder / "model_index.json")
    except (OSError, ValueError):
        return ()
    if not isinstance(index, dict):
        return ()
    return tuple(name for name in index if (folder / name / "config.json").is_file())


def problem_of_masks(path: str, *, is_masked: bool, is_placed: bool) -> str | None:
    """Why masks or patches do not fit to the model in a local folder, or masks are missing, as "key: problem".

    None if its files show no fault, and for a hub id or a model in one file, which are checked once they are folders.
    `is_masked`: whether the recipe has masks; `is_placed`: whether it trains on patches.
    """
    try:
        folder = expanded_path(Path(path))
        index = read_json(folder / "model_index.json")
        denoiser = "unet" if isinstance(index, dict) and "unet" in index else "transformer"
        config, vae = (read_json(folder / name / "config.json") for name in (denoiser, "vae"))
        if not isinstance(config, dict) or not isinstance(vae, dict):
            return None
        channels = f"({denoiser}: in_channels {config.get('in_channels')})"
        fills = fills_holes(config, vae)
    except (OSError, ValueError):
        return None
    if fills and is_placed:
        return (
            f"data.patches: {folder} fills holes {channels}, and a model that fills holes reads no coordinates; remove "
            "patches"
        )
    if fills and not is_masked:
        of, other = ("clips", "first") if "scale_factor_temporal" in vae else ("pictures", "file")
        return f'data.masks: {folder} fills holes of {of} {channels}; set it to "edges", "boxes" or "{other}"'
    if is_masked and not fills:
        return (
            f"data.masks: {folder} reads no masks {channels}; use a folder of Stable Diffusion 1, 2 or XL for "
            "inpainting (unet: in_channels 9), of FLUX.1 Fill (transformer: in_channels 384) or of Wan's image to "
            "video without CLIP (36), or remove masks"
        )
    return None
