"""Large numbers for people."""


def short_count(number: float) -> str:
    """A number as text with three significant digits and a letter from 1,000 on: 950, 15.2k, 860M, 2.57B."""
    for limit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= limit * 0.9995:
            return f"{float(f'{number / limit:.3g}'):g}{letter}"
    return f"{number:.0f}"
