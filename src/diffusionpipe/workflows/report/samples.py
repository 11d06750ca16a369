"""The samples of a run as small pictures of a page, by step, each with its caption."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path

from diffusionpipe.workflows.report.figures import Json, absent

SIDE = 192
"""The longest side of a small picture, in pixels; small ones keep their size."""
MOST = 500
"""The most pictures in a page. Of more, some steps are left out, and the page says how many."""
FOLDER, _STEP = "samples", "step-"
_MOST_CAPTION = 400


def samples_of(folder: Path, most: int, small: Callable[[Path], Json | str]) -> Json:
    """The page's part with about `most` pictures at most, of samplings spread evenly; or the reason why there is none.

    `small`: makes a small picture of a file, or returns the reason why not; see `small_picture`.
    """
    every = sorted(found for found in (folder / FOLDER).glob(f"{_STEP}*") if found.is_dir() and _step(found) >= 0)
    drawn = [(one, sorted(one.glob("*.png"))) for one in every]
    drawn = [(one, pictures) for one, pictures in drawn if pictures]
    if not drawn:
        return absent(
            "no samples were drawn: the recipe has no sampling.every, or the run has not reached its first sampling"
        )
    shown = _spread(drawn, most)
    problems: list[str] = []
    steps: list[Json] = []
    for one, pictures in shown:
        found = [small(path) for path in pictures]
        problems += [picture for picture in found if isinstance(picture, str)]
        if readable := [picture for picture in found if not isinstance(picture, str)]:
            steps.append({"step": _step(one), "pictures": readable})
    if not steps:
        return absent(f"no picture in {FOLDER} can be read; the first: {problems[0]}")
    left = len(drawn) - len(shown)
    notes = [f"{left} of {len(drawn)} samplings are left out, evenly, to keep the page small"] if left else []
    notes += (
        [f"{len(problems)} picture{'s' * (len(problems) > 1)} cannot be read; the first: {problems[0]}"]
        if problems
        else []
    )
    return {"steps": steps, "notes": notes}


def _step(folder: Path) -> int:
    number = folder.name.removeprefix(_STEP)
    return int(number) if number.isascii() and number.isdigit() else -1


def _spread(drawn: Sequence[tuple[Path, list[Path]]], most: int) -> list[tuple[Path, list[Path]]]:
    """The samplings (folder, its pictures), evenly thinned to about `most` pictures; the first and the last stay."""
    each = max(len(pictures) for _, pictures in drawn)
    room = max(2, most // each)
    if len(drawn) > room:
        # A set, because two places may round to one sampling.
        kept = sorted({round(place * (len(drawn) - 1) / (room - 1)) for place in range(room)})
        drawn = [drawn[place] for place in kept]
    return [(one, pictures[: most // 2]) for one, pictures in drawn]


def small_picture(path: Path) -> Json | str:
    """A small picture as data of the page, with its caption (of a clip, its first frame); or the reason why not."""
    from PIL import Image

    try:
        with Image.open(path) as opened:
            text = getattr(opened, "text", {})  # the caption as samples keep it
            frames = getattr(opened, "n_frames", 1)
            picture = opened.convert("RGB")
            width, height = picture.size
            if max(picture.size) > SIDE:
                picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
            packed = BytesIO()
            picture.save(packed, "WEBP", quality=80, method=4)
    except Exception as error:  # Pillow raises many kinds for files that are cut off or no pictures
        return f"{path.name}: {error}".replace(str(path), path.name)
    caption = str(text.get("prompt", f"class {text['label']}" if "label" in text else path.stem))
    return {
        "name": path.name,
        "caption": caption[:_MOST_CAPTION],
        "size": f"{width} x {height}" + (f", {frames} frames, the first is shown" if frames > 1 else ""),
        "source": "data:image/webp;base64," + b64encode(packed.getvalue()).decode("ascii"),
    }
