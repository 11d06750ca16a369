"""The size at which each picture of a folder is trained, from the sizes in the pictures' headers and a recipe.

Nothing here needs torch, a model or pixels. A picture goes to the size that cuts least of it away. Where a recipe has
several areas, a picture visits one after the other: in epoch e it has the area (e + its number) modulo their number.

    areas    512, 768          cycle of 2 epochs
    picture  3,000 x 2,000     epoch 0: 640 x 416      epoch 1: 960 x 640      epoch 2: 640 x 416 ...

A size needs as many pictures as lie side by side in a micro-batch. One with fewer gives them to the size that cuts
least of them away, within a limit. So no picture is dropped but those that a recipe leaves out.

A source may have areas of its own. Its pictures visit these alone. A size that several sources have is one size.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import lcm, log
from statistics import fmean
from typing import NamedTuple

from diffusionpipe.errors import DataError
from diffusionpipe.ir.size import Clip
from diffusionpipe.ir.words import counted

Pixels = tuple[int, int]
"""Width and height of a picture in pixels."""
Areas = tuple[tuple[Clip, ...], ...]
"""The sizes of each area: sizes with about the same number of pixels."""
MOST_CUT = 0.35
"""The default limit of the part of a picture that is cut away where a size gives its pictures to another size."""
MULTIPLE = 64
"""The default number of which all sides are multiples: every published model takes such sides."""
_ASPECTS = 11
"""The largest number of sizes of one area."""
_AREA = (0.85, 1.07)
"""The smallest and the largest area of a size, relative to the area of the square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRules:
    """The sizes that pictures may have, and the pictures that are left out."""

    areas: Areas
    """The sizes of each area, for sources without areas of their own."""
    of_sources: tuple[Areas, ...] = ()
    """The areas of each source; () where all have `areas`."""
    most_cut: float = MOST_CUT
    """The largest part of a picture that may be cut away where a size gives its pictures to another size."""
    min_side: int = 1
    """The shortest side in pixels; pictures with a shorter side are left out."""
    enlarge: bool = True
    """Whether a picture may be enlarged; else it has only sizes that it fills."""

    @property
    def sizes(self) -> tuple[Clip, ...]:
        """All sizes, each once, area after area, `areas` before the areas of sources."""
        return tuple(dict.fromkeys(size for areas in (self.areas, *self.of_sources) for area in areas for size in area))


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeShare:
    """The pictures that are trained at one size, by epoch, and how far they are cut and enlarged."""

    size: Clip
    members: tuple[tuple[int, ...], ...]
    """The indices of the pictures that have the size in each epoch of a cycle, by epoch."""
    cut: float
    """The mean part of a picture that is cut away."""
    enlarged: float
    """The largest factor by which a picture is enlarged; below 1 no picture is."""
    repeats: bool = False
    """Whether the size has fewer pictures than lie side by side in a micro-batch, so that one is there twice."""

    @property
    def pictures(self) -> int:
        """The number of different pictures that are trained at this size."""
        return len({number for epoch in self.members for number in epoch})

    @property
    def visits(self) -> int:
        """The number of times that a picture is trained at this size in a cycle of epochs, over all pictures."""
        return sum(map(len, self.members))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The sizes at which each picture is trained in each epoch of a cycle, and the pictures that are left out."""

    shares: tuple[SizeShare, ...]
    """The sizes that have pictures, in the order of the rules."""
    cycle: int
    """The number of epochs after which the sizes repeat; each picture is seen once in each epoch."""
    left_out: Mapping[int, str] = field(default_factory=dict)
    """Why a picture is left out, by its index, for such pictures alone."""
    joined: tuple[tuple[Clip, Clip, int], ...] = ()
    """Each size that gave its pictures away: (the size, the size that has its pictures now, their number)."""
    empty: tuple[Clip, ...] = ()
    """The sizes to which no picture goes."""
    cut_much: Mapping[int, float] = field(default_factory=dict)
    """The largest part that a size cuts away of a picture, by its index, for pictures with more than `most_cut`."""
    most_cut: float = MOST_CUT
    """The limit of the rules on the part of a picture that is cut away."""

    @property
    def visits(self) -> int:
        """The number of times that a picture is trained on in a cycle of epochs, over all pictures and sizes."""
        return sum(share.visits for share in self.shares)

    @property
    def mean_pixels(self) -> float:
        """The mean number of pixels of a trained picture at its size, over all visits of pictures."""
        return sum(share.size.num_pixels * share.visits for share in self.shares) / self.visits

    @property
    def cut(self) -> float:
        """The mean part of a picture that is cut away, over all visits of pictures."""
        return sum(share.cut * share.visits for share in self.shares) / self.visits

    def parts(self, sizes: Sequence[Clip | None]) -> tuple[float, ...]:
        """The part of all visits, from 0 to 1, that is at each of these sizes; 0 for a size without pictures."""
        visits: dict[Clip | None, int] = {share.size: share.visits for share in self.shares}
        return tuple(visits.get(size, 0) / self.visits for size in sizes)


def stated_size(text: str) -> Clip:
    """The size that a text such as "768x512" (width and height) or "832x480x33" (with a clip's frames) states.

    Raises:
        ValueError: the text is not a size.
    """
    numbers = text.split("x")
    if len(numbers) not in (2, 3) or not all(number.isdecimal() for number in numbers):
        raise ValueError(
            f'{text!r} is not a width and a height such as "768x512", nor a clip\'s size with its frames, "832x480x33"'
        )
    width, height, frames = (*map(int, numbers), 1)[:3]
    return Clip(width=width, height=height, frames=frames)


def size_text(size: Clip) -> str:
    """The text of a size, "WIDTHxHEIGHT", or "WIDTHxHEIGHTxFRAMES" for a clip; `stated_size` reads it back."""
    return f"{size.width}x{size.height}" + (f"x{size.frames}" if size.frames > 1 else "")


def nearest_of(size: Clip, others: Sequence[Clip]) -> Clip:
    """The size among `others` that is most like this size: first in its frames, then in its sides."""

    def off(other: Clip) -> tuple[int, int]:
        return abs(other.frames - size.frames), abs(other.width - size.width) + abs(other.height - size.height)

    return min(others, key=off)


def areas_of(stated: Sequence[int | str], aspects: tuple[float, float] | None, multiple: int = MULTIPLE) -> Areas:
    """The sizes of each area that a recipe states as sides (numbers) or sizes (texts).

    A side is an area of its own: a square, or the sizes of its area whose width / height is within `aspects` and whose
    sides are multiples of `multiple`. Stated sizes with the same number of frames are one area if the largest has at
    most one and a half times the pixels of the smallest.

    Raises:
        ValueError: a text is not a size.
    """
    areas = [
        (Clip.square(side),) if aspects is None else sizes_of_area(side, aspects, multiple)
        for side in sorted({side for side in stated if isinstance(side, int)})
    ]
    exact = {stated_size(size) for size in stated if isinstance(size, str)}
    sizes = sorted(exact, key=lambda size: (size.frames, size.num_pixels, size.width))
    while sizes:
        first = sizes[0]
        # The first ones, because sizes are sorted by their pixels.
        alike = [size for size in sizes if size.frames == first.frames and size.num_pixels <= 1.5 * first.num_pixels]
        areas.append(tuple(alike))
        sizes = sizes[len(alike) :]
    return tuple(areas)


def sizes_of_area(side: int, aspects: tuple[float, float], multiple: int = MULTIPLE) -> tuple[Clip, ...]:
    """At most 11 sizes with about as many pixels as a square, sorted by width / height, which is within `aspects`.

    `side`: the side of the square in pixels.

    All sides are multiples of `multiple`; () where no such size has about that area.

    >>> [f"{size.width} x {size.height}" for size in sizes_of_area(512, (0.5, 1.0))]
    ['384 x 704', '384 x 640', '448 x 576', '448 x 512', '512 x 512']
    """
    units = side / multiple
    most = round(units * max(aspects[1], 1 / aspects[0], 2)) + 1  # a longer side would lie outside of the aspects
    found = [
        Clip(width=width * multiple, height=height * multiple)
        for width, height in product(range(1, most), repeat=2)
        if _AREA[0] <= width * height / units**2 <= _AREA[1] and aspects[0] <= width / height <= aspects[1]
    ]
    # Equal steps of the logarithm.
    wanted = [aspects[0] * (aspects[1] / aspects[0]) ** (i / (_ASPECTS - 1)) for i in range(_ASPECTS)]

    def misfit(size: Clip, aspect: float) -> float:
        off = abs(log(size.num_pixels / side**2))
        # The aspect counts more: it decides how much is cut away.
        return abs(log(size.width / size.height / aspect)) + off / 4

    best = {min(found, key=lambda size: misfit(size, aspect)) for aspect in wanted if found}
    return tuple(sorted(best, key=lambda size: (size.width / size.height, size.num_pixels)))


def cut_away(picture: Pixels, size: Clip) -> float:
    """The part of a picture, from 0 to 1, that is cut away when it is brought to a size."""
    ratio = picture[0] * size.height / (picture[1] * size.width)
    return 1 - min(ratio, 1 / ratio)


def enlargement(picture: Pixels, size: Clip) -> float:
    """The factor by which a picture is enlarged to cover a size; below 1 it is made smaller."""
    return max(size.width / picture[0], size.height / picture[1])


def assign(
    pictures: Sequence[Pixels],
    rules: SizeRules,
    side_by_side: int,
    sources: Sequence[int] = (),
    frames: Sequence[int] | None = None,
) -> Assignment:
    """The sizes at which every picture or clip is trained, by its width and height.

    A size keeps its pictures only if it has `side_by_side` of them, the number in a micro-batch. `sources`: the source
    of each picture, where sources have areas of their own. `frames`: the largest number of frames that can be taken of
    each, 1 for a picture; None: all are pictures. A clip has a size with as many frames as it can fill.

    Raises:
        DataError: there is no size, no picture is left, or sizes with too few pictures can neither give them away nor
            repeat them.
    """
    asked = rules.of_sources or (rules.areas,)
    if not all(map(any, asked)):
        raise DataError(
            "data.resolution: no size of this area has sides that are multiples of data.multiple; give a larger area "
            "or a smaller multiple"
        )
    groups = [asked.index(areas) for areas in asked]  # sources with equal areas are one group
    group_of = [groups[source] for source in sources] if rules.of_sources else [0] * len(pictures)
    grouped = _Grouped(pictures, group_of, asked, [1] * len(pictures) if frames is None else frames)
    cycle = lcm(*map(len, asked))  # each group has come round
    left_out: dict[int, str] = {}
    members: dict[Clip, list[list[int]]] = {size: [[] for _ in range(cycle)] for size in rules.sizes}
    places: Counter[int] = Counter()
    remedies: set[str] = set()
    # By shape, so that pictures alike follow each other.
    for number in sorted(range(len(pictures)), key=lambda number: (pictures[number], number)):
        group, most = grouped.group_of[number], grouped.most[number]
        visited = list(_visited(pictures[number], most, asked[group], rules))
        if min(pictures[number]) < rules.min_side:
            left_out[number] = f"a side of {min(pictures[number])} pixels is below data.min_side"
            remedies.add(f"set data.min_side to {max(map(min, pictures))} or less")
        elif most < min(size.frames for area in asked[group] for size in area):
            left_out[number] = f"it has {counted(most, 'frames')}, and every size has more"
            remedies.add("give sizes of fewer frames in data.resolution")
        elif not visited:
            left_out[number] = "it is smaller than every size, and data.enlarge is false"
            remedies.add("set data.enlarge = true")
        else:
            for epoch in range(cycle):
                # By the place among pictures alike, so that each area has its share of every aspect in every epoch.
                members[visited[(epoch + places[group]) % len(visited)]][epoch].append(number)
        places[group] += 1
    if len(left_out) == len(pictures):
        raise DataError(f"data.train: every picture is left out; {', or '.join(sorted(remedies))}")
    empty = tuple(size for size, epochs in members.items() if not any(epochs))
    joined = _join(members, grouped, rules, side_by_side)
    shares = []
    cut_much: dict[int, float] = {}
    for size, epochs in members.items():
        numbers = [number for epoch in epochs for number in epoch]
        if not numbers:
            continue
        cuts = {number: cut_away(pictures[number], size) for number in numbers}
        for number, cut in cuts.items():
            if cut > rules.most_cut:
                cut_much[number] = max(cut, cut_much.get(number, 0.0))
        share = SizeShare(
            size=size,
            members=tuple(tuple(sorted(epoch)) for epoch in epochs),
            cut=fmean(cuts[number] for number in numbers),
            enlarged=max(enlargement(pictures[number], size) for number in numbers),
            repeats=len(set(numbers)) < side_by_side,
        )
        shares.append(share)
    return Assignment(
        shares=tuple(shares),
        cycle=cycle,
        left_out=left_out,
        joined=tuple(joined),
        empty=empty,
        cut_much=cut_much,
        most_cut=rules.most_cut,
    )


class _Grouped(NamedTuple):
    """All pictures, in groups that have the same areas."""

    pixels: Sequence[Pixels]
    """Width and height of each picture."""
    group_of: Sequence[int]
    """The group of each picture."""
    areas: Sequence[Areas]
    """The areas of each group."""
    most: Sequence[int]
    """The largest number of frames that can be taken of each picture or clip."""

    def split(self, numbers: Sequence[int]) -> dict[int, list[int]]:
        """The pictures with these indices, by their group."""
        found: dict[int, list[int]] = {}
        for number in numbers:
            found.setdefault(self.group_of[number], []).append(number)
        return found


def _visited(picture: Pixels, most: int, areas: Areas, rules: SizeRules) -> Iterator[Clip]:
    """The sizes at which one sample is trained, one after the other: one for each area, with as many frames as fit.

    `most`: the largest number of frames that can be taken of the sample.
    """
    frames = max((size.frames for area in areas for size in area if size.frames <= most), default=0)
    for area in areas:
        if area[:1] and area[0].frames != frames:
            continue
        able = [size for size in area if rules.enlarge or enlargement(picture, size) <= 1]
        if able:
            yield min(able, key=lambda size: cut_away(picture, size))


def _join(
    members: dict[Clip, list[list[int]]], pictures: _Grouped, rules: SizeRules, side_by_side: int
) -> list[tuple[Clip, Clip, int]]:
    """Moves the pictures of sizes with too few to other sizes of their own areas, and returns the moves.

    A move is (size, the size that has its pictures now, their number). The smallest sizes come first. `members`: the
    pictures of each size in each epoch, which it changes.

    Raises:
        DataError: a size with too few pictures can neither give them away nor repeat one.
    """
    joined: list[tuple[Clip, Clip, int]] = []
    settled: set[Clip] = set()
    problems: list[str] = []

    def numbers_of(size: Clip) -> list[int]:
        return [number for epoch in members[size] for number in epoch]

    while True:
        counts = {size: len(set(numbers_of(size))) for size in members if size not in settled}
        few = [size for size, count in counts.items() if 0 < count < side_by_side]
        if not few:
            break
        size = min(few, key=lambda one: counts[one])
        settled.add(size)
        others = [other for other in members if other != size and numbers_of(other)]
        groups = pictures.split(numbers_of(size))
        costs = {group: _costs(numbers, pictures, others) for group, numbers in groups.items()}
        moves = {group: _nearest(size, groups[group], pictures, costs[group], rules) for group in groups}
        if None not in moves.values():
            for group, to in moves.items():
                assert to is not None, "each group has a size to go to"
                joined.append((size, to, len(set(groups[group]))))
                for mine, theirs in zip(members[size], members[to], strict=True):
                    theirs += pictures.split(mine).get(group, [])
            for mine in members[size]:
                mine.clear()
        elif counts[size] < side_by_side - 1:  # with one picture too few, one may be there twice
            least = max(min(own.values(), default=1.0) for own in costs.values())
            problems.append(
                f"{size} has {counted(counts[size], 'pictures')} where {side_by_side} lie side by side"
                + (f", and the nearest size would cut {100 * least:.0f} % away" if all(costs.values()) else "")
            )
    if problems:
        raise DataError(
            f"data.resolution: {'; '.join(problems)}.\nRaise data.max_cut, use fewer sizes or data.same_size, or add "
            "pictures."
        )
    return joined


def _costs(numbers: Sequence[int], pictures: _Grouped, others: Sequence[Clip]) -> dict[Clip, float]:
    """The largest part that each other size would cut away of a picture of a group, for sizes of the group's areas.

    `numbers`: the indices of the group's pictures.
    """
    most = min(pictures.most[number] for number in numbers)
    own = {size for area in pictures.areas[pictures.group_of[numbers[0]]] for size in area if size.frames <= most}
    return {
        other: max(cut_away(pictures.pixels[number], other) for number in numbers) for other in others if other in own
    }


def _nearest(
    size: Clip, numbers: Sequence[int], pictures: _Grouped, costs: Mapping[Clip, float], rules: SizeRules
) -> Clip | None:
    """The size to which a group's pictures of a size may go; None if there is none.

    It has the same number of frames, or the next smaller one, and is of the same area if possible. `costs`: the part of
    a picture that each size would cut away.
    """
    areas = pictures.areas[pictures.group_of[numbers[0]]]
    area_of = {one: number for number, area in enumerate(areas) for one in area}
    able = [other for other, cut in costs.items() if cut <= rules.most_cut]
    able = [other for other in able if rules.enlarge or _fill(numbers, pictures.pixels, other)]
    return min(
        able,
        key=lambda other: (size.frames - other.frames, area_of[other] != area_of[size], costs[other]),
        default=None,
    )


def _fill(numbers: Sequence[int], pictures: Sequence[Pixels], size: Clip) -> bool:
    """Whether none of these pictures would be enlarged at a size; `numbers` are their indices."""
    return all(enlargement(pictures[number], size) <= 1 for number in numbers)
