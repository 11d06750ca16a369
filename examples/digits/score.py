"""Judge generated digits with a classifier that has seen real digits only.

    python examples/digits/score.py runs/digits/samples
    python examples/digits/score.py --export runs/digits/export --count 200 --guidance 1.5 --seed 0

The first form judges a folder of pictures with a metadata.jsonl. The second opens an exported folder with
diffusers' own StableDiffusionPipeline, generates equally many pictures of every digit, in all wordings, and judges
those; `--save` keeps them as an image folder. The classifier is scikit-learn's SVC on 8x8 pixels, fitted to the
training pictures; its accuracy on the held-out real pictures is printed beside the score. `--json` prints the same
figures for programs. The exit status is 1 if fewer than `--require` are recognised, 2 for input that cannot be
used, and else 0.

Distances are Euclidean between 8x8 pictures of ink from 0 to 1. If generated digits were all alike, they would lie
nearer to each other than real digits do; if they were copies, many would lie nearer to a training picture than any
held-out real digit does.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from dataset import (
    PICTURE_SIDE,
    WORDINGS,
    WORDS,
    DataError,
    caption,
    digit_of_caption,
    enlarge,
    held_out,
    load_originals,
    read_folder,
    reduce_to_ink,
)
from PIL import Image

if TYPE_CHECKING:
    from diffusers import StableDiffusionPipeline

BATCH_SIZE = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Diversity:
    """How far apart some digits are, beside real digits."""

    within_digit: float
    """Mean distance of two pictures of the same digit."""
    nearest_other: float
    """Mean distance of a picture to the nearest other one in its own set, of the same digit."""
    nearest_training: float
    """Mean distance of a picture to the nearest training picture."""
    copies: int
    """Pictures that lie nearer to a training picture than any held-out real one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the classifier says about a set of captioned pictures."""

    count: int
    recognised: float
    """Share of the pictures that the classifier takes for the digit of their caption, 0 to 1."""
    recognised_of_digit: tuple[float | None, ...]
    """The same for each digit; None where no caption names it."""
    read_as: tuple[tuple[int, int, int], ...]
    """(digit of the caption, digit that was read, how often) of all mistakes, most frequent first."""
    classifier_accuracy: float
    """Share of the held-out real pictures that the classifier reads rightly."""
    generated: Diversity
    real: Diversity
    """The same of the held-out real pictures."""


def ink_of(pictures: list[Image.Image]) -> np.ndarray:
    """Return pictures as rows of 8x8 ink, (N, 64)."""
    return np.stack([reduce_to_ink(picture) for picture in pictures]).reshape(len(pictures), -1)


def real_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Return (ink, digits) of the training and of the held-out pictures, through the same enlarging as all pictures."""
    images, digits = load_originals()
    ink = ink_of([enlarge(image) for image in images])
    validation = held_out(digits)
    return (ink[~validation], digits[~validation]), (ink[validation], digits[validation])


def diversity(ink: np.ndarray, digits: np.ndarray, training: np.ndarray, copy_distance: float) -> Diversity:
    """Return the distances within a set of digits and to the training pictures."""
    from scipy.spatial.distance import cdist

    within, nearest = [], []
    for digit in np.unique(digits):
        apart = cdist(ink[digits == digit], ink[digits == digit])
        if len(apart) > 1:
            within.append(apart[~np.eye(len(apart), dtype=bool)].mean())
            nearest.extend((apart + np.diag([np.inf] * len(apart))).min(axis=1))
    to_training = cdist(ink, training).min(axis=1)
    return Diversity(
        within_digit=float(np.mean(within)) if within else 0.0,
        nearest_other=float(np.mean(nearest)) if nearest else 0.0,
        nearest_training=float(to_training.mean()),
        copies=int((to_training < copy_distance).sum()),
    )


def score(pictures: list[Image.Image], captions: list[str]) -> Score:
    """Return how well the pictures show what their captions say.

    Raises:
        DataError: a caption does not name exactly one digit.
    """
    from scipy.spatial.distance import cdist
    from sklearn.svm import SVC

    (training, training_digits), (validation, validation_digits) = real_digits()
    classifier = SVC(C=10.0, gamma="scale").fit(training, training_digits)
    asked = np.array([digit_of_caption(text) for text in captions])
    ink = ink_of(pictures)
    read = classifier.predict(ink)
    right = read == asked
    mistakes = [(int(a), int(b)) for a, b in zip(asked[~right], read[~right], strict=True)]
    read_as = sorted(((*pair, mistakes.count(pair)) for pair in set(mistakes)), key=lambda row: (-row[2], row))
    copy_distance = float(cdist(validation, training).min())
    return Score(
        count=len(pictures),
        recognised=float(right.mean()),
        recognised_of_digit=tuple(
            float(right[asked == digit].mean()) if (asked == digit).any() else None for digit in range(len(WORDS))
        ),
        read_as=tuple(read_as),
        classifier_accuracy=float(classifier.score(validation, validation_digits)),
        generated=diversity(ink, asked, training, copy_distance),
        real=diversity(validation, validation_digits, training, copy_distance),
    )


