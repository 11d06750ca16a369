"""The lines about the sizes of pictures that are shown before a run begins.

sizes       9 sizes for 10,000 pictures; 4 % of the pixels are cut away
            384 x 704 pixels: 969 (10 %), 4 % cut away
            ...
cut away    2 pictures by more than 35 %, the most a.png: 80 %
joined      3 pictures of 960 x 448 pixels are trained at 832 x 512 pixels, because 4 lie side by side
"""

from collections.abc import Iterator, Sequence

from diffusionpipe.ir.words import counted
from diffusionpipe.trainer.data.sizes.sizes import Assignment, SizeShare

_MOST = 12
"""The largest number of sizes that are shown."""


def lines_of_sizes(assignment: Assignment, names: Sequence[str], run: int) -> Iterator[tuple[str, str, bool]]:
    """Yields lines about the sizes of training for the screen, each (name, text, whether it is a warning).

    `names`: the name of each picture. `run`: the number of samples in a row that have one size.
    """
    shares, total = assignment.shares, assignment.visits
    number = len({picture for share in shares for epoch in share.members for picture in epoch})
    pictures = counted(number, "pictures")
    yield "sizes", f"{len(shares)} for {pictures}; {_percent(assignment.cut)} of the pixels are cut away", False
    ranked = sorted(shares, key=lambda share: -share.visits)
    for share in ranked[:_MOST]:
        yield "sizes", _of_size(share, total), False
    if len(ranked) > _MOST:
        rest = sum(share.visits for share in ranked[_MOST:])
        yield "sizes", f"{len(ranked) - _MOST} more: {_percent(rest / total)} of the visits", False
    if assignment.cut_much:
        worst = max(assignment.cut_much, key=lambda number: assignment.cut_much[number])
        many = f"{counted(len(assignment.cut_much), 'pictures')} by more than {_percent(assignment.most_cut)}"
        most = f"the most {names[worst]}: {_percent(assignment.cut_much[worst])}"
        # Squares cut long pictures, which the recipe has asked for.
        are_shaped = any(share.size.width != share.size.height for share in shares)
        yield "cut away", f"{many}, {most}", are_shaped
    if assignment.empty:
        yield "no picture", ", ".join(map(str, assignment.empty)), False
    for size, other, count in assignment.joined:
        few = f"{counted(count, 'pictures')} of {size}"
        yield "joined", f"{few} trained at {other}, because {run} lie side by side", True
    for share in shares:
        if share.repeats:
            yield (
                "repeated",
                f"{share.size} has {share.pictures} where {run} lie side by side: one is there twice",
                True,
            )
    if assignment.left_out:
        first = min(assignment.left_out)
        text = f"{counted(len(assignment.left_out), 'pictures')}, e.g. {names[first]}: {assignment.left_out[first]}"
        yield "left out", text, True


def _of_size(share: SizeShare, total: int) -> str:
    text = f"{share.size}: {share.visits:,} ({_percent(share.visits / total)}), {_percent(share.cut)} cut away"
    return text if share.enlarged <= 1 else f"{text}, enlarged up to {share.enlarged:.3g} times"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
