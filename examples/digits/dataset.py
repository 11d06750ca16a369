"""Write scikit-learn's handwritten digits as a captioned image folder.

    python examples/digits/dataset.py --out runs/digits-data

The 1,797 pictures of `sklearn.datasets.load_digits` (8x8 pixels, 13 writers, the test set of UCI's "Optical Recognition
of Handwritten Digits") become 32x32 RGB files, dark ink on white paper, in the layout that Hugging Face's `imagefolder`
reads:

    runs/digits-data/train/00000.png ...        1,617 pictures
    runs/digits-data/train/metadata.jsonl       {"file_name": "00000.png", "text": "a handwritten zero"}
    runs/digits-data/validation/...             180 pictures, 18 of every digit, that nothing is trained on

scikit-learn brings the pictures along, so nothing is downloaded. A second run writes the same bytes again.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

WORDINGS = (
    "a handwritten {word}",
    "a handwritten {numeral}",
    "the digit {word}",
    "the digit {numeral}",
    "the number {word}",
    "the number {numeral}",
    "a picture of the number {word}",
    "a picture of the number {numeral}",
    "a picture of a {word}",
    "the handwritten digit {numeral}",
    "a {word} written with a pen",
    "{word}",
)

SIDE = 8
"""Pixels along one side of an original picture."""

SCALE = 3
"""A digit is drawn this many times larger along each side."""

MARGIN = 4
"""White pixels around the drawn digit, which itself touches the edges of the original picture."""

PICTURE_SIDE = SIDE * SCALE + 2 * MARGIN
"""Pixels along one side of a written picture: 32."""

INK = 16.0
"""The value of full ink in load_digits."""


class DataError(Exception):
    """The user's files or arguments do not fit; the message says what to do."""


def caption(digit: int, wording: int) -> str:
    """Return the caption of `digit` in wording number `wording`."""
    return WORDINGS[wording].format(word=WORDS[digit], numeral=digit)


def digit_of_caption(text: str) -> int:
    """Return the digit that `text` names, as a word or as a numeral.

    Raises:
        DataError: the text names no digit, or more than one.
    """
    named = {WORDS.index(word) if word in WORDS else int(word) for word in text.lower().split() if is_digit_name(word)}
    if len(named) != 1:
        raise DataError(f"caption {text!r} names {len(named)} digits; write exactly one, such as 'a handwritten seven'")
    return named.pop()


def is_digit_name(word: str) -> bool:
    """Return whether `word` is "0" to "9" or "zero" to "nine"."""
    return word in WORDS or (len(word) == 1 and word in "0123456789")


def load_originals() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's pictures as ink from 0 to 1, (N, 8, 8), and their digits, (N,)."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.float32) / INK, digits.target.astype(np.int64)


def held_out(digits: np.ndarray) -> np.ndarray:
    """Return which pictures are for validation, (N,) bool: 18 of every digit, the same on every machine."""
    random = np.random.RandomState(0)
    chosen = np.zeros(len(digits), dtype=bool)
    for digit in range(len(WORDS)):
        chosen[random.permutation(np.flatnonzero(digits == digit))[:18]] = True
    return chosen


def enlarge(ink: np.ndarray) -> Image.Image:
    """Return 8x8 ink as a smooth 32x32 RGB picture with a margin, dark on white."""
    framed = np.pad(ink.astype(np.float32), 2)  # (12, 12), so that strokes fade out beyond the original's edge
    size = (len(framed) * SCALE, len(framed) * SCALE)
    smooth = Image.fromarray(framed).resize(size, Image.Resampling.BICUBIC)
    cut = (size[0] - PICTURE_SIDE) // 2
    paper = 255.0 * (1.0 - np.clip(np.asarray(smooth)[cut:-cut, cut:-cut], 0.0, 1.0))
    return Image.fromarray(np.rint(paper).astype(np.uint8)).convert("RGB")


def reduce_to_ink(picture: Image.Image) -> np.ndarray:
    """Return a picture as 8x8 ink from 0 to 1, (8, 8): `enlarge` backwards, by averages over 3x3 boxes."""
    gray = np.asarray(picture.convert("L").resize((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.BOX), dtype=np.float32)
    digit = gray[MARGIN:-MARGIN, MARGIN:-MARGIN]  # (24, 24)
    boxes = digit.reshape(SIDE, SCALE, SIDE, SCALE)
    return np.asarray(1.0 - boxes.mean(axis=(1, 3)) / 255.0)


def read_folder(folder: Path) -> tuple[list[Image.Image], list[str]]:
    """Return the pictures and captions of an image folder, in the order of its metadata.jsonl.

    Raises:
        DataError: the folder, its metadata or a picture is missing or unreadable.
    """
    metadata = folder / "metadata.jsonl"
    pictures: list[Image.Image] = []
    captions: list[str] = []
    if not metadata.is_file():
        raise DataError(f"{metadata} does not exist; give a folder of pictures with a metadata.jsonl")
    for number, line in enumerate(metadata.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            captions.append(str(row["text"]))
            pictures.append(Image.open(folder / row["file_name"]).convert("RGB"))
        except (ValueError, KeyError, TypeError, OSError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise DataError(f"{metadata} line {number}: {problem}; expected file_name and text of a picture") from error
    if not pictures:
        raise DataError(f"{metadata} lists no pictures")
    return pictures, captions


def write(out: Path) -> None:
    """Write both image folders under `out`."""
    from rich.progress import track

    images, digits = load_originals()
    validation = held_out(digits)
    rows: dict[str, list[str]] = {"train": [], "validation": []}
    for split in rows:
        (out / split).mkdir(parents=True, exist_ok=True)
    for index in track(range(len(images)), description="Writing digits"):
        split = "validation" if validation[index] else "train"
        name = f"{index:05d}.png"
        enlarge(images[index]).save(out / split / name)
        wording = int(np.random.RandomState(index).randint(len(WORDINGS)))
        rows[split].append(json.dumps({"file_name": name, "text": caption(int(digits[index]), wording)}))
    for split, lines in rows.items():
        (out / split / "metadata.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{out / split}: {len(lines)} pictures")


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Write scikit-learn's handwritten digits as captioned image folders.")
    parser.add_argument("--out", type=Path, default=Path("runs/digits-data"), help="folder to write (%(default)s)")
    try:
        write(parser.parse_args().out)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
