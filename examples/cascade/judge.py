"""Judge the digits that the trained cascade draws, and its super-resolution on digits that it has not seen.

    python examples/cascade/judge.py --run runs/cascade

1. The cascade draws `--count` digits, equally many of each. A classifier that was trained on real digits alone reads
   the 32x32 pictures, the 8x8 ones that the base drew, and their bicubic enlargement. Its share on held-out real digits
   is printed beside them. The exit status is 1 if fewer than `--require` of the 32x32 pictures are read rightly.
2. `--enlarged` held-out real digits are reduced to 8x8 pixels. The super-resolution enlarges each `--draws` times,
   without a caption; the squared error of the mean of these, against the real picture, is printed beside that of
   bicubic enlargement. The exit status is 1 if it is not smaller.
3. The picture `digits.png` in the run's folder shows base | super-resolved | bicubic | real.

The classifier is scikit-learn's SVC. DiffusionPipe draws the pictures from the exports, which diffusers opens too.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from mnist import SIDE, WORDS, DataError, caption, held_out, load_digits
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from diffusionpipe.errors import DiffusionPipeError
from diffusionpipe.models.families.deepfloyd import reduced
from diffusionpipe.models.opening.folder import scheduler_config
from diffusionpipe.trainer.inference.conditions import SampleRequest
from diffusionpipe.trainer.inference.denoise import SamplingSettings
from diffusionpipe.trainer.inference.drawing import Arithmetic
from diffusionpipe.trainer.inference.folder_drawing import Source, latents_from_folder

SMALL = 8
CPU = torch.device("cpu")
SCHEDULER = "DPMSolverMultistepScheduler"
CHUNK = Arithmetic(rows=100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What was measured."""

    count: int
    """Drawn digits."""
    recognised: float
    """Share of the 32x32 pictures that the classifier reads as their caption, 0 to 1."""
    recognised_base: float
    """The same of the 8x8 pictures, by a classifier of 8x8 pictures."""
    recognised_bicubic: float
    """The same of their bicubic enlargement."""
    recognised_real: float
    """Share of the held-out real digits that are read rightly."""
    recognised_of_digit: tuple[float, ...]
    """The share of the 32x32 pictures, for each digit."""
    enlarged: int
    """Held-out digits that were reduced and enlarged again."""
    error: float
    """Mean squared error of the mean of the draws, values from 0 to 1."""
    error_bicubic: float


class Cascade:
    """The two exports of a run."""

    def __init__(self, run: Path, steps: int) -> None:
        self.base = Source(folder=run / "export" / "base", resolution=SMALL, name="base")
        self.large = Source(folder=run / "export" / "super", resolution=SIDE, name="super", small=SMALL)
        self._steps = steps

    def _settings(self, source: Source, seed: int, guidance: float, noise_level: int) -> SamplingSettings:
        return SamplingSettings(
            steps=self._steps,
            guidance=guidance,
            seed=seed,
            scheduler=scheduler_config(source.folder),
            scheduler_class=SCHEDULER,
            noise_level=noise_level,
        )

    def draw(self, prompts: tuple[str, ...], seed: int, guidance: float) -> Tensor:
        """Return small pictures, (N, 1, 8, 8) in [-1, 1]."""
        settings = self._settings(self.base, seed, guidance, 0)
        return latents_from_folder(self.base, SampleRequest(prompts=prompts), settings, device=CPU, arithmetic=CHUNK)

    def enlarge(self, small: Tensor, prompts: tuple[str, ...], seed: int, guidance: float, noise_level: int) -> Tensor:
        """Return the small pictures as large ones, (N, 1, 32, 32) in [-1, 1]."""
        settings = self._settings(self.large, seed, guidance, noise_level)
        wish = SampleRequest(prompts=prompts)
        return latents_from_folder(self.large, wish, settings, small, device=CPU, arithmetic=CHUNK)


class Reader:
    """A classifier of pictures of one size, trained on the real training digits."""

    def __init__(self, pictures: Tensor, digits: np.ndarray) -> None:
        from sklearn.svm import SVC

        self._svc = SVC(C=5).fit(self._rows(pictures), digits)

    def share(self, pictures: Tensor, digits: np.ndarray) -> float:
        """Return the share of the pictures that it reads as these digits."""
        return float((self.read(pictures) == digits).mean())

    def read(self, pictures: Tensor) -> np.ndarray:
        """Return the digits that it reads."""
        return np.asarray(self._svc.predict(self._rows(pictures)))

    @staticmethod
    def _rows(pictures: Tensor) -> np.ndarray:
        return pictures.clamp(-1, 1).flatten(1).numpy()


def bicubic(small: Tensor) -> Tensor:
    """Return small pictures enlarged bicubically, (N, 1, 32, 32)."""
    side = [SIDE, SIDE]
    images = [Image.fromarray(picture[0].numpy()).resize(side, Image.Resampling.BICUBIC) for picture in small]
    return torch.from_numpy(np.stack([np.asarray(image) for image in images]))[:, None].clamp(-1, 1)


def squared_error(pictures: Tensor, real: Tensor) -> float:
    """Return the mean squared error of pictures in [-1, 1], for values from 0 to 1."""
    return float(((pictures.clamp(-1, 1) - real) / 2).square().mean())


