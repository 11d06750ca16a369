"""Which cases of a test run always and which in `make test-all` only."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_and_slow(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All values as parameters of a test, tuples for several names; those that are not `quick` are marked slow.

    The quick ones represent every kind of case. A property that only a whole run or a large model shows is slow.
    """
    return [value if value in quick else pytest.param(*_several(value), marks=pytest.mark.slow) for value in values]


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
