"""The memory of frozen layers on a worker: while a fill runs, and between two fills of the same samples.

    fill 0   layers 0 and 1 of samples 0 to 3     holds what lives between the layers, and leaves what layer 1 wrote
    fill 1   layers 2 and 3 of samples 0 and 1    reads a half of that, which stays whole
    fill 2   layers 2 and 3 of samples 2 and 3    reads the rest; then it goes

A fill drops its inputs as it goes; here they count until its end. Raw inputs, and the tensors that trained stages read,
lie in rows of the batch, which count among the frozen outputs.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

from diffusionpipe.costs import Profile
from diffusionpipe.holding.memory import forward_bytes
from diffusionpipe.ir import Fill, Range
from diffusionpipe.units import Bytes


def held_by_fills(profile: Profile, layers: Sequence[str], fills: Sequence[Fill]) -> list[tuple[Bytes, Bytes]]:
    """For each fill of an encoder stage, (bytes held while it runs, bytes held after it, until the next one).

    Args:
        profile: the profile of the model.
        layers: the block of the stage, the layers of the frozen part.
        fills: all fills of the stage, in the order in which they run.
    """
    # Fills of the same layers on equally many samples hold equally much, and counting walks through all layers.
    known: dict[tuple[Range, int], Bytes] = {}
    ends: dict[int, Bytes] = defaultdict(int)
    carried, found = 0, list[tuple[Bytes, Bytes]]()
    last_fills = _last_fills(profile, layers, fills)
    for index, fill in enumerate(fills):
        key = fill.layers, len(fill.samples)
        if key not in known:
            known[key] = forward_bytes(profile, layers[fill.layers.start : fill.layers.stop], len(fill.samples))
        running = carried + known[key]
        for name, last in last_fills[index].items():
            size = profile.graph.tensor(name).num_bytes * len(fill.samples)
            carried += size
            ends[last] += size
        # The fill has run: tensors that it was the last to read go.
        carried -= ends.pop(index, 0)
        found.append((running, carried))
    return found


def _last_fills(profile: Profile, layers: Sequence[str], fills: Sequence[Fill]) -> list[dict[str, int]]:
    """For each fill, name of a tensor that it writes for later fills -> index of the last fill that reads any of it."""
    of_sample: dict[int, list[int]] = defaultdict(list)
    for index, fill in enumerate(fills):
        for sample in range(fill.samples.start, fill.samples.stop):
            of_sample[sample].append(index)
    parts = {fill.layers for fill in fills}
    read = {part: _names(profile, layers, part, "reads") for part in parts}
    written = {part: _names(profile, layers, part, "writes") for part in parts}
    # Raw inputs and the outputs that only trained stages read are not in here: they count among the frozen outputs.
    read_later = {
        part: written[part] & _names(profile, layers, Range(part.stop, len(layers)), "reads") for part in parts
    }
    latest_first: dict[Range, list[int]] = {}
    found = []
    for fill in fills:
        left: dict[str, int] = {}
        if read_later[fill.layers]:
            if fill.samples not in latest_first:
                # Each fill that has any of these samples, the last one first: the first that reads a tensor below is
                # its last reader.
                same = {i for sample in range(fill.samples.start, fill.samples.stop) for i in of_sample[sample]}
                latest_first[fill.samples] = sorted(same, reverse=True)
            later = [i for i in latest_first[fill.samples] if fills[i].layers.start >= fill.layers.stop]
            for name in sorted(read_later[fill.layers]):
                # There is one: legal fills run all layers on all samples.
                left[name] = next(i for i in later if name in read[fills[i].layers])
        found.append(left)
    return found


def _names(profile: Profile, layers: Sequence[str], part: Range, kind: Literal["reads", "writes"]) -> set[str]:
    """The names of the tensors that the layers in the range `part` of `layers` read or write, by `kind`."""
    return {name for layer in layers[part.start : part.stop] for name in getattr(profile.graph.layer(layer), kind)}
