"""Cases of several factors in which each two values of different factors meet: far fewer than all combinations.

What goes wrong with three values together and with no two of them is rare (Kuhn, Wallace and Gallo, "Software Fault
Interactions and Implications for Software Testing", IEEE TSE 30(6), 2004); `make night` may run all combinations.
"""

from collections.abc import Collection, Sequence
from itertools import combinations, product
from typing import Any

Case = tuple[Any, ...]
Meeting = tuple[tuple[int, Any], tuple[int, Any]]


def covering(*factors: Sequence[Any], first: Collection[Case] = (), without: Collection[Case] = ()) -> list[Case]:
    """The cases `first`, then each time the case in which most pairs meet that have not met; never one of `without`.

    >>> covering("ab", "cd", "ef")
    [('a', 'c', 'e'), ('a', 'd', 'f'), ('b', 'c', 'f'), ('b', 'd', 'e')]
    """
    left = [case for case in product(*factors) if case not in first and case not in without]
    found = list(first)
    missing = {meeting for case in left for meeting in meetings(case)}
    missing -= {meeting for case in found for meeting in meetings(case)}
    while missing:
        best = max(left, key=lambda case: len(missing & meetings(case)))  # the earliest of equal ones
        found.append(best)
        missing -= meetings(best)
    return found


def meetings(case: Case) -> set[Meeting]:
    """The pairs of values of a case, each with the number of its factor."""
    return set(combinations(enumerate(case), 2))
