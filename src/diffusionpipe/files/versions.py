"""Documents that have a version: older ones become today's, step by step, before anything else reads them.

    version 1 ── steps[0] ──> version 2 ── steps[1] ──> version 3, which is today's

A step takes a document as plain values of JSON, and returns the next version's. It never changes, so it asks nothing of
today's code: a default in it is the default of its time.
"""

from collections.abc import Callable, Sequence
from typing import Any

Document = dict[str, Any]
Step = Callable[[Document], Document]
"""A function that makes a document of the next version from one of its version; it may change its argument."""


def upgraded(document: Document, version: object, steps: Sequence[Step]) -> Document:
    """The document in the form of today's version, made from a document that has `version`.

    `steps` lead from version 1 to today's, one version each.

    Raises:
        ValueError: there is no such version; the message says which are read.
    """
    newest = len(steps) + 1
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= newest:
        known = "1" if newest == 1 else f"1 to {newest}"
        raise ValueError(f"version {version!r} is unknown; this DiffusionPipe reads version {known}")
    for step in steps[version - 1 :]:
        document = step(document)
    return document