def sheet(columns: dict[str, Tensor], out: Path) -> None:
    """Write columns of pictures (N, 1, 32, 32) side by side under their names, one row a digit."""
    padded = [torch.nn.functional.pad(column, (1, 1, 1, 1), value=1.0) for column in columns.values()]
    whole = torch.cat(list(torch.cat(padded, dim=3)[:, 0]), dim=0)  # (rows * 34, columns * 34)
    levels = ((whole.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).numpy()
    small = Image.fromarray(levels)
    large = small.resize((small.width * 3, small.height * 3), Image.Resampling.NEAREST)
    image = Image.new("L", (large.width, large.height + 20), 255)
    image.paste(large, (0, 20))
    for number, name in enumerate(columns):
        middle = (2 * number + 1) * large.width // (2 * len(columns))
        ImageDraw.Draw(image).text((middle, 10), name, font=ImageFont.load_default(12), fill=0, anchor="mm")
    image.save(out)


def measure(run: Path, options: argparse.Namespace) -> Score:
    """Return the score of a run, and write its picture.

    Raises:
        DataError: the digits are missing.
        DiffusionPipeError: the run has no exports.
    """
    pictures, digits = load_digits()
    real = torch.from_numpy(pictures).float()[:, None] / 127.5 - 1  # (5000, 1, 32, 32)
    validation = held_out(digits)
    train, test = real[~validation], real[validation]
    reader, small_reader = Reader(train, digits[~validation]), Reader(reduced(train, SMALL), digits[~validation])
    cascade = Cascade(run, options.steps)

    wanted = np.arange(options.count) % len(WORDS)
    prompts = tuple(caption(int(digit), index) for index, digit in enumerate(wanted))
    base = cascade.draw(prompts, options.seed, options.guidance)
    large = cascade.enlarge(base, prompts, options.seed, 1.0, options.noise_level)
    right = reader.read(large) == wanted

    of_digit = [np.flatnonzero(validation & (digits == digit)) for digit in range(len(WORDS))]
    chosen = np.stack(of_digit, axis=1).flatten()[: options.enlarged]  # 0, 1, ..., 9, 0, 1, ...
    held, small = real[chosen], reduced(real[chosen], SMALL)
    repeated, empty = small.repeat(options.draws, 1, 1, 1), ("",) * len(held) * options.draws
    draws = cascade.enlarge(repeated, empty, options.seed, 1.0, 0).reshape(options.draws, *held.shape)
    for name, first, few, enlarged in (
        ("digits", "base", base[:10], large[:10]),
        ("enlarged", "reduced", small[:10], draws[0, :10]),
    ):
        columns = {first: torch.nn.functional.interpolate(few, size=(SIDE, SIDE)), "super-resolved": enlarged}
        sheet({**columns, "bicubic": bicubic(few), "real": held[:10]}, run / f"{name}.png")
    return Score(
        count=len(wanted),
        recognised=float(right.mean()),
        recognised_base=small_reader.share(base, wanted),
        recognised_bicubic=reader.share(bicubic(base), wanted),
        recognised_real=reader.share(test, digits[validation]),
        recognised_of_digit=tuple(float(right[wanted == digit].mean()) for digit in range(len(WORDS))),
        enlarged=len(held),
        error=squared_error(draws.clamp(-1, 1).mean(0), held),
        error_bicubic=squared_error(bicubic(small), held),
    )


def report(score: Score, run: Path) -> str:
    """Return the score in plain words."""
    worst = int(np.argmin(score.recognised_of_digit))
    ratio = score.error / score.error_bicubic
    return "\n".join(
        [
            f"The classifier reads {score.recognised:.1%} of {score.count} drawn digits of 32x32 pixels rightly.",
            f"  the 8x8 pixels that the base drew            {score.recognised_base:6.1%}",
            f"  their bicubic enlargement                    {score.recognised_bicubic:6.1%}",
            f"  held-out real digits                         {score.recognised_real:6.1%}",
            f"  the least readable digit is {worst}                {score.recognised_of_digit[worst]:6.1%}",
            f"Squared error on {score.enlarged} held-out digits, reduced to 8x8 and enlarged again:",
            f"  super-resolution {score.error:.5f}   bicubic {score.error_bicubic:.5f}   ratio {ratio:.2f}",
            f"Pictures: {run / 'digits.png'} (base | super-resolved | bicubic | real), {run / 'enlarged.png'}",
        ]
    )


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Judge the digits that the trained cascade draws.")
    parser.add_argument("--run", type=Path, default=Path("runs/cascade"), help="the run's folder (%(default)s)")
    parser.add_argument("--count", type=int, default=500, help="digits to draw (%(default)s)")
    parser.add_argument("--enlarged", type=int, default=600, help="held-out digits to enlarge (%(default)s)")
    parser.add_argument("--draws", type=int, default=8, help="draws of each (%(default)s)")
    parser.add_argument("--steps", type=int, default=15, help="denoising steps (%(default)s)")
    parser.add_argument("--guidance", type=float, default=3.5, help="of the base (%(default)s)")
    parser.add_argument("--noise-level", type=int, default=50, help="of drawn small pictures (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise (%(default)s)")
    parser.add_argument("--require", type=float, default=0.9, help="least share of readable digits (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures for programs")
    options = parser.parse_args()
    try:
        score = measure(options.run, options)
    except (DataError, DiffusionPipeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(score)) if options.json else report(score, options.run))
    return 0 if score.recognised >= options.require and score.error < score.error_bicubic else 1


if __name__ == "__main__":
    sys.exit(main())
