"""Patches of pictures beside plain training that sees as many pixels."""

from pathlib import Path

from benchmarks.recipes.digits import EXAMPLE, losses
from diffusionpipe.trainer.data.sizes.patches import patch_sizes, shares_of
from diffusionpipe.trainer.recipe import load_recipe

SHARE_WHOLE = 0.5


def pixels_of_a_step(resolution: int) -> float:
    """The mean pixels of a sample with patches, as a share of a whole picture's, for a model with an autoencoder."""
    sizes = patch_sizes(resolution, is_encoded=True)
    shares = shares_of(SHARE_WHOLE, len(sizes))
    return sum(share * size.num_pixels for share, size in zip(shares, sizes, strict=True)) / resolution**2


def patches(folder: Path, steps: int) -> list[str]:
    """The lines about patches; losses are of whole pictures."""
    share = pixels_of_a_step(load_recipe(EXAMPLE / "recipe.toml", []).data.resolution)
    longer = round(steps / share)
    every = max(1, steps // 20)
    keys = (f"data.patches.share_whole={SHARE_WHOLE}", f"validation.every={every}")
    plain = losses(folder, steps, f"validation.every={every}")
    patched = losses(folder, longer - longer % every, *keys)
    early = max(step for step in patched if step <= steps)
    lines = [f"whole pictures: loss {plain[max(plain)]:.5f} after {max(plain)} steps"]
    for step in (early, max(patched)):
        seen = f"which see the pixels of {step * share:.0f} steps on whole ones"
        lines.append(f"patches: loss {patched[step]:.5f} after {step} steps, {seen}")
    return lines
