"""The difference of two states of a page's data, so that a watched page is sent no part again that it has.

    {"new": value}                              the value itself
    {"keys": {key: change}, "gone": [key]}      of an object: only keys that differ
    {"kept": [first, last], "items": [...]}     of a list: the numbers of items that stay at its start and
                                                at its end, and between them {"old": place in the old
                                                list} or a change
    {"kept": [first, last], "new": [...]}       the same of a list of numbers and texts

The page applies a change with `dp.changed` (viz/assets/page.js).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from diffusionpipe.workflows.report.figures import Json


def change_of(old: object, new: object) -> Json:
    """The change, as the module says, that turns `old` into `new`, both of JSON's types.

    Parts that are the same object cost no comparison.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        differing = {key: value for key, value in new.items() if key not in old or old[key] != value}
        keys = {key: change_of(old[key], value) if key in old else {"new": value} for key, value in differing.items()}
        return {"keys": keys, "gone": [key for key in old if key not in new]}
    if isinstance(old, list) and isinstance(new, list):
        return _of_list(old, new)
    return {"new": new}


def _of_list(old: Sequence[object], new: Sequence[object]) -> Json:
    shortest = min(len(old), len(new))
    first = next((place for place in range(shortest) if old[place] != new[place]), shortest)
    room = shortest - first
    last = next((place for place in range(room) if old[-1 - place] != new[-1 - place]), room)
    middle = new[first : len(new) - last]
    if any(isinstance(value, dict | list) for value in middle):
        return {"kept": [first, last], "items": list(_items(old, middle, first))}
    return {"kept": [first, last], "new": list(middle)}


def _items(old: Sequence[object], middle: Sequence[object], first: int) -> Iterator[Json]:
    """For each item of `middle`: {"old": index of an equal item of `old`}, or a change of the old item at its index.

    `middle`: the new list from the index `first` on, without the items that are kept at its end.
    """
    for place, value in enumerate(middle, first):
        same = next((number for number, one in enumerate(old) if one == value), None)
        if same is not None:
            yield {"old": same}
        else:
            yield change_of(old[place], value) if place < len(old) else {"new": value}
