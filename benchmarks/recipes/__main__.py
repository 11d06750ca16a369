"""Trains the digits with and without a recipe, and says what it gains.

python -m benchmarks.recipes speed            # SpeeD, about eight minutes on one core
python -m benchmarks.recipes masks            # holes of pictures, about six minutes
python -m benchmarks.recipes prototypes       # embeddings of classes, about eight minutes
python -m benchmarks.recipes patches          # patches of pictures, about eight minutes
python -m benchmarks.recipes narrow           # exports in 8 and 4 bits, about fifteen minutes
python -m benchmarks.recipes in-time          # denoising steps at the same time, about four minutes
python -m benchmarks.recipes weights          # trained weights in bfloat16, about ten minutes
python -m benchmarks.recipes muon             # Muon beside AdamW, about five minutes
python -m benchmarks.recipes adapters         # adapters on bases in bfloat16 and nf4, about ten minutes
"""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.recipes.adapters import adapters
from benchmarks.recipes.in_time import in_time
from benchmarks.recipes.masks import masks
from benchmarks.recipes.narrow import narrow
from benchmarks.recipes.patches import patches
from benchmarks.recipes.prototypes import prototypes
from benchmarks.recipes.speed import speed
from benchmarks.recipes.weights import muon, weights

RECIPES = {
    "speed": speed,
    "masks": masks,
    "patches": patches,
    "prototypes": prototypes,
    "narrow": narrow,
    "in-time": in_time,
    "weights": weights,
    "muon": muon,
    "adapters": adapters,
}


def main() -> None:
    """Print the lines of a recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--steps", type=int, default=400)
    chosen = parser.parse_args()
    with TemporaryDirectory(prefix="diffusionpipe-recipes-") as folder:
        print(*RECIPES[chosen.recipe](Path(folder), chosen.steps), sep="\n")


if __name__ == "__main__":
    main()
