"""Spaces the fills of a worker with the whole model so that weights from host memory arrive before their layers run.

    at the end   F F F F B B B B [0]..[1]..[2]..[3] [vv]    every layer waits for its weights
    spread   [v] F F F F B [0] B [1] B [2] B [3] [v]        they arrive while the copy trains

Copies of the whole model hardly ever wait for each other, so their frozen work takes its own time in every place. Own
algorithm. Components whose weights take longer to come than their layers to run are spread: each layer runs on all
samples before the next one, so that weights come once in an iteration, and at the first place where they are there. If
there are fewer places than layers, those run together whose weights come soonest. Of the places from which on least
time is lost so, the last one is taken, because there most activations are gone already. All other components run where
none are held: while the first blocks are gathered, and at the end.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from diffusionpipe.ir import Range
from diffusionpipe.ir.action import COMPUTE_OPS
from diffusionpipe.passes import PlacedFill
from diffusionpipe.planner.assembly.layout import Unfilled
from diffusionpipe.planner.filling.fill_queue import equal_chunks
from diffusionpipe.planner.filling.frozen_layers import FrozenLayers
from diffusionpipe.planner.pricing.copied import CopiedProfile, CopyStream
from diffusionpipe.planner.pricing.encoders import encode_chunks_of
from diffusionpipe.planner.pricing.setting import Setting
from diffusionpipe.planner.pricing.stage_costs import worker_speeds
from diffusionpipe.timing.prices import price_of
from diffusionpipe.timing.work import Compute
from diffusionpipe.units import Seconds

ROUNDING = 1e-9
"""A wait below this part of the iteration does not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One piece of frozen work before it has a place: layers of a component on some samples, with its time."""

    layers: Range
    samples: Range
    seconds: Seconds
    """Time of the piece without waits for weights, in seconds."""
    is_free: bool = True
    """Whether the layers read no tensor that spread layers write."""


def spread_fills(setting: Setting, unfilled: Unfilled, frozen: FrozenLayers) -> tuple[PlacedFill, ...]:
    """The fills of the only worker, spaced so that copies of weights from host memory end before their layers run.

    () if encoders are on the devices, or if no weights take longer to arrive than their layers to run.

    Args:
        setting: the setting of the plan.
        unfilled: the iteration of a schedule with one worker.
        frozen: the setting's frozen layers.
    """
    profile = setting.profile
    if not isinstance(profile, CopiedProfile):
        return ()
    late, others = _divided(setting, profile, unfilled, frozen)
    if not late:
        return ()
    order = unfilled.schedule.orders[0]
    is_compute = [action.op in COMPUTE_OPS for action in order]
    prices = [
        price_of(Compute(action.stage, action.op), unfilled.costs) if computes else 0.0
        for action, computes in zip(order, is_compute, strict=True)
    ]
    reached = list(accumulate(prices, initial=0.0))
    names = [setting.graph.frozen_layers[piece.layers.start] for piece in late]

    def spread(first: int, patience: Seconds) -> tuple[Seconds, list[int]]:
        return _spread(late, names, profile.arriving, reached, first, patience)

    # How long a layer may wait for its weights before it runs at a later place instead: the time that loses least.
    patience = min((0.0, *{profile.arriving.get(name, 0.0) for name in names}), key=lambda p: (spread(0, p)[0], p))
    enough = spread(0, patience)[0] + ROUNDING * reached[-1]
    least, stop = 0, len(order)
    # The last place at which hardly more time is lost: places after it lose more.
    while stop - least > 1:
        middle = (least + stop) // 2
        least, stop = (middle, stop) if spread(middle, patience)[0] <= enough else (least, middle)
    # Until the first compute starts, the first blocks are being gathered.
    gathering = min(span.start for span in unfilled.timeline.spans if span.action.op in COMPUTE_OPS)
    spent = accumulate((piece.seconds for piece in others), initial=0.0)
    is_early = [piece.is_free and before < gathering for piece, before in zip(others, spent, strict=False)]
    # They run in order, so only those before the first that is not early.
    early = [*is_early, False].index(False)
    pieces = [
        *((is_compute.index(True), piece) for piece in others[:early]),
        *zip(spread(least, patience)[1], late, strict=True),
        *((len(order), piece) for piece in others[early:]),
    ]
    return _joined(
        PlacedFill(
            position=position,
            component=frozen.components[piece.layers.start],
            layers=piece.layers,
            samples=piece.samples,
        )
        for position, piece in pieces
    )


def _divided(
    setting: Setting, profile: CopiedProfile, unfilled: Unfilled, frozen: FrozenLayers
) -> tuple[list[_Piece], list[_Piece]]:
    """(pieces that are spread, layer by layer; all other pieces, chunk by chunk).

    Both are in an order in which they can run. Spread pieces read no output of the others, but the others may read
    their outputs.
    """
    graph, names = setting.graph, setting.graph.frozen_layers
    speed, chunks = worker_speeds(setting.cluster, unfilled.mesh)[0], encode_chunks_of(setting)
    late, others = list[_Piece](), list[_Piece]()
    everything, spread = {name for layer in names for name in graph.layer(layer).writes}, set[str]()

    def piece(first: int, stop: int, samples: Range, *, is_free: bool) -> _Piece:
        seconds = sum(profile.computing(name, len(samples)) for name in names[first:stop]) / speed
        return _Piece(layers=Range(first, stop), samples=samples, seconds=seconds, is_free=is_free)

    for run in frozen.runs:
        layers = range(run.start, run.stop)
        rows, chunk = unfilled.schedule.placement.num_samples, chunks[frozen.components[run.start]]
        samples = [Range(first, first + size) for first, size in equal_chunks(rows, chunk)]
        read = {name for layer in layers for name in graph.layer(names[layer]).reads}
        written = {name for layer in layers for name in graph.layer(names[layer]).writes}
        whole = [piece(run.start, run.stop, some, is_free=not read & spread) for some in samples]
        copying = sum(profile.arriving.get(names[layer], 0.0) for layer in layers)
        if copying > sum(one.seconds for one in whole) and not read & (everything - spread - written):
            late += [piece(layer, layer + 1, some, is_free=False) for layer in layers for some in samples]
            spread |= written
        else:
            others += whole
    return late, others


def _spread(
    pieces: Sequence[_Piece],
    names: Sequence[str],
    arriving: Mapping[str, Seconds],
    reached: Sequence[Seconds],
    position: int,
    patience: Seconds,
) -> tuple[Seconds, list[int]]:
    """(seconds for which pieces wait for weights, index of the action before which each piece runs).

    A piece runs before the first action from `position` on where it would wait for its weights no longer than
    `patience`; pieces that are left run at the end. `names`: the layer of each piece. `arriving`: layer -> seconds in
    which its weights are copied. `reached[i]`: seconds of compute before action i.
    """
    stream, spent, waited, positions = CopyStream(arriving), 0.0, 0.0, list[int]()
    weighted = [name for name in names if name in arriving]
    # After the last layer's copy the first layer of the next iteration is copied already.
    following = iter([*weighted, weighted[0]])
    stream.start(next(following), 0.0)
    for piece, name in zip(pieces, names, strict=True):
        while position < len(reached) - 1 and reached[position] + spent + patience < stream.ready(name):
            position += 1
        now = reached[position] + spent
        end = stream.run(name, now, piece.seconds, next(following) if name in arriving else None)
        waited += max(0.0, end - now - piece.seconds)
        spent += end - now
        positions.append(position)
    return waited, positions


def _joined(fills: Iterable[PlacedFill]) -> tuple[PlacedFill, ...]:
    """The fills after consecutive layers of a component on the same samples at the same position were joined."""
    found: list[PlacedFill] = []
    for fill in fills:
        last = found[-1] if found else None
        if last and fill == replace(last, layers=fill.layers) and fill.layers.start == last.layers.stop:
            found[-1] = replace(last, layers=Range(last.layers.start, fill.layers.stop))
        else:
            found.append(fill)
    return tuple(found)
