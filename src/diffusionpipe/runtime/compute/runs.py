"""Batches of several sizes as one mapping of tensors.

A batch of one size has its raw inputs by name. Rows of several sizes cannot be one tensor: they come in runs, and the
batch also says the size of every row of the pipeline's batch, on every rank:

    {"#sizes": (rows,), "0#pixels": (2, 3, 512, 768), "0#time": (2,), "1#pixels": (2, 3, 768, 512), "1#time": (2,)}

Tensors of frozen layers may be among the inputs. `GIVEN` then says for which rows each of `kept` is there:

    {"pixels": (2, 3, 512, 768), "moments": (2, 8, 64, 96), "cache given": (2, kept), "cache keys": (2, kept, 16), ...}
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_SIZES, _MARK = "#sizes", "#"
GIVEN = "cache given"
"""The name in a batch of the marks that say which frozen tensors were put in for a row, (rows, tensors), uint8."""
KEYS = "cache keys"
"""The name in a batch of the frozen tensors' keys in a cache, (rows, tensors, bytes), uint8."""


def joined_runs(sizes: Sequence[int], runs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One batch as a mapping of tensors, from runs of rows that each have one size of samples.

    `sizes`: for each row of the pipeline's batch, the index of its size. Names in the batch begin with the run's
    number, "0#pixels"; "#sizes" holds `sizes`.
    """
    batch = {_SIZES: torch.tensor(sizes, dtype=torch.int64)}
    for number, run in enumerate(runs):
        batch |= {f"{number}{_MARK}{name}": value for name, value in run.items()}
    return batch


def runs_of(batch: Mapping[str, Tensor]) -> tuple[tuple[int, ...] | None, tuple[Mapping[str, Tensor], ...]]:
    """(sizes, runs) of a batch: the index of each row's size, and the tensors of each run of rows in their order.

    A batch of samples of one size gives (None, (batch,)).
    """
    if _SIZES not in batch:
        return None, (batch,)
    runs: dict[int, dict[str, Tensor]] = {}
    for key, value in batch.items():
        number, _, name = key.partition(_MARK)
        # The key of the sizes has no number in front.
        if number:
            runs.setdefault(int(number), {})[name] = value
    return tuple(batch[_SIZES].tolist()), tuple(runs.values())
