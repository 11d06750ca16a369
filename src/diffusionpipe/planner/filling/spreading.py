"""Fills of copies of the model whose encoders rest in host memory: so far apart that their weights arrive in time.

    at the end   F F F F B B B B [0]..[1]..[2]..[3] [v]     every layer waits for its weights
    spread       F F F F B [0] B [1] B [2] B [3] [v]        they arrive while the copy trains

Copies of the whole model hardly ever wait for each other, so their frozen work takes its own time wherever it stands.
Own algorithm. Components whose weights take longer to come than their layers to run are spread: each layer runs on all
samples before the next one, so that weights come once in an iteration, and no sooner than they are there. Of the places
from which on nothing waits for weights the last one is taken, because there most activations are gone already. All
other components follow at the end, where none are held.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from diffusionpipe.ir import Range
from diffusionpipe.ir.action import COMPUTE_OPS
from diffusionpipe.passes import PlacedFill
from diffusionpipe.planner.assembly.layout import Unfilled
from diffusionpipe.planner.filling.frozen_layers import FrozenLayers
from diffusionpipe.planner.pricing.copied import CopiedProfile, CopyStream
from diffusionpipe.planner.pricing.encoders import encode_chunks_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import worker_speeds
from diffusionpipe.timing.prices import price_of
from diffusionpipe.timing.work import Compute
from diffusionpipe.units import Seconds


NOTHING = 1e-9
"""A loss below this part of the iteration is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Layers of a component on some samples."""

    layers: Range
    samples: Range
    seconds: Seconds = 0.0


def spread_fills(setting: Setting, unfilled: Unfilled, frozen: FrozenLayers) -> tuple[PlacedFill, ...]:
    """The fills of the only worker; () where encoders are on the devices, or no weights take longer than their layers.

    Args:
        setting: what is planned for.
        unfilled: of a schedule with one worker.
        frozen: the setting's frozen layers.
    """
    profile, names = setting.profile, setting.graph.frozen_layers
    if not isinstance(profile, CopiedProfile):
        return ()
    speed = worker_speeds(setting.cluster, unfilled.mesh)[0]
    rows, chunks = unfilled.schedule.placement.num_samples, encode_chunks_of(setting)
    late, others = list[_Piece](), list[_Piece]()
    left = {name for layer in names for name in setting.graph.layer(layer).writes}
    """What no layer writes that is spread."""
    for run in frozen.runs:
        specs = [setting.graph.layer(name) for name in names[run.start : run.stop]]
        read = {name for layer in specs for name in layer.reads}
        written = {name for layer in specs for name in layer.writes}
        samples = _chunks(rows, chunks[frozen.components[run.start]])
        layers = [Range(layer, layer + 1) for layer in range(run.start, run.stop)]
        pieces = [
            _Piece(layers=one, samples=some, seconds=profile.computing(names[one.start], len(some)) / speed)
            for one in layers
            for some in samples
        ]
        copied = sum(profile.arriving.get(name, 0.0) for name in names[run.start : run.stop])
        if copied > sum(piece.seconds for piece in pieces) and not read & (left - written):
            late += pieces
            left -= written
        else:
            others += [_Piece(layers=run, samples=some) for some in samples]
    if not late:
        return ()
    order = unfilled.schedule.orders[0]
    prices = [
        price_of(Compute(action.stage, action.op), unfilled.costs) if action.op in COMPUTE_OPS else 0.0
        for action in order
    ]
    reached = list(accumulate(prices, initial=0.0))

    def placed(first: int) -> tuple[Seconds, list[int]]:
        """The time lost, and where each piece runs, if the first one runs before this action at the earliest."""
        stream, spent, lost, positions = CopyStream(profile.arriving), 0.0, 0.0, list[int]()
        position = first
        for number, piece in enumerate(late):
            name, following = (names[one.layers.start] for one in (piece, late[(number + 1) % len(late)]))
            stream.start(name)
            ready = stream.ready(name)
            while position < len(order) and reached[position] + spent < ready:
                position += 1
            now = reached[position] + spent
            end = stream.run(name, now, piece.seconds, following)
            lost += max(0.0, end - now - piece.seconds)
            spent += end - now
            positions.append(position)
        return lost, positions

    least, stop = 0, len(order)
    while stop - least > 1:
        middle = (least + stop) // 2
        least, stop = (middle, stop) if placed(middle)[0] <= NOTHING * reached[-1] else (least, middle)
    positions = placed(least)[1]
    pieces = [*zip(positions, late, strict=True), *((len(order), piece) for piece in others)]
    return tuple(
        PlacedFill(
            position=position,
            component=frozen.components[piece.layers.start],
            layers=piece.layers,
            samples=piece.samples,
        )
        for position, piece in _joined(pieces, {run.start for run in frozen.runs})
    )


def _chunks(rows: int, size: int) -> list[Range]:
    """The samples in as few chunks as the size allows, as equal as can be."""
    count = -(-rows // size)
    return [Range(rows * i // count, rows * (i + 1) // count) for i in range(count)]


def _joined(pieces: Sequence[tuple[int, _Piece]], starts: Collection[int]) -> Iterator[tuple[int, _Piece]]:
    """Layers that follow each other on the same samples at the same place, as one piece; `starts` are first layers of components."""
    last: tuple[int, _Piece] | None = None
    for position, piece in pieces:
        if last and last[0] == position and _follow(last[1], piece) and piece.layers.start not in starts:
            last = position, _Piece(layers=Range(last[1].layers.start, piece.layers.stop), samples=piece.samples)
            continue
        if last:
            yield last
        last = position, piece
    if last:
        yield last


def _follow(one: _Piece, other: _Piece) -> bool:
    return one.samples == other.samples and one.layers.stop == other.layers.start
