"""What a run says of its prediction after its first steps: a table on a terminal, lines elsewhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from diffusionpipe.units import Seconds

if TYPE_CHECKING:
    from rich.table import Table

    from diffusionpipe.planner.correction.correct import Correction, Kind

LAYERS = 3
"""Shown of those that are most off beside the others."""
CLEAR = 1.2
"""Factor from which on a layer is off beside the usual one."""


def check_lines(found: "Correction", profile: Path) -> Iterator[str]:
    """Predicted, measured and corrected step; what was off; where the profile is."""
    first, last = found.steps
    yield (
        f"checked_steps={first}-{last} predicted_step_s={found.predicted.step:.4f} "
        f"measured_step_s={found.measured.step:.4f} corrected_step_s={found.corrected.step:.4f}"
    )
    kinds = [f"{kind.name} {_off(kind)}" for kind in found.kinds]
    yield f'off="{", ".join([*kinds, f"unexplained {_percent(found.unexplained)}"])}"'
    if places := _places(found):
        yield f'most_off="{"; ".join(places)}"'
    yield f"corrected_profile={profile}"


def check_table(found: "Correction", profile: Path) -> "Table":
    """The same for a terminal."""
    from rich.table import Table
    from rich.text import Text

    first, last = found.steps
    table = Table(box=None, pad_edge=False, caption_justify="left", title_justify="left", caption_style="")
    table.title = f"Prediction after step {last}"
    for number, heading in enumerate((f"steps {first} to {last}", "predicted", "measured", "off", "corrected")):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    times = (
        ("step", found.predicted.step, found.measured.step, found.corrected.step),
        ("iteration", found.predicted.iteration, found.measured.iteration, found.corrected.iteration),
    )
    for name, predicted, measured, corrected in times:
        off = _percent(measured / predicted - 1)
        table.add_row(name, _milliseconds(predicted), _milliseconds(measured), off, _milliseconds(corrected))
    for kind in found.kinds:
        table.add_row(f"  {kind.name}", _milliseconds(kind.predicted), _milliseconds(kind.measured), _off(kind), "")
    table.add_row("  unexplained", "", "", _percent(found.unexplained), "")
    words = [*(f"most off: {place}" for place in _places(found)), f"corrected profile: {profile}"]
    table.caption = Text("\n".join(words))
    return table


def _places(found: "Correction") -> list[str]:
    """The stage whose compute is most off, and the layers that are clearly off beside the usual one."""
    words = []
    if stages := [stage for stage in found.stages if stage.predicted > 0 and stage.measured > 0]:
        worst = max(stages, key=lambda stage: max(stage.error, -stage.error))
        words.append(f"{worst.name} {_percent(worst.error)}")
    factors = sorted(factor for _, factor in found.layers)
    usual = factors[len(factors) // 2]
    apart = [(name, factor) for name, factor in found.layers if max(factor / usual, usual / factor) > CLEAR]
    apart.sort(key=lambda pair: -max(pair[1] / usual, usual / pair[1]))
    return [*words, *(f"{name} {_percent(factor - 1)}" for name, factor in apart[:LAYERS])]


def _off(kind: "Kind") -> str:
    return _percent(kind.error) if kind.predicted else "not predicted"


def _milliseconds(seconds: Seconds) -> str:
    return f"{seconds * 1000:.1f} ms"


def _percent(part: float) -> str:
    """With its sign; what rounds to nothing is +0.0%."""
    return f"{round(part, 3) + 0.0:+.1%}"
