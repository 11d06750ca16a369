"""What the figures say in words: why a cell is below the aim, why it fits nowhere, what to use on a machine."""

from collections.abc import Sequence

from benchmarks.cards.cells import OURS, PEER, Cell, Entry

AIM = 1.3
"""Over diffusion-pipe with encoders on the fly."""
TIE = 0.005
"""Speeds that differ by less are equal."""
GIB = 2**30
LAYOUTS = (
    ("stages with filled waits", ""),
    ("copies of the model", "data parallel"),
    ("copies with parameters in parts", "sharded data parallel"),
)
"""What to call ours, and how the layouts begin that are called so; stages are all others."""


def reason_of(cell: Cell) -> str:
    """Why ours is less than `AIM` times as fast as diffusion-pipe, or why there is no such figure; "" elsewhere."""
    ours, peer = cell.fitting(OURS), cell.fitting(PEER)
    if not cell.fits:
        nearest = min(cell.entries, key=lambda one: one.overflow)
        return (
            f"nothing fits: the nearest, {nearest.system}, misses a device by {nearest.overflow / GIB:.1f} GiB "
            f"and takes {sum(nearest.held) / GIB:.0f} GiB in all; more cards, or cards with so much more, would do"
        )
    if ours is None:
        return "ours does not fit"
    best = cell.best_other
    if best and ours.samples_per_second < (1 - TIE) * best.samples_per_second:
        less = (1 - ours.bubble) / ours.samples_per_second * best.samples_per_second / (1 - best.bubble)
        return (
            f"{best.system} is {best.samples_per_second / ours.samples_per_second:.2f} times as fast: its gathers hide "
            f"behind compute (idle {best.bubble:.0%}, ours {ours.bubble:.0%}), and its larger parts of the batch need "
            f"{1 - 1 / less:.0%} less compute for each sample"
        )
    if peer is None:
        missing = cell.entry(PEER)
        return f"diffusion-pipe misses a device by {missing.overflow / GIB:.1f} GiB" if missing else ""
    over = cell.over(peer)
    if over is None or over >= AIM:
        return ""
    share = f"encoders are {cell.frozen_share:.0%} of the work"
    if peer.layout.startswith("1 stage "):
        return f"the model fits on one device, so diffusion-pipe trains copies and is idle {peer.bubble:.0%}; {share}"
    return f"diffusion-pipe is idle {peer.bubble:.0%}, ours {ours.bubble:.0%}; {share}"


def advice(cells: Sequence[Cell], machine: str) -> str:
    """One sentence for a machine: what to use, and why."""
    mine = [cell for cell in cells if cell.case.machine == machine]
    behind = [cell for cell in mine if (over := cell.over(cell.best_other)) and over < 1 - TIE]
    ahead = [cell for cell in mine if cell.fitting(OURS) and cell not in behind]
    parts = []
    for words, starts in LAYOUTS:
        chosen = [cell for cell in ahead if _layout_of(cell.fitting(OURS)) == starts]
        if chosen:
            gains = [gain for cell in chosen if (gain := cell.over(cell.best_other))]
            parts.append(f"{words} for {_names(chosen)} ({_span(gains)})")
    parts += [
        f"{best.system} for {cell.case.model} (ours: {cell.over(best):.2f} x)"
        for cell in behind
        if (best := cell.best_other)
    ]
    if nowhere := [cell for cell in mine if not cell.fits]:
        parts.append(f"for {_names(nowhere)} nothing fits")
    return f"{machine}: {'; '.join(parts)}."


def _layout_of(entry: Entry | None) -> str:
    return next((starts for _, starts in LAYOUTS[1:] if entry and entry.layout.startswith(starts)), "")


def _names(cells: Sequence[Cell]) -> str:
    names = [cell.case.model for cell in cells]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _span(gains: Sequence[float]) -> str:
    """The speed over the next best, over several models."""
    if not gains:
        return "nothing else fits"
    low, high = f"{min(gains):.2f}", f"{max(gains):.2f}"
    return f"{low} x the next best that fits" if low == high else f"{low} to {high} x the next best that fits"
