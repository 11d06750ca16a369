"""Mixed steps over scikit-image's pictures in every layout, compared with one process: a part of `make families`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from kit.real_pictures import SIZES, save_real, steps_over
from kit.size_cases import LAYOUTS, compare, graph_of
from kit.sized_steps import one_process

KINDS = ("unet", "transformer", "adapters on nf4")
STEPS = 20
FAILED = "FAILED"


def main_of_sizes(only: str) -> bool:
    """Prints a table of the models whose names contain a text; whether nothing failed."""
    kinds = [kind for kind in KINDS if only in f"sizes of {kind}"]
    if not kinds:
        return True
    with TemporaryDirectory() as folder:
        pictures = save_real(Path(folder) / "pictures")
        cells = {kind: list(_row(kind, pictures)) for kind in kinds}
    print("\n".join(table(cells)))
    return FAILED not in {cell for row in cells.values() for cell in row}


def _row(kind: str, pictures: Path) -> Iterator[str]:
    """The seconds of the steps in each layout; or that their gradients are not the ones of one process."""
    graph = graph_of(kind, SIZES)
    steps = steps_over(pictures, graph, SIZES, batch=8, steps=STEPS).steps
    alone = [one_process(graph, *batch) for batch in steps]
    for layout in LAYOUTS:
        started = perf_counter()
        try:
            compare(graph, layout, steps, alone)
            cell = f"{perf_counter() - started:.1f} s"
        except Exception as error:
            print(f"sizes of {kind}, {layout}: {type(error).__name__}: {error}", file=sys.stderr)
            cell = FAILED
        print(f"sizes of {kind}, {layout} {cell}", file=sys.stderr, flush=True)
        yield cell


def table(cells: dict[str, list[str]]) -> Iterator[str]:
    """A row for each model."""
    yield f"| {STEPS} steps of {len(SIZES)} sizes | {' | '.join(LAYOUTS)} |"
    yield f"|---{'|---' * len(LAYOUTS)}|"
    for kind, row in cells.items():
        yield f"| {kind} | {' | '.join(row)} |"
