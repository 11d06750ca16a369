"""What all cells say together."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from benchmarks.cards.cells import OURS, PEER, PEER_SPLIT, STORED, TUNED, Cell
from benchmarks.rivals.replicated import REPLICATED_SPP


def summary(cells: Sequence[Cell]) -> dict[str, float | None]:
    """The headline figures by name; None where no cell has one. Only what fits in memory counts."""
    over_best = _present(cell.over(cell.best_other) for cell in cells)
    over_peer = _present(cell.over(cell.fitting(PEER)) for cell in cells)
    over_split = _present(cell.over(cell.fitting(PEER_SPLIT)) for cell in cells)
    return {
        "cells": len(cells),
        "cells_in_which_ours_fits": sum(cell.fitting("DiffusionPipe") is not None for cell in cells),
        "cells_in_which_diffusion_pipe_fits": len(over_peer),
        "over_the_best_other_min": min(over_best, default=None),
        "over_the_best_other_median": median(over_best) if over_best else None,
        "over_the_best_other_max": max(over_best, default=None),
        "over_diffusion_pipe_min": min(over_peer, default=None),
        "over_diffusion_pipe_median": median(over_peer) if over_peer else None,
        "over_diffusion_pipe_max": max(over_peer, default=None),
        "over_diffusion_pipe_in_stages_median": median(over_split) if over_split else None,
        **dict(_extremes(cells)),
    }


def _extremes(cells: Sequence[Cell]) -> Iterator[tuple[str, float | None]]:
    """Ours over data parallelism as people tune it, over others on the same base, and over replicated SPP.

    And where they fit.
    """
    for system in (*TUNED, *STORED, REPLICATED_SPP):
        found = _present(cell.over(cell.fitting(system)) for cell in cells)
        name = system.replace(",", "").replace("+", "and").replace(" ", "_")
        yield f"cells_in_which_{name}_fits", sum(cell.fitting(system) is not None for cell in cells)
        if system.startswith(OURS):
            continue
        yield f"over_{name}_min", min(found, default=None)
        yield f"over_{name}_max", max(found, default=None)


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
