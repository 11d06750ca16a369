"""The memory of frozen layers on a worker: while a fill runs, and between two fills of the same samples.

    fill 0   layers 0 and 1 of samples 0 to 3     holds what lives between the layers, and leaves what layer 1 wrote
    fill 1   layers 2 and 3 of samples 0 and 1    reads a half of that, which stays whole
    fill 2   layers 2 and 3 of samples 2 and 3    reads the rest; then it goes

A fill drops its inputs as it goes; here they count until its end. Raw inputs, and the tensors that trained stages read,
lie in rows of the batch, which count among the frozen outputs.
"""

from collections import defaultdict
from collections.abc import Sequence

from diffusionpipe.costs import Profile
from diffusionpipe.costs.memory import forward_bytes
from diffusionpipe.ir import Fill, Range
from diffusionpipe.units import Bytes


def held_by_fills(profile: Profile, layers: Sequence[str], fills: Sequence[Fill]) -> list[tuple[Bytes, Bytes]]:
    """For each fill of an encoder stage the bytes held while it runs, and the bytes held after it, until the next one.

    Args:
        profile: of the model.
        layers: the block of the stage, the layers of the frozen part.
        fills: all of the stage, in the order in which they run.
    """
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
        carried -= ends.pop(index, 0)
        found.append((running, carried))
    return found


def _last_fills(profile: Profile, layers: Sequence[str], fills: Sequence[Fill]) -> list[dict[str, int]]:
    """For each fill what it writes for later fills, with the last of them that reads any of it."""
    specs = [profile.graph.layer(name) for name in layers]
    readers: dict[str, list[int]] = defaultdict(list)
    for position, layer in enumerate(specs):
        for name in layer.reads:
            readers[name].append(position)
    of_sample: dict[int, list[int]] = defaultdict(list)
    for index, fill in enumerate(fills):
        for sample in range(fill.samples.start, fill.samples.stop):
            of_sample[sample].append(index)
    found = []
    for fill in fills:
        left: dict[str, int] = {}
        if fill.layers.stop < len(layers):
            same = {i for sample in range(fill.samples.start, fill.samples.stop) for i in of_sample[sample]}
            later = {
                position: i for i in sorted(same) for position in range(fills[i].layers.start, fills[i].layers.stop)
            }
            for layer in specs[fill.layers.start : fill.layers.stop]:
                for name in layer.writes:
                    behind = [later[position] for position in readers[name] if position >= fill.layers.stop]
                    if behind:
                        left[name] = max(behind)
        found.append(left)
    return found