def open_pipeline(export: Path) -> "StableDiffusionPipeline":
    """Return the diffusers pipeline in a folder.

    Raises:
        DataError: diffusers cannot open it, or it has no trained UNet.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    from diffusers import StableDiffusionPipeline
    from diffusers.utils import logging

    if not (export / "model_index.json").is_file():
        raise DataError(f"{export / 'model_index.json'} does not exist; give the folder that training exported")
    if not any((export / "unet").glob("*.safetensors")):
        raise DataError(f"{export / 'unet'} has no weights; train first, then give the folder that training exported")
    logging.set_verbosity(logging.CRITICAL)  # what goes wrong is raised, and reported once
    logging.disable_progress_bar()
    try:
        pipeline = StableDiffusionPipeline.from_pretrained(export, safety_checker=None, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"diffusers cannot open {export}: {error}") from error
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(arguments: argparse.Namespace) -> tuple[list[Image.Image], list[str]]:
    """Return `--count` generated pictures and their captions: all digits in turn, in all wordings in turn."""
    import torch
    from rich.console import Console
    from rich.progress import Progress

    pipeline = open_pipeline(arguments.export)
    numbers = range(arguments.count)
    captions = [caption(i % len(WORDS), i // len(WORDS) % len(WORDINGS)) for i in numbers]
    pictures: list[Image.Image] = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("Generating digits", total=arguments.count)
        for start in range(0, arguments.count, BATCH_SIZE):
            part = numbers[start : start + BATCH_SIZE]
            pictures += pipeline(
                [captions[i] for i in part],
                num_inference_steps=arguments.steps,
                guidance_scale=arguments.guidance,
                generator=[torch.Generator().manual_seed(arguments.seed * 1_000_003 + i) for i in part],
                height=PICTURE_SIDE,
                width=PICTURE_SIDE,
            ).images
            progress.advance(task, len(part))
    return pictures, captions


def save(folder: Path, pictures: list[Image.Image], captions: list[str]) -> None:
    """Write pictures and captions as an image folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i, (picture, text) in enumerate(zip(pictures, captions, strict=True)):
        picture.save(folder / f"{i:05d}.png")
        rows.append(json.dumps({"file_name": f"{i:05d}.png", "text": text}))
    (folder / "metadata.jsonl").write_text("\n".join(rows) + "\n")


def show(result: Score, title: str) -> None:
    """Print the score as tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{title}: {result.count} digits, {result.recognised:.1%} recognised")
    table.add_column("digit")
    for digit in range(len(WORDS)):
        table.add_column(str(digit), justify="right")
    shares = ("-" if share is None else f"{share:.0%}" for share in result.recognised_of_digit)
    table.add_row("right", *shares)
    console.print(table)
    rows = Table("distance between 8x8 pictures", title="Diversity")
    rows.add_column("generated", justify="right")
    rows.add_column("real, held out", justify="right")
    for field, label in (
        ("within_digit", "two of the same digit, mean"),
        ("nearest_other", "to the nearest other of the same digit, mean"),
        ("nearest_training", "to the nearest training picture, mean"),
    ):
        rows.add_row(label, f"{getattr(result.generated, field):.2f}", f"{getattr(result.real, field):.2f}")
    rows.add_row("nearer to training than any held-out real one", str(result.generated.copies), str(result.real.copies))
    console.print(rows)
    if result.read_as:
        console.print("misread: " + ", ".join(f"{a} as {b} ({times}x)" for a, b, times in result.read_as))
    console.print(f"classifier: SVC on 8x8 pixels, {result.classifier_accuracy:.1%} of held-out real digits right")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the checked command line; argparse exits with status 2 where it does not fit."""
    parser = argparse.ArgumentParser(description="Judge generated digits with a classifier of real digits.")
    parser.add_argument("samples", type=Path, nargs="?", help="folder of pictures with metadata.jsonl")
    parser.add_argument("--export", type=Path, help="diffusers folder to generate digits with")
    parser.add_argument("--count", type=int, default=200, help="digits to generate (%(default)s)")
    parser.add_argument("--guidance", type=float, default=1.5, help="guidance scale (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="sampling steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the generated digits (%(default)s)")
    parser.add_argument("--save", type=Path, help="keep the generated digits in this image folder")
    parser.add_argument("--require", type=float, default=0.0, help="exit with 1 below this share, such as 0.95")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    arguments = parser.parse_args(argv)
    if (arguments.samples is None) == (arguments.export is None):
        parser.error("give either a folder of samples or --export")
    if arguments.save and arguments.samples:
        parser.error("--save keeps generated digits; it has no effect on a folder of samples")
    if arguments.count < 1 or arguments.steps < 1:
        parser.error(f"--count {arguments.count} and --steps {arguments.steps} must be at least 1")
    if not 0.0 <= arguments.guidance < math.inf:
        parser.error(f"--guidance {arguments.guidance} must be a number of at least 0, such as 1.5")
    if not 0.0 <= arguments.require <= 1.0:
        parser.error(f"--require {arguments.require} is a share from 0 to 1, such as 0.95")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    arguments = parse(argv)
    try:
        pictures, captions = generate(arguments) if arguments.export else read_folder(arguments.samples)
        if arguments.save:
            save(arguments.save, pictures, captions)
        result = score(pictures, captions)
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        show(result, str(arguments.export or arguments.samples))
    return 0 if result.recognised >= arguments.require else 1


if __name__ == "__main__":
    sys.exit(main())
